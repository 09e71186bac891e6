"""`encoded`: an answer as JSON of at most 1 MB. A list that does not fit ends earlier, and says where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

MOST_BYTES = 1_000_000
"""Most bytes of an answer."""
_FULL = 900_000
"""Bytes at which a list ends."""


def encoded(answer: msgspec.Struct) -> bytes:
    """Return an answer as JSON."""
    return msgspec.json.encode(answer)


def encoded_page(answer: Any, field: str, cursor: Callable[[int], Any], items: Iterable[Any] | None = None) -> bytes:
    """Return an answer with as many items of its list `field` as fit.

    `cursor(i)` is the value of `next` for a page that begins with item i. An answer with all items keeps its `next`.
    `items` are those of `field`, made one at a time until the answer is full.
    """
    found = getattr(answer, field) if items is None else items
    size = len(encoded(msgspec.structs.replace(answer, **{field: []})))
    fitting: list[msgspec.Raw] = []
    for number, item in enumerate(found):
        raw = msgspec.json.encode(item)
        size += len(raw) + 1
        if size > _FULL and fitting:
            return encoded(msgspec.structs.replace(answer, **{field: fitting, "next": cursor(number)}))
        fitting.append(msgspec.Raw(raw))
    return encoded(msgspec.structs.replace(answer, **{field: fitting}))
