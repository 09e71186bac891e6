"""The cases that are measured, and the kernel that wins. No test depends on the speed of this machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.models.config import load_model_config
from verl_server.worker import cpu_measurement
from verl_server.worker.cpu_choice import MOST_ROWS, CpuChoice, counts
from verl_server.worker.cpu_measurement import fastest, measure_choice, product_shapes


class Clock:
    """A clock that advances only when `run` is called, by the times given for that run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[str] = []

    def run(self, name: str, *times: float) -> None:
        self.now += times[min(self.runs.count(name), len(times) - 1)]
        self.runs.append(name)


def race(clock: Clock, preferred: str, **times: tuple[float, ...]) -> str:
    runs = {name: lambda name=name, taken=taken: clock.run(name, *taken) for name, taken in times.items()}
    return fastest(runs, preferred, 30.0, lambda: clock.now)


def test_the_best_run_counts() -> None:
    """A kernel that was disturbed in most runs wins by its undisturbed run."""
    assert race(Clock(), "torch", cpp=(9, 9, 5, 1, 9), torch=(2,)) == "cpp"


def test_the_preferred_one_stays_unless_another_is_clearly_faster() -> None:
    assert race(Clock(), "cpp", cpp=(1.0,), torch=(0.92,)) == "cpp"
    assert race(Clock(), "cpp", cpp=(1.0,), torch=(0.85,)) == "torch"


def test_what_is_far_behind_is_not_run_again() -> None:
    clock = Clock()
    assert race(clock, "slow", slow=(5.0,), torch=(1.0,), cpp=(0.9,)) == "cpp"
    assert clock.runs.count("slow") == 4  # once to warm up, then three rounds
    assert clock.runs.count("torch") > 4


def test_slow_runs_get_few_rounds() -> None:
    clock = Clock()
    race(clock, "cpp", cpp=(100.0,), torch=(101.0,))
    assert len(clock.runs) == 8


def test_shapes_are_those_of_one_rank(tiny_qwen3: Path) -> None:
    config = load_model_config(tiny_qwen3)
    assert product_shapes(config, TpGroup()) == [(64, 64), (64, 128), (128, 64), (256, 64), (320, 64)]
    assert product_shapes(config, TpGroup(rank=1, size=2)) == [(64, 32), (64, 64), (128, 64), (160, 64)]


@pytest.fixture
def measured(cpu_kernels: CpuKernels, tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], CpuChoice]:
    """Return `measure_choice` as a function of `attends`, with little memory."""
    for name, value in {"_WEIGHT_BYTES": (2**20, 2**20), "_CASE_PRODUCTS": 10**6}.items():
        monkeypatch.setattr(cpu_measurement, name, value)
    config = load_model_config(tiny_qwen3)
    return lambda attends: measure_choice(cpu_kernels, config, TpGroup(), attends=attends)


def check(choice: CpuChoice, tiny_qwen3: Path) -> None:
    assert not choice.lacks(product_shapes(load_model_config(tiny_qwen3), TpGroup()))
    assert {len(names) for names in choice.products.values()} == {len(counts(MOST_ROWS))}


def test_every_case_runs_with_every_kernel(
    measured: Callable[[bool], CpuChoice], tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last(runs: Mapping[str, Callable[[], object]], preferred: str, seconds: float) -> str:
        assert preferred in runs and len(runs) > 1
        for run in runs.values():
            run()
        return list(runs)[1]

    monkeypatch.setattr(cpu_measurement, "fastest", last)
    monkeypatch.setattr(cpu_measurement, "_ALL_SECONDS", math.inf)
    choice = measured(True)
    check(choice, tiny_qwen3)
    assert choice.decodes == ["cpp"] and choice.prompts == "cpp", "attention is not measured"
    assert {name for names in choice.products.values() for name in names} == {"torch"}


def test_a_machine_that_is_too_busy_keeps_the_preferred_kernels(
    measured: Callable[[bool], CpuChoice],
    tiny_qwen3: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpu_measurement, "_ALL_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        choice = measured(True)
    check(choice, tiny_qwen3)
    assert "too busy" in caplog.text
    assert choice.products["64x64"] == ["torch", *["cpp"] * 6, *["torch"] * 3]
    assert choice.attends(0) and choice.attends(64)
    without = measured(False)
    check(without, tiny_qwen3)
    assert not without.attends(0) and not without.attends(64)
