"""Prometheus metrics under SGLang's names, so that SGLang's dashboards work.

Each TokenizerManager owns one `Metrics`. Counters and latencies are recorded for each request. Gauges are read from the
scheduler when `/metrics` is requested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from verl_server.server.request_state import ReqState
from verl_server.server_args import ServerArgs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_GAUGES = {
    "num_running_reqs": "Requests in the running batch",
    "num_queue_reqs": "Requests waiting",
    "num_used_tokens": "Tokens that occupy the KV cache",
    "token_usage": "Share of the KV cache in use",
    "gen_throughput": "Output tokens per second",
    "cache_hit_rate": "Share of prompt tokens found in the prefix cache",
    "max_total_num_tokens": "Capacity of the KV cache in tokens",
}
_STATE_NAMES = {"num_queue_reqs": "num_waiting_reqs"}
"""Gauge -> its key in the scheduler's internal state, for the gauges that have another name there."""


def gauges_text(load: Mapping[str, Any]) -> str:
    """Return Prometheus text: one gauge for each number in `load` and in its objects, with SGLang's names.

    `load` is the load of one rank, as `/v1/loads` returns it.
    """
    prefixes = {"disaggregation": "disagg"}
    lines = []
    for name, value in load.items():
        numbers = (
            {f"{prefixes.get(name, name)}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {}
        )
        for key, number in (numbers or {name: value}).items():
            if isinstance(number, int | float) and not isinstance(number, bool) and key != "dp_rank":
                lines += [f"# TYPE sglang_{key} gauge", f'sglang_{key}{{dp_rank="{load["dp_rank"]}"}} {number}']
    return "\n".join(lines) + "\n"


_MOST_IGNORED_NAMES = 100
_COUNTED_NAME = re.compile(r"\??[A-Za-z0-9_.\-]{1,64}")
"""Names of unknown fields that labels show: 64 characters or less, with `?` before query parameters."""


class CountedSessions(Protocol):
    """The figures of the sessions that `Metrics` reads. `SessionTable` implements it."""

    def __len__(self) -> int: ...

    @property
    def memory(self) -> int: ...


def model_label(server_args: ServerArgs) -> str:
    """Return the model's name for the metrics, which everybody may read. For a folder, it is the last part only."""
    path = Path(server_args.model_path)
    return server_args.served_model_name or (path.resolve().name if path.is_dir() else server_args.model_path)


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        names = list(self._labels)

        def counter(name: str, text: str, extra: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, [*names, *extra], registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, buckets=buckets, registry=self.registry).labels(**self._labels)

        self._requests = counter("sglang:num_requests", "Samples accepted").labels(**self._labels)
        self._aborted = counter("sglang:num_aborted_requests", "Samples aborted").labels(**self._labels)
        self._prompt = counter("sglang:prompt_tokens", "Prompt tokens").labels(**self._labels)
        self._cached = counter("sglang:cached_tokens", "Prompt tokens from the prefix cache").labels(**self._labels)
        self._output = counter("sglang:generation_tokens", "Output tokens").labels(**self._labels)
        self._ignored = counter(
            "verl_server:ignored_request_fields", "Unknown fields and query parameters ignored", ("route", "field")
        )
        self._ignored_names: set[str] = set()
        disconnects = counter("verl_server:client_disconnects", "Calls whose client disconnected before the answer")
        self._disconnects = disconnects.labels(**self._labels)
        created = counter("verl_server:sessions_created", "Sessions created")
        self._sessions_created = created.labels(**self._labels)
        self._sessions_ended = counter("verl_server:sessions_ended", "Sessions that ended, by how", ("reason",))
        turns = counter("verl_server:session_turns", "Turns of sessions that finished")
        self._turns = turns.labels(**self._labels)
        branches = "Branches of sessions that began, by the reason"
        self._branches = counter("verl_server:session_branches", branches, ("reason",))
        self._first = histogram("sglang:time_to_first_token_seconds", "Time to the first token", _LATENCY)
        self._total = histogram("sglang:e2e_request_latency_seconds", "Time to the complete answer", _LATENCY)
        later = "Mean time of each output token after the first"
        self._each = histogram("sglang:time_per_output_token_seconds", later, _PER_TOKEN)
        self._sessions: CountedSessions | None = None
        count = Gauge("verl_server:sessions", "Sessions in memory, children included", names, registry=self.registry)
        self._open_sessions = count.labels(**self._labels)
        memory = Gauge("verl_server:session_bytes", "Memory of sessions, about", names, registry=self.registry)
        self._session_bytes = memory.labels(**self._labels)
        paused = Gauge(
            "verl_server:paused_seconds",
            "Seconds since generation was paused; 0 if it is not paused",
            names,
            registry=self.registry,
        )
        self._paused = paused.labels(**self._labels)
        self._gauges = {
            name: Gauge(f"sglang:{name}", text, names, registry=self.registry).labels(**self._labels)
            for name, text in _GAUGES.items()
        }

    def requests_accepted(self, count: int, prompt_tokens: int) -> None:
        self._requests.inc(count)
        self._prompt.inc(prompt_tokens)

    def request_aborted(self) -> None:
        self._aborted.inc()

    def request_finished(self, state: ReqState) -> None:
        if state.finished is None:
            return
        if state.finish_reason is not None and state.finish_reason.type == "abort":
            self._aborted.inc()
        tokens = len(state.output_ids)
        self._output.inc(tokens)
        self._cached.inc(state.cached_tokens)
        self._total.observe(state.finished - state.created)
        if state.first_token is not None:
            self._first.observe(state.first_token - state.created)
            if tokens > 1:
                self._each.observe((state.finished - state.first_token) / (tokens - 1))

    def field_ignored(self, route: str, name: str) -> None:
        """Count an unknown field.

        Callers may send any number of names, so names after the first hundred count as "other".
        """
        if len(self._ignored_names) < _MOST_IGNORED_NAMES and _COUNTED_NAME.fullmatch(name):
            self._ignored_names.add(name)
        self._ignored.labels(**self._labels, route=route, field=name if name in self._ignored_names else "other").inc()

    def client_disconnected(self) -> None:
        """Count a call whose client disconnected before the answer. (A stream that began counts as aborted instead.)"""
        self._disconnects.inc()

    def session_created(self) -> None:
        self._sessions_created.inc()

    def session_ended(self, reason: str) -> None:
        self._sessions_ended.labels(**self._labels, reason=reason).inc()

    def turn_finished(self, began: str | None) -> None:
        """Count a turn, and the branch that it began. `began` is None if the turn continued a branch."""
        self._turns.inc()
        if began is not None:
            self._branches.labels(**self._labels, reason=began).inc()

    def watch_sessions(self, sessions: CountedSessions) -> None:
        """Report the gauges of sessions from now on."""
        self._sessions = sessions

    def _set_session_gauges(self) -> None:
        if self._sessions is not None:
            self._open_sessions.set(len(self._sessions))
            self._session_bytes.set(self._sessions.memory)

    def render(self, internal_state: Mapping[str, Any], paused_seconds: float) -> bytes:
        """Return all metrics in Prometheus's text format.

        `internal_state` is the scheduler's payload, or {} if the scheduler did not answer in time.
        """
        self._paused.set(paused_seconds)
        self._set_session_gauges()
        for name, gauge in self._gauges.items():
            value = internal_state.get(name, internal_state.get(_STATE_NAMES.get(name, name)))
            if isinstance(value, int | float):
                gauge.set(value)
        return generate_latest(self.registry)
