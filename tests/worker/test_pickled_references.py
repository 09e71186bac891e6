"""SGLang's pickles hold reference counts, which refused, late and withdrawn updates must decrement, too.

A count that stays too high keeps the trainer's memory until the trainer exits. The tests cover the whole way from the
arrival of a request, with a real stager.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.multiprocessing as mp

from tests.scheduler.fakes import prompt
from tests.weight_sync import sglang_payloads as sglang
from tests.weight_sync.fakes import NORM, random_weights
from tests.worker.weights.test_weight_fuzz import WeighedHarness
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import PauseGenerationReq, WithdrawReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    ReleaseMemoryOccupationReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.weight_sync.sglang.payloads import parse_payload
from verl_server.worker.tp_worker import TpWorker
from verl_server.worker.weights.stager import Stager


class StagedHarness(WeighedHarness):
    def make_worker(self, *sizes: int) -> TpWorker:
        worker = super().make_worker(*sizes)
        self.rang = threading.Event()
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        prepare = self.sources.prepare

        def held_prepare(req: object) -> object:
            self.entered.set()
            assert self.go_on.wait(20)
            return prepare(req)  # type: ignore[arg-type]

        self.sources.prepare = held_prepare  # type: ignore[method-assign, assignment]
        self.real = worker.stager = Stager(self.sources, TpGroup(), take_timeout=10.0)
        self.real.on_finished = self.rang.set
        return worker

    def receive(self, message: object) -> None:
        super(WeighedHarness, self).receive(message)  # type: ignore[arg-type]

    def until_answered(self, id: int) -> int:
        """Run steps until the request is answered, and return the status code of the reply."""
        for _ in range(2000):
            if id in self.replies:
                break
            self.rang.wait(0.01)
            self.steps()
        return self.replies[id].status_code

    def until_staged(self) -> None:
        """Wait until the stager has finished every request that was submitted."""
        last = UpdateWeightsFromDiskReq(id=99, model_path="/nowhere")
        self.real.submit(last)
        while last.id not in [id for id, _ in self.real.finished()]:
            assert self.rang.wait(10)
            self.rang.clear()


@pytest.fixture(autouse=True)
def file_system() -> Iterator[None]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    yield
    mp.set_sharing_strategy(before)


@pytest.fixture
def h() -> Iterator[StagedHarness]:
    harness = StagedHarness(control_timeout=5.0)
    yield harness
    harness.go_on.set()
    harness.real.close(10.0)


class Pickled:
    """A pickled update, and the reference counts of the pickled memory."""

    def __init__(self) -> None:
        self._tensors = [(name, tensor) for name, tensor in random_weights(3).items()]
        payload = sglang.dumps(self._tensors)
        self._files = [handle.allocation.name for _, handle in parse_payload(payload, None)]
        self.text = base64.b64encode(payload).decode()
        assert self.references == {2}

    @property
    def references(self) -> set[int]:
        counts = set()
        for name in self._files:
            with open(f"/dev/shm/{name}", "rb") as file:
                counts.add(int.from_bytes(file.read(4), "little"))
        return counts

    def req(self, id: int, **fields: object) -> UpdateWeightsFromTensorReq:
        return UpdateWeightsFromTensorReq(id=id, serialized_named_tensors=[self.text], **fields)  # type: ignore[arg-type]


def fenced(h: StagedHarness, pickled: Pickled) -> int:
    h.control(BeginWeightUpdateReq(id=1, transaction_id="s"))
    h.scheduler.handle(pickled.req(2))
    return h.until_answered(2)


def malformed(h: StagedHarness, pickled: Pickled) -> int:
    h.scheduler.handle(pickled.req(2, keep=True))
    return h.until_answered(2)


def not_staged_well(h: StagedHarness, pickled: Pickled) -> int:
    h.scheduler.handle(pickled.req(2, checksums={NORM: "0" * 32}))
    return h.until_answered(2)


def asleep(h: StagedHarness, pickled: Pickled) -> int:
    h.control(ReleaseMemoryOccupationReq(id=1, tags=["weights"]))
    h.scheduler.handle(pickled.req(2))
    return h.until_answered(2)


def late_for_its_turn(h: StagedHarness, pickled: Pickled) -> int:
    h.add("r", prompt(1, 9), 100)
    h.steps(2)
    h.scheduler.handle(pickled.req(2))
    assert h.rang.wait(10)
    h.steps()
    assert h.scheduler.control.draining
    h.clock.now += 10.0
    return h.until_answered(2)


def late_in_staging(h: StagedHarness, pickled: Pickled) -> int:
    h.go_on.clear()
    h.scheduler.handle(pickled.req(2))
    assert h.entered.wait(10)
    h.clock.now += 10.0
    status = h.until_answered(2)
    h.go_on.set()
    return status


def late_before_staging(h: StagedHarness, pickled: Pickled) -> int:
    h.go_on.clear()
    h.scheduler.handle(Pickled().req(2))
    h.scheduler.handle(pickled.req(3))
    assert h.entered.wait(10)
    h.clock.now += 10.0
    status = h.until_answered(3)
    h.go_on.set()
    return status


def withdrawn(h: StagedHarness, pickled: Pickled) -> int:
    h.go_on.clear()
    h.scheduler.handle(pickled.req(2))
    h.scheduler.handle(WithdrawReq(id=2))
    h.go_on.set()
    return h.until_answered(2)


def carried_out(h: StagedHarness, pickled: Pickled) -> int:
    h.control(PauseGenerationReq(id=1))
    h.scheduler.handle(pickled.req(2))
    return h.until_answered(2)


@pytest.mark.parametrize(
    ("what", "status"),
    [
        (fenced, 409),
        (malformed, 400),
        (not_staged_well, 400),
        (asleep, 400),
        (late_for_its_turn, 504),
        (late_in_staging, 504),
        (late_before_staging, 504),
        (withdrawn, 499),
        (carried_out, 200),
    ],
)
def test_references_are_given_back(
    h: StagedHarness, what: Callable[[StagedHarness, Pickled], int], status: int
) -> None:
    pickled = Pickled()
    assert what(h, pickled) == status
    h.until_staged()
    assert pickled.references == {1}
    assert torch.equal(h.weighed.held()[NORM], random_weights(3)[NORM]) == (status == 200)
