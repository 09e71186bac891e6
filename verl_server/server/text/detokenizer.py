"""Detokenization of one token at a time: `IncrementalDetokenizer`, and `OutputText`, which also looks for stops.

A request's state in the TokenizerManager owns an `OutputText`. Results depend on the token sequence only: the grouping
of tokens into the scheduler's messages changes no result.
"""

from __future__ import annotations

from verl_server.server.text.stop_regex import StopRegexes
from verl_server.server.text.text_tools import Decoder

_REPLACEMENT = "�"
_MAX_HELD_TOKENS = 256
"""Number of tokens.

Text that cannot be decoded after so many tokens is emitted with replacement characters, to bound the work for each
token.
"""


class IncrementalDetokenizer:
    """Decodes a growing token sequence without decoding all earlier tokens again.

    The text of a token depends on the tokens before it (spaces, bytes of one character). Each step therefore decodes a
    window that starts one emitted piece earlier, and emits the new part. Replacement characters at the end may be an
    unfinished character, and are held back.
    """

    def __init__(self, decode: Decoder) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._read = 0  # window[:read] has been emitted completely
        self._emitted = 0  # number of characters of the window's text that have been emitted

    def push(self, token: int) -> str:
        """Add a token. Return the new text that later tokens cannot change, possibly ""."""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(self._window) - self._read
        whole = (len(text) > self._emitted and not text.endswith(_REPLACEMENT)) or held > _MAX_HELD_TOKENS
        certain = text if whole else text.rstrip(_REPLACEMENT)
        piece = certain[self._emitted :]
        if whole:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._emitted = len(self._decode(self._window))
        else:
            self._emitted = max(self._emitted, len(certain))
        return piece

    def flush(self) -> str:
        """Return the text that was held back. Call it after the last token."""
        piece = self._decode(self._window)[self._emitted :]
        self._emitted += len(piece)
        return piece


class OutputText:
    """The text of one completion, which ends at the first stop string or match of a stop regex.

    If a token completes both, the stop string counts. `goes_on` is the number of leading tokens that cannot end the
    output: a stop string must end after their text, and a match of a regex must begin after it.
    """

    def __init__(
        self,
        decode: Decoder,
        stop: list[str],
        no_stop_trim: bool,
        stop_regexes: StopRegexes | None = None,
        goes_on: int = 0,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(decode)
        self._stop = stop
        self._stop_regexes = stop_regexes
        self._no_stop_trim = no_stop_trim
        self._longest = max((len(s) for s in stop), default=0)
        self.text = ""
        self._goes_on = goes_on
        self._from = 0  # stops count behind this character
        self.matched: str | None = None
        """The stop string or the pattern that ended the output."""

    def push(self, token: int) -> str | None:
        """Add a token. Return the stop string or the pattern that the token completed, or None.

        Add no token after one that completed a stop string or a pattern.
        """
        piece = self._detokenizer.push(token)
        self._goes_on -= 1
        return self._add(piece)

    def finish(self) -> str | None:
        """Add the text that was held back. Return the stop string or pattern that ends the output, or None."""
        return self._add(self._detokenizer.flush()) if self.matched is None else self.matched

    def _add(self, piece: str) -> str | None:
        if not piece:
            return None
        if self._goes_on >= 0:
            self.text += piece
            self._from = len(self.text)
            return None
        start = max(0, len(self.text) - self._longest + 1)
        self.text += piece
        found = [(at, s) for s in self._stop if (at := self.text.find(s, max(start, self._from - len(s) + 1))) >= 0]
        if found:
            at, stop = min(found, key=lambda hit: hit[0])
            self._end(stop, at, at + len(stop))
        elif self._stop_regexes is not None:
            counted = self.text[self._from :] if self._from else self.text
            if (match := self._stop_regexes.search(counted, len(piece))) is not None:
                pattern, begin, end = match
                self._end(pattern, self._from + begin, self._from + end)
        return self.matched

    def _end(self, matched: str, start: int, end: int) -> None:
        self.matched = matched
        self.text = self.text[: end if self._no_stop_trim else start]

    @property
    def safe_text(self) -> str:
        """The text that a stream may send now: `text` without an end that may be the beginning of a stop string.

        The beginning of a match of a stop regex is not held back, because a match may begin anywhere.
        """
        if self.matched is not None or self._no_stop_trim or not self._stop:
            return self.text
        held = max(self._held(stop) for stop in self._stop)
        return self.text[: len(self.text) - held]

    def _held(self, stop: str) -> int:
        """Return the length of the longest end of the text that is the beginning of `stop`."""
        text = self.text
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0 and not stop.startswith(text[start:]):
            start = text.find(stop[0], start + 1)
        return len(text) - start if start >= 0 else 0
