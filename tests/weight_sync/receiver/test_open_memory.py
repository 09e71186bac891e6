"""Memory of other processes is opened once, shows the owner's latest values, and is closed after the last reader."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests import fork_server
from tests.weight_sync.described import SharedMemory
from tests.weight_sync.fakes import EMBED
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation, TensorHandle, WeightsDescription
from verl_server.weight_sync.receiver.open_memory import OpenAllocations, fault_in

CPU = torch.device("cpu")


class Owner:
    """A child process that runs `owner.py`, or another module with the same commands."""

    def __init__(self, module: str = "owner", *arguments: str) -> None:
        self.process = fork_server.run_module(
            f"tests.weight_sync.{module}",
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.description = msgspec.json.decode(self.process.stdout.readline(), type=WeightsDescription)
        (source,) = (t for t in self.description.tensors if t.name == EMBED)
        self.handle = TensorHandle(
            allocation=self.description.allocations[0],
            dtype=source.dtype,
            shape=source.shards[0].shape,
            stride=source.shards[0].stride,
            storage_offset=source.shards[0].storage_offset,
        )
        """A handle of the embedding's first five rows."""

    def tell(self, what: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def owner() -> Iterator[Owner]:
    process = Owner()
    yield process
    process.end()


def handle_of(memory: SharedMemory, tensor: torch.Tensor, **change: Any) -> TensorHandle:
    shard = memory.shard(tensor, [0] * tensor.dim())
    fields = {
        "allocation": memory.allocation,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": shard.shape,
        "stride": shard.stride,
        "storage_offset": shard.storage_offset,
    }
    return TensorHandle(**(fields | change))


def mappings() -> int:
    gc.collect()
    return sum("memfd:verl-" in line for line in Path("/proc/self/maps").read_text().splitlines())


FIRST = torch.arange(20.0).reshape(5, 4)


def test_another_process_is_read_as_it_writes(owner: Owner) -> None:
    held = OpenAllocations(CPU).hold()
    first = held.view("a", owner.handle)
    assert torch.equal(first, FIRST)
    owner.tell("write")
    assert torch.equal(held.view("a", owner.handle), FIRST * 10)
    assert held.view("a", owner.handle).data_ptr() == first.data_ptr(), "opened once"


def test_holders_share_a_region_and_the_last_one_closes_it(owner: Owner) -> None:
    memory, before = OpenAllocations(CPU), mappings()
    holders = [memory.hold() for _ in range(3)]
    addresses = {held.view("a", owner.handle).data_ptr() for held in holders}
    assert (len(addresses), len(memory), mappings() - before) == (1, 1, 1)
    holders[0].clear()
    holders.pop()
    assert len(memory) == 1
    holders[1].clear()
    assert (len(memory), mappings() - before) == (0, 0)


def test_a_view_keeps_its_memory_when_its_owner_and_holder_are_gone(owner: Owner) -> None:
    memory, before = OpenAllocations(CPU), mappings()
    held = memory.hold()
    view = held.view("a", owner.handle)
    held.clear()
    owner.end()
    assert torch.equal(view, FIRST)
    del view
    assert mappings() == before


def test_an_owner_that_is_gone_is_named_with_the_possible_causes(owner: Owner) -> None:
    owner.end()
    with pytest.raises(WeightUpdateError, match=rf"'a'.*{owner.process.pid}.*same user.*PID namespace"):
        OpenAllocations(CPU).view("a", owner.handle)


def test_memory_that_was_freed_is_not_taken_for_what_came_after(owner: Owner) -> None:
    inode = msgspec.structs.replace(owner.handle.allocation, inode=owner.handle.allocation.inode + 1)
    pipe = msgspec.structs.replace(owner.handle.allocation, fd=0)
    # A restarted trainer has the same pid, descriptor and inode by chance.
    arena = msgspec.structs.replace(owner.handle.allocation, id="0" * 32)
    for other in (inode, pipe, arena):
        with pytest.raises(WeightUpdateError, match="not the memory that was described"):
            OpenAllocations(CPU).view("a", msgspec.structs.replace(owner.handle, allocation=other))
    owner.tell("free")
    with pytest.raises(WeightUpdateError, match="Cannot open"):
        OpenAllocations(CPU).view("a", owner.handle)


def test_an_ordinary_file_is_not_taken_for_weights(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(bytes(4096))
    with file.open("rb") as opened:
        status = os.fstat(opened.fileno())
        file_as = Allocation(id="x", kind="shm", nbytes=16, pid=os.getpid(), fd=opened.fileno(), inode=status.st_ino)
        handle = TensorHandle(allocation=file_as, dtype="float32", shape=[4], stride=[1])
        with pytest.raises(WeightUpdateError, match="not the memory that was described"):
            OpenAllocations(CPU).view("a", handle)


def test_a_region_smaller_than_described_is_refused() -> None:
    memory = SharedMemory()
    handle = handle_of(memory, memory.put(torch.ones(4)))
    huge = msgspec.structs.replace(handle.allocation, nbytes=1 << 40)
    with pytest.raises(WeightUpdateError, match="1,099,511,627,776 were described"):
        OpenAllocations(CPU).view("a", msgspec.structs.replace(handle, allocation=huge))


def test_memory_that_can_be_cut_off_is_copied() -> None:
    sealed, unsealed = SharedMemory(), SharedMemory(sealed=False)
    held = OpenAllocations(CPU).hold()
    views = [held.view("a", handle_of(memory, memory.put(torch.ones(4)))) for memory in (sealed, unsealed)]
    with pytest.raises(OSError):
        os.ftruncate(sealed.fd, 0)
    os.ftruncate(unsealed.fd, 0)  # to read a mapping of it would be SIGBUS now
    assert all(torch.equal(view, torch.ones(4)) for view in views)
    with pytest.raises(WeightUpdateError, match=r"'a': .* was cut off while it was read, at byte 0"):
        held.read_again()


def test_memory_that_shrinks_and_is_sealed_then_is_not_mapped_by_its_old_size(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SharedMemory(sealed=False)
    handle = handle_of(memory, memory.put(torch.ones(4)))
    control = fcntl.fcntl

    def cut_and_seal(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_GET_SEALS:
            os.ftruncate(memory.fd, 0)
            control(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return control(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", cut_and_seal)
    with pytest.raises(WeightUpdateError, match="holds 0 bytes, but 1,048,576 were described"):
        OpenAllocations(CPU).view("a", handle)


def test_copies_are_read_again_when_their_owner_has_written() -> None:
    memory = SharedMemory(sealed=False)
    theirs = memory.put(torch.arange(12.0).reshape(3, 4).t())
    held = OpenAllocations(CPU).hold()
    view = held.view("a", handle_of(memory, theirs))
    assert view.stride() == theirs.stride() and torch.equal(view, theirs)
    theirs.mul_(3)
    held.read_again()
    assert torch.equal(view, theirs)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_view_with_wide_strides_costs_what_its_elements_cost(sealed: bool) -> None:
    memory = SharedMemory(256 << 20, sealed=sealed)  # sparse: nothing is written
    rows, stride = 20 << 10, 6 << 10
    handle = TensorHandle(
        allocation=memory.allocation, dtype="bfloat16", shape=[rows // 4, 2, 2], stride=[4 * stride, stride, 1]
    )
    before = os.fstat(memory.fd).st_blocks
    view = OpenAllocations(CPU).view("a", handle)
    fault_in([view])
    assert not view.float().any() and view.shape == (rows // 4, 2, 2)
    assert os.fstat(memory.fd).st_blocks == before, "no page was allocated for a hole"
    assert view.untyped_storage().nbytes() == view.nbytes


@pytest.mark.parametrize("shape", [(5, 3, 4), (60,), (1, 60), (60, 1)])
def test_scattered_elements_keep_their_places(shape: tuple[int, ...]) -> None:
    memory = SharedMemory()
    values = torch.arange(60.0).reshape(shape)
    spread = (
        torch.nn.functional.pad(values, (0, 200))[..., : shape[-1]] if shape[-1] > 1 else values.repeat(1, 99)[:, :1]
    )
    spread = spread if len(shape) > 1 else values[:, None].repeat(1, 99)[:, 0]
    theirs = memory.put(spread)
    copy = OpenAllocations(CPU).view("a", handle_of(memory, theirs))
    assert torch.equal(copy, values)


def test_long_rows_are_mapped_however_far_apart_they_lie() -> None:
    memory = SharedMemory(64 << 20)  # sparse
    handle = TensorHandle(allocation=memory.allocation, dtype="float32", shape=[4, 1024], stride=[4 << 20, 1])
    before = os.fstat(memory.fd).st_blocks
    view = OpenAllocations(CPU).view("a", handle)
    fault_in([view])
    assert view.stride() == (4 << 20, 1), "no copy"
    assert not view.any() and os.fstat(memory.fd).st_blocks - before <= 4 * 3 * 8


def test_a_view_of_too_many_scattered_rows_is_refused() -> None:
    memory = SharedMemory(64 << 20)
    handle = TensorHandle(allocation=memory.allocation, dtype="bfloat16", shape=[1 << 19], stride=[60])
    with pytest.raises(
        WeightUpdateError, match=r"'a': its 524,288 elements lie scattered .* Make the tensor contiguous"
    ):
        OpenAllocations(CPU).view("a", handle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [100], "stride": [1]}, "needs 400 bytes"),
        ({"shape": [2, 2], "stride": [1000, 1]}, "needs"),
        ({"storage_offset": 1 << 70}, "needs"),
        ({"storage_offset": -1}, "do not describe"),
        ({"stride": [-1]}, "do not describe"),
        ({"shape": [-4]}, "do not describe"),
        ({"shape": [2, 2]}, "do not describe"),
        ({"shape": [2**62, 2**62], "stride": [0, 0]}, "do not describe"),
        ({"shape": [2**70], "stride": [0]}, "do not describe"),
        ({"shape": [1], "stride": [2**70]}, "do not describe"),
        ({"shape": [0, 2**62, 2**62], "stride": [1, 1, 1]}, "do not describe"),
        ({"dtype": "int64"}, "int64"),
        ({"dtype": "load"}, "load"),
    ],
)
def test_a_view_outside_its_allocation_is_refused(change: dict[str, Any], message: str) -> None:
    memory = SharedMemory()
    small = msgspec.structs.replace(memory.allocation, nbytes=16)
    forged = handle_of(memory, memory.put(torch.ones(4)), **({"allocation": small} | change))
    with pytest.raises(WeightUpdateError, match=f"'a': .*{message}"):
        OpenAllocations(CPU).view("a", forged)


def test_empty_tensors_need_no_memory() -> None:
    nowhere = Allocation(id="", kind="shm", nbytes=0)
    handle = TensorHandle(allocation=nowhere, dtype="bfloat16", shape=[0, 4], stride=[4, 1])
    assert OpenAllocations(CPU).view("a", handle).shape == (0, 4)


def test_gpu_memory_is_refused_by_a_cpu_server() -> None:
    handle = TensorHandle(allocation=Allocation(id="x", kind="cuda", nbytes=4), dtype="float32", shape=[1], stride=[1])
    with pytest.raises(WeightUpdateError, match="Push CPU tensors"):
        OpenAllocations(CPU).view("a", handle)


def resident(address: int) -> int:
    """Return the resident bytes of the mapping that contains `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            start, end = (int(part, 16) for part in line.split()[0].split("-"))
            inside = start <= address < end
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("not mapped")


def test_only_what_is_read_is_faulted_in() -> None:
    owner = SharedMemory(16 << 20)
    tensor = owner.put(torch.ones(2 << 20))  # 8 MiB of 16 MiB
    view = OpenAllocations(CPU).view("a", handle_of(owner, tensor))
    part = view[1 << 20 :]
    before = resident(view.data_ptr())
    fault_in([part, part[:5], torch.empty(0)])
    grown = resident(view.data_ptr()) - before
    if grown == 0:
        pytest.skip("this kernel does not know MADV_POPULATE_READ")
    assert (4 << 20) <= grown < (6 << 20)
