"""Training runs of both trainers with `--logger`: what each package wrote is what metrics.jsonl has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reading import READERS

from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train import async_grpo, grpo
from verl_server.train.demo import make_policy_folder
from verl_server.train.trackers.names import STEP_FIGURES, STEP_GROUPS
from verl_server.train.trackers.trackers import Trackers

SETTINGS = ["--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu", "--retry-pause", "0"]
SETTINGS += ["--grpo.groups", "4", "--grpo.group-size", "8", "--grpo.epochs", "1", "--grpo.minibatches", "1"]
SETTINGS += ["--grpo.learning-rate", "0.003", "--steps", "4", "--server.cpu-threads", "1"]
SETTINGS += ["--server.kv-cache-gib", "0.1"]


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


def recorded(out: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the figures of metrics.jsonl by the names of trackers."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        named: dict[str, Any] = {name: line[field] for name, field in STEP_FIGURES.items()}
        for prefix, field in STEP_GROUPS.items():
            named |= {f"{prefix}{key}": value for key, value in line[field].items()}
        for name, value in named.items():
            if value is not None:
                series.setdefault(name, []).append((line["step"], value))
    return series


def in_fp32(value: float) -> float:
    """Return a figure as TensorBoard stores it."""
    return float(torch.tensor(value, dtype=torch.float32))


def test_all_trackers_of_a_run_have_each_figure_of_metrics_jsonl(where: list[str], tmp_path: Path) -> None:
    out = tmp_path / "synchronous"
    assert grpo.main([*where, "--out", str(out), "--logger", *READERS]) == 0
    expected = recorded(out)
    assert len(expected["reward/mean"]) == 4 and len(expected["policy/behaviour_kl"]) == 4
    for name, read in READERS.items():
        series = read(out).series
        if name == "tensorboard":
            assert series == {key: [(step, in_fp32(value)) for step, value in line] for key, line in expected.items()}
        else:
            assert series == expected, name


def test_an_asynchronous_run_has_the_names_of_a_synchronous_one(where: list[str], tmp_path: Path) -> None:
    out = tmp_path / "asynchronous"
    assert async_grpo.main([*where, "--out", str(out), "--logger", "tensorboard"]) == 0
    series = READERS["tensorboard"](out).series
    assert {"reward/mean", "policy/behaviour_kl", "gap/mean", "time/rollout", "age/mean"} <= series.keys()
    assert series.keys() == recorded(out).keys()
