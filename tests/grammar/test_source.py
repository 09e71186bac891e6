"""Translation of GBNF, regular expressions, JSON schemas and structural tags: which outputs the result accepts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.grammar.conftest import accepts
from verl_server.errors import BadRequestError
from verl_server.grammar.compiler import GrammarCompiler
from verl_server.grammar.source import Grammar, Kind, grammar_of, translate
from verl_server.sampling_params import SamplingParams

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def tag(form: dict[str, Any]) -> str:
    return json.dumps({"type": "structural_tag", "format": form})


def number_tag(begin: str, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": NUMBER, "end": end}


CALLS = json.dumps(
    {
        "type": "structural_tag",
        "structures": [
            {
                "begin": "<function=f>",
                "schema": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
                "end": "</function>",
            },
            {"begin": "<function=g>", "schema": {"type": "object"}, "end": "</function>"},
        ],
        "triggers": ["<function="],
    }
)
CALL = '<function=f>{"x":1}</function>'

CASES: list[tuple[Kind, str, list[str], list[str]]] = [
    # -- GBNF
    ("ebnf", 'root ::= a | a " is big"\na ::= "Rome" | "Oslo" # c', ["Rome", "Oslo is big"], ["Paris", "Rome is"]),
    ("ebnf", 'root ::= a-b\na-b ::= "x"\n  | "y"', ["x", "y"], ["z", "xy"]),
    ("ebnf", 'root ::= [a-z]+ "x"', ["aax", "xxx"], ["x", "aay"]),  # the longest match of [a-z]+ must not take the x
    ("ebnf", 'root ::= "a"{2,3} [^\\]]? | ""', ["aab", "aaa", ""], ["ab", "aa]"]),
    ("ebnf", r'root ::= "\"" [^"\\\n]* "\"" "\u0041\x42\\n"', ['"hi"AB\\n'], ['"h"i"AB\\n']),
    ("ebnf", 'root ::= t ("+" t)*\nt ::= [0-9]+ | "(" root ")"', ["1+(2+33)", "7"], ["1+", "(1"]),
    ("ebnf", 'root ::= "a" | root "a"', ["a", "aaa"], ["", "b"]),
    ("ebnf", 'root ::= "é" [ж-я]{2} .', ["éжю!"], ["éab!", "éжю\n"]),
    ("ebnf", 'root ::= ( ( "a" | ) "b" )+', ["b", "abb"], ["a"]),
    # -- Lark
    ("ebnf", 'start: "a" NUMBER\nNUMBER: /[0-9]+/', ["a12"], ["a", "12"]),
    # -- regular expressions
    ("regex", r"[a-z]{2}/\d+", ["ab/12"], ["ab12", "ab/"]),
    ("regex", r"^(é|ü)+$", ["éü"], ["e"]),
    ("regex", r"a\.b\"c", ['a.b"c'], ['axb"c']),
    # -- JSON schemas
    ("json_schema", '{"type": "object", "required": ["a"]}', ['{"a": 1}', '{"a": null, "b": []}'], ["{}", "[1]"]),
    ("json_schema", '{"enum": ["x", 3, null]}', ['"x"', "3", "null"], ["x", "4"]),
    ("json_schema", "true", ["[1]", '"a"'], ["a"]),
    # -- structural tags
    ("structural_tag", CALLS, ["hi", "", f"a {CALL} b <function=g>{{}}</function>"], ["<function=h>", CALL[:-1]]),
    ("structural_tag", CALLS, ["a < b <functional"], ["<function=f>{}</function>"]),
    (
        "structural_tag",
        tag({"type": "sequence", "elements": [{"type": "const_string", "value": "a/"}, NUMBER]}),
        ["a/12"],
        ["a/", "12"],
    ),
    (
        "structural_tag",
        tag({"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}),
        ["<think>a < b</think>", "<think></think>"],
        ["<think>a", "<think>a</think>b"],
    ),
    (
        "structural_tag",
        tag(
            {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
                    {"type": "triggered_tags", "triggers": ["<t>"], "tags": [number_tag("<t>", "</t>")]},
                ],
            }
        ),
        ["<think>a</think>x<t>1</t>y"],
        ["x<t>1</t>", "<think>a</think><t>x</t>"],
    ),
    (
        "structural_tag",
        tag(
            {
                "type": "triggered_tags",
                "at_least_one": True,
                "triggers": ["<t"],
                "tags": [number_tag("<t1>", ["</t>", ";"])],
            }
        ),
        ["<t1>1</t>y", "<t1>1;<t1>2</t>"],
        ["x<t1>1</t>", "", "<t1>1"],
    ),
    (
        "structural_tag",
        tag(
            {
                "type": "triggered_tags",
                "stop_after_first": True,
                "triggers": ["<t"],
                "tags": [number_tag("<t1>", "</t>")],
            }
        ),
        ["a<t1>1</t>", "abc"],
        ["<t1>1</t>y"],
    ),
    (
        "structural_tag",
        tag({"type": "tags_with_separator", "separator": ",", "tags": [number_tag("<", ">")]}),
        ["<1>,<2>", "", "<1>"],
        ["<1>,", "<1><2>"],
    ),
    (
        "structural_tag",
        tag({"type": "or", "elements": [{"type": "const_string", "value": "yes"}, NUMBER]}),
        ["yes", "4"],
        ["no", "yes4"],
    ),
    (
        "structural_tag",
        tag({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}, NUMBER]}),
        ["abcEND1", "END1"],
        ["abc", "abcEND"],
    ),
    ("structural_tag", tag({"type": "grammar", "grammar": 'root ::= "a"+'}), ["aa"], ["b", ""]),
    ("structural_tag", tag({"type": "regex", "pattern": "a/b"}), ["a/b"], ["ab"]),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), CASES)
def test_a_grammar_accepts_its_outputs_and_no_others(
    compiler: GrammarCompiler, kind: Kind, text: str, good: list[str], bad: list[str]
) -> None:
    assert [output for output in good if not accepts(compiler, kind, text, output)] == []
    assert [output for output in bad if accepts(compiler, kind, text, output)] == []


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("ebnf", 'root ::= "a" b', "the rule `b`, which it does not define"),
        ("ebnf", 'a ::= "a"', "no rule `root`"),
        ("ebnf", 'root ::= "a"\nroot ::= "b"', "line 2"),
        ("ebnf", 'root ::= ("a"', "a parenthesis is not closed"),
        ("ebnf", 'root ::= "a")', "was not opened"),
        ("ebnf", 'root ::= "a" *+', "'+' must follow"),
        ("ebnf", 'root ::= "a', "line 1"),
        ("ebnf", "root ::= [z-a]", "z-a is empty"),
        ("ebnf", "root ::= []", "a set of characters is empty"),
        ("ebnf", r'root ::= "\U00110000"', "is no character"),
        ("ebnf", 'root ::= "a"{99999999999}', "is too large"),
        ("ebnf", "root ::= " + "(" * 200, "more than 100"),
        ("ebnf", 'a b ::= "b"\nroot ::= "a"', "must begin with `name ::=`"),
        ("ebnf", "nothing", "Expected token"),
        ("ebnf", "start: <|nope|>", "unknown special token"),
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[1]", "must be a JSON schema"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "http://host/x"}', "does not fetch"),
        ("json_schema", '{"type": "unknown"}', "Invalid type"),
        ("structural_tag", "1", "must be a JSON object"),
        ("structural_tag", "{}", "needs `format`"),
        ("structural_tag", '{"format": {"type": "qwen_xml_parameter"}}', "'qwen_xml_parameter' is not supported"),
        ("structural_tag", '{"format": {"type": "any_text", "excludes": ["a"]}}', "`excludes` is not supported"),
        ("structural_tag", '{"structures": [1], "triggers": ["a"]}', "must be a list of objects"),
        ("structural_tag", '{"structures": [], "triggers": ["a"]}', "`tags` must be a list that is not empty"),
        (
            "structural_tag",
            '{"structures": [{"begin": "b", "schema": {}, "end": "c"}], "triggers": ["a"]}',
            "begins with no trigger",
        ),
        (
            "structural_tag",
            tag({"type": "sequence", "elements": [{"type": "any_text"}, NUMBER]}),
            "must be the last element",
        ),
    ],
)
def test_a_refusal_names_the_fault(compiler: GrammarCompiler, kind: Kind, text: str, says: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        compiler.compile(translate(Grammar(kind, text), {}))
    assert says in str(caught.value)
    assert len(str(caught.value)) < 700


def test_formats_inside_each_other_are_bounded() -> None:
    form: dict[str, Any] = NUMBER
    for _ in range(100):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(BadRequestError, match="more than 32 formats"):
        translate(Grammar("structural_tag", tag(form)), {})


@pytest.mark.parametrize(
    ("form", "tokens"),
    [
        ({"type": "const_string", "value": "<|im_start|>a<|im_end|>"}, [3, 69, 4]),
        (
            {"type": "tag", "begin": "<|im_start|>", "content": {"type": "any_text"}, "end": "<|im_end|>"},
            [3, 69, 70, 4],
        ),
        (
            {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [number_tag("<|im_start|>b", "c")]},
            [69, 69, 3, 70, 22, 71, 69],
        ),
    ],
)
def test_special_tokens_are_distinct_from_their_text(
    compiler: GrammarCompiler, form: dict[str, Any], tokens: list[int]
) -> None:
    """Token 69 is "a", 22 is "1"; token 3 is <|im_start|>, and 4 is <|im_end|>."""
    special = {"<|im_start|>": 3, "<|im_end|>": 4}
    matcher = compiler.compile(translate(Grammar("structural_tag", tag(form)), special)).inner
    assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    with pytest.raises(BadRequestError, match="special token must be its beginning"):
        late = {"type": "tag", "begin": "a", "content": {"type": "any_text"}, "end": "b<|im_end|>"}
        translate(Grammar("structural_tag", tag(late)), special)


def test_an_empty_text_is_no_grammar() -> None:
    unset = SamplingParams.parse({"json_schema": "", "regex": None})
    assert grammar_of(unset) is None and unset.json_schema is None
    assert grammar_of(SamplingParams.parse({"ebnf": "", "regex": "a"})) == Grammar("regex", "a")
