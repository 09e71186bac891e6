"""`JsonScanner`: checks one JSON value that arrives in pieces, and finds its end.

The readers of tool calls (`call_readers`) use it, so that the arguments of a call can be passed on while the model
still writes them. The scanner looks at each character once, keeps the open brackets only, and never recurses.
"""

from __future__ import annotations

import re

WHITE_SPACE = " \t\r\n"

_SPACES = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARS = re.compile(r"[-+.0-9eE]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]")
_LITERALS = {"t": "true", "f": "false", "n": "null"}

_MOST_DEPTH = 128
_MOST_DIGITS = 1024

_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _STRING, _ESCAPE, _HEX_DIGITS, _LITERAL, _NUMBER_STATE = range(11)


class JsonScanner:
    """Scans one value. `done` is True after its last character, `broken` at the first character that is not JSON.

    A number at the top level has no last character, so it is never done. Nesting deeper than 128 levels and numbers of
    more than 1024 characters count as broken.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._state = _VALUE
        self._open: list[str] = []  # the brackets that must close
        self._is_key = False
        self._word = ""  # what is left of a literal, the characters of a number, or the digits of an escape

    def feed(self, text: str, at: int) -> int:
        """Scan `text` from index `at` on. Return the index after the value's last character, the index of the character
        that breaks the value, or the length of the text."""
        end = len(text)
        while at < end and not (self.done or self.broken):
            state = self._state
            if state == _STRING:
                at = self._string(text, at)
            elif state == _NUMBER_STATE:
                at = self._number(text, at)
            elif state in (_ESCAPE, _HEX_DIGITS, _LITERAL):
                at = self._exact(text[at], at)
            else:
                at = _end(_SPACES, text, at)
                if at < end:
                    at = self._structure(text[at], at)
        return at

    def _string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._state = _COLON
            else:
                self._end_of_value()
        elif text[at] == "\\":
            self._state = _ESCAPE
        else:
            return self._break(at)
        return at + 1

    def _number(self, text: str, at: int) -> int:
        end = _end(_NUMBER_CHARS, text, at)
        room = _MOST_DIGITS - len(self._word)
        if end - at > room:
            return self._break(at + room)
        self._word += text[at:end]
        if end < len(text):
            if not _NUMBER.fullmatch(self._word):
                return self._break(end)
            self._end_of_value()
        return end

    def _exact(self, char: str, at: int) -> int:
        """Scan one character of an escape or of true, false or null."""
        if self._state == _ESCAPE:
            if char == "u":
                self._state, self._word = _HEX_DIGITS, ""
            elif char in '"\\/bfnrt':
                self._state = _STRING
            else:
                return self._break(at)
        elif self._state == _HEX_DIGITS:
            if not _HEX.match(char):
                return self._break(at)
            self._word += char
            if len(self._word) == 4:
                self._state = _STRING
        else:
            if char != self._word[0]:
                return self._break(at)
            self._word = self._word[1:]
            if not self._word:
                self._end_of_value()
        return at + 1

    def _structure(self, char: str, at: int) -> int:
        """Scan one character outside of strings, numbers and literals."""
        state = self._state
        if state == _COLON:
            if char != ":":
                return self._break(at)
            self._state = _VALUE
        elif state == _NEXT:
            if char == ",":
                self._state = _KEY if self._open[-1] == "}" else _VALUE
            elif char == self._open[-1]:
                self._close()
            else:
                return self._break(at)
        elif (char, state) in (("}", _FIRST_KEY), ("]", _FIRST_ITEM)):
            self._close()
        elif state in (_FIRST_KEY, _KEY):
            if char != '"':
                return self._break(at)
            self._state, self._is_key = _STRING, True
        else:
            return self._begin_value(char, at)
        return at + 1

    def _begin_value(self, char: str, at: int) -> int:
        if char == '"':
            self._state, self._is_key = _STRING, False
        elif char in "{[":
            if len(self._open) == _MOST_DEPTH:
                return self._break(at)
            self._open.append("}" if char == "{" else "]")
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char in _LITERALS:
            self._state, self._word = _LITERAL, _LITERALS[char][1:]
        elif char in "-0123456789":
            self._state, self._word = _NUMBER_STATE, char
        else:
            return self._break(at)
        return at + 1

    def _close(self) -> None:
        self._open.pop()
        self._end_of_value()

    def _end_of_value(self) -> None:
        if self._open:
            self._state = _NEXT
        else:
            self.done = True

    def _break(self, at: int) -> int:
        self.broken = True
        return at


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the pattern's match at index `at`. The pattern matches the empty text, too."""
    match = pattern.match(text, at)
    assert match is not None
    return match.end()
