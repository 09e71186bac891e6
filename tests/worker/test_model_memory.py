"""A release and a resume set the bound on special sampling, release and reconsider graphs, and warn."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from verl_server.worker.memory_account import MemoryAccount, Needs
from verl_server.worker.model_memory import ModelMemory, close_account

NEEDS = Needs(weights=100, tables=0, step=50, graphs=0, special_least=10, special_most=10_000, received_most=1000)


class Part:
    """Stands for an arena, the KV cache, the graphs or the sampler. It notes its calls in a list."""

    device = torch.device("cpu")
    is_present, num_pages, page_size, bytes_held = True, 2, 4, 7

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, name: str) -> Any:
        def call(**options: Any) -> bool:
            self._calls.append(f"{self._name}.{name}" + "".join(f" {key}={value}" for key, value in options.items()))
            self.is_present = {"release": False, "resume": True}.get(name, self.is_present)
            return False

        return call


class Gpu:
    """2**30 bytes, of which `others` are taken."""

    others = 0

    def free(self) -> int:
        return 2**30 - self.others

    reclaim = free

    def reserved(self) -> int:
        return 0

    def holders(self) -> str:
        return ""


class Bench:
    def __init__(self, *, is_alone: bool = False, keeps_weights: bool = False) -> None:
        self.calls: list[str] = []
        weights, kv, graphs, sampler = (Part(name, self.calls) for name in ("weights", "kv", "graphs", "sampler"))
        self.gpu = Gpu()
        self.account = MemoryAccount(self.gpu, NEEDS, 0.5, free=2**30, collectives=0)
        self.account.special = 500
        self.memory = ModelMemory(
            *(weights, kv, graphs, sampler, self.account),  # type: ignore[arg-type]
            keeps_weights=keeps_weights,
            is_alone=is_alone,
        )


def test_the_bound_on_special_sampling_is_measured_again_when_all_memory_is_present() -> None:
    bench = Bench()
    memory = bench.memory
    assert memory.step_budget == 500
    memory.release_weights()
    memory.release_kv_cache()
    bench.gpu.others = 2**30 - 200
    memory.resume_weights()
    assert memory.step_budget == 500 and not memory.is_present, "the KV pool is not allocated yet"
    memory.resume_kv_cache()
    assert memory.step_budget == 150 and memory.is_present


def test_a_single_rank_has_no_bound() -> None:
    memory = Bench(is_alone=True).memory
    memory.resume_kv_cache()
    assert memory.step_budget is None


def test_a_resume_without_room_for_the_largest_step_warns(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.memory.resume_weights()
    assert not caplog.records
    bench.gpu.others = 2**30
    with caplog.at_level(logging.WARNING):
        bench.memory.resume_weights()
    assert "The largest step may lack" in caplog.text


def test_activations_and_the_last_batch_are_freed_before_memory_is_released() -> None:
    bench = Bench(keeps_weights=True)
    bench.memory.release_kv_cache()
    bench.memory.release_weights()
    bench.memory.release_weights(keep_contents=False)
    bench.memory.release_cuda_graphs()
    assert bench.calls == [
        *("sampler.forget", "kv.release"),
        *("sampler.forget", "weights.release keep_contents=True"),
        *("sampler.forget", "weights.release keep_contents=False"),
        *("graphs.release", "sampler.forget"),
    ]
    bench.calls.clear()
    bench.memory.resume_cuda_graphs()
    assert bench.calls == ["graphs.resume", "graphs.consider_again"]


class TwoRanks:
    """A process group whose other rank can receive 300 bytes."""

    rank, size = 0, 2

    def gather(self, data: bytes) -> list[bytes]:
        return [data, b"300"]


@pytest.mark.parametrize(("wanted", "expected", "warns"), [(1000, 300, True), (300, 300, False)])
def test_all_ranks_receive_what_the_smallest_one_can(
    caplog: pytest.LogCaptureFixture, wanted: int, expected: int, warns: bool
) -> None:
    account = MemoryAccount(Gpu(), NEEDS, 0.5, free=2**30, collectives=0)
    with caplog.at_level(logging.WARNING):
        assert close_account(account, 200, TwoRanks(), wanted) == expected  # type: ignore[arg-type]
    assert (f"weight_receive_bytes is 300, not {wanted}" in caplog.text) == warns
