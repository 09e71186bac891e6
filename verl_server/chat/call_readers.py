"""Readers of tool calls: each reads the calls of one format from text that arrives in pieces.

`output.OutputParser` creates a reader after the tag that opens a call, and converts the reader's events into deltas. A
reader visits each character once. If a text is not a call, the reader becomes `broken` at the first character that
proves it.
"""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from verl_server.chat.json_scanner import WHITE_SPACE, JsonScanner

MOST_NAME = 1024
"""The most characters of a key or a tool's name as JSON.

A longer key or name breaks the call, so that little text is held back.
"""

ParameterTypes = Mapping[str, Mapping[str, frozenset[str]]]
"""Name of a tool -> name of a parameter -> the JSON types that its schema allows, for formats that write values without
quotes."""
TEXT = frozenset({"text"})
"""Type of a plain string: the value is a string without quotes, whatever characters it has."""


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of the tool `name` begins, and its arguments follow."""

    name: str
    id: str | None = None
    """The id that the policy wrote, for formats that have one."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments, as JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, and its arguments are a JSON object."""


Event = CallBegin | CallArguments | CallEnd


class CallReader(abc.ABC):
    """Reads the calls that follow one opening tag."""

    def __init__(self) -> None:
        self.done = False
        """True after the last character that belongs to the calls."""
        self.broken = False
        """True if the text is not a call. The characters from the break on belong to the content."""
        self.events: list[Event] = []
        """Events since the last `take_events`."""

    def feed(self, text: str, at: int) -> int:
        """Read `text` from index `at` on, up to the next event. Return the index of the first unread character."""
        while at < len(text) and not (self.done or self.broken or self.events):
            at = self._read(text, at)
        return at

    @abc.abstractmethod
    def _read(self, text: str, at: int) -> int:
        """Read a part of `text` from index `at` on. Return the index of the first unread character."""

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def _break(self, at: int) -> int:
        self.broken = True
        return at


def skip_spaces(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is not white space."""
    while at < len(text) and text[at] in WHITE_SPACE:
        at += 1
    return at


_NOT_IN_NAME = re.compile(r"[\s\ud800-\udfff]")


def is_name(name: str) -> bool:
    """Return True if a tool can have this name: it is not empty and has no white space and no lone surrogates."""
    return bool(name) and not _NOT_IN_NAME.search(name)


_OPEN, _FIRST_KEY, _KEY, _KEY_TEXT, _COLON, _VALUE, _VALUE_TEXT, _NEXT = range(8)


class JsonCall(CallReader):
    """Reads `{"name": ..., "arguments": {...}}`; "parameters" is another name of "arguments".

    Other keys are read and ignored. If the arguments come before the name, they are held back until the name is known.
    """

    def __init__(self, needs_arguments: bool = False) -> None:
        """Without `needs_arguments`, absent arguments mean `{}`."""
        super().__init__()
        self._needs_arguments = needs_arguments
        self._state = _OPEN
        self._scanner = JsonScanner()
        self._kept: list[str] = []  # text of the key or value that is being read, if it is needed
        self._kept_length = 0
        self._key = ""
        self._name: str | None = None
        self._arguments: list[str] | None = None

    def _read(self, text: str, at: int) -> int:
        if self._state in (_KEY_TEXT, _VALUE_TEXT):
            return self._scan(text, at)
        at = skip_spaces(text, at)
        return self._structure(text[at], at) if at < len(text) else at

    def _structure(self, char: str, at: int) -> int:
        """Read one character between keys and values. A key or value is then read from its first character on."""
        state = self._state
        if state == _OPEN and char == "{":
            self._state = _FIRST_KEY
        elif state == _COLON and char == ":":
            self._state = _VALUE
        elif state == _NEXT and char == ",":
            self._state = _KEY
        elif state in (_NEXT, _FIRST_KEY) and char == "}":
            return self._end(at)
        elif state in (_FIRST_KEY, _KEY) and char == '"':
            self._state, self._scanner = _KEY_TEXT, JsonScanner()
            return at
        elif state == _VALUE:
            return self._begin_value(char, at)
        else:
            return self._break(at)
        return at + 1

    def _begin_value(self, char: str, at: int) -> int:
        self._state, self._scanner = _VALUE_TEXT, JsonScanner()
        if self._key == "name":
            if char != '"' or self._name is not None:
                return self._break(at)
        elif self._is_arguments:
            if char != "{" or self._arguments is not None:
                return self._break(at)
            self._arguments = []
            if self._name is not None:
                self.events.append(CallBegin(self._name))
        return at

    @property
    def _is_arguments(self) -> bool:
        return self._key in ("arguments", "parameters")

    def _scan(self, text: str, at: int) -> int:
        """Read a part of a key or a value."""
        in_key = self._state == _KEY_TEXT
        if in_key or self._key == "name":
            part = text[at : at + MOST_NAME - self._kept_length]
            end = at + self._scanner.feed(part, 0)
            self._kept.append(text[at:end])
            self._kept_length += end - at
            if self._kept_length == MOST_NAME and not self._scanner.done:
                return self._break(end)
        else:
            end = self._scanner.feed(text, at)
            if self._is_arguments and end > at:
                self._add_arguments(text[at:end])
        if self._scanner.broken:
            return self._break(end)
        if self._scanner.done:
            self._end_of_text(in_key)
            if self._name is not None and not is_name(self._name):
                return self._break(end)
        return end

    def _add_arguments(self, text: str) -> None:
        if self._name is not None:
            self.events.append(CallArguments(text))
        elif self._arguments is not None:
            self._arguments.append(text)

    def _end_of_text(self, in_key: bool) -> None:
        kept, self._kept, self._kept_length = "".join(self._kept), [], 0
        if in_key:
            self._key, self._state = json.loads(kept), _COLON
            return
        self._state = _NEXT
        if self._key == "name":
            self._name = json.loads(kept)
            if self._arguments is not None and self._name and is_name(self._name):
                self.events += [CallBegin(self._name), CallArguments("".join(self._arguments))]

    def _end(self, at: int) -> int:
        if self._name is None or (self._arguments is None and self._needs_arguments):
            return self._break(at)
        if self._arguments is None:
            self.events += [CallBegin(self._name), CallArguments("{}")]
        self.events.append(CallEnd())
        self.done = True
        return at + 1


class JsonCalls(CallReader):
    """Reads `JsonCall`s with a separator between them, and with brackets around them if the format has brackets.

    Without brackets, the calls end at the first character that is not the separator.
    """

    def __init__(self, opening: str, separator: str, closing: str, needs_arguments: bool = False) -> None:
        super().__init__()
        self._separator, self._closing = separator, closing
        self._needs_arguments = needs_arguments
        self._expects = opening
        self._call: JsonCall | None = None if opening else JsonCall(needs_arguments)

    def _read(self, text: str, at: int) -> int:
        if self._call is None:
            at = skip_spaces(text, at)
            return self._between(text[at], at) if at < len(text) else at
        at = self._call.feed(text, at)
        self.events += self._call.take_events()
        self.broken = self._call.broken
        if self._call.done:
            self._call, self._expects = None, self._separator
        return at

    def _between(self, char: str, at: int) -> int:
        if char == self._expects:
            self._call = JsonCall(self._needs_arguments)
            return at + 1
        if self._expects == self._separator and not self._closing:
            self.done = True
            return at
        if self._expects == self._separator and char == self._closing:
            self.done = True
            return at + 1
        return self._break(at)
