"""The simulator of cache policies: small runs of the real planner, and replays of recorded trajectories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import cache_policies
from benchmarks.agents import Episode, Lengths, Turn
from benchmarks.cache_policies import Work, main, replay, simulate
from benchmarks.cache_simulation import Machine
from benchmarks.recorded_episodes import recorded_episodes
from verl_server.rollout.trajectory import Event, Task, Trajectory, append_jsonl

GROWING = Lengths(prompt=(64, 192), output=(16, 64), observation=(32, 128))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 agents of four turns and a pool for half of their histories, and others whose histories grow eight times.

    Their pool is 31 times smaller than that of 8B on an H200, and each token takes 31 times as long.
    """
    monkeypatch.setitem(cache_policies.MACHINES, "0.6b", Machine(14_000, 1, 0.8e-3, 0.3e-3, 2.2e-6, 28e-9))
    monkeypatch.setitem(cache_policies.MACHINES, "8b", Machine(24_000, 1, 0.9e-3, 3.75e-3, 0.7e-3, 1.2e-6))
    monkeypatch.setitem(cache_policies.WORKLOADS, "small", Work("0.6b", 24, 4))
    monkeypatch.setitem(cache_policies.WORKLOADS, "growing", Work("8b", 128, 8, lengths=GROWING))
    monkeypatch.setitem(cache_policies.WORKLOADS, "slow", Work("8b", 128, 8, 0.2, GROWING))
    dropped = Work("8b", 64, 6, 0.2, GROWING, system=320, dropped=0.7)
    monkeypatch.setitem(cache_policies.WORKLOADS, "dropped", dropped)


def test_the_default_policy_keeps_histories_where_first_come_first_served_loses_them() -> None:
    fcfs, lpm = simulate("small", "fcfs"), simulate("small", "lpm")
    assert float(lpm["hit_rate"]) > 1.3 * float(fcfs["hit_rate"])
    assert float(lpm["computed_again"]) < 0.7 * float(fcfs["computed_again"])
    assert float(lpm["of_belady"]) >= 0.9


@pytest.mark.parametrize("work", ["growing", "slow"])
def test_episodes_that_outgrow_the_pool_keep_their_histories(work: str) -> None:
    """Although they wait for longer than `max_age`, which would make the order that of arrival."""
    lpm, without, gate = (simulate(work, policy) for policy in ("lpm", "lpm-headroom", "gate"))
    assert float(lpm["hit_rate"]) > 0.87 * float(gate["hit_rate"]), "gate knows the lengths in advance"
    assert float(lpm["computed_again"]) < 0.7 * float(without["computed_again"])
    assert float(lpm["largest_age"]) > cache_policies.POLICIES["lpm"].max_age


def test_histories_are_recognized_without_session_ids_although_clients_drop_tokens() -> None:
    lpm, ids = simulate("dropped", "lpm"), simulate("dropped", "lpm+ids")
    assert float(lpm["hit_rate"]) > 0.95 * float(ids["hit_rate"])


@pytest.mark.parametrize("policy", list(cache_policies.POLICIES))
def test_no_policy_beats_the_bounds(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--workload", "small", "--policy", policy])
    line = json.loads(capsys.readouterr().out)
    assert line["hit_rate"] <= line["belady"] <= line["allowed"]
    assert simulate("small", policy) | {"took": 0} == line | {"took": 0}, "a run can be repeated"


def trajectory(start: float) -> Trajectory:
    """An episode of two turns: 40 tokens, 8 sampled, 2 s in the environment, 20 tokens, 4 sampled."""
    found = Trajectory(task=Task(seed=0))
    for length, output in ((40, 8), (20, 4)):
        found.append_observation({}, list(range(length)))
        found.append_output([1] * output, [0.0] * output, ["0"] * output)
    for kind, begin, end in (("env", 0.0, 0.5), ("generate", 0.5, 1.0), ("env", 1.0, 3.0), ("generate", 3.0, 4.0)):
        found.events.append(Event(kind, start + begin, start + end))
    return found


def test_trajectories_become_episodes_with_their_starts_and_waits() -> None:
    failed = Trajectory(task=Task(seed=1))
    episodes, starts = recorded_episodes([trajectory(7.0), failed, trajectory(5.0)])
    assert starts == [0.0, 2.0]
    assert episodes[0] == Episode(list(range(40)), [Turn(8, list(range(20)), 2.0), Turn(4, [], 0.0)])


def test_recorded_trajectories_are_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trajectories.jsonl"
    append_jsonl(file, [trajectory(float(i)) for i in range(4)])
    main(["--trajectories", str(file), "--machine", "0.6b", "--policy", "lpm"])
    line = json.loads(capsys.readouterr().out)
    assert line["workload"] == "trajectories"
    assert line["seconds"] >= 5.0, "the last one begins after 3 s and waits for 2 s"
    # The prompts have 40 and 68 tokens, of which 2 and 4 pages can be reused. The second turn of the first episode
    # finds the pages of the first turn. The other episodes have the same tokens, so they find everything.
    assert line["hit_rate"] == line["allowed"] == pytest.approx((32 + 3 * (32 + 64)) / (4 * (40 + 68)), abs=1e-3)
    assert replay(*recorded_episodes([trajectory(0.0)]), "0.6b", "fcfs")["retractions"] == 0


@pytest.mark.parametrize(("content", "message"), [("", "no trajectory"), ("{", "trajectories.jsonl")])
def test_a_file_without_trajectories_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_text(content)
    with pytest.raises(SystemExit):
        main(["--trajectories", str(file)])
    assert message in capsys.readouterr().err
