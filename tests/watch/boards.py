"""What Prometheus is asked by a Grafana board: its queries with the variables filled in, and what they select.

`board_queries` reads a board's JSON. `sglang_queries` states what SGLang's board asks, without its file.

SGLang's board is examples/monitoring/grafana/dashboards/json/sglang-dashboard.json of github.com/sgl-project/sglang,
Apache-2.0. The file is not copied here. The figures below were read off two of its states: one with the names
`sglang:NAME`, which SGLang 0.5.16 and 0.5.23 serve, and a later one with the names `sglang_NAME`, which they do not
serve, and with a panel for the hit rate of the prefix cache more. So docs/monitoring.md says to replace the prefix.
With VERL_SERVER_SGLANG_BOARD=FILE, the tests read the file itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser

OUR_BOARD = Path(__file__).parents[2] / "verl_server" / "watch" / "grafana" / "verl-server.json"
_VARIABLES = {"job": ".+", "model_name": ".+", "instance": ".+", "__rate_interval": "1m"}
_SGLANG_GAUGES = ("num_running_reqs", "gen_throughput", "cache_hit_rate", "num_queue_reqs")
_SGLANG_LATENCIES = ("e2e_request_latency_seconds", "time_to_first_token_seconds")


@dataclass(frozen=True)
class Selected:
    """One series selector of a query."""

    metric: str
    equal: tuple[tuple[str, str], ...]
    """Labels that must have one value."""
    labels: frozenset[str]
    """Labels that the selector names."""


def board_queries(board: dict[str, Any]) -> list[str]:
    """Return the queries of all panels, with each variable replaced by a value."""
    return [_filled(target["expr"]) for panel in panels(board) for target in panel.get("targets", ())]


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield all panels, those in collapsed rows included."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def sglang_queries() -> list[str]:
    """Return what SGLang's board asks, or the queries of the file that the environment names."""
    given = os.environ.get("VERL_SERVER_SGLANG_BOARD")
    if given is not None:
        text = Path(given).read_text(encoding="utf-8").replace("sglang_", "sglang:")
        return board_queries(json.loads(text))
    queries = [f"sglang:{name}" for name in _SGLANG_GAUGES]
    for name in (f"sglang:{name}" for name in _SGLANG_LATENCIES):
        queries += [f"histogram_quantile({q}, sum by (le) (rate({name}_bucket[1m])))" for q in (0.5, 0.9, 0.99)]
        queries += [f"avg(rate({name}_sum[1m]) / rate({name}_count[1m]))"]
        queries += [f'sum by (le) (increase({name}_bucket{{model_name=~".+"}}[1m]))']
    cached, all_read = (f'sum(rate(sglang:realtime_tokens_total{{mode=~"{modes}"}}[1m]))' for modes in _PROMPT_MODES)
    return [*queries, f"{cached} / {all_read}"]


_PROMPT_MODES = ("prefill_cache", "prefill_cache|prefill_compute")


def selected(query: str) -> list[Selected]:
    """Return the selectors of a query. Raise ValueError if the query is not PromQL."""
    found: list[Selected] = []

    def visit(node: object) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = node.matchers.matchers
            equal = tuple((m.name, m.value) for m in matchers if m.op == promql_parser.MatchOp.Equal)
            found.append(Selected(node.name or "", equal, frozenset(m.name for m in matchers)))
        return True

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def grouped_by(query: str) -> set[str]:
    """Return the labels that aggregations of a query keep, or by which its operators match."""
    return {name.strip() for names in re.findall(r"\b(?:by|on) \(([^)]*)\)", query) for name in names.split(",")}


def exposed(exposition: str) -> dict[str, list[dict[str, str]]]:
    """Return name of a metric -> labels of its series, of a text that `/metrics` returned."""
    series: dict[str, list[dict[str, str]]] = {}
    for name, labels in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", exposition, re.MULTILINE):
        series.setdefault(name, []).append(dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)))
    return series


def families(series: Iterable[str]) -> set[str]:
    """Return the names without the suffixes of histograms and the times of creation."""
    names = {name for name in series if not name.endswith("_created")}
    histograms = {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}
    return {next((h for h in histograms if name.rpartition("_")[0] == h), name) for name in names}


def _filled(query: str) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        assert name in _VARIABLES, f"the query uses ${name}, for which this test has no value: {query}"
        return _VARIABLES[name]

    return re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, query).strip()
