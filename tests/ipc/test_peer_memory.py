"""Peer memory: the algorithm for each size, sums that the process group does instead, and setup on all ranks or none.

`benchmarks/all_reduce.py` tests the sums on GPUs.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_server.ipc import peer_memory
from verl_server.ipc.peer_memory import PeerMemory
from verl_server.ipc.tp_group import TpGroup


class TwoRanks:
    """Stands for symmetric memory: the other rank's tensor always holds ones."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def one_shot_all_reduce(self, buffer: Tensor, op: str, group: str) -> Tensor:
        self.called.append("one shot")
        return buffer + 1

    def two_shot_all_reduce_(self, buffer: Tensor, op: str, group: str) -> Tensor:
        self.called.append("two shots")
        return buffer.add_(1)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> TwoRanks:
    ranks = TwoRanks()
    monkeypatch.setattr(torch.ops, "symm_mem", ranks)
    monkeypatch.setattr(peer_memory, "_BUFFER_BYTES", 1024)
    monkeypatch.setattr(peer_memory, "_ONE_SHOT_BYTES", 256)
    return ranks


@pytest.fixture
def memory() -> PeerMemory:
    return PeerMemory(torch.zeros(1024, dtype=torch.uint8), "ranks")


@pytest.mark.parametrize(("rows", "way"), [(1, "one shot"), (8, "one shot"), (9, "two shots"), (32, "two shots")])
def test_a_sum_goes_the_way_of_its_size(ranks: TwoRanks, memory: PeerMemory, rows: int, way: str) -> None:
    tensor = torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))
    expected = tensor + 1
    summed = memory.sum(tensor)
    assert summed is not None
    assert torch.equal(summed, expected)
    assert ranks.called == [way]
    memory.sum(torch.zeros(32, 8))
    assert torch.equal(summed, expected), "the next sum must write the buffer, not this result"


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.zeros(33, 8), id="larger-than-the-buffer"),
        pytest.param(torch.zeros(2, 8, dtype=torch.float16), id="dtype-that-the-kernels-lack"),
        pytest.param(torch.zeros(3, 3), id="not-whole-vectors"),
    ],
)
def test_other_sums_are_left_to_the_group(
    ranks: TwoRanks, memory: PeerMemory, tensor: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.sum(tensor) is None
    summed: list[Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: summed.append(tensor))
    assert TpGroup(size=2, peer_memory=memory).all_reduce(tensor) is tensor
    assert len(summed) == 1
    assert not ranks.called


class OtherRank:
    """The answers of another rank in a gather: the UUID of its GPU, then its votes."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers

    def gather(self, data: bytes) -> list[bytes]:
        return [data, self.answers.pop(0)]


@pytest.mark.parametrize(
    ("device", "fails", "answers", "connects"),
    [
        pytest.param("cpu", "", [], False, id="no-gpu"),
        pytest.param("cuda:0", "", [b"GPU-1", b"0"], False, id="other-cannot-reach-this"),
        pytest.param("cuda:0", "reach", [b"GPU-1", b"1"], False, id="this-cannot-reach-other"),
        pytest.param("cuda:0", "", [b"GPU-1", b"1", b"0", b"0"], False, id="other-has-no-memory"),
        pytest.param("cuda:0", "empty", [b"GPU-1", b"1", b"1", b"0"], False, id="this-has-no-memory"),
        pytest.param("cuda:0", "rendezvous", [b"GPU-1", b"1", b"1", b"1"], False, id="this-cannot-map"),
        pytest.param("cuda:0", "", [b"GPU-1", b"1", b"1", b"0"], False, id="other-cannot-map"),
        pytest.param("cuda:0", "", [b"GPU-1", b"1", b"1", b"1"], True, id="all-can"),
    ],
)
def test_all_ranks_have_it_or_none(
    device: str, fails: str, answers: list[bytes], connects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed._symmetric_memory as symmetric_memory

    def succeed_unless(name: str, result: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            if fails == name:
                raise RuntimeError("no")
            return result

        return call

    group: Any = type("Group", (), {"group_name": "ranks"})()
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(peer_memory, "_uuid", lambda index: b"GPU-0")
    monkeypatch.setattr(
        peer_memory, "_can_access", lambda device, uuids: uuids == [b"GPU-0", b"GPU-1"] and fails != "reach"
    )
    monkeypatch.setattr(symmetric_memory, "empty", succeed_unless("empty", torch.empty(0)))
    monkeypatch.setattr(symmetric_memory, "rendezvous", succeed_unless("rendezvous", object()))
    other = OtherRank(answers)
    memory = PeerMemory.connect(group, torch.device(device), other.gather)
    assert (memory is not None) is connects
    assert not other.answers, "a vote was not requested"
