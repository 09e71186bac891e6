"""`find_tag`: the first of several tags in a text whose end may be the beginning of a tag."""

from __future__ import annotations

import re
from functools import lru_cache


def find_tag(text: str, at: int, tags: tuple[str, ...]) -> tuple[int, str | None]:
    """Return (index, tag) of the first tag in `text` from index `at` on.

    Without a tag, return (index, None): the text from that index on may be the beginning of a tag, and is to be held
    back until more text arrives. It is the length of the text if nothing is to be held back. A tag counts as found only
    if no earlier position can become another tag.
    """
    match = _pattern(tags).search(text, at)
    end = match.start() if match is not None else len(text)
    longest = max(map(len, tags))
    for start in range(max(at, len(text) - longest + 1), end):
        tail = text[start:]
        if any(tag.startswith(tail) for tag in tags):
            return start, None
    return (end, match.group()) if match is not None else (end, None)


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))
