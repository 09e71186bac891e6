"""Training runs of all trainers with `--logger`: what each package wrote is what the run's own files have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reading import READERS, Series, in_fp32

from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train import async_grpo, grpo, ppo
from verl_server.train.demo import make_policy_folder
from verl_server.train.trackers.names import EVALUATION_FIGURES, STEP_FIGURES, STEP_GROUPS, name_in_group
from verl_server.train.trackers.trackers import Trackers

SETTINGS = ["--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu", "--retry-pause", "0"]
SETTINGS += ["--server.cpu-threads", "1", "--server.kv-cache-gib", "0.1"]
EVALUATED = ["--eval-every", "2", "--eval-tasks", "4"]


def batch(option: str) -> list[str]:
    """Return the settings of the algorithm, whose options begin with --grpo or --ppo."""
    values = {"groups": "4", "group-size": "8", "epochs": "1", "minibatches": "1", "learning-rate": "0.003"}
    return [word for name, value in values.items() for word in (f"--{option}.{name}", value)]


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Yield the options that name the demo's policy and an easy game of it."""
    policy = make_policy_folder(tmp_path_factory.mktemp("policy"), seed=0)
    game = {"numbers": 3, "guesses": 3}
    with EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs=game) as environment:
        yield ["--model-path", str(policy), "--env-url", environment.url, *SETTINGS]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the packages, whose imports take long on a busy machine, the time that they need."""
    monkeypatch.setitem(Trackers.__init__.__kwdefaults__, "flush_seconds", 200.0)


def recorded(out: Path) -> dict[str, Series]:
    """Return the figures of metrics.jsonl and evaluations.jsonl by the names of trackers."""
    series: dict[str, Series] = {}
    for line in lines_of(out / "metrics.jsonl"):
        named: dict[str, Any] = {name: line[field] for name, field in STEP_FIGURES.items()}
        for prefix, field in STEP_GROUPS.items():
            named |= {name_in_group(prefix, key): value for key, value in line[field].items()}
        add(series, line["step"], named)
    for line in lines_of(out / "evaluations.jsonl"):
        assert line["incomplete"] is None and not line.get("episode_metrics")
        add(series, line["step"], {name: line[field] for name, field in EVALUATION_FIGURES.items()})
    return series


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def add(series: dict[str, Series], step: int, named: dict[str, Any]) -> None:
    for name, value in named.items():
        if value is not None:
            series.setdefault(name, []).append((step, value))


def check_all_trackers(out: Path, steps: list[int], evaluations: list[int]) -> None:
    """Check that each tracker has each figure of a run, once for each step, in one run with the name of the folder."""
    expected = recorded(out)
    assert [step for step, _ in expected["episodes/count"]] == steps
    assert [step for step, _ in expected.get("evaluation/reward", [])] == evaluations
    for name, read in READERS.items():
        written = read(out)
        if name == "tensorboard":
            in_its_precision = {key: [(step, in_fp32(v)) for step, v in series] for key, series in expected.items()}
            assert written.series == in_its_precision
        else:
            assert written.series == expected, name
            assert len(written.ids) == 1 and written.names == {out.name}


def test_all_trackers_of_a_run_that_goes_on_and_is_forked_have_each_figure(where: list[str], tmp_path: Path) -> None:
    out, fork = tmp_path / "synchronous", tmp_path / "forked"
    command = [*where, *batch("grpo"), *EVALUATED, "--logger", *READERS]
    assert grpo.main([*command, "--out", str(out), "--steps", "2"]) == 0
    assert grpo.main([*command, "--out", str(out), "--steps", "3", "--resume"]) == 0
    check_all_trackers(out, steps=[0, 1, 2], evaluations=[0, 2, 3])
    assert grpo.main([*command, "--out", str(fork), "--steps", "3", "--fork", str(out), "--fork-step", "2"]) == 0
    check_all_trackers(fork, steps=[2], evaluations=[2, 3])
    check_all_trackers(out, steps=[0, 1, 2], evaluations=[0, 2, 3])


def test_all_trackers_have_each_figure_of_the_critic(where: list[str], tmp_path: Path) -> None:
    out = tmp_path / "critic"
    command = [*where, *batch("ppo"), "--out", str(out), "--steps", "2", "--logger", *READERS]
    assert ppo.main([*command, "--ppo.critic-warmup-steps", "1"]) == 0
    check_all_trackers(out, steps=[0, 1], evaluations=[])
    series = recorded(out)
    assert [step for step, _ in series["critic/loss"]] == [0, 1]
    assert [step for step, _ in series["policy/loss"]] == [1], "the policy is not trained in the warm-up of the critic"


def test_an_asynchronous_run_has_the_names_of_a_synchronous_one(where: list[str], tmp_path: Path) -> None:
    out = tmp_path / "asynchronous"
    command = [*where, *batch("grpo"), "--out", str(out), "--steps", "4", "--logger", "tensorboard"]
    assert async_grpo.main(command) == 0
    series = READERS["tensorboard"](out).series
    assert {"reward/mean", "policy/behaviour_kl", "gap/mean", "time/rollout", "age/mean"} <= series.keys()
    assert series.keys() == recorded(out).keys()
