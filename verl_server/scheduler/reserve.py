"""`Reserve`: the pages that requests will probably still need, for their prompts and the tokens that they sample.

It is not known in advance how many of its `max_new_tokens` a request will sample. Admission reserves a fraction of
them, so that more requests run than with a full reservation. The fraction rises when a request is retracted for lack of
pages, and falls slowly with every step without a retraction.
"""

from __future__ import annotations

from collections.abc import Iterable

from verl_server.scheduler.schedule_batch import Req

_START, _LEAST, _DECAY, _RISE = 0.5, 0.1, 0.002, 0.2
_CLIP = 4096
"""The most tokens that are counted for a request. A huge `max_new_tokens` says little about the length of the reply."""


class Reserve:
    """The reserved fraction of the tokens that requests may still sample. `Admission` owns it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._ratio = _START

    def step_planned(self, retracted: bool) -> None:
        """Record that a step was planned. `retracted` is True if a request was retracted for it."""
        self._ratio = min(1.0, self._ratio + _RISE) if retracted else max(_LEAST, self._ratio - _DECAY)

    def expected_pages(self, reqs: Iterable[Req]) -> int:
        """Return the number of pages that `reqs` need besides those that they hold. A waiting request holds none.

        Written as one loop without calls, because every step with a queue runs it over all running requests.
        """
        size, ratio = self._page_size, self._ratio
        total = 0
        for req in reqs:
            remain = req.max_new_tokens - len(req.output_ids)
            sampled = int(ratio * (remain if remain < _CLIP else _CLIP))
            expected = -(-len(req.token_ids) // size) - (-sampled // size) - len(req.pages)
            if expected > 0:
                total += expected
        return total
