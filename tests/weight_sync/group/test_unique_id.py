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

from tests.reserved_port import reserved_port
from tests.weight_sync.prime_rl_trainer import broadcasts
from tests.weight_sync.sglang_payloads import stub_modules
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq
from verl_server.weight_sync.group import process_group, unique_id
from verl_server.weight_sync.group.group_connection import in_thread
from verl_server.weight_sync.group.process_group import WeightGroup
from verl_server.weight_sync.group.unique_id import connect_by_unique_id, read_unique_id
from verl_server.weight_sync.group.windows import windows_of

MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
ID = bytes(range(128))


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def pickled(value: bytes = ID, name: str = "ncclUniqueId") -> bytes:
    """Return the value that the trainer's rank 0 puts into the store."""
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
    (window,) = windows_of(names, dtypes, shapes, "packed", 1 << 20, 12)
    assert window.parts() == [(0, 16), (256, 16)], "b makes the first broadcast larger than 12 bytes"
    buffer = torch.zeros(window.nbytes, dtype=torch.uint8)
    buffer[0:12] = torch.tensor([1.0, 2.0, 3.0]).view(torch.uint8)
    buffer[256 + 12 : 256 + 16] = torch.tensor([7.0]).view(torch.uint8)
    tensors = dict(window.tensors(buffer))
    assert tensors["a"].tolist() == [1.0, 2.0, 3.0] and tensors["d"].tolist() == [7.0]
    assert tensors["b"].dtype == torch.bfloat16 and list(tensors["c"].shape) == [3]
    small = windows_of(names, dtypes, shapes, "packed", 64, 12)
    assert [w.names for w in small] == [["a", "b"], ["c", "d"]], "windows end between two broadcasts"


# -- two GPUs -------------------------------------------------------------------------------------------------

BOUND = 120.0
"""Longest wait in seconds for NCCL, which meets for the first time while other tests use the cores."""


class PyNccl:
    """Rank 0 of two, as vLLM's trainer is it: NCCL through ctypes, on the second GPU."""

    def __init__(self, port: int) -> None:
        self._nccl = ctypes.CDLL("libnccl.so.2")
        self._id = ncclUniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(self._id)))
        self._comm = ctypes.c_void_p()
        # The constructor returns when the other rank has connected, as in vLLM.
        self._store = TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=BOUND), use_libuv=False)
        self._store.set("broadcast_from/0/0", pickled(bytes(self._id)))  # type: ignore[arg-type]
        torch.cuda.set_device(1)
        self._check(self._nccl.ncclCommInitRank(ctypes.byref(self._comm), 2, self._id, 0))
        one = torch.zeros(1, device="cuda:1")
        address, stream = ctypes.c_void_p(one.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._check(self._nccl.ncclAllReduce(address, address, ctypes.c_size_t(1), 7, 0, self._comm, stream))
        torch.cuda.synchronize(1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        flat = tensor.contiguous().view(torch.uint8).view(-1)
        with torch.cuda.device(1):
            address, stream = ctypes.c_void_p(flat.data_ptr()), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            count = ctypes.c_size_t(flat.numel())
            self._check(self._nccl.ncclBroadcast(address, address, count, 1, 0, self._comm, stream))
            torch.cuda.synchronize(1)

    def _check(self, result: int) -> None:
        assert result == 0, f"NCCL returned {result}"


def join_on_two_gpus() -> tuple[PyNccl, WeightGroup]:
    with reserved_port() as port:
        starting = in_thread(lambda: PyNccl(port))
        joining = in_thread(lambda: WeightGroup.join(request(port), 0, torch.device("cuda:0"), BOUND))
        return starting.result(BOUND), joining.result(BOUND)


def weights_on_the_second_gpu() -> dict[str, torch.Tensor]:
    return {
        "a": torch.randn(300, 7, device="cuda:1"),
        "b": torch.randn(33, device="cuda:1", dtype=torch.bfloat16),
        "c": torch.randn(5, 5, device="cuda:1"),
    }


@pytest.mark.cuda
@pytest.mark.two_gpus
@pytest.mark.parametrize("load_format", [None, "packed"])
def test_tensors_of_a_vllm_trainer_arrive(load_format: str | None) -> None:
    weights = weights_on_the_second_gpu()
    trainer, group = join_on_two_gpus()
    names, shapes = list(weights), [list(tensor.shape) for tensor in weights.values()]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()]
    arriving = in_thread(
        lambda: [
            (name, tensor.clone())
            for window in group.receive(names, dtypes, shapes, load_format, 1 << 20, 8000)
            for name, tensor in window
        ]
    )
    tensors = list(weights.values())
    flat = [tensor.contiguous().view(torch.uint8).view(-1) for tensor in tensors]
    for part in tensors if load_format is None else [flat[0], torch.cat(flat[1:])]:  # 8400 bytes fill a buffer of 8000
        trainer.broadcast(part)
    received = dict(arriving.result(BOUND))
    group.close()
    assert all(torch.equal(received[name].cpu(), weights[name].cpu()) for name in names)


@pytest.mark.cuda
@pytest.mark.two_gpus
def test_state_dicts_of_a_prime_rl_trainer_arrive() -> None:
    weights = weights_on_the_second_gpu()
    trainer, group = join_on_two_gpus()
    for _ in range(2):
        arriving = in_thread(lambda: [entry for window in group.receive_state_dicts() for entry in window])
        for part in broadcasts([weights, {"d": torch.ones(4, device="cuda:1")}]):
            trainer.broadcast(part.to("cuda:1"))
        received = dict(arriving.result(BOUND))
        assert list(received) == ["a", "c", "b", "d"], "the tensors of one dtype are sent together"
        assert all(torch.equal(received[name].cpu(), weights[name].cpu()) for name in weights)
    group.close()
