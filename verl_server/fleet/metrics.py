"""`RouterMetrics`: the metrics of a router: counters that live with it, and gauges that are read at a scrape.

`router` and `relay` count. `status` serves the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from verl_server.fleet.members import Fleet, State
from verl_server.fleet.placement import REASONS, Placement
from verl_server.fleet.sessions import SessionPlaces
from verl_server.weight_version import WeightVersion

_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class RouterMetrics:
    """The metrics of one router."""

    def __init__(
        self, fleet: Fleet, placement: Placement, sessions: SessionPlaces, held_bytes: Callable[[], int]
    ) -> None:
        """`held_bytes` returns the bytes of the bodies that the router holds."""
        registry = self._registry = CollectorRegistry()
        self._answers = Counter(
            "verl_router:responses",
            "Answers to clients. source: a server, or the router itself.",
            ["status_code", "source"],
            registry=registry,
        )
        self._repeated = Counter(
            "verl_router:repeated_requests",
            "Requests that were sent again, to another server or later. reason: a server refused it, or was lost.",
            ["reason"],
            registry=registry,
        )
        for reason in ("refused", "lost"):
            self._repeated.labels(reason)
        self._broken = Counter(
            "verl_router:broken_responses", "Answers that broke after a part was handed on.", registry=registry
        )
        self._held = Gauge(
            "verl_router:held_requests", "Requests that wait for a server or a version now.", registry=registry
        )
        self._holds = Counter(
            "verl_router:holds", "Requests that had to wait for a server or a version.", registry=registry
        )
        self._held_seconds = Counter(
            "verl_router:held_seconds", "Seconds that requests have waited.", registry=registry
        )
        self._choice = Histogram(
            "verl_router:choice_seconds",
            "Time from the end of a request's body to the choice of its server, without the time that it was held.",
            buckets=_BUCKETS,
            registry=registry,
        )
        registry.register(_Gauges(fleet, placement, sessions, held_bytes))

    def answered(self, status: int, source: Literal["server", "router"]) -> None:
        self._answers.labels(status, source).inc()

    def chosen(self, seconds: float) -> None:
        """Count the first choice of a server for a request."""
        self._choice.observe(seconds)

    def repeated(self, reason: Literal["refused", "lost"]) -> None:
        self._repeated.labels(reason).inc()

    def broke(self) -> None:
        self._broken.inc()

    def hold(self, *, is_first: bool) -> None:
        """Note that a request begins to wait. `is_first` is False if it has waited before."""
        self._held.inc()
        if is_first:
            self._holds.inc()

    def release(self, seconds: float) -> None:
        """Note that a request has waited for so many seconds."""
        self._held.dec()
        self._held_seconds.inc(max(0.0, seconds))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return bytes(generate_latest(self._registry))


class _Gauges(Collector):
    """Reads the fleet when Prometheus asks, so that no figure is old."""

    def __init__(
        self, fleet: Fleet, placement: Placement, sessions: SessionPlaces, held_bytes: Callable[[], int]
    ) -> None:
        self._fleet, self._placement, self._sessions = fleet, placement, sessions
        self._held_bytes = held_bytes

    def collect(self) -> Iterable[Metric]:
        yield from self._of_servers()
        yield from self._of_versions()
        yield GaugeMetricFamily(
            "verl_router:held_bytes", "Bytes of the bodies that the router holds.", self._held_bytes()
        )
        yield GaugeMetricFamily("verl_router:sessions", "Sessions whose server is known.", len(self._sessions))
        placed = CounterMetricFamily(
            "verl_router:placements", "Choices of a server, by their reason.", labels=["reason"]
        )
        for reason in REASONS:
            placed.add_metric([reason], self._placement.counts[reason])
        yield placed

    def _of_servers(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "verl_router:server_state", "1 for the state of a server, 0 for the others.", labels=["server", "state"]
        )
        figures = {
            name: GaugeMetricFamily(f"verl_router:{name}", text, labels=["server"])
            for name, text in (
                ("running_requests", "Requests that the router has at a server."),
                ("load", "Tokens in flight as a share of the tokens that the server's cache holds."),
                ("version_lag", "Versions that a server is behind the newest one."),
            )
        }
        for member in self._fleet.members:
            for state in State:
                states.add_metric([member.url, state.value], member.state == state)
            figures["running_requests"].add_metric([member.url], member.requests)
            figures["load"].add_metric([member.url], member.load)
            figures["version_lag"].add_metric([member.url], self._fleet.versions.lag(member.url))
        return [states, *figures.values()]

    def _of_versions(self) -> Iterable[Metric]:
        versions = self._fleet.versions
        committed = None if versions.committed is None else WeightVersion.parse(versions.committed)
        number = GaugeMetricFamily(
            "verl_router:weight_version_number", "Number of the fleet's version.", labels=["incarnation"]
        )
        if committed is not None:
            number.add_metric([committed.incarnation], committed.number)
        yield number
        if versions.last_spread is not None:
            yield GaugeMetricFamily(
                "verl_router:version_spread_seconds",
                "Seconds from the first server with the fleet's version to the last one.",
                versions.last_spread[1],
            )
