"""`Grammar`, the constraint of a request as its caller wrote it, and its translation for llguidance.

`SamplingParams` holds the text. A text worker translates it (`translate`) and checks the result. The scheduler receives
the translation only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from verl_server.errors import BadRequestError
from verl_server.grammar.gbnf import is_gbnf, lark_of_gbnf
from verl_server.grammar.json_schema import enforceable_schema, with_layout
from verl_server.grammar.structural_tag import lark_of_regex, lark_of_structural_tag
from verl_server.sampling_params import SamplingParams

Kind = Literal["json_schema", "regex", "ebnf", "structural_tag"]
"""Name of the sampling parameter that holds the text."""


class Grammar(msgspec.Struct, frozen=True):
    """The constraint of a request. Equal grammars have one compiled form."""

    kind: Kind
    text: str


def grammar_of(params: SamplingParams) -> Grammar | None:
    """Return the grammar of a request, or None if its output is free."""
    for kind in get_args(Kind):
        if text := getattr(params, kind):
            return Grammar(kind, text)
    return None


def translate(grammar: Grammar, special_tokens: Mapping[str, int]) -> str:
    """Return a grammar as JSON in llguidance's format. Raise BadRequestError for text that is malformed.

    `special_tokens` are the tokenizer's (text -> id). A grammar distinguishes them from the same text.
    """
    match grammar.kind:
        case "json_schema":
            return _json_schema(grammar.text)
        case "regex":
            return _lark(f"start: {lark_of_regex(grammar.text)}")
        case "ebnf":
            return _lark(lark_of_gbnf(grammar.text) if is_gbnf(grammar.text) else grammar.text)
        case "structural_tag":
            return _structural_tag(grammar.text, special_tokens)


def _json_schema(text: str) -> str:
    schema = _parse_json(text, "json_schema")
    if not isinstance(schema, (dict, bool)):
        raise BadRequestError(
            f"sampling_params.json_schema must be a JSON schema (an object or a boolean), not {type(schema).__name__}."
        )
    return json.dumps({"grammars": [{"json_schema": with_layout(enforceable_schema(schema))}]})


def _structural_tag(text: str, special_tokens: Mapping[str, int]) -> str:
    tag = _parse_json(text, "structural_tag")
    if not isinstance(tag, dict):
        raise BadRequestError(f"sampling_params.structural_tag must be a JSON object, not {type(tag).__name__}.")
    return json.dumps({"grammars": lark_of_structural_tag(tag, special_tokens)})


def _lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"sampling_params.{name} is not valid JSON: {error}.") from None
