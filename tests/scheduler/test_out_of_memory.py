"""A step runs out of memory: which requests end, which continue, and which are not admitted at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scheduler.fakes import Harness, generate, prompt
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import FinishReason
from verl_server.messages.weight_requests import ReleaseMemoryOccupationReq, ResumeMemoryOccupationReq
from verl_server.worker.device import is_out_of_memory
from verl_server.worker.forward_batch import ForwardBatch

ROOMY: dict[str, Any] = {"num_pages": 400, "max_rows": 16, "chunked_prefill_size": 256}


@pytest.fixture(params=[False, True], ids=["collected", "overlapped"])
def h(request: pytest.FixtureRequest) -> Harness:
    return Harness(**ROOMY, overlaps=request.param)


class Memory:
    """Makes launches fail that exceed a limit or contain a culprit, as a device does."""

    def __init__(self, h: Harness, most_rows: int = 10**9, most_tokens: int = 10**9, culprits: tuple[str, ...] = ()):
        self.h, self.most_rows, self.most_tokens, self.culprits = h, most_rows, most_tokens, culprits
        self.failures = 0
        self.rows: list[int] = []
        h.runner.on_launch = self.check

    def check(self, batch: ForwardBatch) -> None:
        running = {req.row: req.rid for req in self.h.scheduler.planner.running}
        rids = [running[batch.rows[entry]] for entry in batch.sample]
        self.rows.append(len(batch.rows))
        too_much = len(batch.rows) > self.most_rows or len(batch.input_ids) > self.most_tokens
        if too_much or any(rid in self.culprits for rid in rids):
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.")


def add(h: Harness, count: int, new: int = 12) -> None:
    for i in range(count):
        h.add(f"r{i}", prompt(i, 9), new)


def check_all(h: Harness, count: int, new: int = 12) -> None:
    for i in range(count):
        assert h.finished[f"r{i}"] == FinishReason(type="length", length=new), h.finished[f"r{i}"]
        assert h.tokens[f"r{i}"] == generate(prompt(i, 9), new, 0)


def test_only_the_request_that_takes_too_much_ends(h: Harness) -> None:
    memory = Memory(h, culprits=("greedy",))
    add(h, 10)
    h.steps(3)
    h.add("greedy", prompt(99, 9), 12)
    h.run()
    reason = h.finished["greedy"]
    assert reason.type == "abort" and reason.status_code == 500
    for words in ("Out of memory", "3 GiB", "mem_fraction_static", "top_logprobs_num"):
        assert words in (reason.message or "")
    check_all(h, 10)
    assert memory.failures <= 6, "the search halves the batch"
    assert max(memory.rows[-3:]) == 10, "the others continue in full steps"


def test_two_requests_that_take_too_much_end_and_no_others(h: Harness) -> None:
    Memory(h, culprits=("r3", "r7"))
    add(h, 10)
    h.run()
    assert [rid for rid, reason in h.finished.items() if reason.type == "abort"] in (["r7", "r3"], ["r3", "r7"])
    for i in (0, 1, 2, 4, 5, 6, 8, 9):
        assert h.tokens[f"r{i}"] == generate(prompt(i, 9), 12, 0)


def test_a_sum_that_is_too_much_is_computed_in_smaller_steps(h: Harness) -> None:
    memory = Memory(h, most_rows=5)
    add(h, 12, new=30)
    h.run()
    check_all(h, 12, new=30)
    assert memory.failures < 12, "limits grow slowly after they shrank"
    assert h.scheduler.planner.num_retractions == 0, "no request loses its KV"


def test_a_prompt_is_computed_in_smaller_chunks(h: Harness) -> None:
    memory = Memory(h, most_tokens=70)
    h.add("long", prompt(1, 250), 4)
    h.run()
    assert h.tokens["long"] == generate(prompt(1, 250), 4, 0)
    assert memory.failures <= 4


def test_memory_that_is_gone_for_good_ends_everybody_in_bounded_steps(h: Harness) -> None:
    memory = Memory(h, most_rows=0)
    add(h, 8)
    h.run()
    assert all(h.finished[f"r{i}"].status_code == 500 for i in range(8))
    assert memory.failures <= 8 * 4


def test_full_steps_come_back(h: Harness) -> None:
    memory = Memory(h, most_rows=5)
    add(h, 8, new=150)
    h.steps(20)
    memory.most_rows = 100
    h.run()
    assert max(memory.rows[-20:]) == 8
    check_all(h, 8, new=150)


def test_nobody_waits_while_steps_are_small(h: Harness) -> None:
    """Requests take turns: none gets many tokens ahead of another that started at the same time."""
    Memory(h, most_rows=3)
    add(h, 9, new=40)
    h.steps(60)
    lengths = [len(h.tokens.get(f"r{i}", [])) for i in range(9)]
    assert max(lengths) - min(lengths) <= 12, lengths


def test_requests_whose_sampling_takes_much_wait_for_each_other() -> None:
    h = Harness(**ROOMY)
    h.runner.step_budget = 100
    h.runner.step_bytes = lambda spec: 40 if spec.top_logprobs_num else 0
    h.scheduler.planner.admission.step_budget = 100
    for i in range(4):
        h.add(f"heavy{i}", prompt(i, 6), 5, return_logprob=True, top_logprobs_num=2)
    h.steps()
    assert [len(h.tokens.get(f"heavy{i}", [])) for i in range(4)] == [1, 1, 0, 0]
    h.run()
    for i in range(4):
        assert h.tokens[f"heavy{i}"] == generate(prompt(i, 6), 5, 0)


def test_the_budget_of_sampling_is_read_again_after_a_resume() -> None:
    h = Harness(**ROOMY)
    h.runner.step_budget = 100
    h.scheduler.handle(ReleaseMemoryOccupationReq(id=1, tags=["kv_cache"]))
    h.steps()
    h.runner.step_budget = 50
    h.scheduler.handle(ResumeMemoryOccupationReq(id=2))
    h.steps()
    assert h.scheduler.planner.admission.step_budget == 50


def test_a_request_whose_sampling_never_fits_is_refused() -> None:
    h = Harness(**ROOMY)
    h.runner.step_budget = 100 << 20
    h.runner.step_bytes = lambda spec: 150 << 20
    h.add("a", prompt(1, 6), 5)
    h.steps()
    reason = h.finished["a"]
    assert reason.status_code == 400
    assert "150 MiB" in (reason.message or "") and "100 MiB" in (reason.message or "")


def test_one_of_several_ranks_ends_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait in a sum of the step, so that the step cannot be started again."""
    h = Harness()
    monkeypatch.setattr(TpGroup, "broadcast_command", lambda *_: b"")
    h.worker.tp = TpGroup(rank=0, size=2)
    h.runner.fail_with = torch.OutOfMemoryError("CUDA out of memory.")
    h.add("a", prompt(1, 6), 5)
    with pytest.raises(RuntimeError, match=r"Rank 0 ran out of memory in a step of 1 requests and 6 .*mem_fraction"):
        h.run()


def test_which_errors_are_out_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x")) and is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(error.value)
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("device-side assert"))
