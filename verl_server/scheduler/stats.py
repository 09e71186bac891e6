"""`SchedulerStats`: the counters that the `Scheduler` keeps and reports in its reply to `GetInternalStateReq`."""

from __future__ import annotations

from collections.abc import Callable

_WINDOW = 1.0  # seconds over which throughput is averaged


class SchedulerStats:
    """Counts since the start of the process, and the throughput of the last full window of one second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.num_requests = 0
        self.num_aborted = 0
        self.num_steps = 0
        self.num_output_tokens = 0
        self._window_start = clock()
        self._window_tokens = 0
        self._throughput = 0.0

    def count_step(self, tokens: int) -> None:
        """Count a step that sampled `tokens` tokens."""
        self.num_steps += 1
        self.num_output_tokens += tokens
        self._roll()
        self._window_tokens += tokens

    def gen_throughput(self) -> float:
        """Return the output tokens per second of the last full window."""
        self._roll()
        return self._throughput

    def _roll(self) -> None:
        elapsed = self._clock() - self._window_start
        if elapsed >= _WINDOW:
            self._throughput = self._window_tokens / elapsed
            self._window_start += elapsed
            self._window_tokens = 0
