"""vLLM's rendezvous: the unique id that its trainer pickles into the store, and the group that is made from it."""

from __future__ import annotations

import ctypes
import os
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from tests.weight_sync.sglang_payloads import stub_modules
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.io_struct import InitWeightsUpdateGroupReq
from verl_server.weight_sync.group import process_group, unique_id
from verl_server.weight_sync.group.process_group import WeightGroup
from verl_server.weight_sync.group.unique_id import connect_by_unique_id, read_unique_id

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
ID = bytes(range(128))


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def pickled(value: bytes = ID, name: str = "ncclUniqueId") -> bytes:
    """What the trainer's rank 0 puts into the store."""
    kind: Any = type(name, (ncclUniqueId,), {})
    with stub_modules(**{f"{MODULE}:{name}": kind}):
        return pickle.dumps(kind.from_buffer_copy(value))


def test_the_id_is_read_as_data() -> None:
    assert read_unique_id(pickled()) == ID


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickle.dumps(os.system), "posix.system is not allowed"),
        (pickle.dumps(b"short"), "does not hold NCCL's unique id"),
        (pickle.dumps(5), "does not hold"),
        (pickled(name="ncclComm"), "ncclComm is not allowed"),
        (pickle.dumps(bytes(5000)), "more than 4096"),
        (b"no pickle", "not a pickle"),
    ],
)
def test_anything_else_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        read_unique_id(data)


def test_torchs_group_finds_the_id_in_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(unique_id, "nccl_group", lambda *arguments: made.append(arguments))
    store = HashStore()
    store.set("broadcast_from/0/0", pickled())  # type: ignore[arg-type]
    connect_by_unique_id(store, 2, 3, torch.device("cuda:0"))
    ((local, rank, size, device),) = made
    assert (local.get("0"), rank, size, device) == (ID, 2, 3, torch.device("cuda:0"))


class FakeNccl:
    """Stands for the NCCL group of this rank, and counts the sums with which vLLM's ranks begin."""

    def __init__(self, req: Any, rank: int, device: torch.device, timeout: float) -> None:
        store = TCPStore(req.master_address, req.master_port, req.world_size, False, timedelta(seconds=timeout))
        self.rank, self.id, self.sums = rank, read_unique_id(store.get("broadcast_from/0/0")), 0

    def meet(self) -> None:
        self.sums += 1

    def abort(self) -> None:
        pass


def request(port: int, **changes: Any) -> InitWeightsUpdateGroupReq:
    fields: dict[str, Any] = {
        "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2,
        "group_name": "g", "rendezvous": "unique_id",
    }  # fmt: skip
    return InitWeightsUpdateGroupReq(**(fields | changes))


def test_a_rank_meets_vllms_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "NcclMember", FakeNccl)
    store = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False, use_libuv=False)
    store.set("broadcast_from/0/0", pickled())  # type: ignore[arg-type]
    group = WeightGroup.join(request(store.port), 0, torch.device("cuda:0"), 20.0)
    member: Any = group._member
    assert (member.rank, member.id, member.sums) == (1, ID, 1)
    group.close()


def test_a_trainer_that_publishes_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "NcclMember", FakeNccl)
    store = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=20), wait_for_workers=False, use_libuv=False)
    with pytest.raises(WeightUpdateError, match="Could not join the group 'g'"):
        WeightGroup.join(request(store.port), 0, torch.device("cuda:0"), 0.3)


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [({}, "cpu", "needs GPUs"), ({"backend": "gloo"}, "cuda:0", "rendezvous='unique_id' is NCCL's")],
)
def test_layouts_without_nccl_are_refused(changes: dict[str, Any], device: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        WeightGroup.join(request(1, **changes), 0, torch.device(device), 1.0)


def test_packed_broadcasts_end_with_the_tensor_that_fills_the_buffer() -> None:
    names = ["a", "b", "c", "d"]
    shapes, dtypes = [[3], [2], [3], [1]], ["float32", "bfloat16", "float32", "float32"]  # 12, 4, 12 and 4 bytes
    (window,) = process_group._windows(names, dtypes, shapes, "packed", 1 << 20, 12)
    assert window.parts() == [(0, 16), (256, 16)], "b makes the first broadcast larger than 12 bytes"
    buffer = torch.zeros(window.nbytes, dtype=torch.uint8)
    buffer[0:12] = torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8)
    buffer[256 + 12 : 256 + 16] = torch.tensor([7.0]).view(torch.uint8)
    tensors = dict(window.tensors(buffer))
    assert tensors["a"].tolist() == [1.0, 2.0, 3.0] and tensors["d"].tolist() == [7.0]
    assert tensors["b"].dtype == torch.bfloat16 and list(tensors["c"].shape) == [3]
    small = process_group._windows(names, dtypes, shapes, "packed", 64, 12)
    assert [w.names for w in small] == [["a", "b"], ["c", "d"]], "windows end between two broadcasts"
