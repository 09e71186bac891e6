"""Constraints of the output in OpenAI's, vLLM's and SGLang's fields, and their conversion into sampling parameters.

`/v1/messages` has SGLang's fields, too, beside the schema of Anthropic's `output_config.format`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from verl_server.errors import BadRequestError

CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
)
"""Fields that constrain the output."""

_ANY_OBJECT = '{"type":"object"}'
_OPTIONS = frozenset({"disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"})
"""Keys of `structured_outputs` that choose or configure vLLM's grammar libraries."""


def constraint(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the one constraint of a request as {name of the sampling parameter: value}, or {} if there is none.

    `given` holds the values of the fields `CONSTRAINTS`, or of those of `/v1/messages`. Several fields may have the
    same constraint: clients of vLLM send the new field and the older one, for servers of both ages. Raise
    BadRequestError if a field is wrong, or if several fields have different constraints.
    """
    found = {name: _READ[name](name, value) for name, value in given.items() if value is not None and value != ""}
    found = {name: params for name, params in found.items() if params}
    first = next(iter(found.values()), {})
    if any(_meaning(params) != _meaning(first) for params in found.values()):
        names = " and ".join(f"`{name}`" for name in found)
        raise BadRequestError(f"{names} constrain the output differently: set only one of them, or all to the same.")
    return first


def _meaning(params: dict[str, str]) -> Any:
    """Return a constraint in a form that does not depend on how its JSON is written."""
    ((name, text),) = params.items()
    if name in ("json_schema", "structural_tag"):
        try:
            return name, json.loads(text)
        except (ValueError, RecursionError):
            return name, text  # refused later, with the reason
    return name, text


def response_format_schema(name: str, value: Any) -> dict[str, str]:
    """Return the constraint of OpenAI's `response_format`, or {} for text. `name` is the field in messages."""
    if not isinstance(value, dict):
        raise BadRequestError(f"{name} must be an object with `type`, not {type(value).__name__}.")
    kind = value.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": _ANY_OBJECT}
    if kind == "json_schema":
        holder = value.get("json_schema")
        if holder is None and "schema" in value:  # the shape of /v1/responses, and of older clients of SGLang
            holder = value
        if not isinstance(holder, dict):
            raise BadRequestError(f"{name}.json_schema must be an object with `schema`.")
        schema = holder.get("schema")
        if schema is None:
            raise BadRequestError(f"{name}.json_schema.schema is missing.")
        return _schema(f"{name}.json_schema.schema", schema)
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(value)}
    raise BadRequestError(
        f"{name}.type must be `text`, `json_object`, `json_schema` or `structural_tag`, not {kind!r:.64}."
    )


def read_schema(text: str) -> dict[str, Any] | bool:
    """Return the JSON schema in a text. Raise BadRequestError if there is none."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"The JSON schema of the output is not valid JSON: {error}.") from None
    if not isinstance(schema, dict | bool):
        raise BadRequestError(
            f"The JSON schema of the output must be an object or a boolean, not {type(schema).__name__}."
        )
    return schema


def _structured_outputs(name: str, value: Any) -> dict[str, str]:
    readers: dict[str, Callable[[str, Any], dict[str, str]]] = {
        "json": _schema,
        "regex": _text("regex"),
        "choice": _choice,
        "grammar": _text("ebnf"),
        "json_object": lambda at, wanted: {"json_schema": _ANY_OBJECT} if wanted is True else {},
        "structural_tag": _structural_tag,
    }
    given = {key: each for key, each in value.items() if each is not None and each is not False and each != ""}
    given.pop("disable_fallback", None)  # there is one library
    unknown = given.keys() - readers.keys() - _OPTIONS
    if unknown:
        raise BadRequestError(f"{name} has the unknown key `{min(unknown):.64}`; known: {', '.join(readers)}.")
    if options := given.keys() & _OPTIONS:
        raise BadRequestError(f"{name}.{min(options)} is not supported: it configures a library that is not used here.")
    found = {key: readers[key](f"{name}.{key}", each) for key, each in given.items()}
    if len(found) != 1:
        raise BadRequestError(f"{name} must have exactly one of {', '.join(readers)}, not {len(found)}.")
    return next(iter(found.values()))


def _schema(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"json_schema": value}
    if not isinstance(value, dict | bool):
        raise BadRequestError(f"{name} must be a JSON schema (an object), not {type(value).__name__}.")
    return {"json_schema": json.dumps(value)}


def _choice(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise BadRequestError(f"{name} must be a list of at least one text.")
    return {"ebnf": "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in value)}


def _structural_tag(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, str | dict):
        raise BadRequestError(f"{name} must be an object or JSON text, not {type(value).__name__}.")
    return {"structural_tag": value if isinstance(value, str) else json.dumps(value)}


def _text(parameter: str) -> Callable[[str, Any], dict[str, str]]:
    def read(name: str, value: Any) -> dict[str, str]:
        if not isinstance(value, str):
            raise BadRequestError(f"{name} must be a string, not {type(value).__name__}.")
        return {parameter: value}

    return read


_READ: dict[str, Callable[[str, Any], dict[str, str]]] = {
    "response_format": response_format_schema,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("ebnf"),
    "json_schema": _schema,
    "regex": _text("regex"),
    "ebnf": _text("ebnf"),
    "output_config.format": _schema,
}
