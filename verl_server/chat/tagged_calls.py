"""Readers of tool calls that are not one JSON object: the formats of Mistral and Qwen3-Coder, and Python calls.

`formats` assigns a reader to each format, and `call_readers` defines the interface of a reader.
"""

from __future__ import annotations

import ast
import json
import re
import warnings

from verl_server.chat.call_readers import (
    MOST_NAME,
    TEXT,
    CallArguments,
    CallBegin,
    CallEnd,
    CallReader,
    JsonCalls,
    ParameterTypes,
    is_name,
    skip_spaces,
)
from verl_server.chat.json_scanner import JsonScanner
from verl_server.chat.tags import find_tag

_WINDOW = 4096
"""Characters of a value that are searched at once."""
_MOST_PYTHON = 16 * 1024
"""Most characters of calls in Python, which are parsed at once: about 10 ms."""
_MOST_PYTHON_DEPTH = 32


_SPACE = re.compile(r"\s")


class _Word:
    """Reads a name that ends at one of several tags. `tag` is the tag that was found, None before."""

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._kept = ""  # not more than a name and the beginning of a tag
        self.word = ""
        self.tag: str | None = None
        self.broken = False

    def feed(self, text: str, at: int) -> int:
        """Read from index `at` on. Return the index of the first unread character."""
        before = len(self._kept)
        self._kept += text[at : at + MOST_NAME - before]
        found, self.tag = find_tag(self._kept, max(0, before - max(map(len, self._tags))), self._tags)
        space = _SPACE.search(self._kept, before, found)
        if space is not None:
            self.broken, self.tag = True, None
            return at + space.start() - before
        if self.tag is None:
            self.broken = len(self._kept) == MOST_NAME
            return at + len(self._kept) - before
        self.word = self._kept[:found]
        self.broken = not is_name(self.word)
        return at + found + len(self.tag) - before


class MistralCalls(CallReader):
    """Reads what follows `[TOOL_CALLS]`: a JSON list of calls, or `name[ARGS]{...}`, since version 11 of the format.

    `name[CALL_ID]id[ARGS]{...}` and `name{...}` are read, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._list: JsonCalls | None = None
        self._word: _Word | None = None
        self._name = ""
        self._begin: CallBegin | None = None
        self._arguments: JsonScanner | None = None

    def _read(self, text: str, at: int) -> int:
        if self._list is not None:
            at = self._list.feed(text, at)
            self.events, self.done, self.broken = self._list.take_events(), self._list.done, self._list.broken
        elif self._arguments is not None:
            at = self._read_arguments(self._arguments, text, at)
        elif self._word is not None:
            at = self._read_word(self._word, text, at)
        else:
            at = skip_spaces(text, at)
            if text[at : at + 1] == "[":
                self._list = JsonCalls("[", ",", "]")
            elif at < len(text):
                self._word = _Word("[ARGS]", "[CALL_ID]", "{")
        return at

    def _read_word(self, word: _Word, text: str, at: int) -> int:
        at = word.feed(text, at)
        self.broken = word.broken
        if word.broken or word.tag is None:
            return at
        if word.tag == "[CALL_ID]":
            self._name, self._word = word.word, _Word("[ARGS]")
            return at
        self._begin = CallBegin(self._name, word.word) if self._name else CallBegin(word.word)
        self._arguments = JsonScanner()
        return at - 1 if word.tag == "{" else at

    def _read_arguments(self, scanner: JsonScanner, text: str, at: int) -> int:
        if self._begin is not None:
            at = skip_spaces(text, at)
            if at == len(text) or text[at] != "{":
                return at if at == len(text) else self._break(at)
            self.events.append(self._begin)
            self._begin = None
        end = scanner.feed(text, at)
        if end > at:
            self.events.append(CallArguments(text[at:end]))
        self.broken, self.done = scanner.broken, scanner.done
        if scanner.done:
            self.events.append(CallEnd())
        return end


class XmlCall(CallReader):
    """Reads `<function=name><parameter=key>value</parameter>...</function>`, the format of Qwen3-Coder.

    A value has no quotes. If the tool's schema allows only a string, the value is a string. Otherwise the value is read
    as JSON, or as a literal of Python, if this has a type that the schema allows. If not, the value is a string. One
    line break after the opening tag and one before the closing tag do not belong to the value.
    """

    def __init__(self, types: ParameterTypes) -> None:
        super().__init__()
        self._types = types
        self._name = ""
        self._keys: set[str] = set()
        self._tag = ""  # the beginning of a tag between values
        self._expected: tuple[str, ...] = ("<function=",)
        self._word: _Word | None = None
        self._in_value = False
        self._allowed = TEXT
        self._starts = True  # the value has no character yet
        self._held = ""  # end of a value that may be a line break or a closing tag
        self._kept: list[str] = []  # a value that is not a string

    @property
    def _is_text(self) -> bool:
        return self._allowed == TEXT

    def _read(self, text: str, at: int) -> int:
        if self._in_value:
            return self._read_value(text, at)
        if self._word is not None:
            return self._read_word(self._word, text, at)
        return self._read_tag(text, at)

    def _read_tag(self, text: str, at: int) -> int:
        """Read one character of a tag, or white space before it."""
        if not self._tag:
            at = skip_spaces(text, at)
            if at == len(text):
                return at
        tag = self._tag + text[at]
        if not any(expected.startswith(tag) for expected in self._expected):
            return self._break(at)
        self._tag = "" if tag in self._expected else tag
        if tag in self._expected and self._name and not self._keys:
            self.events.append(CallBegin(self._name))
        if tag == "</function>":
            self.events += [CallArguments("}" if self._keys else "{}"), CallEnd()]
            self.done = True
        elif tag in self._expected:
            self._word = _Word(">")
        return at + 1

    def _read_word(self, word: _Word, text: str, at: int) -> int:
        at = word.feed(text, at)
        self.broken = word.broken or word.word in self._keys
        if self.broken or word.tag is None:
            return at
        self._word = None
        if not self._name:
            self._name = word.word
            self._expected = ("<parameter=", "</function>")
            return at
        opening = (", " if self._keys else "{") + json.dumps(word.word, ensure_ascii=False) + ": "
        self._keys.add(word.word)
        self._allowed = self._types.get(self._name, {}).get(word.word, TEXT)
        self._in_value, self._starts, self._held, self._kept = True, True, "", []
        self.events.append(CallArguments(opening + '"' if self._is_text else opening))
        return at

    def _read_value(self, text: str, at: int) -> int:
        before = len(self._held)
        held = self._held + text[at : at + _WINDOW]
        end, tag = find_tag(held, 0, ("\n</parameter>", "</parameter>"))
        value = held[:end]
        if self._starts and value:
            value, self._starts = value.removeprefix("\n"), False
        if self._is_text:
            if value:
                self.events.append(CallArguments(json.dumps(value, ensure_ascii=False)[1:-1]))
        else:
            self._kept.append(value)
        if tag is None:
            self._held = held[end:]
            return at + len(held) - before
        self.events.append(CallArguments('"' if self._is_text else _as_json("".join(self._kept), self._allowed)))
        self._in_value = False
        return at + end + len(tag) - before


def _as_json(value: str, allowed: frozenset[str]) -> str:
    """Return a value as JSON text of an allowed type, or as a string. If no string is allowed, return JSON of another
    type unchanged, so that the tool can report what is wrong."""
    stripped = value.strip()
    for text in (_json(stripped), _json_of_python(stripped)):
        if text is not None and ("string" not in allowed or _type_of(text) in allowed):
            return text
    return json.dumps(value, ensure_ascii=False)


def _json(text: str) -> str | None:
    """Return the text if it is JSON."""
    scanner = JsonScanner()
    return text if scanner.feed(text + " ", 0) >= len(text) and scanner.done else None


def _json_of_python(text: str) -> str | None:
    """Return the JSON of a literal in Python's notation: a list, a tuple, a dict, True, False or None."""
    if len(text) > _MOST_PYTHON or not (text[:1] in ("[", "(", "{") or text in ("True", "False", "None")):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for escapes that Python does not know
            found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        found.encode()  # raises for a lone surrogate
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    return found


_TYPES_OF_STARTS = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}


def _type_of(text: str) -> str:
    """Return the type of a JSON text. A number is an integer if it has neither a fraction nor an exponent."""
    number = "number" if any(mark in text for mark in ".eE") else "integer"
    return _TYPES_OF_STARTS.get(text[:1], number)


class PythonCalls(CallReader):
    """Reads `[f(a=1, b="x"), g()]`, the format of Llama 3.2 and Llama 4. The calls are reported at the closing bracket.

    Arguments are literals and have keywords. Text of more than 16384 characters is not read as calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[str] = []
        self._length = 0
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._in_name = True  # before the first call's opening parenthesis

    def _read(self, text: str, at: int) -> int:
        if not self._length:
            at = skip_spaces(text, at)
        start = at
        while at < len(text):
            self._length += 1
            if self._length > _MOST_PYTHON or not self._accepts(text[at]):
                return self._break(at)
            at += 1
            if self._depth == 0:
                self._kept.append(text[start:at])
                self._report("".join(self._kept))
                return at
        self._kept.append(text[start:at])
        return at

    def _accepts(self, char: str) -> bool:
        if self._length == 1:
            self._depth = 1
            return char == "["
        if self._in_name:
            self._in_name = char != "("
            if self._in_name and not (char.isalnum() or char in "_. \n"):
                return False
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            if char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "[({":
            self._depth += 1
        elif char in "])}":
            self._depth -= 1
        return 0 <= self._depth <= _MOST_PYTHON_DEPTH

    def _report(self, text: str) -> None:
        calls = _python_calls(text)
        if calls is None:
            self.broken = True
            return
        for name, arguments in calls:
            self.events += [CallBegin(name), CallArguments(arguments), CallEnd()]
        self.done = True


def _python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return (name, arguments as JSON) of each call in a Python list, or None if it is not a list of calls."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # for escapes that Python does not know
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(call) for call in tree.elts]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("Each element must be a call with keywords.")
    name = ast.unparse(call.func)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("A tool's name consists of identifiers.")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if None in arguments:
        raise ValueError("A call has no ** argument.")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    text.encode()  # raises for a lone surrogate
    return name, text
