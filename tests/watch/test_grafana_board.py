"""The Grafana boards: ours is valid, and what ours and SGLang's ask for are metrics of a running server."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.watch.boards import (
    OUR_BOARD,
    board_queries,
    exposed,
    families,
    grouped_by,
    panels,
    selected,
    sglang_queries,
)
from tests.watch.metrics_server import busy_server

ROOT = Path(__file__).parents[2]
BOARD: dict[str, Any] = json.loads(OUR_BOARD.read_text(encoding="utf-8"))
QUERIES = {"ours": board_queries(BOARD), "SGLang's": sglang_queries()}
OF_PROMETHEUS = {"up"}
"""Metrics that Prometheus itself makes at each scrape."""
OF_TARGET = {"job", "instance"}
"""Labels that Prometheus adds to each series."""


@pytest.fixture(scope="module")
def exposition(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with busy_server(tiny_qwen3, tmp_path_factory.mktemp("boards") / "store") as client:
        answer = client.get("/metrics")
        assert answer.status_code == 200
        yield answer.text


@pytest.mark.parametrize("board", QUERIES)
def test_queries_select_series_of_a_running_server(board: str, exposition: str) -> None:
    series = exposed(exposition)
    for query in QUERIES[board]:
        for each in selected(query):
            if each.metric in OF_PROMETHEUS:
                continue
            assert each.metric in series, f"{query}: the server has no {each.metric}"
            fitting = [labels for labels in series[each.metric] if set(each.equal) <= set(labels.items())]
            assert fitting, f"{query}: no series of {each.metric} has {dict(each.equal)}"
            missing = each.labels - OF_TARGET - set(fitting[0])
            assert not missing, f"{query}: {each.metric} has no label {missing}"
            assert grouped_by(query) <= OF_TARGET | set(fitting[0]), f"{query}: {each.metric} lacks a label"


def test_the_page_lists_every_metric(exposition: str) -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8").split("## Every metric")[1]
    listed = set(re.findall(r"^\| `((?:sglang|verl_server):\w+)` \|", page, re.MULTILINE))
    assert listed == families(exposed(exposition))


def test_the_page_lists_every_panel() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    titles = {panel["title"] for panel in BOARD["panels"] if panel["type"] != "row"}
    assert set(re.findall(r"^\| \*\*(.*?)\*\* \|", page, re.MULTILINE)) == titles


def test_each_panel_asks_a_question_of_the_chosen_prometheus() -> None:
    variables = {each["name"]: each for each in BOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    for panel in (panel for panel in panels(BOARD) if panel["type"] != "row"):
        assert "?" in panel["description"] and panel["targets"], panel["title"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
        for asking in (panel, *panel["targets"]):
            assert asking["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$\{?(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= set(variables) and {"job", "instance"} <= used, target["expr"]


def test_the_board_has_the_form_that_grafana_reads() -> None:
    assert BOARD["uid"] == "verl-server" and BOARD["title"] and BOARD["schemaVersion"] >= 36 and "id" not in BOARD
    every = list(panels(BOARD))
    assert len({panel["id"] for panel in every}) == len(every)
    assert len({panel["title"] for panel in every if panel["type"] != "row"}) == len(
        [panel for panel in every if panel["type"] != "row"]
    )
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert min(place.values()) >= 0 and place["w"] > 0 and place["h"] > 0 and place["x"] + place["w"] <= 24
    for one, other in itertools.combinations(BOARD["panels"], 2):
        assert not overlap(one["gridPos"], other["gridPos"]), f"{one['title']} and {other['title']} overlap"


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    """Return True if two places on the grid share a cell."""
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size] for at, size in (("x", "w"), ("y", "h"))
    )
