"""A server's session store as a run: sessions are episodes, and their branches a tree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.watch.index.test_session_store import Server, session, turn
from tests.watch.site.conftest import Site

OpenSite = Callable[..., Site]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    server = Server(tmp_path / "store")
    server.write(
        session("one", 100.0, group="g"), turn("one", 0), turn("one", 1, prompt=(1, 2, 3, 4), parent=0, shared=3)
    )
    server.write(session("one.helper", 101.0, parent="one", group="g"), turn("one.helper"))
    server.write(session("two", 105.0, group="g"), turn("two", 0, output=(7, 8)))
    server.write(session("three", 110.0))
    server.kill()
    return tmp_path / "store"


def test_sessions_are_episodes_of_a_run_without_steps(open_site: OpenSite, store: Path) -> None:
    site = open_site(stores=[store])
    run = site.get("")["run"]
    assert (run["kind"], run["state"], run["steps"], run["warnings"]) == ("store", "unknown", 0, [])
    assert (run["started"], run["last"]) == (100.0, 110.0)
    (step,) = site.get("/steps")["steps"]
    assert (step["step"], step["episodes"], step["groups"]) == ("-", 3, 2)
    answer = site.get("/episodes")
    found = answer["rows"]
    assert answer["total"] == 3 and site.get("/episodes?tokens_from=4")["total"] is None
    assert [row["row"] for row in found] == ["three:0", "two:0", "one:0"]
    assert [row["episode_id"] for row in found] == [None, "g", "g"]
    groups = {group["episode_id"]: group for group in site.get("/steps/-")["groups"]}
    assert groups["g"]["count"] == 2 and groups[None]["count"] == 1
    assert site.get("/episodes?tokens_from=4")["rows"][0]["row"] == "two:0"
    assert site.get("/advisories") == {"advisories": [], "judged": False, "problem": None}
    assert site.get("/metrics")["names"] == [] and site.get("/events")["events"] == []


def test_a_session_is_an_episode_with_its_sub_agents(open_site: OpenSite, store: Path) -> None:
    site = open_site(stores=[store])
    found = site.get(f"/episodes/{quote('one:0', safe='')}")
    kinds = [(branch["row"], branch["kind"], branch["parent"]) for branch in found["tree"]]
    assert kinds == [("one:0", "root", None), ("one.helper:0", "sub-agent", "one:0")]
    assert len(found["turns"]) == 2 and found["source"] == "none"
    assert sorted(found["siblings"]) == ["one:0", "two:0"]
    child = site.get(f"/episodes/{quote('one.helper:0', safe='')}")
    assert child["tree"] == found["tree"] and len(child["turns"]) == 1
    tokens = site.get(f"/episodes/{quote('two:0', safe='')}/tokens?start=0")
    assert tokens["id"] == [1, 2, 7, 8] and tokens["mask"] == [0, 0, 1, 1] and tokens["text"] is None
    for row in ("nothing:0", "one:9", "nothing"):
        assert site.request(f"/api/runs/{site.run}/episodes/{quote(row, safe='')}").status_code == 404


def test_lanes_and_search_of_a_store(open_site: OpenSite, store: Path) -> None:
    site = open_site(stores=[store])
    lanes = site.get("/lanes")
    assert lanes["total"] == 3 and [lane["label"] for lane in lanes["episodes"]] == ["one", "two", "three"]
    found = site.get("/episodes?q=nothing-like-this")
    assert found["rows"] == [] and found["next"] is None
    assert found["searched"]["bytes"] == found["searched"]["total"]
