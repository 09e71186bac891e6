"""GBNF, the notation of llama.cpp and xgrammar (`root ::= "a" | "b"`), translated into Lark for llguidance.

llguidance matches upper-case names (terminals) as regular expressions, and lower-case names as rules of a grammar over
terminals. A terminal takes the longest match, so a rule of many small terminals can reject text that the grammar
describes. Therefore every rule that does not contain itself becomes a terminal, which is exact.

`llguidance.gbnf_to_lark` (1.7) is not used: it ends a rule at the end of a line, decodes escapes such as `\\u0041`
wrongly, and has no limits.
"""

from __future__ import annotations

import re

from verl_server.errors import BadRequestError

_MOST_DEPTH = 100
"""Largest number of parentheses that are open at the same time."""
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
      | (?P<literal>"(?:[^"\\\n]|\\.)*")
      | (?P<set>\[(?:[^\]\\\n]|\\.)*\])
      | (?P<rule>[A-Za-z_][\w.-]*)
      | (?P<repeat>[*+?]|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
      | (?P<mark>::=|[|().])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(text: str) -> bool:
    """Return True if the text has a rule of GBNF. Lark has `:` in the place of `::=`."""
    return re.search(r"(?m)^\s*[A-Za-z_][\w.-]*\s*::=", text) is not None


def lark_of_gbnf(text: str) -> str:
    """Return the grammar in Lark. Raise BadRequestError, with the line, for text that is not GBNF."""
    rules = _parse(text)
    if "root" not in rules:
        raise BadRequestError("sampling_params.ebnf has no rule `root`, with which the output begins.")
    for parts in rules.values():
        for name in _names(parts):
            if name not in rules:
                raise BadRequestError(f"sampling_params.ebnf uses the rule `{name}`, which it does not define.")
    recursive = _recursive(rules)
    lark_names = {name: f"rule_{i}" if name in recursive else f"RULE_{i}" for i, name in enumerate(rules)}
    lines = [f"start: {lark_names['root']}"]
    for name, parts in rules.items():
        written = [lark_names[part] if is_name else part for part, is_name in parts]
        lines.append(f"{lark_names[name]}: {' '.join(written)}")
    return "\n".join(lines)


_Parts = list[tuple[str, bool]]
"""The right side of a rule: (text in Lark, False) or (name of a rule, True), in order."""


def _names(parts: _Parts) -> list[str]:
    return [part for part, is_name in parts if is_name]


def _parse(text: str) -> dict[str, _Parts]:
    rules: dict[str, _Parts] = {}
    tokens = _tokens(text)
    starts = [i for i, (kind, value, _) in enumerate(tokens) if kind == "mark" and value == "::="]
    if not starts or starts[0] != 1:
        raise _error(text, tokens[0][2] if tokens else 0, "a rule must begin with `name ::=`")
    for number, start in enumerate(starts):
        kind, name, at = tokens[start - 1]
        if kind != "rule":
            raise _error(text, at, "`::=` must follow the name of a rule")
        if name in rules:
            raise _error(text, at, f"the rule `{name}` is defined twice")
        end = starts[number + 1] - 1 if number + 1 < len(starts) else len(tokens)
        rules[name] = _parse_body(text, tokens[start + 1 : end])
    return rules


def _tokens(text: str) -> list[tuple[str, str, int]]:
    """Return (kind, text, position) of all tokens but spaces and comments."""
    tokens, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise _error(text, at, f"{text[at]!r} is unexpected")
        kind = match.lastgroup
        if kind is not None and kind != "space":
            tokens.append((kind, match.group(), at))
        at = match.end()
    return tokens


def _parse_body(text: str, tokens: list[tuple[str, str, int]]) -> _Parts:
    """Return the right side of a rule in Lark, where names of rules are still those of GBNF."""
    parts: _Parts = []
    depth, ends_item, is_empty = 0, False, True
    for kind, value, at in tokens:
        if kind == "repeat":
            if not ends_item:
                raise _error(text, at, f"{value!r} must follow what it repeats")
            parts.append((_repetition(text, value, at), False))
            ends_item = False
            continue
        if kind in ("literal", "set", "rule") or value == ".":
            parts.append(_item(text, kind, value, at))
            ends_item, is_empty = True, False
            continue
        if value in "|)" and is_empty:
            parts.append(('""', False))
        if value == "(":
            depth += 1
            if depth > _MOST_DEPTH:
                raise _error(text, at, f"more than {_MOST_DEPTH} parentheses are open")
        elif value == ")":
            depth -= 1
            if depth < 0:
                raise _error(text, at, "a parenthesis is closed that was not opened")
        parts.append((value, False))
        ends_item, is_empty = value == ")", value in "(|"
    if depth:
        raise _error(text, tokens[-1][2], "a parenthesis is not closed")
    return [*parts, ('""', False)] if is_empty else parts


def _item(text: str, kind: str, value: str, at: int) -> tuple[str, bool]:
    if kind == "rule":
        return value, True
    if value == ".":
        return r"/[^\n]/", False
    if kind == "literal":
        return _literal("".join(_characters(text, value[1:-1], at))), False
    return _set(text, value[1:-1], at), False


def _literal(value: str) -> str:
    """Return a regular expression for exactly this text. Lark's literals have other escapes than GBNF's."""
    return "/" + "".join(_code_point(c) for c in value) + "/" if value else '""'


def _code_point(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):X}}}"


def _characters(text: str, value: str, at: int) -> list[str]:
    """Return the characters of a literal or of a part of a set, without escapes."""
    result, place = [], 0
    while place < len(value):
        match = _ESCAPE.match(value, place)
        if match is None:
            result.append(value[place])
            place += 1
            continue
        code = match.group(1)
        if len(code) > 1:
            number = int(code[1:], 16)
            if number > 0x10FFFF or 0xD800 <= number < 0xE000:
                raise _error(text, at, f"\\{code} is no character")
            result.append(chr(number))
        else:
            result.append(_ESCAPED.get(code, code))
        place = match.end()
    return result


def _set(text: str, value: str, at: int) -> str:
    """Return a set of characters, such as `[^a-z"]`, as a regular expression."""
    negated = value.startswith("^")
    pieces = re.findall(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|.", value[negated:], re.DOTALL)
    ranges, i = [], 0
    while i < len(pieces):
        first = _characters(text, pieces[i], at)[0]
        if i + 2 < len(pieces) and pieces[i + 1] == "-":
            last = _characters(text, pieces[i + 2], at)[0]
            if last < first:
                raise _error(text, at, f"the range {pieces[i]}-{pieces[i + 2]} is empty")
            ranges.append(f"{_code_point(first)}-{_code_point(last)}")
            i += 3
        else:
            ranges.append(_code_point(first))
            i += 1
    if not ranges:
        raise _error(text, at, "a set of characters is empty")
    return f"/[{'^' if negated else ''}{''.join(ranges)}]/"


def _repetition(text: str, value: str, at: int) -> str:
    if not value.startswith("{"):
        return value
    numbers = value[1:-1].replace(" ", "").split(",")
    if not numbers[0] and (len(numbers) == 1 or not numbers[1]):
        raise _error(text, at, f"{value} has no number")
    if any(len(number) > 9 for number in numbers):
        raise _error(text, at, f"the number of repetitions in {value:.40} is too large")
    first = numbers[0] or "0"
    return f"{{{first}}}" if len(numbers) == 1 else f"{{{first},{numbers[1]}}}"


def _recursive(rules: dict[str, _Parts]) -> set[str]:
    """Return the rules that contain themselves, or a rule that does."""
    users: dict[str, list[str]] = {name: [] for name in rules}
    missing = {name: len(set(_names(parts))) for name, parts in rules.items()}
    for name, parts in rules.items():
        for used in set(_names(parts)):
            users[used].append(name)
    ready = [name for name, count in missing.items() if not count]
    for name in ready:  # grows: rules whose parts are all free of recursion
        for user in users[name]:
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    return set(rules) - set(ready)


def _error(text: str, at: int, reason: str) -> BadRequestError:
    line = text.count("\n", 0, at) + 1
    near = text[max(0, at - 10) : at + 20]
    return BadRequestError(f"sampling_params.ebnf, line {line}, near {near!r}: {reason}.")
