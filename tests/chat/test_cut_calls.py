"""A call that a grammar forced, and that the end of the output cuts, is a call with the arguments so far."""

from __future__ import annotations

import json

import pytest

from tests.chat.test_tool_grammar import GOOD, TOOLS
from verl_server.chat.cut_json import completed
from verl_server.chat.output import OutputFormat, OutputParser, ParsedMessage, joined
from verl_server.chat.tools import parameter_types

TEXTS = [(name, text) for name, texts in GOOD.items() for text in texts]


def parser_of(name: str, reasoning: str = "none", *, whole: bool = True, **options: object) -> OutputParser:
    types = parameter_types(TOOLS)
    return OutputFormat(name, reasoning).parser(
        True, False, whole_calls=whole, types=types, constrained=True, **options  # type: ignore[arg-type]
    )  # fmt: skip


def read(parser: OutputParser, text: str, chunk: int = 1000) -> ParsedMessage:
    deltas = [delta for at in range(0, len(text), chunk) for delta in parser.push(text[at : at + chunk])]
    return joined([*deltas, *parser.finish()])


def shown(message: ParsedMessage) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_the_end_at_any_character(name: str, text: str) -> None:
    calls = shown(read(parser_of(name), text))
    assert calls and not read(parser_of(name), text).content
    for end in range(len(text) + 1):
        parser = parser_of(name)
        message = read(parser, text[:end])
        found = shown(message)
        assert not message.content and message.reasoning is None, text[:end]
        for chunk in (1, 1000):
            streamed = parser_of(name, whole=False)
            assert shown(read(streamed, text[:end], chunk)) == found and streamed.is_cut == parser.is_cut
        *before, last = found or [("", "")]
        assert before == calls[: len(before)]
        if found:
            assert last[0] == calls[len(before)][0] and calls[len(before)][1].startswith(last[1])
            assert parser.is_cut or last == calls[len(before)]
            assert isinstance(json.loads(completed(last[1])), dict)
        else:
            assert not parser.is_cut


@pytest.mark.parametrize("name", list(GOOD))
def test_the_only_function_is_known_before_its_name(name: str) -> None:
    text = GOOD[name][0]
    for end in range(1, len(text) + 1):
        parser = parser_of(name, "qwen3", only_call="get")
        (call,) = read(parser, f"<think>hm</think>\n{text[:end]}").tool_calls
        assert call.name == "get" and (parser.is_cut or call.arguments == "{}" or end > 20)
    for thought in (
        "",
        "<",
        "<thi",
        "<think>",
        "<think>hm",
        "<think>hm</thi",
        "<think>hm</think>",
        "<think>hm</think>\n",
    ):
        message = read(parser_of(name, "qwen3", only_call="get"), thought)
        assert not message.tool_calls, thought


@pytest.mark.parametrize("name", list(GOOD))
def test_an_answer_in_the_place_of_calls_is_content(name: str) -> None:
    for answer in ('{"sum": 5', '{"na', "[1, 2", '"', "5", "tru", "{"):
        message = read(parser_of(name, calls_first=True), answer)
        assert message.content == answer and not message.tool_calls
    text = GOOD[name][0]
    whole = shown(read(parser_of(name), text))
    for end in range(text.index('"n": ' if name != "qwen3_coder" else "n>") + 3, len(text)):
        message = read(parser_of(name, calls_first=True), text[:end])
        assert not message.content and message.tool_calls[0].name == whole[0][0]


def test_reasoning_that_is_cut_stays_reasoning() -> None:
    parser = parser_of("hermes", "qwen3", only_call="get")
    assert read(parser, "<think>hm <tool_ca") == ParsedMessage("hm <tool_ca", "", []) and not parser.is_cut


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "{}"),
        ("{", "{}"),
        ('{"a"', "{}"),
        ('{"a": 1', "{}"),
        ('{"a": 1, "b', '{"a": 1}'),
        ('{"a": "x\\"y", "b": "z', '{"a": "x\\"y"}'),
        ('{"a": 1, "b": "x, y', '{"a": 1}'),
        ('{"a": "x}', "{}"),
        ('{"a": ["{", "]', '{"a": ["{"]}'),
        ('{"a": 1, "b": "\\', '{"a": 1}'),
        ('{"a": 1, "b,', '{"a": 1}'),
        ('{"a": [1, 2', '{"a": [1]}'),
        ('{"a": [1, {"b": 2.50}, {"c"', '{"a": [1, {"b": 2.50}, {}]}'),
        ('{"a": "},]{", "b": {"c": true}', '{"a": "},]{", "b": {"c": true}}'),
        ('{"a": 1}', '{"a": 1}'),
        ("}", "{}"),
    ],
)
def test_the_whole_members_of_an_object(text: str, expected: str) -> None:
    assert completed(text) == expected and isinstance(json.loads(expected), dict)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": 'x, y}{][\\" z', "c": {"d": [1, {"e": "f,"}, 3]}},
        {"a": [], "b": {}, "c": [[], [1]]},
        {"x,": "{", "y}": "]"},
    ],
)
def test_every_beginning_of_an_object_becomes_an_object(value: dict[str, object], indent: int | None) -> None:
    """Brackets and commas of a text, also of one without its end, are no structure."""
    text = json.dumps(value, indent=indent)
    for end in range(len(text) + 1):
        kept = json.loads(completed(text[:end]))
        assert list(kept) == list(value)[: len(kept)]
        assert all(kept[name] == value[name] for name in list(kept)[:-1])
    assert kept == value
