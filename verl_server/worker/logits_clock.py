"""`LogitsClock`: predicts when the device has computed the logits of a step, for a host that launches sampling in time.

The `ModelRunner` owns it and uses it for steps with masks. Masks follow from the tokens of the step before, so such a
step is launched in two parts: the forward pass, and the sampling when the masks are ready. If the host waited for slow
masks until the logits are computed, the device would wait for the host, which then launches the sampling and the next
forward pass. So the wait ends earlier, by the time that these launches take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

_SIMILAR = 0.1
"""The forward passes of two steps take about the same time if their numbers of tokens differ by this part at most."""
_MOST_LEAD = 0.005
"""Seconds. A longer time between two launches was no launch: the host did something else."""
_NEWEST = 0.2
"""Weight of the newest of the times that launches took."""


class Event(Protocol):
    """The part of a `torch.cuda.Event` with timing that is used here."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> Any:
        """Return the milliseconds from this event to `end_event`."""


@dataclass(frozen=True)
class _Forward:
    """A forward pass that was launched."""

    begin: Event
    end: Event
    num_tokens: int

    def seconds(self) -> float | None:
        """Return how long the device took. None if it is not finished."""
        return float(self.begin.elapsed_time(self.end)) / 1e3 if self.end.query() else None


class LogitsClock:
    def __init__(self, make_event: Callable[[], Event], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make_event, self._clock = make_event, clock
        self._before: _Forward | None = None
        self._last: _Forward | None = None
        """The two latest forward passes whose sampling has masks."""
        self._seconds: tuple[int, float] | None = None
        """Number of tokens of a forward pass, and how long it took."""
        self._began = 0.0
        """Time at which the host knew that the device began the latest forward pass."""
        self._due: float | None = None
        """Time from which the host waited no longer for masks, until the next forward pass is launched."""
        self._lead = 0.0
        """Seconds from that time until the next forward pass is launched."""

    def forward_begins(self) -> Event:
        """Return an event of the moment at which the device begins the forward pass that is launched next."""
        return self._recorded()

    def forward_launched(self, begin: Event, num_tokens: int) -> Callable[[], bool]:
        """Return a function that returns True when the host should wait no longer for masks of this forward pass."""
        if self._due is not None:
            lead, self._due = self._clock() - self._due, None
            if lead <= _MOST_LEAD:
                self._lead += _NEWEST * (lead - self._lead)
        self._before, self._last = self._last, _Forward(begin, self._recorded(), num_tokens)
        self._began = self._clock()
        return self._is_due

    def step_read(self) -> None:
        """Note that the step before the latest one is finished, so that the device begins the latest forward pass."""
        self._began = self._clock()
        if self._before is not None and (seconds := self._before.seconds()) is not None:
            self._seconds = self._before.num_tokens, seconds

    def forget(self) -> None:
        """Note that a step without masks is launched."""
        self._before = self._last = self._due = None

    def _is_due(self) -> bool:
        assert self._last is not None
        is_due = self._last.end.query() or self._ends_soon(self._last.num_tokens)
        if is_due and self._due is None:
            self._due = self._clock()
        return is_due

    def _ends_soon(self, num_tokens: int) -> bool:
        if self._seconds is None:
            return False
        known, seconds = self._seconds
        is_similar = abs(num_tokens - known) <= _SIMILAR * known
        return is_similar and self._clock() - self._began >= seconds - self._lead

    def _recorded(self) -> Event:
        event = self._make_event()
        event.record()
        return event
