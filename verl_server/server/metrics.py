"""Prometheus metrics under SGLang's names, so that SGLang's dashboards work.

Each TokenizerManager owns one `Metrics`. Counters and latencies are recorded for each request. What other parts of the
server count is read when `/metrics` is requested (`ScrapedFigures`). docs/monitoring.md lists all metrics.

A label has few values, and no caller chooses one freely. A counter whose labels are known begins at 0, because a rate
misses the first increment of a series that did not exist.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from verl_server.server.request_state import ReqState
from verl_server.server.scraped_figures import Scrape, ScrapedFigures, ScrapedSessions, ScrapedStore
from verl_server.server.weight_pushes import PUSH_ROUTES, PUSH_SOURCES
from verl_server.server_args import ServerArgs

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_PER_TOKEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


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
        ended = counter("verl_server:sessions_ended", "Sessions that ended, by how", ("reason",))
        self._sessions_ended = {
            reason: ended.labels(**self._labels, reason=reason) for reason in ("finished", "expired", "deleted")
        }
        turns = counter("verl_server:session_turns", "Turns of sessions that finished")
        self._turns = turns.labels(**self._labels)
        branches = "Branches of sessions that began, by the reason"
        self._branches = counter("verl_server:session_branches", branches, ("reason",))
        self._first = histogram("sglang:time_to_first_token_seconds", "Time to the first token", _LATENCY)
        self._total = histogram("sglang:e2e_request_latency_seconds", "Time to the complete answer", _LATENCY)
        later = "Mean time of each output token after the first"
        self._each = histogram("sglang:time_per_output_token_seconds", later, _PER_TOKEN)
        self._answers = counter(
            "sglang:http_responses", "Answers by route, method and status", ("endpoint", "method", "status_code")
        )
        pushes = Histogram(
            "verl_server:weight_push_seconds",
            "Time of a weight push that succeeded: of an update, or of a transaction from its begin to its end",
            [*names, "source"],
            buckets=_LATENCY,
            registry=self.registry,
        )
        self._pushes = {source: pushes.labels(**self._labels, source=source) for source in PUSH_SOURCES}
        prepared = "Time from the arrival of a weight update until every rank had staged it; 0 for a push by id"
        self._prepared = histogram("verl_server:weight_prepare_seconds", prepared, _LATENCY)
        held = "Time without a step because of a weight update or a transaction"
        self._held = histogram("verl_server:weight_pause_seconds", held, _LATENCY)
        failures = counter("verl_server:weight_push_failures", "Calls of weight pushes that failed", ("endpoint",))
        self._push_failures = {route: failures.labels(**self._labels, endpoint=route) for route in PUSH_ROUTES}
        last = "Unix time of the last weight push that succeeded"
        self._last_push = Gauge("verl_server:last_weight_push_time_seconds", last, names, registry=self.registry)
        self._scraped = ScrapedFigures(self._labels)
        self.registry.register(self._scraped)

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
        """Count the end of a session: finished, expired or deleted."""
        self._sessions_ended[reason].inc()

    def turn_finished(self, began: str | None) -> None:
        """Count a turn, and the branch that it began. `began` is None if the turn continued a branch."""
        self._turns.inc()
        if began is not None:
            self._branches.labels(**self._labels, reason=began).inc()

    def answered(self, endpoint: str, method: str, status: int) -> None:
        """Count an answer. `endpoint` and `method` are those of a route that exists."""
        self._answers.labels(**self._labels, endpoint=endpoint, method=method, status_code=status).inc()

    def weights_pushed(self, source: str, seconds: float) -> None:
        """Count a weight push that succeeded. `source` is one of `PUSH_SOURCES`."""
        self._pushes[source].observe(seconds)
        self._last_push.labels(**self._labels).set(time.time())

    def weights_prepared(self, seconds: float) -> None:
        """Count the preparation of an update."""
        self._prepared.observe(seconds)

    def generation_held(self, seconds: float) -> None:
        """Count the pause of generation for an update or a transaction."""
        self._held.observe(seconds)

    def push_failed(self, route: str) -> None:
        """Count a call of a weight push that failed. `route` is one of `PUSH_ROUTES`."""
        self._push_failures[route].inc()

    def watch_sessions(self, sessions: ScrapedSessions) -> None:
        """Report the figures of sessions from now on."""
        self._scraped.sessions = sessions

    def watch_store(self, store: ScrapedStore) -> None:
        """Report the figures of the session store from now on."""
        self._scraped.store = store

    def render(self, scrape: Scrape) -> bytes:
        """Return all metrics in Prometheus's text format."""
        self._scraped.scrape = scrape
        return generate_latest(self.registry)
