"""Grammars that try to harm the server: `KINDS`, one of each kind, and `generated`, any number of random ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

Hostile = tuple[str, str, str]
"""(name, sampling parameter, text)"""


def _json(name: str, schema: Any) -> Hostile:
    return name, "json_schema", json.dumps(schema)


def _nested(depth: int, open_text: str, close_text: str, inner: str) -> str:
    return open_text * depth + inner + close_text * depth


def _doubling(depth: int) -> dict[str, Any]:
    """Return a schema in which each definition refers to the next one twice."""
    parts = {f"d{i}": {"type": "array", "items": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {"$defs": parts | {f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def _all_of(width: int) -> dict[str, Any]:
    """Return an intersection of choices, whose product grows exponentially."""
    choice = [{"properties": {f"p{i}": {"type": "integer"}}} for i in range(width)]
    return {"allOf": [{"anyOf": choice} for _ in range(width)]}


KINDS: list[Hostile] = [
    # -- regular expressions
    ("deep parentheses", "regex", _nested(5000, "(", ")", "a")),
    ("deep alternations", "regex", _nested(2000, "(a|", ")", "a")),
    ("nested plus", "regex", "((((a+)+)+)+)+$"),
    ("nested star of choices", "regex", "((a|aa|aaa)*b?)*c"),
    ("a million repetitions", "regex", "(ab?c){1000000}"),
    ("nested counts", "regex", "(((((a{1,100}){1,100}){1,100}){1,100}){1,100}){1,100}"),
    ("counts of choices", "regex", "(a|b|ab|ba){500,1000}"),
    ("a token far from the end", "regex", "(a|b)*a(a|b){25}"),
    ("two tokens far from the end", "regex", "(a|b)*a(a|b){18}(c|d)*c(c|d){18}"),
    ("many wildcards", "regex", "|".join(f".*{i}.*" for i in range(300))),
    ("a chain of wildcards", "regex", "(.*x){40}.*"),
    ("unicode ranges", "regex", "[Ā-\uffff]{1,500}x"),
    ("unicode classes", "regex", r"\p{L}{0,5000}\p{N}{0,5000}"),
    ("a large alternation", "regex", "|".join(f"word{i * 7919 % 100_003}" for i in range(10_000))),
    ("a large text", "regex", "a" * 200_000),
    ("case-insensitive text", "regex", "(?i)" + "ß" * 5000),
    ("look-ahead", "regex", "(?=(a+)+$)a"),
    ("back reference", "regex", r"(a*)\1\1\1"),
    ("nothing", "regex", "[^\\s\\S]"),
    ("a NUL", "regex", "\x00{3}\x01"),
    ("unclosed", "regex", "([{"),
    # -- JSON schemas
    ("deep JSON", "json_schema", _nested(5000, '{"items":', "}", "{}")),
    ("deep brackets", "json_schema", "[" * 100_000),
    _json("an array in 90 arrays", json.loads(_nested(90, '{"type":"array","minItems":3,"items":', "}", "{}"))),
    _json("many properties", {"properties": {f"p{i}": {"type": "string"} for i in range(500)}}),
    _json(
        "many required", {"properties": {f"p{i}": {} for i in range(600)}, "required": [f"p{i}" for i in range(600)]}
    ),
    _json("a large enum", {"enum": [f"v{i * 7919}" for i in range(15_000)]}),
    _json("an enum of long strings", {"enum": [str(i) + "x" * 10_000 for i in range(20)]}),
    _json("a reference to itself", {"$ref": "#"}),
    _json(
        "references in a circle",
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ),
    _json("doubling references", _doubling(40)),
    _json("a product of choices", _all_of(7)),
    _json("oneOf of 2000", {"oneOf": [{"const": f"a{i}"} for i in range(2000)]}),
    _json("huge minItems", {"type": "array", "items": {"type": "array", "minItems": 10**6}, "minItems": 10**6}),
    _json("huge maxLength", {"type": "string", "minLength": 10**7, "maxLength": 10**9}),
    _json("a huge number", {"type": "number", "minimum": -1e300, "maximum": 1e300, "multipleOf": 1e-5}),
    _json("a large multiple", {"type": "integer", "multipleOf": 20_011}),
    _json("patternProperties", {"patternProperties": {f"^.*a.{{{i}}}$": {"type": "null"} for i in range(40)}}),
    _json("an ambiguous pattern", {"type": "string", "pattern": "^(a|aa)+$", "minLength": 4000, "maxLength": 5000}),
    _json("a pattern of whitespace", {"type": "object", "x-guidance": {"whitespace_pattern": "( *)*( {0,500})*"}}),
    _json("a remote reference", {"$ref": "http://127.0.0.1:9/schema.json"}),
    _json("a local file", {"$ref": "file:///etc/passwd"}),
    _json("wrong types", {"type": 7, "properties": [], "required": {}}),
    ("NaN", "json_schema", '{"minimum": NaN, "maximum": Infinity}'),
    ("half an object", "json_schema", '{"type": "object", "properties"'),
    # -- grammars
    ("left recursion", "ebnf", 'root ::= root "a" | root root | ""'),
    ("an epsilon loop", "ebnf", 'root ::= a\na ::= b a | ""\nb ::= a | ""'),
    ("an ambiguous sum", "ebnf", 'root ::= s\ns ::= s s | s s s | "a" | [a-z]+ | [a-z ]*'),
    ("products of counts", "ebnf", 'root ::= a{2000}\na ::= b{2000}\nb ::= "x"{2000}'),
    (
        "doubling rules",
        "ebnf",
        "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)), 'r40 ::= "a"']),
    ),
    (
        "doubling recursive rules",
        "ebnf",
        "\n".join(["root ::= r0", *(f'r{i} ::= r{i + 1} r{i + 1} | "(" root ")"' for i in range(30)), 'r30 ::= "a"']),
    ),
    ("a rule without an end", "ebnf", 'root ::= "a" root'),
    ("deep GBNF", "ebnf", "root ::= " + _nested(20_000, "(", ")", '"a"')),
    (
        "many rules",
        "ebnf",
        "\n".join(["root ::= r0", *(f'r{i} ::= "{i}" | r{i + 1}' for i in range(4000)), 'r4000 ::= "x"']),
    ),
    ("a large choice of rules", "ebnf", "root ::= " + " | ".join(f'"w{i}" root' for i in range(5000)) + ' | ""'),
    ("intersections", "ebnf", "start: A\nA: " + " & ".join(f"/.*{c}.*/" for c in "abcdefghijklm")),
    ("complements", "ebnf", "start: A\nA: ~(~(/(.*[a-f]){1,40}.{10}/ & ~/(.*[c-g]){1,40}.{11}/))"),
    ("a lazy wildcard", "ebnf", "start: A* B\nA[lazy]: /(.|\\n)*/ /x{1,300}/\nB: /(.|\\n)*/"),
    ("an inner schema", "ebnf", "start: %json " + json.dumps(_all_of(7))),
    ("an inner substring", "ebnf", "start: %regex " + json.dumps({"substring_chars": "ab" * 20_000})),
    # -- structural tags
    ("deep formats", "structural_tag", _nested(3000, '{"type":"sequence","elements":[', "]}", "1")),
    (
        "many triggers",
        "structural_tag",
        json.dumps(
            {
                "structures": [{"begin": f"<f{i}>", "schema": {}, "end": "</f>"} for i in range(500)],
                "triggers": [f"<f{i}>" for i in range(500)],
            }
        ),
    ),
    ("no object", "structural_tag", "[[[[1]]]]"),
]


def generated(count: int, seed: int = 0) -> Iterator[Hostile]:
    """Yield random grammars, most of which are valid."""
    rng = random.Random(seed)
    for number in range(count):
        kind = rng.choice(["regex", "json_schema", "ebnf", "structural_tag"])
        text = {
            "regex": _random_regex,
            "json_schema": _random_json,
            "ebnf": _random_gbnf,
            "structural_tag": _random_tag,
        }[kind](rng)
        if rng.random() < 0.1:  # damage it
            at = rng.randrange(len(text) + 1)
            text = text[:at] + rng.choice(["", "(", "\\", "{", '"', "\ud7ff", "]"]) + text[at + rng.randrange(3) :]
        yield f"{kind} {number}", kind, text or "("


def _random_regex(rng: random.Random, depth: int = 0) -> str:
    if depth > rng.randrange(2, 7):
        return rng.choice(["a", "b", ".", r"\d", r"\w", "[a-z]", r"\p{L}", "é", " ", "[^a]", "x{3}", "ab|cd"])
    inner = [_random_regex(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    joined = rng.choice(["", "|"]).join(inner)
    count = rng.choice([3, 30, 300, 3000, 10**6])
    return rng.choice(["({})", "({})*", "({})+", "({})?", f"({{}}){{{{{count}}}}}", f"({{}}){{{{1,{count}}}}}"]).format(
        joined
    )


def _random_json(rng: random.Random) -> str:
    return json.dumps(_random_schema(rng))


def _random_schema(rng: random.Random, depth: int = 0) -> Any:
    size = rng.choice([1, 2, 5, 50])
    number = rng.choice([0, 1, 7, 1000, 10**9])
    leaves: list[Any] = [
        {"type": "string", "maxLength": number},
        {"type": "string", "pattern": _random_regex(rng, 4)},
        {"type": "string", "format": rng.choice(["date-time", "email", "uri", "ipv6", "hostname", "uuid"])},
        {"type": "integer", "minimum": -number, "maximum": number * 3},
        {"type": "number", "multipleOf": rng.choice([0.01, 3, 97])},
        {"enum": [rng.randrange(10**6) for _ in range(size * 20)]},
        {"$ref": "#"},
        {"$ref": "#/$defs/a"},
        {"not": {}},
        True,
        {},
    ]
    if depth > rng.randrange(1, 5):
        return rng.choice(leaves)
    inner = [_random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    schema: dict[str, Any] = rng.choice(
        [
            {"type": "array", "items": inner[0], "minItems": number % 50, "maxItems": number},
            {"type": "object", "properties": {f"p{i}": s for i, s in enumerate(inner)}, "required": ["p0", "q"]},
            {"anyOf": inner},
            {"allOf": inner},
            {"oneOf": inner},
            {
                "type": "object",
                "patternProperties": {_random_regex(rng, 4): inner[0]},
                "additionalProperties": inner[-1],
            },
            {"type": "object", "additionalProperties": inner[0], "minProperties": number % 100},
        ]
    )
    if not depth:
        schema = schema | {"$defs": {"a": rng.choice(leaves), "b": {"$ref": "#/$defs/a"}}}
    return schema


def _random_gbnf(rng: random.Random) -> str:
    names = ["root", *(f"r{i}" for i in range(rng.randrange(1, 12)))]

    def part(depth: int = 0) -> str:
        count = rng.choice([2, 20, 1000])
        leaves = ['"a"', '"bc"', "[a-z]", "[^x]", '""', ".", *names]
        if depth > 2 or rng.random() < 0.6:
            return rng.choice(leaves)
        return rng.choice(["({} {})", "({} | {})", "({})*{}", "({})+ {}", f"({{}}){{{{{count}}}}} {{}}"]).format(
            part(depth + 1), part(depth + 1)
        )

    return "\n".join(f"{name} ::= " + " | ".join(part() for _ in range(rng.randrange(1, 5))) for name in names)


def _random_tag(rng: random.Random) -> str:
    def form(depth: int = 0) -> Any:
        if depth > 2 or rng.random() < 0.3:
            return rng.choice(
                [
                    {"type": "const_string", "value": "x" * rng.randrange(4)},
                    {"type": "json_schema", "json_schema": _random_schema(rng, 2)},
                    {"type": "regex", "pattern": _random_regex(rng, 3)},
                    {"type": "any_text"},
                    {"type": "grammar", "grammar": _random_gbnf(rng)},
                ]
            )
        tags = [
            {"type": "tag", "begin": f"<{i}", "content": form(depth + 1), "end": ">"}
            for i in range(rng.randrange(1, 6))
        ]
        return rng.choice(
            [
                {"type": "sequence", "elements": [form(depth + 1) for _ in range(rng.randrange(1, 5))]},
                {"type": "or", "elements": [form(depth + 1) for _ in range(rng.randrange(1, 5))]},
                {"type": "triggered_tags", "triggers": ["<"], "tags": tags, "at_least_one": rng.random() < 0.5},
                {"type": "tags_with_separator", "separator": rng.choice(["", ","]), "tags": tags},
            ]
        )

    return json.dumps({"type": "structural_tag", "format": form()})
