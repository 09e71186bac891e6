"""Command-line options whose value is a JSON object, for tyro: `--engine-args '{"max_model_len": 4096}'`."""

from __future__ import annotations

import json
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from verl_server.files.json_files import parse_json

JSON_OPTIONS = ConstructorRegistry()
"""Registry of these options. Pass it as `registry` to `tyro.cli`."""


@JSON_OPTIONS.primitive_rule
def _json_object(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, Any]] | None:
    if info.type != dict[str, Any]:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _parsed(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _parsed(text: str) -> dict[str, Any]:
    """Return the object. Raise ValueError, which tyro prints, for anything else."""
    value = parse_json(text, f"{text!r:.60}")
    if not isinstance(value, dict):
        raise ValueError(f"{text!r:.200} is not a JSON object, such as '{{\"max_model_len\": 4096}}'")
    return value
