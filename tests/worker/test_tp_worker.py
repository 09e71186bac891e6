"""Rank 0 broadcasts each command before it carries it out, and the other ranks carry out the same ones in order."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_server.messages.weight_requests import (
    ReleaseMemoryOccupationReq,
    StagedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.tp_worker import TpWorker


@dataclass
class Wire:
    """Holds the commands that rank 0 broadcast. If the wire is empty, rank 0 is lost."""

    sent: deque[bytes] = field(default_factory=deque)
    size: int = 2
    rank: int = 0

    def broadcast_command(self, data: bytes | None) -> bytes:
        if data is not None:
            self.sent.append(data)
            return data
        if not self.sent:
            raise RuntimeError("Connection closed by peer")
        return self.sent.popleft()


class Rank:
    """A worker whose runner, updater and stager note what they are asked for."""

    def __init__(self, wire: Wire, device: str = "cpu") -> None:
        self.calls: list[Any] = []
        self.error: Exception | None = None
        note = self.calls.append

        def launch(batch: ForwardBatch, specs: Any, make_masks: Any) -> Any:
            note(("launch", batch.rows, specs))
            if self.error is not None:
                raise self.error

        runner = SimpleNamespace(launch=launch, warm_up=lambda: note("warm up") or True, device=torch.device(device))
        stager = SimpleNamespace(
            submit=lambda req: note(("submit", req.id)),
            take=lambda id: SimpleNamespace(req=SimpleNamespace(id=id), prepared="prepared"),
            drop=lambda id: note(("drop", id)),
        )
        weights = SimpleNamespace(handle=lambda req, prepared=None: note(("handle", req.id, prepared)))
        self.worker = TpWorker(runner, weights, stager, wire)  # type: ignore[arg-type]


BATCH = ForwardBatch(rows=[3], cached_lens=[0], extend_lens=[1], input_ids=[5], page_updates=[], sample=[0])
STAGED: StagedReq = UpdateWeightsFromTensorReq(id=7, registration="r")


def test_followers_carry_out_what_rank_0_did_in_its_order() -> None:
    wire = Wire()
    first, follower = Rank(wire), Rank(wire)
    worker = first.worker
    worker.stage(STAGED)
    worker.launch(BATCH, [])
    worker.warm_up()
    worker.run_staged(STAGED)
    worker.control(ReleaseMemoryOccupationReq(id=8))
    worker.drop_staged(STAGED)
    worker.control(UpdateWeightVersionReq(id=9, new_version="2"))
    worker.stop()
    follower.worker.follow()
    launched = [call if call[0] != "launch" else ("launch", call[1], None) for call in first.calls]
    assert follower.calls == launched, "only rank 0 has the settings of sampling"
    assert launched == [
        ("submit", 7),
        ("launch", [3], None),
        "warm up",
        ("handle", 7, "prepared"),
        ("handle", 8, None),
        ("drop", 7),
        ("handle", 9, None),
    ]


def test_a_command_is_broadcast_before_rank_0_carries_it_out() -> None:
    wire = Wire()
    first = Rank(wire)
    first.error = ValueError("a step failed")
    with pytest.raises(ValueError, match="a step failed"):
        first.worker.launch(BATCH, [])
    assert len(wire.sent) == 1, "the other ranks would wait in a collective otherwise"


def test_a_single_rank_broadcasts_nothing() -> None:
    wire = Wire(size=1)
    Rank(wire).worker.launch(BATCH, [])
    assert not wire.sent


def test_a_follower_that_loses_rank_0_says_so() -> None:
    with pytest.raises(ConnectionError, match="rank 1 lost the connection to rank 0: Connection closed"):
        Rank(Wire(rank=1)).worker.follow()


@pytest.mark.parametrize("size", [1, 2])
def test_out_of_memory_on_one_of_several_ranks_names_the_rank_and_a_remedy(size: int) -> None:
    rank = Rank(Wire(size=size))
    rank.error = torch.OutOfMemoryError("2 GiB")
    with pytest.raises(RuntimeError) as raised:
        rank.worker.launch(BATCH, [])
    is_named = "Rank 0 ran out of memory in a step of 1 requests and 1 new tokens" in str(raised.value)
    assert is_named == (size > 1) and isinstance(raised.value, torch.OutOfMemoryError) == (size == 1)


@pytest.mark.parametrize(
    ("size", "device", "error", "expected"),
    [
        (1, "cpu", ValueError(), True),
        (1, "cuda", ValueError(), False),
        (1, "cuda", torch.OutOfMemoryError(), True),
        (2, "cpu", ValueError(), False),
        (2, "cuda", torch.OutOfMemoryError(), False),
    ],
)
def test_when_the_next_step_can_run_after_an_error(size: int, device: str, error: Exception, expected: bool) -> None:
    assert Rank(Wire(size=size), device).worker.is_recoverable(error) is expected
