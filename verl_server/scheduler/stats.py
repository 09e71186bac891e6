"""`SchedulerStats`: counters of the scheduler and the payload of `GetInternalStateReq`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_server.scheduler.scheduler import Scheduler

_WINDOW = 1.0  # seconds over which throughput is averaged


class SchedulerStats:
    """Counts since the start, and output tokens per second of the last full window."""

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
        self.num_steps += 1
        self.num_output_tokens += tokens
        self._roll()
        self._window_tokens += tokens

    def gen_throughput(self) -> float:
        self._roll()
        return self._throughput

    def _roll(self) -> None:
        elapsed = self._clock() - self._window_start
        if elapsed >= _WINDOW:
            self._throughput = self._window_tokens / elapsed
            self._window_start += elapsed
            self._window_tokens = 0


def internal_state(scheduler: Scheduler) -> dict[str, Any]:
    """Load, memory and weight figures, for `/server_info`, `/v1/loads` and `/metrics`."""
    planner, weights, stats = scheduler.planner, scheduler.worker.weights, scheduler.stats
    total, used = planner.max_tokens(), planner.num_used_tokens()
    prompt_tokens, cached_tokens = planner.num_prompt_tokens, planner.num_cached_tokens
    return {
        "num_running_reqs": len(planner.running),
        "num_waiting_reqs": len(planner.waiting),
        "num_used_tokens": used,
        "max_total_num_tokens": total,
        "token_usage": used / total,
        "cache_hit_rate": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "num_cached_pages": planner.cache.num_shareable,
        "gen_throughput": stats.gen_throughput(),
        "num_retractions": planner.num_retractions,
        "num_requests": stats.num_requests,
        "num_aborted_requests": stats.num_aborted,
        "num_steps": stats.num_steps,
        "prompt_tokens_total": prompt_tokens,
        "cached_tokens_total": cached_tokens,
        "output_tokens_total": stats.num_output_tokens,
        "weight_version": weights.version,
        "weights_state": weights.state,
        "refusal": weights.refusal(),
        "paused": scheduler.control.paused,
        "draining": scheduler.control.draining,
        "session": scheduler.control.session.name if scheduler.control.session.is_open else None,
        "memory": scheduler.worker.runner.memory_figures(),
    }
