"""Keywords that change nothing are removed from a schema, and exactly the same values stay valid."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from llguidance import LLMatcher

from verl_server.errors import BadRequestError
from verl_server.grammar.json_schema import (
    _IN_PLACE,
    _MAPS,
    _OF_ARRAYS,
    _OF_OBJECTS,
    _SCHEMAS,
    FORMATS,
    enforceable_schema,
    marked_rule,
    schema_refusal,
)

OBJECT: dict[str, Any] = {"type": "object"}
ARRAY: dict[str, Any] = {"type": "array"}
AB: dict[str, Any] = {"properties": {"a": {}, "b": {}}}


def llguidance_error(schema: Any) -> str:
    return str(LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]})))


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        # names of properties
        (OBJECT | {"propertyNames": True}, OBJECT),
        (OBJECT | {"propertyNames": {}}, OBJECT),
        (OBJECT | {"propertyNames": {"type": "string", "description": "x", "minLength": 0}}, OBJECT),
        (OBJECT | {"propertyNames": {"type": ["string", "null"]}}, OBJECT),
        (OBJECT | {"propertyNames": {"type": "string", "format": "made-up"}}, OBJECT),
        ({"type": "string", "propertyNames": {"pattern": "a"}}, {"type": "string"}),
        (
            OBJECT | {"additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["x", "y"]}},
            OBJECT
            | {"properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "additionalProperties": False},
        ),
        (
            AB | {"additionalProperties": False, "propertyNames": {"const": "b"}},
            {"properties": {"b": {}}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"$ref": "#/$defs/K"}, "$defs": {"K": {"type": "string", "enum": ["k"]}}},
            {
                "$defs": {"K": {"type": "string", "enum": ["k"]}},
                "properties": {"k": True},
                "additionalProperties": False,
            },
        ),
        # numbers of properties
        (OBJECT | {"minProperties": 0}, OBJECT),
        (AB | {"required": ["a"], "minProperties": 1}, AB | {"required": ["a"]}),
        (AB | {"additionalProperties": False, "maxProperties": 2}, AB | {"additionalProperties": False}),
        # what no other keyword evaluated
        (AB | {"unevaluatedProperties": True}, AB),
        (AB | {"unevaluatedProperties": False}, AB | {"additionalProperties": False}),
        (AB | {"additionalProperties": {}, "unevaluatedProperties": False}, AB | {"additionalProperties": {}}),
        (ARRAY | {"unevaluatedItems": {}}, ARRAY),
        (ARRAY | {"prefixItems": [{}], "unevaluatedItems": False}, ARRAY | {"prefixItems": [{}], "items": False}),
        (ARRAY | {"items": [{}], "unevaluatedItems": False}, ARRAY | {"items": [{}], "additionalItems": False}),
        (ARRAY | {"items": {}, "unevaluatedItems": False}, ARRAY | {"items": {}}),
        # items
        (ARRAY | {"uniqueItems": False}, ARRAY),
        (ARRAY | {"uniqueItems": True, "maxItems": 1}, ARRAY | {"maxItems": 1}),
        ({"type": "string", "uniqueItems": True, "contains": {"const": 1}}, {"type": "string"}),
        (ARRAY | {"minContains": 2, "maxContains": 3}, ARRAY),
        (ARRAY | {"contains": {"const": 1}, "minContains": 0}, ARRAY),
        # conditions
        ({"not": False, "type": "null"}, {"type": "null"}),
        ({"if": {"required": ["a"]}}, {}),
        ({"then": {"required": ["a"]}, "else": False}, {}),
        ({"if": {"required": ["a"]}, "then": True, "else": {"title": "x"}}, {}),
        (OBJECT | {"dependentRequired": {}, "dependencies": {"a": []}, "dependentSchemas": {"a": True}}, OBJECT),
        (OBJECT | {"dependentRequired": {"a": ["a", "b"]}, "required": ["b"]}, OBJECT | {"required": ["b"]}),
        # annotations, anchors and nulls
        ({"type": "string", "format": "made-up"}, {"type": "string"}),
        ({"$dynamicAnchor": "x", "$recursiveAnchor": True, "type": "null"}, {"type": "null"}),
        ({"type": "object", "properties": None, "required": None, "enum": None}, OBJECT),
        ({"properties": {"a": None}, "default": None}, {"properties": {"a": True}, "default": None}),
    ],
)
def test_keywords_without_effect_are_removed_at_any_depth(schema: Any, wanted: Any) -> None:
    assert enforceable_schema(schema) == wanted
    assert not llguidance_error(wanted)
    if "$defs" in schema:  # a reference is relative to the whole schema
        return
    for deep in (
        lambda inner: {"properties": {"uniqueItems": inner}},
        lambda inner: {"anyOf": [{"items": inner}, {"type": "null"}]},
        lambda inner: {"$defs": {"not": inner}, "$ref": "#/$defs/not"},
        lambda inner: {"prefixItems": [inner], "additionalProperties": inner},
    ):
        assert enforceable_schema(deep(schema)) == deep(wanted)


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT | {"propertyNames": {"pattern": "^a"}},
        OBJECT | {"propertyNames": {"type": "integer"}},
        OBJECT | {"propertyNames": {"type": "string", "minLength": 1}},
        OBJECT | {"propertyNames": False},
        OBJECT | {"propertyNames": {"enum": ["a"]}, "patternProperties": {"a": {}}},
        ARRAY | {"uniqueItems": True},
        ARRAY | {"contains": {"const": 1}},
        ARRAY | {"contains": {"const": 1}, "minContains": 0, "maxContains": 1},
        {"not": {"const": 1}},
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"if": {"required": ["a"]}, "else": False},
        OBJECT | {"dependentRequired": {"a": ["b"]}},
        OBJECT | {"dependencies": {"a": {"required": ["b"]}}},
        OBJECT | {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"anyOf": [AB, OBJECT], "unevaluatedProperties": False},
        {"anyOf": [ARRAY], "unevaluatedItems": False},
        ARRAY | {"unevaluatedItems": {"const": 1}, "contains": {"const": 2}},
        AB | {"minProperties": 1},
        AB | {"maxProperties": 1, "required": ["a"]},
        {"$dynamicRef": "#x"},
    ],
)
def test_keywords_with_an_effect_stay_and_are_refused(schema: Any) -> None:
    assert enforceable_schema(schema) == schema
    assert llguidance_error(schema)


def test_values_are_no_schemas() -> None:
    value = {"uniqueItems": False, "format": "made-up", "not": False, "x": None}
    for schema in ({"const": value}, {"enum": [value]}, {"default": value}, {"examples": [value]}):
        assert enforceable_schema(schema) == schema


def test_the_known_formats_are_those_of_llguidance() -> None:
    others = ("uri-template", "int32", "regex", "password", "idn-email", "json-pointer", "iri", "byte", "file-path")
    for name in FORMATS:
        assert not llguidance_error({"type": "string", "format": name}), name
    for name in others:
        assert llguidance_error({"type": "string", "format": name}), f"llguidance knows {name} now: add it"


def test_references_in_circles_end() -> None:
    circle = {"anyOf": [{"propertyNames": {"$ref": "#/$defs/a"}}] * 2}
    schema = {"$ref": "#/$defs/a", "$defs": {"a": circle}}
    assert enforceable_schema(schema) == schema


def test_no_value_of_a_keyword_makes_the_function_fail() -> None:
    values: list[Any] = [
        5,
        1.5,
        "x",
        True,
        False,
        None,
        [],
        {},
        [[]],
        [{}],
        [5],
        {"a": 5},
        {"a": [{}]},
        {"a": {"$ref": 5}},
    ]
    others: list[dict[str, Any]] = [{}, OBJECT, {"properties": 5}, {"required": [[]], "additionalProperties": False}]
    keys = [*_SCHEMAS, *_MAPS, *_OF_OBJECTS, *_OF_ARRAYS, *_IN_PLACE, "required", "type", "enum", "format", "maxItems"]
    for key, value, other in itertools.product(keys, values, others):
        enforceable_schema({**other, key: value})
        enforceable_schema({**other, key: value, "propertyNames": {"enum": ["a", []]}})
        enforceable_schema({**other, "propertyNames": {key: value}, "maxProperties": 1})


def test_a_schema_that_nests_too_deeply() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(BadRequestError, match="nests too deeply"):
        enforceable_schema(schema)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (ARRAY | {"contains": {}, "uniqueItems": True}, "`contains`"),
        (ARRAY | {"contains": {}}, "Leave `contains` out, or use tool_choice"),
        (ARRAY | {"contains": {}}, '"x-guidance": {"lenient": true}'),
        ({"type": "string", "pattern": "^(?!x).*$"}, "look-around"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "Use `anyOf`, or use tool_choice"),
        ({"type": "any"}, "Invalid type: any. Change the schema, or use tool_choice"),
        ({"$ref": "#/$defs/lost"}, "Pointer '/$defs/lost' does not exist"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5)"),
    ],
)
def test_a_refusal_names_the_owner_of_the_schema(schema: Any, says: str) -> None:
    rules = [marked_rule("a", "tools[0] `get`", OBJECT), marked_rule("b", "tools[2] `search`", schema)]
    grammar = json.dumps({"grammars": [{"lark_grammar": "\n".join(["start: a | b", *rules, ""])}]})
    message = schema_refusal(str(LLMatcher.validate_grammar(grammar)), grammar)
    assert message is not None and message.startswith("tools[2] `search`: ") and says in message
    answer = schema_refusal(
        "at 3(1): failed to compile JSON schema: no", grammar.replace("tools[0] `get`", "the answer's schema")
    )
    assert answer is not None and answer.startswith("the answer's schema: ") and "tool_choice" not in answer


def test_other_errors_have_no_owner() -> None:
    grammar = json.dumps({"grammars": [{"lark_grammar": "start: a\na: %json {\n"}]})
    assert schema_refusal(str(LLMatcher.validate_grammar(grammar)), grammar) is None
    unmarked = json.dumps({"grammars": [{"lark_grammar": 'start: "a"\n%json {"not": {}}\n'}]})
    assert schema_refusal("at 2(1): failed to compile JSON schema: no", unmarked) is None
