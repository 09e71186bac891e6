"""`enforceable_schema` removes keywords without effect from a JSON schema.

`schema_refusal` returns the error for other keywords.

llguidance refuses a schema with a keyword that it does not implement, even if the keyword has no effect. Generators of
schemas write such keywords into every schema. A keyword is removed, or written in another way, only if exactly the same
values stay valid. A keyword with an effect stays, and llguidance then refuses the schema.

An unknown `format` is removed: JSON Schema 2020-12 makes it an annotation.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Mapping
from importlib.metadata import version
from itertools import pairwise
from typing import Any

from verl_server.errors import BadRequestError

FORMATS = frozenset({
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown",
})  # fmt: skip
"""Values of `format` that llguidance enforces."""

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment",
})  # fmt: skip
_ANY_VALUE = frozenset({"const", "default", "examples"})
"""Keywords whose null is a value. Any other null means that the keyword is not set."""
_SCHEMAS = frozenset({
    "additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "else", "if", "items", "not", "oneOf",
    "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
"""Keywords whose value is a schema or a list of schemas."""
_MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose value is an object with schemas."""
_OF_OBJECTS = (
    "propertyNames", "unevaluatedProperties", "dependentRequired", "dependentSchemas", "dependencies", "minProperties",
    "maxProperties",
)  # fmt: skip
_OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems")
_IN_PLACE = frozenset({
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies",
})  # fmt: skip
"""Keywords with schemas that may evaluate properties and items of the same value."""
_ANCHORS = ("$dynamicAnchor", "$recursiveAnchor")
"""Keywords that affect only `$dynamicRef` and `$recursiveRef`, which are refused."""

_WHITE_SPACE = r"[ \t]{0,8}(\r?\n[ \t]{0,40})?"
"""White space between two tokens of JSON: some spaces, and at most one line break with an indentation."""
_SEPARATORS = {"item": ",", "key": ":"}
_MARK = "// schema of "
"""A line of a grammar before the line with a schema. `schema_refusal` quotes it."""
_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
_PLACE = re.compile(r"at (\d+)\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| |\Z)", re.DOTALL)
_MOST_REASON = 300
"""Most characters of llguidance's reason that an error quotes."""


def enforceable_schema(schema: Any) -> Any:
    """Return a JSON schema of the same values, without keywords that change nothing.

    Raise BadRequestError for a schema that nests too deeply.
    """
    try:
        return _schema(schema, schema)
    except RecursionError:
        raise BadRequestError("The JSON schema nests too deeply. Use a simpler schema.") from None


def with_layout(schema: Any, **layout: Any) -> Any:
    """Return a schema whose JSON has a bounded amount of white space between two tokens.

    A model that finds no next token likely would write line breaks until `max_new_tokens`. `layout` has llguidance's
    options; those of the schema's own `x-guidance` win, also a `whitespace_pattern` without a bound.
    """
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    if schema is False or not isinstance(own, dict | None):
        return schema  # it permits nothing, or llguidance refuses it
    options = layout | (own or {})
    if options.get("whitespace_flexible") is not False and "whitespace_pattern" not in options:
        options |= _bounded_space()
    return {**({} if schema is True else schema), "x-guidance": options}


@functools.cache
def _bounded_space() -> dict[str, Any]:
    """Return llguidance's options that bound white space.

    Before 1.9, llguidance repeats a `whitespace_pattern`: there, white space may stand around commas and colons only.
    vLLM 0.32 needs llguidance 1.7.
    """
    major, minor = version("llguidance").split(".")[:2]
    if (int(major), int(minor)) >= (1, 9):
        return {"whitespace_pattern": _WHITE_SPACE}
    separators = {f"{name}_separator": f"{_WHITE_SPACE}{mark}{_WHITE_SPACE}" for name, mark in _SEPARATORS.items()}
    return {"whitespace_flexible": False} | separators


def marked_rule(name: str, owner: str, schema: Any) -> str:
    """Return a rule `name` of a Lark grammar for JSON of a schema, marked with its owner (`tools[2] `search``)."""
    return f"{_MARK}{owner}\n{name}: %json {json.dumps(schema)}"


def schema_refusal(error: str, grammar: str) -> str | None:
    """Return the message for llguidance's error about a `marked_rule` of a translated grammar, or None."""
    found = _PLACE.search(error)
    if found is None:
        return None
    for each in json.loads(grammar)["grammars"]:
        lines = each.get("lark_grammar", "").split("\n")
        at = int(found[1]) - 2  # the number counts from 1, and the mark stands before the rule
        if 0 <= at < len(lines) and lines[at].startswith(_MARK):
            return _refusal(lines[at].removeprefix(_MARK), found[2])
    return None


def schemas_alone(grammar: str) -> dict[str, str]:
    """Return owner -> a translated grammar of its schema alone, for each `marked_rule` of a translated grammar."""
    alone: dict[str, str] = {}
    for each in json.loads(grammar)["grammars"]:
        lines = each.get("lark_grammar", "").split("\n")
        for mark, rule in pairwise(lines):
            if mark.startswith(_MARK):
                start = f"start: {rule.partition(': ')[2]}"
                alone[mark.removeprefix(_MARK)] = json.dumps({"grammars": [{"lark_grammar": start}]})
    return alone


def _refusal(owner: str, reason: str) -> str:
    remedy = ', or use tool_choice "auto" without a schema of the answer' if owner.startswith("tools[") else ""
    keys = _KEYS.search(reason)
    if "coerce_one_of" in reason:
        reason = "more than one schema of a `oneOf` may permit a value"
        remedy = (
            f'Use `anyOf`{remedy}, or set "x-guidance": {{"coerce_one_of": true}} in the schema, which does the same'
        )
    elif keys is None:
        reason, remedy = " ".join(reason.split())[:_MOST_REASON], f"Change the schema{remedy}"
    else:
        names = keys[1].replace('"', "`")
        reason = f"{names} cannot be enforced"
        remedy = (
            f'Leave {names} out{remedy}, or set "x-guidance": {{"lenient": true}} in the schema to enforce the rest'
        )
    return f"{owner}: the output cannot be constrained to this JSON schema: {reason}. {remedy}."


def _schema(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = {key: _part(key, value, root) for key, value in schema.items() if value is not None or key in _ANY_VALUE}
    form = found.get("format")
    if not isinstance(form, str) or form not in FORMATS:
        found.pop("format", None)
    if not _allows(found, "object"):
        _remove(found, _OF_OBJECTS)
    if not _allows(found, "array"):
        _remove(found, _OF_ARRAYS)
    _remove(found, _ANCHORS)
    _simplify_conditions(found)
    _simplify_items(found)
    _simplify_properties(found)
    _simplify_property_names(found, root)
    return found


def _part(key: str, value: Any, root: Any) -> Any:
    if key in _SCHEMAS:
        return [_schema(each, root) for each in value] if isinstance(value, list) else _schema(value, root)
    if key in _MAPS and isinstance(value, dict):
        return {name: True if each is None else _schema(each, root) for name, each in value.items()}
    return value


def _simplify_conditions(found: dict[str, Any]) -> None:
    if "if" not in found or (_is_true(found.get("then", True)) and _is_true(found.get("else", True))):
        _remove(found, ("if", "then", "else"))
    if found.get("not") is False:
        del found["not"]
    required = found.get("required")
    always = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(rules := found.get(key), dict):
            found[key] = {name: rule for name, rule in rules.items() if not _is_met(rule, {*always, name})}
            if not found[key]:
                del found[key]


def _is_met(rule: Any, present: Collection[str]) -> bool:
    """Return True if every object with these properties meets the rule of a `dependentRequired` or `dependencies`."""
    return all(isinstance(name, str) and name in present for name in rule) if isinstance(rule, list) else _is_true(rule)


def _simplify_items(found: dict[str, Any]) -> None:
    most = found.get("maxItems")
    if found.get("uniqueItems") is False or (isinstance(most, int) and most <= 1):
        found.pop("uniqueItems", None)
    if "contains" not in found or (found.get("minContains") == 0 and "maxContains" not in found):
        _remove(found, ("contains", "minContains", "maxContains"))
    if "unevaluatedItems" not in found:
        return
    rest = "additionalItems" if isinstance(found.get("items"), list) else "items"
    if _is_true(found["unevaluatedItems"]) or rest in found:
        del found["unevaluatedItems"]
    elif not found.keys() & (_IN_PLACE | {"contains"}):
        found[rest] = found.pop("unevaluatedItems")


def _simplify_properties(found: dict[str, Any]) -> None:
    if "unevaluatedProperties" in found:
        if _is_true(found["unevaluatedProperties"]) or "additionalProperties" in found:
            del found["unevaluatedProperties"]
        elif not found.keys() & _IN_PLACE:
            found["additionalProperties"] = found.pop("unevaluatedProperties")
    least, most, required = (found.get(key) for key in ("minProperties", "maxProperties", "required"))
    if isinstance(least, int) and least <= (len(set(map(str, required))) if isinstance(required, list) else 0):
        del found["minProperties"]
    properties = found.get("properties", {})
    is_closed = found.get("additionalProperties") is False and "patternProperties" not in found
    if isinstance(most, int) and is_closed and isinstance(properties, dict) and most >= len(properties):
        del found["maxProperties"]


def _simplify_property_names(found: dict[str, Any], root: Any) -> None:
    """Remove a `propertyNames` that every name satisfies. Names of an enumeration become properties."""
    rule = found.get("propertyNames")
    if isinstance(rule, dict) and isinstance(rule.get("$ref"), str):
        rule = _referred(rule["$ref"], root)  # as it was written: a reference may lead in circles
    names: list[Any] | None = None
    if isinstance(rule, dict):
        names = [rule["const"]] if "const" in rule else rule.get("enum")
        rest = {key for key in rule.keys() - _ANNOTATIONS if not (key == "minLength" and rule[key] == 0)}
        rest -= {"type"} if _allows(rule, "string") else set()
        rest -= {"const"} if "const" in rule else {"enum"} if isinstance(names, list) else set()
        if rest:
            return
    if _is_true(rule) or (isinstance(rule, dict) and names is None):
        found.pop("propertyNames", None)
        return
    properties, other = found.get("properties", {}), found.get("additionalProperties", True)
    is_plain = isinstance(properties, dict) and not found.keys() & {"patternProperties", "unevaluatedProperties"}
    if isinstance(names, list) and is_plain:
        known = [name for name in properties if name in names]
        new = [name for name in names if isinstance(name, str) and name not in properties] if other is not False else []
        del found["propertyNames"]
        found["properties"] = {name: properties[name] for name in known} | dict.fromkeys(new, other)
        found["additionalProperties"] = False


def _referred(reference: str, root: Any) -> Any:
    """Return the schema that a reference such as #/$defs/name refers to, or the reference."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return (
        found if isinstance(found, dict) and "$ref" not in found and reference.startswith("#/") else {"$ref": reference}
    )


def _is_true(schema: Any) -> bool:
    """Return True for a schema that obviously allows every value."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() - _ANNOTATIONS)


def _allows(schema: Mapping[str, Any], kind: str) -> bool:
    """Return False if the `type` of a schema excludes values of this type."""
    types = schema.get("type")
    return types == kind if isinstance(types, str) else not isinstance(types, list) or kind in types


def _remove(found: dict[str, Any], keys: Collection[str]) -> None:
    for key in keys:
        found.pop(key, None)
