"""`find_tag`: finds the first of several tags in a text. The end of the text may be the beginning of a tag."""

from __future__ import annotations

import re
from functools import lru_cache


def find_tag(text: str, at: int, tags: tuple[str, ...]) -> tuple[int, str | None]:
    """Return (index, tag) of the first tag in `text` from index `at` on.

    Without a tag, return (index, None). The text from that index on may be the beginning of a tag: hold this text back
    until more text arrives. The index is len(text) if there is no such beginning. A tag counts as found only if no
    earlier position can become another tag.
    """
    whole, beginning, longest = _patterns(tags)
    match = whole.search(text, at)
    end = match.start() if match is not None else len(text)
    tail = max(at, len(text) - longest + 1)
    if tail < end and (held := beginning.search(text, tail)) is not None and held.start() < end:
        return held.start(), None
    return (end, match.group()) if match is not None else (end, None)


@lru_cache(maxsize=64)
def _patterns(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return (pattern of a tag, pattern of the beginning of a tag at the end of a text, length of the longest tag)."""
    whole = "|".join(map(re.escape, sorted(tags, key=len, reverse=True)))
    beginnings = {tag[:length] for tag in tags for length in range(1, len(tag))}
    beginning = "|".join(map(re.escape, sorted(beginnings, key=len, reverse=True)))
    return re.compile(whole), re.compile(rf"(?:{beginning or '(?!)'})\Z"), max(map(len, tags))
