"""Histories and the advisories that they raise: beyond each bound, just within it, and in a short odd run."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_server.errors import BadRequestError
from verl_server.watch.advisories import GAP, NAMES, Advisor, Advisory, FolderAdvisories, advisories_of
from verl_server.watch.advisory_rules.figures import Past, RunSettings
from verl_server.watch.run_records import Alarm, AlarmEnded, RunResumed, RunStarted

PHASES = {"rollout": 1.0, "train": 0.5, "sync": 0.1, "record": 0.01}


def line(step: int = 0, **changed: Any) -> dict[str, Any]:
    """Return the line of a step in which nothing is wrong: 32 groups of 8 episodes."""
    healthy: dict[str, Any] = {
        "step": step, "reward": 0.3, "reward_min": 0.0, "reward_max": 1.0, "trajectories": 256, "trainable": 256,
        "kept": 224, "failed": 0, "replaced": 0, "failures": {}, "stop_reasons": {"done": 256}, "groups": 32,
        "groups_without_spread": 4, "truncated": 0, "turns": 4.0, "losses": {"entropy": 1.0, "behaviour_kl": 0.01},
        "idle": {"trainer": 0.1, "servers": 0.1}, "waits": {}, "prompt_tokens": 256 * 4 * 500, "age": 0.5,
        "reusable_tokens": 256 * 4 * 400, "cache_hit_rate": 0.75,
    }  # fmt: skip
    return healthy | changed


def judged(lines: list[dict[str, Any]], phases: list[dict[str, float]] | None = None) -> list[Advisory]:
    advisor, found = Advisor(), list[Advisory]()
    for number, each in enumerate(lines):
        found += advisor.judge(each | {"step": number}, PHASES if phases is None else phases[number])
    return found


def losses(entropy: float = 1.0, behaviour_kl: float | None = 0.01) -> dict[str, Any]:
    return {"entropy": entropy, "behaviour_kl": behaviour_kl, "clip_fraction": 0.5}


# Name -> (beyond the bound, just within it): the fields of three steps of a large run.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "failed": ({"failed": 10, "replaced": 12, "failures": {"infrastructure": 22}}, {"failed": 6, "replaced": 6}),
    "truncated": ({"truncated": 90}, {"truncated": 64}),
    "groups_without_spread": ({"groups_without_spread": 22}, {"groups_without_spread": 16}),
    "behaviour_kl": ({"losses": losses(behaviour_kl=1.1)}, {"losses": losses(behaviour_kl=0.99)}),
    "trainer_idle": (
        {"idle": {"trainer": 0.51, "servers": 0.1}, "waits": {"deadline": 3.0, "episodes": 1.0}},
        {"idle": {"trainer": 0.49, "servers": 0.1}},
    ),
    "servers_idle": ({"idle": {"servers": 0.51}}, {"idle": {"servers": 0.49}}),
    "cache_hits": ({"cache_hit_rate": 0.39}, {"cache_hit_rate": 0.41}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_figure_raises_its_advisory_beyond_the_bound_only(name: str) -> None:
    beyond, within = CASES[name]
    found = judged([line(**beyond)] * 5)
    assert [(advisory.name, advisory.step) for advisory in found] == [(name, 2)], "written once, at the third step"
    (advisory,) = found
    assert advisory.figure is not None and advisory.bound is not None
    assert (advisory.figure < advisory.bound) == (name == "cache_hits")
    assert advisory.cause and advisory.remedy.endswith(".")
    assert advisory.severity == {"behaviour_kl": "error", "servers_idle": "info"}.get(name, "warning")
    assert judged([line(**within)] * 5) == []


@pytest.mark.parametrize("name", CASES)
def test_one_or_two_odd_steps_raise_nothing(name: str) -> None:
    beyond, _ = CASES[name]
    assert judged([line(**beyond)] * 2) == [], "a run of two steps"
    assert judged([line(), line(), line(**beyond), line(), line()]) == [] or name in SUMMED


SUMMED = ("failed", "truncated", "groups_without_spread")
"""Advisories about a share of all episodes in the last steps: a step in which all fail is half of them."""


def test_shares_of_small_runs_must_be_sure() -> None:
    """Two of 24 episodes are 8 %, and say nothing. So do four of six groups. All of 24 do."""
    small = line(trajectories=8, trainable=8, kept=4, groups=2, groups_without_spread=1, stop_reasons={"done": 8})
    odd = small | {"failed": 1, "failures": {"policy": 1}, "groups_without_spread": 2, "truncated": 3}
    assert judged([odd, odd, small]) == []
    assert [advisory.name for advisory in judged([small | {"failed": 8}] * 3)] == ["failed"]
    assert [advisory.name for advisory in judged([small | {"truncated": 8}] * 3)] == ["truncated"]


def test_failures_name_the_party_and_most_of_them_are_an_error() -> None:
    ends = {"done": 100, "action_refused": 156}
    (advisory,) = judged([line(failed=156, failures={"policy": 156}, stop_reasons=ends)] * 3)
    assert "actions of the policy are refused" in advisory.cause and "action_refused 468" in advisory.message
    assert advisory.severity == "error"
    (advisory,) = judged([line(replaced=30, failures={"infrastructure": 30})] * 3)
    assert "90 replaced" in advisory.message and "environment server" in advisory.cause
    assert advisory.severity == "warning"


def test_a_reward_that_never_differs_is_named() -> None:
    constant = line(reward=0.0, reward_min=0.0, reward_max=0.0, kept=0, groups_without_spread=32, losses={})
    (advisory,) = judged([constant] * 5)
    assert advisory.severity == "error" and "has the reward 0, so nothing is learned" in advisory.message
    assert "returns a constant" in advisory.cause
    hard, easy = line(groups_without_spread=28, reward=0.1), line(groups_without_spread=28, reward=0.9)
    (advisory,) = judged([hard] * 3)
    assert (advisory.severity, "too hard" in advisory.cause) == ("warning", True)
    (advisory,) = judged([easy] * 3)
    assert (advisory.severity, "have become easy" in advisory.cause) == ("info", True)
    assert "--grpo.refill plays other groups" in advisory.remedy
    (advisory,) = judged([easy | {"refilled_groups": 20}] * 3)
    assert "--grpo.refill" not in advisory.remedy
    single = line(groups=256, groups_without_spread=256, kept=256)  # PPO: one episode of each task, and all teach
    assert not judged([single] * 5)


@pytest.mark.parametrize(
    ("ends", "truncated", "option"),
    [
        ({"max_turns": 200, "done": 56}, 200, "--max-turns"),
        ({"context_full": 200, "done": 56}, 210, "--server.context-length"),
        ({"max_tokens": 20, "done": 236}, 200, "--max-new-tokens"),
    ],
)
def test_the_limit_that_cuts_most_is_named(ends: dict[str, int], truncated: int, option: str) -> None:
    (advisory,) = judged([line(stop_reasons=ends, truncated=truncated)] * 3)
    assert f"raise {option}" in advisory.remedy


def entropies(*values: float, reward: Callable[[int], float] = lambda step: 0.3) -> list[dict[str, Any]]:
    return [line(losses=losses(value), reward=reward(step)) for step, value in enumerate(values)]


def test_entropy_that_is_gone_without_a_gain_is_a_collapse() -> None:
    fall = (1.0, 1.0, 1.0, 0.09, 0.09, 0.09, 0.09)
    (advisory,) = judged(entropies(*fall))
    assert (advisory.name, advisory.step, advisory.bound) == ("entropy_collapse", 5, pytest.approx(0.1))
    assert judged(entropies(1.0, 1.0, 1.0, *[0.11] * 7)) == []
    assert judged(entropies(1.0, 1.0, 1.0, 0.01, 1.0, 1.0)) == [], "one odd step"
    solved = entropies(*fall, reward=lambda step: 0.1 if step < 3 else 0.8)
    assert judged(solved) == [], "the policy traded its entropy for reward"
    assert judged(entropies(0.05, 0.05, 0.05, 0.05)) == [], "a model that is sure from the start"


def test_a_reward_that_is_lost_again_is_a_collapse() -> None:
    def rewards(*values: float, **changed: Any) -> list[Advisory]:
        return judged([line(reward=value, **changed) for value in values])

    rise = [0.02 * step for step in range(20)]
    advisory, *worse = rewards(*rise, *[0.1] * 12)
    assert (advisory.name, advisory.severity) == ("reward_collapse", "error")
    assert [each.name for each in worse] == ["reward_collapse"], "it fell on"
    assert advisory.bound == pytest.approx(0.5 * 0.29), "half of the best ten steps in a row"
    assert "up to step 19" in advisory.message
    assert rewards(*rise, *[0.2] * 12) == [], "two thirds are kept"
    assert rewards(*rise, 0.0, 0.0, *[0.4] * 12) == [], "two odd steps"
    few = [0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, *[0.0] * 10]
    assert rewards(*few) == [], "a step of few episodes varies by as much"
    below, *_ = rewards(*[-0.2] * 10, *[-0.9] * 10, reward_min=-1.0)
    assert below.bound == pytest.approx(-0.6), "above the lowest reward, which may be negative"


def test_a_loss_that_is_not_finite_is_beyond_its_bound() -> None:
    for value in (None, math.nan, math.inf):
        odd, advisory = judged([line(losses=losses(behaviour_kl=value))] * 4)
        assert (odd.name, odd.step) == ("non_finite", 0)
        assert advisory.name == "behaviour_kl" and advisory.figure == math.inf


@pytest.mark.parametrize(
    ("changed", "said", "cause"),
    [
        ({"losses": {"grad_norm": None, "policy": 0.1}}, "losses.grad_norm", "diverged"),
        ({"losses": {"kl": math.inf}}, "losses.kl", "diverged"),
        ({"reward": math.nan}, "reward", "reward function"),
        ({"reward": None, "not_finite": ["reward"]}, "reward", "reward function"),
        ({"not_finite": ["logprob_gap", "logprob_gap_mean"]}, "logprob_gap, logprob_gap_mean", "the same policy"),
    ],
)
def test_a_figure_that_is_not_finite_is_told_at_once(changed: dict[str, Any], said: str, cause: str) -> None:
    (advisory,) = judged([line(), line(**changed), line(), line(**changed)])
    assert (advisory.name, advisory.step, advisory.severity) == ("non_finite", 1, "error")
    assert advisory.message == f"not finite: {said}" and cause in advisory.cause and advisory.remedy.endswith(".")
    assert judged([line(reward=None)] * 4) == [], "a figure that is absent is none that is not finite"


def test_a_phase_six_times_its_median() -> None:
    usual = [{"rollout": 20.0, "train": 5.0, "sync": 2.0}] * 9

    def slow(**seconds: float) -> list[Advisory]:
        return judged([line()] * (len(usual) + 1), [*usual, usual[0] | seconds])

    (advisory,) = slow(sync=13.0)
    assert (advisory.name, advisory.step, advisory.figure) == ("slow_phase", 9, 6.5)
    assert "the phase sync took 13.0 s" in advisory.message and "server" in advisory.cause
    assert slow(sync=11.9) == [], "5.95 times"
    assert judged([line()] * 8, [*usual[:7], usual[0] | {"sync": 60.0}]) == [], "too few steps to compare with"
    fast = [{"rollout": 0.1, "train": 0.05, "sync": 0.001}] * 9
    assert judged([line()] * 10, [*fast, fast[0] | {"sync": 1.0}]) == [], "a second of a step that is small"
    skipped = [{"rollout": 20.0, "train": 0.0, "sync": 0.0}] * 5
    assert judged([line()] * 15, [*usual, *skipped, usual[0]]) == [], "steps without training have no part in it"


def test_cache_hits_of_short_prompts_or_without_a_history_say_nothing() -> None:
    low = CASES["cache_hits"][0]
    assert judged([line(**low, prompt_tokens=256 * 4 * 255, reusable_tokens=256 * 4 * 200)] * 3) == []
    assert judged([line(**low, reusable_tokens=256 * 4 * 200)] * 3) == []
    assert judged([line(cache_hit_rate=None)] * 3) == []


def test_a_synchronous_trainer_may_wait() -> None:
    assert judged([line(idle={"servers": 0.2}, age=None)] * 5) == []
    (advisory,) = judged([line(idle={"servers": 0.7}, age=None)] * 5)
    assert "in which episodes play" in advisory.message and "async_grpo" in advisory.remedy


def test_an_advisory_is_written_again_when_it_is_worse_or_after_its_end() -> None:
    advisor = Advisor()
    history = [0.6] * 4 + [0.65] * 5 + [0.75] * 5 + [0.1] * 10 + [0.6] * 5
    found, ends = [], []
    for step, share in enumerate(history):
        for advisory in advisor.judge(line(step, idle={"servers": share}), PHASES):
            found.append((advisory.step, advisory.figure))
        ends += [(step, name) for name in advisor.ended]
    # The median of five steps follows a change after three. 0.75 is more than twice as far beyond 0.5 as 0.6.
    assert found == [(2, 0.6), (11, 0.75), (26, 0.6)]
    assert ends == [(20, "servers_idle")]


# Name -> fields of steps within the bound, but close to it, and clearly within it.
NEAR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "failed": ({"failed": 6, "replaced": 8}, {"failed": 10}),
    "truncated": ({"truncated": 64}, {"truncated": 50}),
    "groups_without_spread": ({"groups_without_spread": 17}, {"groups_without_spread": 12}),
    "behaviour_kl": ({"losses": losses(behaviour_kl=0.85)}, {"losses": losses(behaviour_kl=0.79)}),
    "trainer_idle": ({"idle": {"trainer": 0.45, "servers": 0.1}}, {"idle": {"trainer": 0.39, "servers": 0.1}}),
    "servers_idle": ({"idle": {"servers": 0.45}}, {"idle": {"servers": 0.39}}),
    "cache_hits": ({"cache_hit_rate": 0.45}, {"cache_hit_rate": 0.51}),
}


@pytest.mark.parametrize("name", NEAR)
def test_an_advisory_ends_only_clearly_within_its_bound(name: str) -> None:
    near, clear = NEAR[name]
    assert judged([line(**near)] * 10) == [], "nothing is wrong with a run that was never beyond the bound"
    for after, ends in ((near, False), (clear, True)):
        advisor, ended = Advisor(), []
        for step, fields in enumerate([CASES[name][0]] * 5 + [after] * 15):
            found = advisor.judge(line(step, **fields), PHASES)
            assert [advisory.name for advisory in found] == ([name] if step == 2 else [])
            ended += advisor.ended
        assert ended == ([name] if ends else [])


def test_a_figure_that_crosses_its_bound_again_and_again_is_told_once() -> None:
    """The idle shares of a steady run on a GPU, where rollouts and training take about as long."""
    advisor, found, ended = Advisor(), [], []
    for step, share in enumerate([0.49, 0.57, 0.52, 0.48, 0.49, 0.47, 0.49, 0.5, 0.49, 0.51, 0.55, 0.53] * 5):
        found += advisor.judge(line(step, idle={"trainer": 0.1, "servers": share}), PHASES)
        ended += advisor.ended
    assert [advisory.name for advisory in found] == ["servers_idle"] and ended == []


def test_entropy_near_its_bound_keeps_a_collapse_true() -> None:
    for last, ends in ((0.12, []), (0.13, ["entropy_collapse"])):
        advisor, ended = Advisor(), []
        for step, value in enumerate([1.0] * 3 + [0.09] * 5 + [last] * 12):
            advisor.judge(line(step, losses=losses(value)), PHASES)
            ended += advisor.ended
        assert ended == ends


def test_a_reward_near_its_bound_keeps_a_collapse_true() -> None:
    for last, ends in ((0.17, []), (0.2, ["reward_collapse"])):
        advisor, ended = Advisor(), []
        for step, reward in enumerate([0.02 * step for step in range(20)] + [0.1] * 12 + [last] * 30):
            advisor.judge(line(step, reward=reward), PHASES)
            ended += advisor.ended
        assert ended == ends, last


def test_a_gap_near_its_bound_keeps_its_warning_true() -> None:
    for mean, ends in ((4.5e-5, []), (3.9e-5, [GAP])):
        advisor, ended = Advisor("float32"), []
        advisor.judge_gap(0, 6e-5, 9e-5, 0.0)
        for step in range(1, 10):
            assert advisor.judge_gap(step, mean, 7e-5, 0.0) == []
            ended += advisor.ended
        assert ended == ends


def test_the_remedy_of_idle_servers_knows_a_shared_gpu() -> None:
    """Who trains on the servers' GPU cannot give it away, and loses nothing while the trainer computes."""
    slow_training = [line(step, idle={"trainer": 0.05, "servers": 0.6}) for step in range(3)]

    def told(settings: dict[str, Any]) -> Advisory:
        advisor = Advisor(past=Past(RunSettings.of(settings)))
        (found,) = [each for step in slow_training for each in advisor.judge(step, PHASES)]
        return found

    shared = told({"server_urls": [], "server.base_gpu_id": 0, "server.gpu_uuids": []})
    assert shared.severity == "info" and shared.remedy.startswith("Nothing is lost")
    elsewhere = {"server_urls": [], "server.base_gpu_id": 4}
    for settings in ({}, {"server_urls": ["http://*"]}, {"server_urls": [], "device": "cpu"}, elsewhere):
        unknown = told(settings)
        assert unknown.severity == "warning"
        assert "If the servers have GPUs of their own" in unknown.remedy and "If they share" in unknown.remedy


def test_the_learning_rate_of_the_run_is_named() -> None:
    advisor = Advisor(past=Past(RunSettings.of({"grpo.learning_rate": 0.4})))
    (found,) = [a for n in range(3) for a in advisor.judge(line(n, losses=losses(behaviour_kl=7.0)), PHASES)]
    assert "the learning rate (0.4) is too high" in found.cause


def test_the_gap_warns_is_an_error_and_ends() -> None:
    advisor = Advisor("float32")
    assert advisor.judge_gap(0, 4e-5, 9e-5, 0.0) == []
    (warned,) = advisor.judge_gap(1, 6e-5, 9e-5, 0.0)
    assert (warned.name, warned.severity, warned.bound) == (GAP, "warning", 5e-5)
    assert advisor.judge_gap(2, 6.5e-5, 9e-5, 0.0) == [], "no worse"
    (far,) = advisor.judge_gap(3, 0.02, 0.5, 0.1)
    assert far.severity == "error" and "are expected in float32" in far.message and "different dtypes" in far.cause
    for step in range(4, 9):
        assert advisor.judge_gap(step, 1e-6, 1e-6, 0.0) == []
        assert advisor.ended == ([GAP] if step == 8 else [])
    (broken,) = advisor.judge_gap(9, math.nan, math.nan, math.nan)
    assert broken.severity == "error"
    assert Advisor().judge_gap(0, 1.0, 1.0, 1.0) == [], "bounds of no dtype"


def test_a_gap_that_keeps_growing_is_an_error() -> None:
    advisor = Advisor("float32")
    found = [a for step, mean in enumerate((6e-5, 7e-5, 9e-5, 1.3e-4)) for a in advisor.judge_gap(step, mean, 1e-4, 0)]
    assert found[-1].severity == "error" and "it grew over 4 steps" in found[-1].message


def test_damaged_metrics_are_refused() -> None:
    with pytest.raises(BadRequestError, match="step 3 are damaged"):
        Advisor().judge(line(3, failed="many"), PHASES)


# -- folders -----------------------------------------------------------------------------------------------------------


class Folder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0

    def add(self, file: str, *records: Any) -> None:
        with (self.path / file).open("ab") as opened:
            opened.writelines(msgspec.json.encode(record) + b"\n" for record in records)

    def event(self, event: Any, incarnation: str = "a1") -> None:
        self._number += 1
        event.time, event.incarnation = float(self._number), incarnation
        self.add("events.jsonl", event)

    def steps(self, numbers: range, incarnation: str = "a1", **changed: Any) -> None:
        self.add("metrics.jsonl", *(line(n, **changed) | {"incarnation": incarnation} for n in numbers))


def names(found: list[Advisory]) -> list[tuple[str, int, int | None]]:
    return [(advisory.name, advisory.step, advisory.ended) for advisory in found]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


FAILING = {"failed": 60, "failures": {"infrastructure": 60}}


def test_failures_in_a_mixture_name_the_environments() -> None:
    environments = {"code": {"failed": 40, "replaced": 16, "reward": None}, "math": {"failed": 4}}
    (found,) = judged([line(step, **FAILING, replaced=16, environments=environments) for step in range(3)])
    assert found.message.endswith("by fault: infrastructure 180; by environment: code 168, math 12")


def test_a_run_of_an_earlier_version_is_judged_from_its_files(folder: Folder) -> None:
    """It wrote the alarm of the gap only, without figure and severity."""
    folder.add("events.jsonl", {"kind": "run_started", "time": 1.0, "incarnation": "a1", "ranks": 1, "version": "0.1"})
    text = "Step 1: log-probabilities of server and trainer differ. Likely causes: server and trainer."
    alarm = {"kind": "alarm", "time": 2.0, "incarnation": "a1", "name": GAP, "step": 1, "message": text, "stops": False}
    folder.add("events.jsonl", alarm, {"kind": "of a later version", "time": 3.0})
    folder.steps(range(4), **FAILING)
    found = advisories_of(folder.path)
    assert names(found) == [(GAP, 1, None), ("failed", 2, None)]
    assert (found[0].severity, found[0].figure, found[0].describe()) == ("warning", None, text)


def test_a_run_that_advised_is_not_judged_again(folder: Folder) -> None:
    folder.event(RunStarted(ranks=1, version="1", advises=True))
    folder.steps(range(3), **FAILING)
    assert advisories_of(folder.path) == []
    advisory = Advisory(
        name="failed", step=2, figure=math.inf, bound=0.05, message="m", cause="c", remedy="r.", severity="error"
    )
    folder.event(advisory.event(stops=True))
    (found,) = advisories_of(folder.path)
    assert found == msgspec.structs.replace(advisory, figure=None), "JSON has no infinity"
    assert found.describe() == "Step 2: m. Likely causes: c. Remedy: r."
    folder.event(AlarmEnded(name="failed", step=9))
    assert names(advisories_of(folder.path)) == [("failed", 2, 9)]


def test_a_growing_run_is_read_once(folder: Folder) -> None:
    reader = FolderAdvisories(folder.path)
    assert reader.read() == []
    folder.event(RunStarted(ranks=1, version="1"))
    folder.steps(range(2), **FAILING)
    assert reader.read() == []
    folder.steps(range(2, 4), **FAILING)
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "incarnation": "a1", "fai')  # the writer has not written all of it yet
    assert names(reader.read()) == [("failed", 2, None)]
    with (folder.path / "metrics.jsonl").open("ab") as file:
        file.write(b'led": 0, "trajectories": 256}\n')
    folder.steps(range(5, 15))
    assert names(reader.read()) == [("failed", 2, 11)] == names(advisories_of(folder.path))


def test_lost_steps_have_no_advisories_and_a_resumed_run_begins_anew(folder: Folder) -> None:
    folder.event(RunStarted(ranks=1, version="1"))
    folder.steps(range(10), **FAILING)
    assert names(advisories_of(folder.path)) == [("failed", 2, None)]
    folder.event(RunResumed(ranks=1, version="1", next_step=2, checkpoint="checkpoint-2"), "b2")
    folder.steps(range(2, 4), "b2", **FAILING)
    assert advisories_of(folder.path) == []
    folder.steps(range(4, 6), "b2", **FAILING)
    assert names(advisories_of(folder.path)) == [("failed", 4, None)]


def test_the_gap_of_a_folder_without_events_is_judged_by_its_dtype(folder: Folder) -> None:
    """The demo writes no events, and computes in float32."""
    gap = {"logprob_gap": 0.01, "logprob_gap_mean": 0.001, "logprob_kl": 1e-5}
    folder.steps(range(2), **gap)
    assert advisories_of(folder.path) == []
    (folder.path / "run.json").write_text('{"command": "demo"}')
    assert names(advisories_of(folder.path)) == [(GAP, 0, None)]


def test_the_settings_of_a_folder_are_known_to_its_advisories(folder: Folder) -> None:
    (folder.path / "run.json").write_text('{"grpo.learning_rate": 0.25, "server_urls": []}')
    folder.steps(range(3), losses=losses(behaviour_kl=3.0))
    (found,) = advisories_of(folder.path)
    assert "(0.25)" in found.cause


def test_a_line_of_a_folder_that_is_damaged_is_named(folder: Folder) -> None:
    folder.steps(range(1))
    (folder.path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1, "failed": []}\n')
    with pytest.raises(BadRequestError, match="step 1 are damaged"):
        advisories_of(folder.path)
    (folder.path / "metrics.jsonl").write_bytes(b"nonsense\n")
    with pytest.raises(BadRequestError, match=r"metrics.jsonl:1"):
        advisories_of(folder.path)


def test_events_of_alarms_are_read_back() -> None:
    (advisory,) = judged([line(**FAILING)] * 3)
    event = advisory.event(stops=True)
    read = msgspec.json.decode(msgspec.json.encode(event), type=Alarm)
    assert Advisory.of(read) == advisory and read.stops


def test_all_names_have_a_meaning_and_the_module_needs_no_torch() -> None:
    others = {"entropy_collapse", "reward_collapse", "slow_phase", "non_finite", GAP}
    assert {*CASES, *others} == set(NAMES) and all(NAMES.values())
    code = "import sys, verl_server.watch.advisories; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
