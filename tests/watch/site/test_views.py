"""The answers about recorded runs: a synchronous one, a resumed one, an asynchronous one, agents, a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from tests.watch.site.conftest import Site
from tests.watch.site.recorded_runs import (
    FIRST,
    HOSTILE,
    SEED,
    failed,
    step_metrics,
    trajectory,
    write_agents_run,
    write_asynchronous_run,
    write_resumed_run,
    write_run,
    write_tokenizer,
)
from verl_server.rollout.trajectory import append_jsonl, summarize
from verl_server.train.run_writer import RunWriter
from verl_server.watch.recorded import read_recorded
from verl_server.watch.run_records import Alarm, RunStarted
from verl_server.watch.site.answers.advisories import Advisories
from verl_server.watch.site.answers.episode import Episode, TextPart, Tokens
from verl_server.watch.site.answers.lanes import Lanes
from verl_server.watch.site.answers.runs import Events, Metrics, RunSettings
from verl_server.watch.site.answers.steps import Comparison, Episodes, StepGroups, Steps
from verl_server.watch.site.overview import bucket_of

OpenSite = Callable[..., Site]
SHOWN = "</script><script>alert(1)</script>\u241b[31m\\u202eevil\u2400"


def row_path(row: str) -> str:
    return f"/episodes/{quote(row, safe='')}"


def all_urls(site: Site) -> Iterator[tuple[str, type[Any]]]:
    """Yield each URL of the first run that the page can ask for without a search, and the struct of its answer."""
    for path, kind in {
        "": RunSettings,
        "/metrics": Metrics,
        "/metrics?names=reward&points=2": Metrics,
        "/events": Events,
        "/advisories": Advisories,
        "/lanes": Lanes,
        "/steps": Steps,
        "/episodes": Episodes,
        "/episodes?q=guess": Episodes,
    }.items():
        yield path, kind
    steps = [step["step"] for step in site.get("/steps")["steps"]]
    for step in steps:
        yield f"/steps/{step}", StepGroups
        yield f"/compare?a={steps[0]}&b={step}", Comparison
        for group in site.get(f"/steps/{step}")["groups"]:
            for row in group["episodes"]:
                episode = site.get(row_path(row["row"]))
                for branch in episode["tree"]:
                    path = row_path(branch["row"])
                    yield path, Episode
                    yield f"{path}/tokens?start=0", Tokens
                    yield f"{path}/text?part=0&turn=0", TextPart


@pytest.mark.parametrize("kind", ["sync", "resumed", "async", "agents", "file"])
def test_every_url_answers_as_declared(open_site: OpenSite, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "sync":
        write_run(path).close()
    elif kind == "resumed":
        write_resumed_run(path)
    elif kind == "async":
        write_asynchronous_run(path)
    elif kind == "agents":
        write_agents_run(path)
    else:
        path = tmp_path / "rollout.jsonl"
        append_jsonl(path, [trajectory(group, member, 1.0) for group in range(2) for member in range(2)])
    site = open_site(path)
    asked = 0
    for url, answer in all_urls(site):
        found = site.get(url)
        assert json.loads(msgspec.json.encode(msgspec.convert(found, answer))) == found, url
        asked += 1
    assert asked > 15


def test_the_list_says_what_a_run_is(open_site: OpenSite, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one").close()
    write_agents_run(tmp_path / "runs" / "two")
    (tmp_path / "empty").mkdir()
    site = open_site(tmp_path / "runs", tmp_path / "empty")
    one, two, empty = site.request("/api/runs").json()["runs"]
    assert (one["kind"], one["state"], one["steps"], one["last_step"]) == ("training", "ended", 3, 2)
    assert one["tokenizer"] == str(tmp_path / "runs" / "one" / "model")
    assert two["kind"] == "agents" and two["last"] is not None
    assert empty["state"] == "new" and "--tokenizer" in empty["tokenizer_problem"]
    assert one["id"].startswith("one-") and len({one["id"], two["id"], empty["id"]}) == 3


def test_metrics_are_thinned(open_site: OpenSite, tmp_path: Path) -> None:
    files = RunWriter(tmp_path, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    for step in range(10):
        files.record(step_metrics(step, FIRST, float(step)))
    files.close()
    site = open_site(tmp_path)
    thin = site.get("/metrics?names=reward,nothing&points=5")
    assert thin["step"] == [1, 3, 5, 7, 9] and thin["thinned"] == 2
    assert thin["values"]["reward"] == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert thin["low"]["reward"][0] == 0.0 and thin["high"]["reward"][0] == 1.0
    assert "nothing" not in thin["values"] and "losses.kl" in thin["names"]
    part = site.get("/metrics?from=2&names=losses.kl&to=3")
    assert part["step"] == [2, 3] and part["values"] == {"losses.kl": [0.02, 0.03]}
    assert (part["first"], part["last"], part["low"]) == (0, 9, {})


@pytest.mark.parametrize(
    ("column", "bucket"),
    [
        ([1.0, None, 2.0], (1.0, 1.5, 2.0)),
        ([None], (None, None, None)),
        ([math.inf, 1.0, 2.0], (1.0, math.inf, 2.0)),
    ],
)
def test_a_bucket_shows_a_figure_that_is_not_finite(column: list[Any], bucket: tuple[Any, ...]) -> None:
    assert bucket_of(column) == bucket


def test_groups_are_sorted_and_filtered(open_site: OpenSite, tmp_path: Path) -> None:
    write_run(tmp_path).close()
    site = open_site(tmp_path)
    found = site.get("/steps/1")
    spread, flat = found["groups"]
    assert (spread["number"], spread["spread"], spread["mean"], spread["count"]) == (2, 0.5, 0.5, 4)
    assert (flat["number"], flat["spread"]) == (3, 0.0)
    assert (found["previous_step"], found["next_step"]) == (0, 2)
    assert found["step"]["flat"] == 1 and found["step"]["episodes"] == 8 and found["step"]["played"] == 8
    assert [group["number"] for group in site.get("/steps/1?sort=mean")["groups"]] == [3, 2]
    assert [group["number"] for group in site.get("/steps/1?reward_to=0")["groups"]] == [2]
    assert [group["number"] for group in site.get("/steps/1?error=1")["groups"]] == [3]
    assert spread["seed"] == str(SEED + 2), "a seed is a text: scripts have 53 bits"


def test_means_are_those_of_the_summary_of_a_rollout(open_site: OpenSite, tmp_path: Path) -> None:
    write_agents_run(tmp_path)
    played = [recorded.trajectory for recorded in read_recorded(tmp_path)]
    step = open_site(tmp_path).get("/steps")["steps"][0]
    assert step["step"] == "-" and step["episodes"] == 2
    assert step["reward"] == summarize(played).mean_reward


def test_two_steps_are_compared_by_task(open_site: OpenSite, tmp_path: Path) -> None:
    files = RunWriter(tmp_path, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    for step, groups in enumerate([(0, 1), (7, 2)]):  # groups 0 and 7 have one seed
        files.record_trajectories(step, [trajectory(group, 0, float(step)) for group in groups])
    files.close()
    site = open_site(tmp_path)
    assert site.get(f"/compare?a=0&b=1&with={site.run}") == (found := site.get("/compare?a=0&b=1"))
    assert found["common"] == 1 and len(found["pairs"]) == 3
    assert (found["pairs"][0]["a"]["mean"], found["pairs"][0]["b"]["mean"]) == (0.0, 1.0)
    assert {bool(pair["a"]) for pair in found["pairs"][1:]} == {True, False}


def test_a_resumed_run_hides_lost_steps_unless_they_are_asked_for(open_site: OpenSite, tmp_path: Path) -> None:
    write_resumed_run(tmp_path)
    site = open_site(tmp_path)
    assert [step["step"] for step in site.get("/steps")["steps"]] == [0, 1, 2, 3, 4]
    assert site.get("/metrics?names=reward")["step"] == [0, 1, 2, 3, 4]
    shown = site.get("/episodes?from=2&group=4&to=2")["rows"]
    counted = site.get("/episodes?from=2&group=4&lost=1&to=2")
    with_lost = counted["rows"]
    assert counted["total"] == len(with_lost)
    assert len(with_lost) == 2 * len(shown) == 8
    assert {row["lost"] for row in shown} == {False} and {row["lost"] for row in with_lost} == {False, True}


def test_groups_of_an_asynchronous_run_are_in_the_step_that_used_them(open_site: OpenSite, tmp_path: Path) -> None:
    write_asynchronous_run(tmp_path)
    site = open_site(tmp_path)
    assert [step["step"] for step in site.get("/steps")["steps"]] == [1, "playing", "dropped"]
    assert site.get("/steps/1")["groups"][0]["number"] == 0
    assert site.get("/steps/dropped")["groups"][0]["number"] == 1


def test_a_search_finds_texts_and_says_what_it_has_read(open_site: OpenSite, tmp_path: Path) -> None:
    write_run(tmp_path).close()
    found = open_site(tmp_path).get("/episodes?q=EVIL")
    assert len(found["rows"]) == 3 and found["next"] is None
    assert found["searched"]["bytes"] == found["searched"]["total"] > 0
    assert len(found["excerpts"]) == 3 and all("evil" in excerpt for excerpt in found["excerpts"])
    assert found["rows"][0]["error"] == SHOWN


def test_lanes_have_the_parts_of_a_window(open_site: OpenSite, tmp_path: Path) -> None:
    write_run(tmp_path).close()
    site = open_site(tmp_path)
    lanes = site.get("/lanes?from=1790000000&rows=2&to=1790000002")
    assert lanes["total"] == 13 and len(lanes["episodes"]) == 2, "an even choice of those that overlap"
    assert lanes["episodes"][0]["parts"][0] == ["env", 1790000000.0, 1790000000.25]
    assert lanes["trainer"] == [] and lanes["first"] == 1790000000.0
    whole = site.get("/lanes")
    assert {phase[0] for phase in whole["trainer"]} <= {"rollout", "train", "sync"} and len(whole["pushes"]) == 3
    assert [span[0] for span in whole["servers"][0]["spans"]] == ["up", "lost"]


def test_an_episode_has_its_turns_and_its_group(open_site: OpenSite, tmp_path: Path) -> None:
    write_run(tmp_path).close()
    site = open_site(tmp_path)
    rows = {row["name"]: row["row"] for row in site.get("/steps/0")["groups"][0]["episodes"]}
    found = site.get(row_path(rows["0-1"]))
    first, last = found["turns"]
    assert [(part["role"], part["text"]) for part in first["parts"]] == [
        ("environment", "guess a number (0)"),
        ("policy", "seven"),
    ]
    assert [part["text"] for part in last["parts"]][-1] == "correct", "what came after the last action"
    assert (first["read"], first["wrote"], first["logprob"]) == ([0, 3], [3, 5], -0.5)
    assert first["spans"] == [["env", 0.0, 0.25], ["generate", 0.25, 1.0]]
    assert found["siblings"] == [rows[f"0-{member}"] for member in range(4)]
    assert found["trained"]["gap_mean"] == 0.125 and found["trained"]["tokens"] == 4
    assert found["source"] == "recorded" and found["environment"] == "http://e"


def test_an_agents_episode_is_a_tree_of_branches(open_site: OpenSite, tmp_path: Path) -> None:
    write_agents_run(tmp_path)
    site = open_site(tmp_path)
    rows = {row["name"]: row for row in site.get("/episodes")["rows"]}
    assert rows["0-0"]["branches"] == 3
    found = site.get(row_path(rows["0-0"]["row"]))
    tree = {(branch["session"], branch["branch"]): branch for branch in found["tree"]}
    root = tree["s1", 0]
    assert root["kind"] == "root" and root["parent"] is None
    assert tree["s1", 1]["kind"] == "branch" and tree["s1", 1]["parent"] == root["row"]
    assert tree["s1", 1]["shared"] == 5
    assert tree["s1.helper", 0]["kind"] == "sub-agent" and tree["s1.helper", 0]["parent"] == root["row"]
    parts = [(part["role"], part["kind"], part["name"], part["text"]) for part in found["turns"][0]["parts"]]
    assert parts == [
        ("system", "text", None, "You guess."),
        ("user", "text", None, f"Guess. {SHOWN}"),
        ("policy", "reasoning", None, "It may be seven."),
        ("policy", "text", None, "I search."),
        ("policy", "call", "search", '{"query": "seven"}'),
    ]
    assert found["turns"][1]["parts"][0] == {
        "number": 0, "role": "tool", "kind": "result", "name": "search", "text": "7 is likely", "length": 11,
        "next": None,
    }  # fmt: skip


def test_texts_are_decoded_where_a_file_has_none(open_site: OpenSite, tmp_path: Path) -> None:
    write_agents_run(tmp_path / "run")
    old = {row["name"]: row for row in open_site(tmp_path / "run").get("/episodes")["rows"]}["1-0"]["row"]
    found = open_site(tmp_path / "run").get(row_path(old))
    assert found["source"] == "decoded"
    assert [part["text"] for part in found["turns"][0]["parts"]] == ["guessanumber", "seven<|end|>"]
    (tmp_path / "run" / "model" / "tokenizer.json").unlink()
    without = open_site(tmp_path / "run")
    assert without.get(row_path(old))["source"] == "none"
    assert without.get(f"{row_path(old)}/tokens?start=0")["text"] is None


def test_tokens_come_in_windows_that_fit_together(open_site: OpenSite, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokens")
    append_jsonl(tmp_path / "r.jsonl", [trajectory(0, 0, 1.0, turns=900)])
    site = open_site(tmp_path / "r.jsonl", tokenizer=str(tmp_path / "tokens"))
    path = row_path(site.get("/episodes")["rows"][0]["row"])
    windows = [site.get(f"{path}/tokens?start={start}") for start in (0, 2000, 4000)]
    assert [len(window["id"]) for window in windows] == [2000, 2000, 500]
    texts = [text for window in windows for text in window["text"]]
    assert texts == ["guess", "a", "number", "seven", "<|end|>"] * 900
    assert [value for window in windows for value in window["mask"]] == [0, 0, 0, 1, 1] * 900
    second = windows[1]
    assert second["versions"][second["version"][3]] == f"400@{FIRST}" and second["turn"][0] == 400
    assert site.request(f"/api/runs/{site.run}{path}/tokens?start=1").status_code == 400
    assert site.request(f"/api/runs/{site.run}{path}/tokens?start=6000").status_code == 404


def test_a_long_text_goes_on_where_it_is_cut(open_site: OpenSite, tmp_path: Path) -> None:
    said = "".join(chr(0x4E00 + i % 5000) for i in range(250_000))
    append_jsonl(tmp_path / "r.jsonl", [trajectory(0, 0, 1.0, turns=1, said=said)])
    site = open_site(tmp_path / "r.jsonl")
    path = row_path(site.get("/episodes")["rows"][0]["row"])
    part = site.get(path)["turns"][0]["parts"][1]
    text, start = part["text"], part["next"]
    assert (len(text), start, part["length"]) == (4000, 4000, 250_000)
    while start is not None:
        rest = site.get(f"{path}/text?part=1&start={start}&turn=0")
        text, start = text + rest["text"], rest["next"]
    assert text == said


def test_many_long_turns_are_paged(open_site: OpenSite, tmp_path: Path) -> None:
    append_jsonl(tmp_path / "r.jsonl", [trajectory(0, 0, 1.0, turns=500, said="\x00" * 5000)])
    site = open_site(tmp_path / "r.jsonl")
    path = row_path(site.get("/episodes")["rows"][0]["row"])
    numbers, after = [], 0
    while after is not None:
        page = site.get(f"{path}?after={after}" if after else path)
        numbers += [turn["number"] for turn in page["turns"]]
        after = page["next"]
    assert numbers == list(range(500))


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/steps/77", 404),
        ("/steps/nothing", 404),
        ("/episodes/trajectories-rank0.jsonl%3A0%3Affffff", 410),
        ("/episodes/..%2f..%2fetc%2fpasswd%3A0%3Affffff", 404),
        ("/episodes/nothing", 404),
        ("/compare?a=0", 400),
        ("/compare?a=0&b=99", 404),
        ("/compare?a=0&b=1&with=nothing", 404),
        ("/metrics?points=x", 400),
        ("/metrics?points=999999999", 400),
        ("/metrics?other=1", 400),
        ("/metrics?from=1&from=2", 400),
        ("/steps/0?sort=nothing", 400),
        ("/episodes?order=nothing", 400),
        ("/episodes?reward_from=nan", 400),
        (f"/episodes?q={'x' * 501}", 400),
        ("/lanes?from=2&to=1", 400),
        ("/nothing", 404),
    ],
)
def test_what_is_wrong_is_said_as_json(open_site: OpenSite, tmp_path: Path, path: str, status: int) -> None:
    write_run(tmp_path, 1).close()
    site = open_site(tmp_path)
    answer = site.request(f"/api/runs/{site.run}{path}")
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]


def test_advisories_of_a_run_are_one_for_each_name(open_site: OpenSite, tmp_path: Path) -> None:
    files = write_run(tmp_path, 2, ends=False)
    for step in (0, 1):
        files.note(Alarm(name="logprob_gap", step=step, message=f"gap {step} {HOSTILE}", stops=step == 1))
    files.close()
    (found,) = open_site(tmp_path).get("/advisories")["advisories"]
    assert (found["name"], found["severity"], found["first_step"], found["step"]) == ("logprob_gap", "error", 0, 1)
    assert found["message"] == f"gap 1 {SHOWN}"


def test_a_growing_run_is_read_on(open_site: OpenSite, tmp_path: Path) -> None:
    files = write_run(tmp_path, 1, ends=False)
    site = open_site(tmp_path)
    before = site.get("")["run"]
    files.record(step_metrics(1, FIRST, 0.5))
    files.record_trajectories(1, [failed(9, 0, "broken")])
    files.close()
    site.runs.poll()
    while site.runs.get(site.run).index.poll():
        pass
    after = site.get("")["run"]
    assert after["steps"] == 2 and after["generation"] > before["generation"]
    assert [step["step"] for step in site.get("/steps")["steps"]] == [0, 1]
    assert site.get("/episodes?error=1")["rows"][0]["error"] == "broken"
