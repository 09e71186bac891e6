"""Pushes of several ranks, which are threads here: the messages between ranks, and one outcome for all ranks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.fake_engine import FakeEngine
from tests.weight_sync.reading import read
from verl_server.engine.push import Push, WeightPusher
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq
from verl_server.weight_sync.handles import LocalSerializedTensor
from verl_server.weight_sync.trainer.sender import describe_tensors
from verl_server.weight_sync.trainer.shards import TensorShard

Named = list[tuple[str, Any]]
FULL = torch.arange(24.0).reshape(6, 4)


class ThreadRank:
    """One of `size` ranks in one process. An error of one rank is raised on all ranks, as by `RankGroup`."""

    def __init__(self, rank: int, size: int, shared: dict[str, Any]) -> None:
        self.rank, self.size, self._shared = rank, size, shared
        self.bytes_sent: list[int] = []

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        try:
            mine: bytes | Exception = prepare()
        except Exception as error:
            mine = error
        everyone = self._exchange(mine)
        for other in everyone:
            if isinstance(other, Exception):
                raise other
        self.bytes_sent.append(len(everyone[self.rank]))
        return everyone

    def of_engine(self, parts: list[Any]) -> list[Any]:
        return parts

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        outcome: Any = None
        if self.rank == 0:
            try:
                outcome = act()
            except Exception as error:
                outcome = error
        (outcome, *_) = self._exchange(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _exchange(self, mine: Any) -> list[Any]:
        self._shared[f"value {self.rank}"] = mine
        self._shared["barrier"].wait(20)
        everyone = [self._shared[f"value {rank}"] for rank in range(self.size)]
        self._shared["barrier"].wait(20)
        return everyone


class Trainer:
    """Ranks that push to one engine."""

    def __init__(self, size: int) -> None:
        shared: dict[str, Any] = {"barrier": threading.Barrier(size)}
        self.engine = FakeEngine()
        self.ranks = [ThreadRank(rank, size, shared) for rank in range(size)]
        self.pushers = [WeightPusher(rank) for rank in self.ranks]

    def each(self, call: Callable[[int], Any]) -> list[Any]:
        """Return the result of each rank, or the exception that the rank raised."""

        def run(rank: int) -> Any:
            try:
                return call(rank)
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return [job.result(30) for job in [pool.submit(run, rank) for rank in range(len(self.ranks))]]

    def push(self, *named: Named) -> list[Any]:
        return self.each(lambda rank: self.pushers[rank].update(named[rank], None, self.send))

    def send(self, push: Push) -> tuple[bool, str]:
        return self.engine.send_update(push, UpdateWeightsFromTensorReq())


def rows(*bounds: int) -> list[Named]:
    """Return the named shard of each rank: the rows of FULL between two consecutive bounds."""
    pairs = itertools.pairwise(bounds)
    return [[("w", TensorShard(FULL[start:stop].clone(), (6, 4), (start, 0)))] for start, stop in pairs]


def test_shards_of_three_ranks_are_one_update() -> None:
    trainer, named = Trainer(3), rows(0, 1, 1, 6)
    assert trainer.push(*named) == [(True, "done")] * 3
    assert torch.equal(read(trainer.engine.last.description)["w"], FULL)


def test_descriptions_travel_only_when_they_change() -> None:
    trainer, named = Trainer(2), rows(0, 2, 6)
    for _ in range(4):
        trainer.push(*named)
    assert trainer.engine.updates == ["description", "description+", "registration", "registration"]
    first, *later = trainer.ranks[1].bytes_sent
    assert max(later) < 100 < first
    named[1] = rows(0, 2, 6)[1]
    trainer.push(*named)
    assert trainer.engine.updates[-1] == "description", "one rank's memory moved"
    assert trainer.ranks[0].bytes_sent[-1] < 100 < trainer.ranks[1].bytes_sent[-1]
    assert torch.equal(read(trainer.engine.last.description)["w"], FULL)


def test_a_server_that_forgot_gets_what_all_ranks_described() -> None:
    trainer, named = Trainer(2), rows(0, 2, 6)
    for _ in range(3):
        trainer.push(*named)
    trainer.engine.known.clear()
    assert trainer.push(*named) == [(True, "done")] * 2
    assert trainer.engine.updates[-2:] == ["registration", "description+"]
    assert torch.equal(read(trainer.engine.last.description)["w"], FULL)


def test_ranks_come_to_the_same_decisions() -> None:
    trainer, named = Trainer(2), rows(0, 2, 6)
    for _ in range(3):
        trainer.push(*named)
    trainer.engine.refuse = ControlReply(id=0, success=False, message="no", status_code=400)
    trainer.push(*rows(0, 3, 6))
    held = [pusher._registrations.open_ids() for pusher in trainer.pushers]
    assert held[0] == held[1] and len(held[0]) == 1
    trainer.engine.refuse = None
    assert trainer.each(lambda rank: trainer.pushers[rank].unregister(trainer.engine.send_unregistration)) == [None] * 2
    assert [pusher._registrations.open_ids() for pusher in trainer.pushers] == [[], []]


def test_errors_are_everyones() -> None:
    trainer, named = Trainer(2), rows(0, 2, 6)
    trainer.push(*named)

    trainer.engine.refuse = ControlReply(id=0, success=False, message="no such parameter", status_code=400)
    outcomes = trainer.push(*named)
    assert all(isinstance(outcome, WeightUpdateError) for outcome in outcomes), outcomes
    trainer.engine.refuse = None

    outcomes = trainer.push(named[0], [("w", "no tensor")])
    assert all("'w' is a str" in str(outcome) for outcome in outcomes), outcomes

    outcomes = trainer.push(*rows(0, 2, 5))
    assert all("20 of 24" in str(outcome) for outcome in outcomes), outcomes
    sent = len(trainer.engine.requests)
    outcomes = trainer.push(named[0], [("w", TensorShard(FULL[2:].double(), (6, 4), (2, 0)))])
    assert all("float64" in str(outcome) for outcome in outcomes), outcomes
    assert len(trainer.engine.requests) == sent, "the server received no request"

    assert trainer.push(*named) == [(True, "done")] * 2, "the next push succeeds"


def test_registered_by_all_ranks() -> None:
    trainer, named = Trainer(2), rows(0, 2, 6)
    register = trainer.engine.send_registration
    trainer.each(lambda rank: trainer.pushers[rank].register(named[rank], None, lambda push: register(push, False)))
    assert trainer.each(lambda rank: trainer.pushers[rank].push(trainer.send)) == [(True, "done")] * 2
    assert trainer.engine.updates == ["registration"]


def test_handles_keep_the_order_of_ranks() -> None:
    trainer = Trainer(2)
    tensors = [torch.zeros(2), torch.ones(2)]
    handles = [describe_tensors([("w", tensor)]) for tensor in tensors]
    trainer.push(*handles)
    ((name, value),) = trainer.engine.last.named_tensors
    assert (name, value.values) == ("w", [handles[0][0][1].get(0), handles[1][0][1].get(0)])
    for other in ([("v", handles[1][0][1])], [("w", torch.ones(2))]):
        outcomes = trainer.push(handles[0], other)
        assert all(isinstance(outcome, BadRequestError) for outcome in outcomes), outcomes


def test_each_rank_picks_its_own_of_several_handles() -> None:
    trainer = Trainer(2)
    tensors = [torch.zeros(2), torch.ones(2)]
    both = [describe_tensors([("w", tensor)])[0][1].get(0) for tensor in tensors]
    trainer.push(*[[("w", LocalSerializedTensor(values=both))]] * 2)
    assert trainer.engine.last.named_tensors[0][1].values == both


@pytest.mark.parametrize("size", [1, 2])
def test_memory_is_read_before_anyone_returns(size: int) -> None:
    """A push returns only after the server has read all memory, because ranks write as soon as their call returns."""
    trainer = Trainer(size)
    tensors = [torch.zeros(1024) for _ in range(size)]
    seen: list[torch.Tensor] = []

    def look(req: Any) -> None:
        threading.Event().wait(0.02)  # a copy that takes a while
        seen.extend(read(req.description).values())

    trainer.engine.on_request = look

    def push(rank: int) -> None:
        trainer.pushers[rank].update([(f"w{rank}", tensors[rank])], None, trainer.send)
        tensors[rank].fill_(9.0)

    trainer.each(push)
    assert len(seen) == size
    assert all((tensor == 0).all() for tensor in seen)
