"""What policies of the families write: reasoning, tool calls and answers in each family's format."""

from __future__ import annotations

import json
from typing import Any

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("weather", "distance")
OPENAI_TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "description": f"Look up the {name}", "parameters": CITY}}
    for name in NAMES
]
ANTHROPIC_TOOLS: list[Any] = [
    {"name": name, "description": f"Look up the {name}", "input_schema": CITY} for name in NAMES
]


def output(family: str, turn: int) -> str:
    """Return what a family's policy writes in a turn: thinking where the family has it, then calls or an answer."""
    city = {"city": f"Zürich {turn}", "days": turn}
    both = [("weather", city), ("distance", {"days": -turn})] if turn % 4 == 2 and family != "llama3" else []
    calls = both or ([("weather", city)] if turn % 2 == 0 else [])
    said = "" if family in ("llama3", "mistral") and calls else f"Answer {turn}: naïve façade… 東京\n\nand more"
    write = {"qwen3": _hermes, "llama3": _llama, "mistral": _mistral, "magistral": _magistral}[family]
    return write(f"Step {turn}. The user wants\n\n- a thing;  so", said, calls)


def _hermes(thought: str, said: str, calls: list[Any]) -> str:
    each = [json.dumps({"name": name, "arguments": given}, ensure_ascii=False) for name, given in calls]
    return f"<think>\n{thought}\n</think>\n\n{said}" + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in each)


def _llama(thought: str, said: str, calls: list[Any]) -> str:
    return said or json.dumps({"name": calls[0][0], "parameters": calls[0][1]}, ensure_ascii=False)


def _mistral(thought: str, said: str, calls: list[Any]) -> str:
    each = [{"name": name, "arguments": given, "id": f"abcdefg{i:02}"} for i, (name, given) in enumerate(calls)]
    return said or "[TOOL_CALLS]" + json.dumps(each, ensure_ascii=False)


def _magistral(thought: str, said: str, calls: list[Any]) -> str:
    each = "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given, ensure_ascii=False)}" for name, given in calls)
    return f"[THINK]{thought}[/THINK]{said}{each}"
