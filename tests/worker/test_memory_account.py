"""The account of a GPU's memory: what each part gets, and who has room when other processes take memory later."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.worker.test_step_memory import QWEN3_8B, spec
from verl_server.models.config import load_model_config
from verl_server.models.tiny import make_model_folder
from verl_server.worker.device import DeviceMemory
from verl_server.worker.memory_account import (
    LEAST_RECEIVED,
    LEAST_SPECIAL,
    SLACK,
    MemoryAccount,
    Needs,
    cpu_budget,
)
from verl_server.worker.step_memory import StepMemory

GIB = 2**30


@dataclass
class FakeGpu:
    """A stand-in for a `DeviceMemory`."""

    total: int
    held: int = 0
    """Bytes of the engine: communicators, weights, KV pool and graphs."""
    others: int = 0
    """Bytes of other processes."""
    cached: int = 0
    """Bytes that the engine's allocator keeps unused."""

    def free(self) -> int:
        return self.total - self.held - self.others - self.cached

    def reclaim(self) -> int:
        self.cached = 0
        return self.free()

    def reserved(self) -> int:
        return self.cached

    def holders(self) -> str:
        return f"Other processes hold {self.others / GIB:.2f} GiB (process 7)." if self.others else ""


def needs_of(memory: StepMemory, *, tp_size: int = 2, rows: int = 256, weights: int = 15 * GIB // 2) -> Needs:
    return Needs(
        weights=weights,
        tables=2**28,
        step=memory.largest(8192 + rows, rows),
        graphs=memory.graphs(rows, rows),
        special_least=LEAST_SPECIAL if tp_size > 1 else 0,
        special_most=memory.most_special(rows),
        received_most=2 * GIB,
    )


@pytest.fixture
def memory(tmp_path: Path) -> StepMemory:
    """The memory of steps of Qwen3-8B on one of two ranks."""
    folder = make_model_folder(tmp_path, "qwen3", weights=False, **QWEN3_8B)
    return StepMemory.of(load_model_config(folder), 2, torch.bfloat16, fused=True)


def opened(gpu: FakeGpu, needs: Needs, fraction: float = 0.85, collectives: int = GIB // 2) -> MemoryAccount:
    """Return a closed account of an engine that has allocated what the account gives it."""
    free = gpu.reclaim()
    gpu.held += collectives
    account = MemoryAccount(gpu, needs, fraction, free=free, collectives=collectives)
    gpu.held += needs.weights
    pool = account.kv_budget().bytes
    gpu.held += pool
    account.close(pool)
    return account


def test_the_parts_are_all_of_the_gpu(memory: StepMemory) -> None:
    account = opened(FakeGpu(79 * GIB), needs_of(memory))
    *parts, free_at_start = account.parts().values()
    assert sum(parts) == free_at_start == 79 * GIB and min(parts) >= 0
    static = account.parts()["weights"] + account.parts()["kv_cache"]
    assert static == pytest.approx(0.85 * 79 * GIB, abs=2), "the static share is that of mem_fraction_static"
    table = account.table()
    assert all(name.replace("_", " ") in table for name in account.parts())


@pytest.mark.parametrize("fraction", [0.5, 0.7, 0.85])
def test_special_sampling_gets_what_it_can_use_and_no_more(memory: StepMemory, fraction: float) -> None:
    """256 requests with top-p and penalties run together on two ranks. A smaller share of the GPU changes nothing."""
    account = opened(FakeGpu(79 * GIB), needs_of(memory), fraction)
    each = memory.special(spec(temperature=1.0, top_p=0.9, top_k=20, frequency_penalty=1.0))
    assert 256 * each <= account.special == memory.most_special(256) < 4 * GIB


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("fraction", [0.5, 0.7, 0.85, 0.95, 1.0])
@pytest.mark.parametrize("total", [14, 24, 79, 139])
def test_every_graph_has_room_whatever_the_share(memory: StepMemory, total: int, fraction: float, tp_size: int) -> None:
    """After the first allocation of a workspace, too, which once ended all captures of engines with several ranks."""
    gpu, needs = FakeGpu(total * GIB), needs_of(memory, tp_size=tp_size)
    account = opened(gpu, needs, fraction)
    gpu.held += SLACK
    assert account.room_for_graphs(needs.graphs) >= needs.graphs
    assert account.shortage() == 0


def test_a_process_that_takes_20_gb_later_costs_no_graph_if_they_are_free(memory: StepMemory) -> None:
    gpu, needs = FakeGpu(79 * GIB), needs_of(memory)
    account = opened(gpu, needs, fraction=0.5)
    gpu.others += 20 * 10**9
    assert account.room_for_graphs(needs.graphs) >= needs.graphs
    assert account.taken_by_others() == 20 * 10**9


@pytest.mark.parametrize("others", [9 * GIB, 11 * GIB])
def test_the_remedy_helps(memory: StepMemory, others: int) -> None:
    """The engine that is started as the advice says has room for all graphs beside the same process."""
    gpu, needs = FakeGpu(79 * GIB), needs_of(memory)
    account = opened(gpu, needs)
    gpu.others += others
    assert account.room_for_graphs(needs.graphs) < needs.graphs
    advice = account.advice()
    assert f"{others / GIB:.2f} GiB" in advice and "torch.cuda.empty_cache()" in advice
    (found,) = re.findall(r"mem_fraction_static=([\d.]+)", advice)
    again = FakeGpu(79 * GIB)
    helped = opened(again, needs, float(found))
    again.others += others
    assert helped.room_for_graphs(needs.graphs) >= needs.graphs
    gpu.others = 0
    assert account.room_for_graphs(needs.graphs) >= needs.graphs, "so does the memory that the process frees"


def test_no_share_is_advised_if_none_helps(memory: StepMemory) -> None:
    gpu = FakeGpu(20 * GIB)
    account = opened(gpu, needs_of(memory), fraction=0.5)
    gpu.others += 8 * GIB
    assert "there is no mem_fraction_static" in account.advice()


def test_without_other_processes_the_advice_names_the_engine_settings(memory: StepMemory) -> None:
    assert "smaller mem_fraction_static, cuda_graph_max_bs" in opened(FakeGpu(79 * GIB), needs_of(memory)).advice()


def test_freeing_memory_does_not_wait_for_the_streams_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stager's stream may wait for a trainer that sends nothing yet."""
    calls = []

    class Stream:
        def synchronize(self) -> None:
            calls.append("stream")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: calls.append("device"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7, 8))
    assert DeviceMemory(torch.device("cuda", 0)).reclaim() == 7
    assert calls == ["stream", "empty"]


def test_unused_memory_of_the_allocator_is_freed_only_if_that_decides(memory: StepMemory) -> None:
    gpu, needs = FakeGpu(79 * GIB), needs_of(memory)
    account = opened(gpu, needs)
    gpu.cached = GIB // 4
    assert account.room_for_graphs(2**20) >= 2**20 and gpu.cached
    gpu.cached = 8 * GIB
    assert account.room_for_graphs(needs.graphs) >= needs.graphs and not gpu.cached


def test_a_step_that_lacks_memory_after_a_resume_is_seen(memory: StepMemory) -> None:
    gpu, needs = FakeGpu(79 * GIB), needs_of(memory)
    account = opened(gpu, needs)
    gpu.others += gpu.free() - needs.step
    assert account.shortage() == LEAST_SPECIAL
    assert account.special_now() == LEAST_SPECIAL < account.special


def test_special_sampling_gets_less_while_other_processes_hold_of_its_part(memory: StepMemory) -> None:
    gpu, needs = FakeGpu(79 * GIB), needs_of(memory)
    account = opened(gpu, needs)
    assert account.special_now() == account.special
    gpu.others += gpu.free() - needs.step - GIB
    assert account.special_now() == GIB < account.special


def test_memory_that_others_took_while_the_weights_were_loaded_is_not_given_to_the_pool(
    memory: StepMemory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gpu, needs = FakeGpu(79 * GIB), needs_of(memory)
    account = MemoryAccount(gpu, needs, 0.85, free=gpu.free(), collectives=0)
    gpu.held += needs.weights
    gpu.others += 40 * GIB
    budget = account.kv_budget()
    assert budget.bytes < gpu.free() - needs.step - needs.graphs
    assert "Other processes have taken 40.00 GiB" in caplog.text and "40.00 GiB" in budget.explanation
    gpu.held += budget.bytes
    account.close(budget.bytes)
    assert account.special == LEAST_SPECIAL, "nor to special sampling"
    assert account.received == LEAST_RECEIVED, "nor to received weights"
    assert account.parts()["other_processes"] == 40 * GIB and sum(account.parts().values()) == 2 * 79 * GIB


# -- the size of the KV pool ---------------------------------------------------------------------------------------


def budget_of(free: int, weights: int, fraction: float, step: int) -> MemoryAccount:
    needs = Needs(weights, tables=0, step=step, graphs=0, special_least=0, special_most=0, received_most=1)
    gpu = FakeGpu(free * GIB, held=weights)
    return MemoryAccount(gpu, needs, fraction, free=free * GIB, collectives=0)


def test_the_fraction_counts_what_was_free_before_loading() -> None:
    """A trainer holds half of a GPU of 140 GiB, so 70 GiB are free.

    Of these, 85 % may be static: 16 GiB of weights, and the pool.
    """
    for free in (70, 140):
        budget = budget_of(free, 16 * GIB, 0.85, 2 * GIB).kv_budget()
        assert budget.bytes == pytest.approx((free * 0.85 - 16) * GIB, rel=1e-6)


def test_the_largest_step_keeps_its_room_whatever_the_fraction() -> None:
    budget = budget_of(20, 10 * GIB, 0.95, 3 * GIB).kv_budget()
    assert budget.bytes == 7 * GIB - SLACK - 1
    assert "largest step, CUDA graphs and other parts need 3.50 GiB" in budget.explanation


def test_a_gpu_that_is_too_small_names_what_was_free_and_the_remedy() -> None:
    budget = budget_of(20, 16 * GIB, 0.8, GIB).kv_budget()
    assert budget.bytes <= 0
    for words in ("20.00 GiB of the GPU were free", "weights take 16.00 GiB", "mem_fraction_static=0.8 keeps 4.00 GiB"):
        assert words in budget.explanation
    assert "Raise mem_fraction_static" in budget.remedy


def test_a_larger_share_is_no_remedy_if_the_other_parts_take_the_rest() -> None:
    budget = budget_of(20, 18 * GIB, 0.95, 3 * GIB).kv_budget()
    assert budget.bytes <= 0
    assert budget.remedy.startswith("Lower chunked_prefill_size") and "mem_fraction_static" not in budget.remedy


def test_received_weights_get_their_least_and_then_what_is_left(memory: StepMemory) -> None:
    needs = needs_of(memory)
    assert opened(FakeGpu(79 * GIB), needs).received == 2 * GIB
    assert opened(FakeGpu(16 * GIB), needs).received == LEAST_RECEIVED
    small = replace(needs, received_most=2**20)
    assert opened(FakeGpu(16 * GIB), small).received == 2**20


def test_host_memory_is_a_setting() -> None:
    assert cpu_budget(2.0).bytes == 2 * GIB
