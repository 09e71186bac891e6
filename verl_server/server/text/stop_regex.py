"""`StopRegexes`: the regular expressions that end an output, searched by RE2 after each token.

A request's `OutputText` uses it on the event loop. So the time of a search is bounded: RE2 needs at most time in
proportion to the length of the text and the size of the compiled patterns, and a search reads only the end of the text,
which is shorter for larger patterns. The TokenizerManager compiles the patterns; RE2's Python module keeps the last 128
compiled patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import re2

from verl_server.errors import BadRequestError

_LONGEST_TAIL = 1024
"""The most characters before the newest text that a search reads."""
_MOST_INSTRUCTIONS = 2048
"""Largest size of all compiled patterns of a request together."""
_MOST_WORK = 2**16
"""Largest product of the characters that a search reads and the size of the patterns.

A search usually takes microseconds. For patterns with very many states RE2 takes about 5 ns for each unit of this
product, which is 0.3 ms.
"""
_MOST_MEMORY = 2**20
"""Bytes that a compiled pattern may take, with the states that RE2 keeps between searches."""


class StopRegexes:
    def __init__(self, patterns: Iterable[str]) -> None:
        """Compile the patterns. Raise BadRequestError with RE2's reason for a pattern that RE2 refuses."""
        self._patterns = [(pattern, _compile(pattern)) for pattern in patterns]
        size = sum(compiled.programsize for _, compiled in self._patterns)
        if size > _MOST_INSTRUCTIONS:
            raise BadRequestError(
                f"sampling_params.stop_regex compiles to {size} instructions; this server accepts at most "
                f"{_MOST_INSTRUCTIONS}. Use fewer patterns, smaller counts and fewer Unicode classes."
            )
        self.tail = min(_LONGEST_TAIL, _MOST_WORK // max(size, 1))
        """A match that begins more characters than this before the newest text is not found."""

    def search(self, text: str, new: int) -> tuple[str, int, int] | None:
        """Return (pattern, start, end) of the first match in `text` whose last `new` characters are new.

        Of several matches, the first in the text counts, and then the first in the order of the patterns. `$` and `\\b`
        take the end of the text so far for the end of the output.
        """
        begin = max(0, len(text) - new - self.tail)
        seen = max(0, begin - 1)  # RE2 looks at the character before the begin, for `^` and `\b`
        tail, at = text[seen:], begin - seen
        best: tuple[str, int, int] | None = None
        for pattern, compiled in self._patterns:
            match = compiled.search(tail, at)
            if match is not None and (best is None or seen + match.start() < best[1]):
                best = pattern, seen + match.start(), seen + match.end()
        return best


def _compile(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MOST_MEMORY
    options.never_capture = True
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise BadRequestError(
            f"sampling_params.stop_regex has a pattern that RE2 refuses: {reason}. The syntax is RE2's, without "
            "look-around and backreferences."
        ) from None
