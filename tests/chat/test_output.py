"""Output is split into reasoning, content and tool calls, however the text arrives, and nothing of it is lost."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from tests.chat.parsing import parse_message
from verl_server.chat.call_readers import TEXT
from verl_server.chat.output import (
    ContentDelta,
    Delta,
    OutputFormat,
    ParsedMessage,
    ReasoningDelta,
    ToolCallDelta,
    joined,
)
from verl_server.errors import BadRequestError

TYPES = {
    "get": {
        "city": TEXT,
        "days": frozenset({"integer"}),
        "flag": frozenset({"boolean"}),
        "list": frozenset({"array"}),
    }
}
CALL = '{"name": "get", "arguments": {"city": "Paris"}}'
ARGUMENTS = '{"city": "Paris"}'


def parse(
    tools: str, text: str, reasoning: str = "none", thinking_open: bool = False, with_tools: bool = True
) -> ParsedMessage:
    format = OutputFormat(tools, reasoning)
    return parse_message(format, text, tools=with_tools, thinking_open=thinking_open, types=TYPES)


def calls(message: ParsedMessage) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


# -- one format after the other -----------------------------------------------------------------------------

ONE_CALL = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "hermes, arguments first": '<tool_call>{"arguments": {"city": "Paris"}, "id": [null], "name": "get"}</tool_call>',
    "hermes, no end": f"<tool_call>\n{CALL}",
    "llama3_json": CALL.replace("arguments", "parameters"),
    "llama3_json, tag": f"<|python_tag|>{CALL}",
    "mistral": f"[TOOL_CALLS] [{CALL}]",
    "mistral, version 11": f"[TOOL_CALLS]get[ARGS]{ARGUMENTS}",
    "mistral, without a tag": f"[TOOL_CALLS]get{ARGUMENTS}",
    "qwen3_coder": "<tool_call>\n<function=get>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "pythonic": '[get(city="Paris")]',
    "pythonic, tag": "<|python_start|>[get(city='Paris')]<|python_end|>",
}


@pytest.mark.parametrize("name", list(ONE_CALL))
def test_one_call(name: str) -> None:
    message = parse(name.split(",")[0], ONE_CALL[name])
    assert calls(message) == [("get", ARGUMENTS)] and message.content == "" and message.reasoning is None


SEVERAL = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n",
    "llama3_json": f"{CALL}; {CALL}",
    "mistral": f"[TOOL_CALLS][{CALL}, {CALL}]",
    "mistral, version 11": f"[TOOL_CALLS]get[ARGS]{ARGUMENTS}[TOOL_CALLS]get[CALL_ID]abcdefghi[ARGS]{ARGUMENTS}",
    "qwen3_coder": ONE_CALL["qwen3_coder"] + "\n" + ONE_CALL["qwen3_coder"],
    "pythonic": '[get(city="Paris"), get(city="Paris")]',
}


@pytest.mark.parametrize("name", list(SEVERAL))
def test_several_calls(name: str) -> None:
    message = parse(name.split(",")[0], SEVERAL[name])
    assert calls(message) == [("get", ARGUMENTS)] * 2 and message.content == ""
    assert len({call.id for call in message.tool_calls}) == 2


def test_mistrals_ids_have_nine_characters_and_its_own_id_is_kept() -> None:
    first, second = parse("mistral", SEVERAL["mistral, version 11"]).tool_calls
    assert len(first.id) == 9 and first.id.isalnum() and second.id == "abcdefghi"


def test_content_and_reasoning_stand_beside_calls() -> None:
    text = f"<think>\nhm\n</think>\n\nI look.\n{ONE_CALL['hermes']}\nDone."
    message = parse("hermes", text, "qwen3")
    assert message.reasoning == "hm" and message.content == "I look.Done." and len(message.tool_calls) == 1


@pytest.mark.parametrize(
    ("text", "open_", "reasoning", "content"),
    [
        ("hm</think>\n\nYes", True, "hm", "Yes"),
        ("\nhm </think>Yes", True, "hm", "Yes"),
        ("hm, no end ", True, "hm, no end ", ""),
        ("<think></think>Yes", False, None, "Yes"),
        (" \n<think>hm</think> Yes <think>", False, "hm", "Yes <think>"),
        ("Yes <think>hm</think>", False, None, "Yes <think>hm</think>"),
        (" Yes ", False, None, " Yes "),
        ("<thi", False, None, "<thi"),
        ("a</thin", True, "a</thin", ""),
        ("", False, None, ""),
    ],
)
def test_reasoning(text: str, open_: bool, reasoning: str | None, content: str) -> None:
    for name in ("none", "hermes"):
        message = parse(name, text, "qwen3", thinking_open=open_)
        assert (message.reasoning, message.content) == (reasoning, content)


def test_deepseek_begins_inside_the_reasoning() -> None:
    assert parse("none", "hm</think>Yes", "deepseek-r1") == ParsedMessage("hm", "Yes", [])
    assert parse("none", "<think>hm</think>Yes", "deepseek-r1") == ParsedMessage("hm", "Yes", [])
    assert parse("none", "[THINK]hm[/THINK]Yes", "mistral") == ParsedMessage("hm", "Yes", [])


def test_without_tools_a_call_is_content() -> None:
    assert parse("hermes", ONE_CALL["hermes"], with_tools=False).content == ONE_CALL["hermes"]


def test_values_without_quotes_have_the_types_of_the_schema() -> None:
    values = {"city": "5", "days": "5", "flag": "True", "list": '["a", 1]', "other": "1"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    ((_, arguments),) = calls(parse("qwen3_coder", f"<tool_call><function=get>{body}</function></tool_call>"))
    assert json.loads(arguments) == {"city": "5", "days": 5, "flag": True, "list": ["a", 1], "other": "1"}
    value = 'two "lines"\n  \\ and </param and <b>\n'
    text = (
        f"<tool_call><function=get><parameter=city>\n{value}\n</parameter><parameter=days>soon</parameter></function>"
    )
    ((_, arguments),) = calls(parse("qwen3_coder", text))
    assert json.loads(arguments) == {"city": value, "days": "soon"}


@pytest.mark.parametrize(
    ("allowed", "value", "expected"),
    [
        ("text", '"2024"', '"2024"'),
        ("string", '"2024"', "2024"),
        ("string", "None", "None"),
        ("string null", "2024", "2024"),
        ("string null", "null", None),
        ("string null", "None", None),
        ("string null", "true", "true"),
        ("string null", '"2024"', "2024"),
        ("string null", "[1]", "[1]"),
        ("string integer", "2024", 2024),
        ("string integer", "20.5", "20.5"),
        ("string array", "['a', 'b']", ["a", "b"]),
        ("array", "['a', None, (1, 2)]", ["a", None, [1, 2]]),
        ("object", "{'a': True, 'b': \"it's\"}", {"a": True, "b": "it's"}),
        ("array", "[a, b]", "[a, b]"),
        ("array", "[" * 500, "[" * 500),
        ("array", "{1, 2}", "{1, 2}"),
        ("array", "[f(1)]", "[f(1)]"),
        ("integer", "'5'", "'5'"),
        ("integer", '"5"', "5"),
        ("number", "-1.5e3", -1500.0),
        ("boolean", "False", False),
    ],
)
def test_a_value_without_quotes_has_a_type_that_its_schema_allows(allowed: str, value: str, expected: Any) -> None:
    types = {"get": {"city": frozenset(allowed.split())}}
    body = f"<parameter=city>\n{value}\n</parameter>\n"
    text = f"<tool_call><function=get>{body}</function></tool_call>"
    message = parse_message(OutputFormat("qwen3_coder", "none"), text, tools=True, thinking_open=False, types=types)
    ((_, arguments),) = calls(message)
    assert json.loads(arguments) == {"city": expected}


# -- text that is not a call ------------------------------------------------------------------------------------

MALFORMED = {
    "hermes": [
        "<tool_call>",
        "<tool_call>call it</tool_call>",
        "<tool_call>\n{}\n</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"city": Paris}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"city": "Par\nis"}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"a": 01}}</tool_call>',
        '<tool_call>{"name": "get", "name": "get", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": {"city": "Pa',
        '<tool_call>{"name": "' + "x" * 3000 + '", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "get", "arguments": ' + '{"a":' * 300 + "1" + "}" * 300 + "}</tool_call>",
        '<tool_call>{"name": "get", "arguments": {"a": ' + "1" * 2000 + "}}</tool_call>",
        "</tool_call> <tool_cal",
    ],
    "llama3_json": [
        "{",
        '{"name": "Bob", "age": 5}',
        '{"a": 1}',
        '{"name": "get"',
        "<|python_tag|>get.call(1)",
        'see {"name": "get"}',
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] nothing here", "[TOOL_CALLS]get[ARGS]5", "[TOOL_CALLS][5]"],
    "qwen3_coder": [
        "<tool_call><function=>",
        "<tool_call><function=get>text",
        "<tool_call>\n<function=get>\n<parameter=city>\nParis",
        "<tool_call><function=get><parameter=a>1</parameter><parameter=a>",
    ],
    "pythonic": [
        "[",
        "[1, 2]",
        "[a](b)",
        "[get(1)]",
        "[get(city=x)]",
        "[get(city=b'1')]",
        "[get(**{})]",
        '[get(city="\\ud800")]',
        "[get(a=" + "(" * 200 + "1" + ")" * 200 + ")]",
        "[get(a=" + "-" * 9000 + "1)]",
        "[get(a=" + "9" * 5000 + ")]",
        "[get(a='" + "x" * 20000 + "')]",
        "[" * 100_000,
        "[get(a=" + "-" * 100_000 + "1)]",
        "[get(a=1" + "+1" * 8000 + ")]",
        "[get(a=1" + "<1" * 8000 + ")]",
        "[get(a=1" + "if 1 else 1 " * 1300 + ")]",
        "[get(a=" + "lambda:" * 2300 + "1)]",
        "[get(a=f'" + "{1}" * 5000 + "')]",
        "[get(a=0x" + "f" * 16000 + ")]",
        "[get(a=1e999)]",
        "[get(a={[1]: 2})]",
        "[get" + ".get" * 4000 + "(a=1)]",
        "[get" + "()" * 8000 + "(a=1)]",
    ],
}


@pytest.mark.parametrize(
    ("name", "text"),
    [pytest.param(name, text, id=f"{name}-{text[:40]}") for name in MALFORMED for text in MALFORMED[name]],
)
def test_a_malformed_call_is_content(name: str, text: str) -> None:
    assert parse(name, text) == ParsedMessage(None, text, [])
    around = f"Look: {text} ok" if name not in ("llama3_json", "pythonic") else text
    assert parse(name, around) == ParsedMessage(None, around, [])


def test_a_call_after_a_malformed_one_is_found() -> None:
    for bad in MALFORMED["hermes"][1:12]:
        message = parse("hermes", f"{bad}\n{ONE_CALL['hermes']}")
        assert message.content == bad and calls(message) == [("get", ARGUMENTS)]


BROKEN = '<tool_call>{"name": "get", "arguments": {"city": "Rome"</tool_call>'


def test_a_stream_keeps_a_call_that_breaks_after_its_arguments_began() -> None:
    parser = OutputFormat("hermes", "none").parser(True, False)
    text = '<tool_call>{"name": "get", "arguments": {"city": Paris}}</tool_call>'
    message = joined([*parser.push(text), *parser.finish()])
    assert calls(message) == [("get", '{"city": ')] and message.content == "Paris}}</tool_call>"


@pytest.mark.parametrize("pieces", [[BROKEN], list(BROKEN)])
def test_the_tag_that_closes_a_broken_call_is_no_content(pieces: list[str]) -> None:
    parser = OutputFormat("hermes", "none").parser(True, False)
    deltas = [delta for piece in [*pieces, "\nMore."] for delta in parser.push(piece)]
    message = joined([*deltas, *parser.finish()])
    assert calls(message) == [("get", '{"city": "Rome"')] and message.content == "More."
    assert parse("hermes", BROKEN).content == BROKEN


# -- pieces -------------------------------------------------------------------------------------------------

PIECES = [
    "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "\n", "  ", "<", "</", "[", "]", "{",
    "}", ",", ";", ":", '"', "\\", "hi", "é", "😀", "5", "-", "true", "nul", "<function=get>", "</function>",
    "<parameter=city>", "<parameter=days>", "</parameter>", "\n</parameter>", "[TOOL_CALLS]", "get", "[ARGS]",
    "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "get(city=", "'", "(", ")", CALL, ARGUMENTS,
    '{"name": "get", ', '"arguments": ', *ONE_CALL.values(),
]  # fmt: skip


def samples(name: str) -> list[str]:
    """Return well-formed, malformed and random texts of a format."""
    draw = random.Random(name)
    good = [text for key, text in (*ONE_CALL.items(), *SEVERAL.items()) if key.split(",")[0] == name]
    bad = [text for text in MALFORMED[name] if len(text) < 500]
    mixed = ["".join(draw.choices(PIECES, k=draw.randint(2, 14))) for _ in range(150)]
    return [*good, *bad, *(f"a \n{text} b" for text in (*good, *bad)), *mixed]


def run(name: str, reasoning: str, open_: bool, whole_calls: bool, pieces: list[str]) -> list[Delta]:
    ids = itertools.count()
    parser = OutputFormat(name, reasoning).parser(
        True, open_, whole_calls=whole_calls, types=TYPES, new_id=lambda: str(next(ids))
    )
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return merged([*deltas, *parser.finish()])


def merged(deltas: list[Delta]) -> list[Delta]:
    """Join adjacent deltas of one kind."""
    found: list[Delta] = []
    for delta in deltas:
        last = found[-1] if found else None
        if isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + delta.text)
        elif isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
            found[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(last, ToolCallDelta) and isinstance(delta, ToolCallDelta) and delta.id is None:
            assert last.index == delta.index
            found[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
        else:
            found.append(delta)
    return found


@pytest.mark.parametrize("whole_calls", [False, True])
@pytest.mark.parametrize("name", list(MALFORMED))
def test_deltas_do_not_depend_on_how_the_text_is_cut(name: str, whole_calls: bool) -> None:
    draw = random.Random(name)
    for text in samples(name):
        reasoning, open_ = draw.choice([("none", False), ("qwen3", False), ("qwen3", True), ("mistral", False)])
        expected = run(name, reasoning, open_, whole_calls, [text])
        assert run(name, reasoning, open_, whole_calls, list(text)) == expected, text
        for _ in range(3):
            cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(1, 5)))
            pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
            assert run(name, reasoning, open_, whole_calls, pieces) == expected, pieces


@pytest.mark.parametrize("name", list(MALFORMED))
def test_every_call_of_a_whole_message_is_valid_and_no_text_is_lost(name: str) -> None:
    for text in samples(name):
        message = parse(name, text)
        for _, arguments in calls(message):
            assert isinstance(json.loads(arguments), dict)
        if not message.tool_calls:
            assert "".join(message.content.split()) == "".join(text.split())


@pytest.mark.parametrize("name", [*MALFORMED])
def test_a_stream_of_valid_calls_equals_the_whole_message(name: str) -> None:
    for key, text in (*ONE_CALL.items(), *SEVERAL.items()):
        if key.split(",")[0] == name:
            assert run(name, "qwen3", False, False, list(text)) == run(name, "qwen3", False, True, [text])


def test_arguments_are_streamed_and_only_a_possible_tag_is_held_back() -> None:
    parser = OutputFormat("hermes", "qwen3").parser(True, False)
    shown = [parser.push(piece) for piece in ("Hel", "lo <b", "> <tool", "_call>", '{"name": "get", "arguments": {"a')]
    assert shown[:4] == [[ContentDelta("Hel")], [ContentDelta("lo <b")], [ContentDelta(">")], []]
    head, arguments = shown[4]
    assert isinstance(head, ToolCallDelta) and (head.index, head.name, head.arguments) == (0, "get", "")
    assert arguments == ToolCallDelta(0, None, None, '{"a')
    assert parser.push('": 1}') == [ToolCallDelta(0, None, None, '": 1}')]
    assert parser.push("}\n</tool_call>") == [] and parser.finish() == []


@pytest.mark.parametrize(
    "piece",
    ["<tool_call>", '<tool_call>{"name": "get", "arguments": {"a": "', "[get(", "<tool_cal", "<", " ", '{"', "[["],
)
def test_hostile_texts_are_read_in_linear_steps(piece: str) -> None:
    """The text that a parser keeps unread stays short, so that no character is read again and again."""
    for name in MALFORMED:
        parser = OutputFormat(name, "qwen3").parser(True, False)
        for _ in range(300):
            parser.push(piece)
            assert len(parser._text) < 32
        parser.finish()


# -- detection ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "tools", "reasoning"),
    [
        ("{{ messages }}", "none", "none"),
        ("{% if tools %}<tool_call>{% endif %}", "hermes", "none"),
        ("<tool_call> <think></think>", "hermes", "qwen3"),
        ("<tool_call> <function=x> <think>", "qwen3_coder", "qwen3"),
        ("content.split('</think>')", "none", "qwen3"),
        ("<|python_tag|>", "llama3_json", "none"),
        ("<|python_start|> <|python_tag|>", "pythonic", "none"),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("""{{- '"parameters": ' }}""", "llama3_json", "none"),
        ("<tool_call> <arg_key>", "none", "none"),
        (None, "none", "none"),
    ],
)
def test_formats_follow_the_template(source: str | None, tools: str, reasoning: str) -> None:
    assert OutputFormat.of(source) == OutputFormat(tools, reasoning)


def test_a_setting_overrides_the_template() -> None:
    assert OutputFormat.of("<tool_call><think>", "llama3", "deepseek-r1") == OutputFormat("llama3_json", "deepseek-r1")
    assert OutputFormat.of("<tool_call><think>", "none", "none") == OutputFormat("none", "none")
    assert OutputFormat.of(None, "qwen25", "qwen3") == OutputFormat("hermes", "qwen3")
    for settings in (("other", None), (None, "other")):
        with pytest.raises(BadRequestError, match="must be one of"):
            OutputFormat.of(None, *settings)


def test_the_prompt_decides_whether_the_reasoning_is_open() -> None:
    format = OutputFormat.of("<think>")
    assert format.thinking_open("...<think>\n") and not format.thinking_open("...<think>\n\n</think>\n\n")
    assert not OutputFormat.of("").thinking_open("<think>\n")


def test_a_prompt_that_closes_the_reasoning_leaves_none_for_the_output() -> None:
    format = OutputFormat.of("<tool_call> <think>", None, "deepseek-r1")
    assert format.after("<think>\n\n</think>\n\n") == OutputFormat("hermes", "none")
    assert format.after("a</think>b") == format.after("") == format


def test_tags_that_may_be_special_tokens() -> None:
    assert OutputFormat.of("[TOOL_CALLS]").tags(tools=True) == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    assert OutputFormat.of("<tool_call><think>").tags(tools=False) == ("<think>", "</think>")
