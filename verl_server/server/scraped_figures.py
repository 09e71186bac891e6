"""`ScrapedFigures`: what a scrape of `/metrics` reads from the scheduler, the weights, the pause and the sessions.

`Metrics` owns it, and gives it a `Scrape` at each request. It shows the figures as gauges and counters that
`prometheus_client` cannot count itself, because another part of the server counts them.

A figure that nobody knows is left out: the driver of vLLM does not report the use of its KV cache, and a scheduler
that carries out a long update does not answer in time. A zero, or the figure of the last scrape, would look measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from verl_server.weight_version import WeightVersion

_GAUGES = {
    "num_running_reqs": ("num_running_reqs", "Requests in the running batch"),
    "num_queue_reqs": ("num_waiting_reqs", "Requests that wait in the scheduler"),
    "num_used_tokens": ("num_used_tokens", "Tokens that running requests hold in the KV cache"),
    "token_usage": ("token_usage", "Share of the KV cache that running requests hold"),
    "gen_throughput": ("gen_throughput", "Output tokens per second, over the last full second"),
    "cache_hit_rate": ("cache_hit_rate", "Share of prompt tokens found in the prefix cache, since the start"),
    "max_total_num_tokens": ("max_total_num_tokens", "Capacity of the KV cache in tokens"),
}
"""SGLang's gauge -> its key in the scheduler's internal state, and its meaning."""
_WEIGHTS_STATES = ("serving", "torn", "not_loaded", "asleep")
"""The values of `weights_state` in the internal state."""
_MOST_DIGITS = 15
"""The most digits of a version's number that a float keeps exactly."""


class ScrapedSessions(Protocol):
    """The figures of the sessions that a scrape reads. `SessionTable` implements it."""

    def __len__(self) -> int: ...

    @property
    def memory(self) -> int: ...


class ScrapedStore(Protocol):
    """The figures of the session store that a scrape reads. `Journal` implements it."""

    @property
    def failure(self) -> str | None: ...

    @property
    def backlog(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Scrape:
    """The state of the server at one request to `/metrics`."""

    internal_state: Mapping[str, Any] = field(default_factory=dict)
    """The scheduler's figures, or {} if the scheduler did not answer in time."""
    paused_seconds: float = 0.0
    """Seconds since generation was paused; 0 if it is not paused."""
    busy_seconds: float = 0.0
    """See `BusyTime.seconds`."""
    weight_version: str = ""


class ScrapedFigures(Collector):
    def __init__(self, labels: Mapping[str, str]) -> None:
        """`labels` are the labels of all metrics of the server."""
        self.scrape = Scrape()
        """What `collect` shows. The owner sets it before each scrape."""
        self.sessions: ScrapedSessions | None = None
        self.store: ScrapedStore | None = None
        self._names, self._values = [*labels], [*labels.values()]

    def describe(self) -> Iterable[Metric]:
        """Return nothing: a registry asks when the first scrape is not there yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics whose figures are known."""
        scrape = self.scrape
        paused = "Seconds since generation was paused; 0 if it is not paused"
        yield self._gauge("verl_server:paused_seconds", paused, scrape.paused_seconds)
        busy = "Seconds in which at least one request was in the server"
        yield self._counter("verl_server:busy_seconds", busy, scrape.busy_seconds)
        yield from self._of_scheduler(scrape.internal_state)
        yield from self._of_version(scrape.weight_version)
        if self.sessions is not None:
            yield self._gauge("verl_server:sessions", "Sessions in memory, children included", len(self.sessions))
            yield self._gauge("verl_server:session_bytes", "Memory of sessions, about", self.sessions.memory)
        if self.store is not None:
            failing = "1 while the session store cannot be written, otherwise 0"
            yield self._gauge("verl_server:session_store_failing", failing, self.store.failure is not None)
            backlog = "Records of sessions that are not durable yet, by the policy of the store"
            yield self._gauge("verl_server:session_store_backlog", backlog, self.store.backlog)
            yield self._gauge("verl_server:session_store_bytes", "Bytes of the session store", self.store.size)

    def _of_scheduler(self, state: Mapping[str, Any]) -> Iterator[Metric]:
        answered = "1 if the scheduler answered this scrape in time, otherwise 0: then its figures are left out"
        yield self._gauge("verl_server:scheduler_answered", answered, bool(state))
        for name, (key, text) in _GAUGES.items():
            if _is_number(state.get(key)):
                yield self._gauge(f"sglang:{name}", text, state[key])
        if _is_number(state.get("num_retractions")):
            text = "Times that a running request lost its place and its KV cache, and was computed again"
            yield self._counter("sglang:num_retracted_requests", text, state["num_retractions"])
        yield self._tokens(state)
        if state.get("weights_state") in _WEIGHTS_STATES:
            yield self._states(state["weights_state"])

    def _tokens(self, state: Mapping[str, Any]) -> Metric:
        """Return the tokens of requests that run or ran, under SGLang's names of the modes.

        The prompt of a request counts when the request first runs. Tokens that are computed again after a retraction
        are not counted, so the two modes of prompts yield the share that the prefix cache had in any window of time.
        """
        text = "Tokens so far, also of requests that still run: output, and prompts by whether they were cached"
        family = CounterMetricFamily("sglang:realtime_tokens", text, labels=[*self._names, "mode"])
        output, prompt, cached = (state.get(f"{part}_tokens_total") for part in ("output", "prompt", "cached"))
        if _is_number(output):
            family.add_metric([*self._values, "decode"], output)
        if _is_number(prompt) and _is_number(cached):
            family.add_metric([*self._values, "prefill_compute"], prompt - cached)
            family.add_metric([*self._values, "prefill_cache"], cached)
        return family

    def _states(self, state: str) -> Metric:
        text = "1 for the state of the weights, 0 for the other states"
        family = GaugeMetricFamily("verl_server:weights_state", text, labels=[*self._names, "state"])
        for each in _WEIGHTS_STATES:
            family.add_metric([*self._values, each], each == state)
        return family

    def _of_version(self, label: str) -> Iterator[Metric]:
        """Yield the number of the served version, if it has one.

        The incarnation is a label, because numbers of two incarnations have no order. There is one series at a time.
        """
        version = WeightVersion.parse(label)
        incarnation, number = ("", label) if version is None else (version.incarnation, str(version.number))
        if len(number) > _MOST_DIGITS or not (number.isascii() and number.isdigit()):
            return
        text = "Number of the served weight version"
        yield self._gauge("verl_server:weight_version_number", text, int(number), incarnation=incarnation)

    def _gauge(self, name: str, text: str, value: float, **labels: str) -> Metric:
        family = GaugeMetricFamily(name, text, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], value)
        return family

    def _counter(self, name: str, text: str, value: float, **labels: str) -> Metric:
        family = CounterMetricFamily(name, text, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], value)
        return family


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
