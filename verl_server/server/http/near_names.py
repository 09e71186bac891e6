"""`near_name`: the known name that an unknown one misspells by one letter, by another way of writing, or by a synonym.

Called for fields of request bodies and for query parameters. A wrong guess would refuse a valid request. So the rule is
narrow, and fewer kinds of misspellings count for short names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHORTEST = 3
"""Fewest letters of a name that is compared. Shorter names are too similar (`tag` and `tags`, `mod` and `mode`)."""
_SHORTEST_EXCHANGED = 4
"""From this length on, two exchanged letters count as a misspelling."""
_SHORTEST_REPLACED = 6
"""From this length on, one different letter counts as a misspelling.

A shorter name is just as likely another word (`step` and `stop`).
"""
_OTHER_WORDS = {
    "history": ("messages",),
    "max_gen_len": ("max_tokens", "max_output_tokens"),
    "max_generated_tokens": ("max_tokens", "max_output_tokens"),
    "max_length": ("max_tokens", "max_output_tokens"),
    "max_len": ("max_tokens", "max_output_tokens"),
    "num_samples": ("n",),
    "num_return_sequences": ("n",),
    "rep_penalty": ("repetition_penalty",),
    "repeat_penalty": ("repetition_penalty",),
    "return_logprobs": ("return_logprob", "logprobs"),
    "stop_strings": ("stop", "stop_sequences"),
    "stop_words": ("stop", "stop_sequences"),
    "system_prompt": ("system", "instructions"),
    "temp": ("temperature",),
}
"""Word of other libraries -> fields with this meaning. The first field that the request has counts."""


_WORDS = frozenset({"models", "model", "mode"})
"""Names of other services that are similar to known names but are not misspelled."""


def near_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name for which `name` was probably meant, or None."""
    if name in _WORDS:
        return None
    known = set(known)
    for meant in _OTHER_WORDS.get(_plain(name), ()):
        if meant in known:
            return meant
    return next((other for other in sorted(known) if _is_near(name, other)), None)


def _is_near(name: str, other: str) -> bool:
    """Return True for two names that differ in case and separators, or by one slip: a letter too many or too few, two
    letters exchanged, or, in longer names, one other letter."""
    if _plain(name) == _plain(other):
        return True
    shorter, longer = sorted((name, other), key=len)
    if len(shorter) < _SHORTEST or len(longer) - len(shorter) > 1:
        return False
    at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), len(shorter))
    if len(shorter) < len(longer):
        return shorter[at:] == longer[at + 1 :]
    if len(shorter) < _SHORTEST_EXCHANGED:
        return False
    if shorter[at + 2 :] == longer[at + 2 :] and shorter[at : at + 2] == longer[at : at + 2][::-1]:
        return True
    return len(shorter) >= _SHORTEST_REPLACED and shorter[at + 1 :] == longer[at + 1 :]


def _plain(name: str) -> str:
    """Return a name in lower case with underscores: `maxTokens`, `max-tokens` and `MAX_TOKENS` become `max_tokens`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|-", "_", name).lower()
