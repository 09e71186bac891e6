"""Arenas return memory to the system and keep addresses: on the CPU, with a fake CUDA driver, and on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_server.errors import ServerUnavailableError
from verl_server.worker import cuda_memory, memory_arena
from verl_server.worker.cuda_memory import AccessDesc, AllocationProp, DeviceRegion, DriverError
from verl_server.worker.memory_arena import HostRegion, MemoryArena, aligned

MIB = 2**20
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- on the CPU ------------------------------------------------------------------------------------------------


def test_release_gives_pages_to_the_system_and_keeps_addresses() -> None:
    arena = MemoryArena(64 * MIB, CPU)
    view = arena.view(aligned(1000), (1000, 1000), torch.float32)
    address = view.data_ptr()
    assert arena.is_present and arena.bytes_held == arena.nbytes == 64 * MIB and address % 512 == 0
    empty = resident_bytes()
    for _ in range(3):
        arena.contents.fill_(1)
        full = resident_bytes()
        assert full - empty > 60 * MIB
        arena.release()
        assert full - resident_bytes() > 60 * MIB
        assert (arena.is_present, arena.bytes_held) == (False, 0)
        assert arena.resume() is False
        assert arena.is_present and view.data_ptr() == address
        assert (view == 0).all(), "zeros after resume, not the old values"
        view.fill_(2.0)
        again = arena.view(aligned(1000), (1000, 1000), torch.float32)
        assert again.data_ptr() == address and (again == 2.0).all()
    assert resident_bytes() - empty < 16 * MIB  # one view's pages


def test_misuse_does_no_harm() -> None:
    arena = MemoryArena(MIB, CPU)
    arena.contents.fill_(7)
    assert arena.resume() is True and (arena.contents == 7).all(), "nothing was released"
    arena.release()
    arena.release()
    assert (arena.contents == 0).all()  # a read before the resume returns zeros
    assert arena.resume() is False and arena.resume() is True


def test_views_that_do_not_fit_are_refused() -> None:
    arena = MemoryArena(4096, CPU)
    assert arena.view(4092, (1,), torch.float32).numel() == 1
    assert arena.view(4096, (0, 5), torch.float32).shape == (0, 5)
    for offset, shape in ((4093, (1,)), (4096, (1,)), (-4, (1,)), (0, (1025,)), (2, (1,))):
        with pytest.raises(ValueError, match="does not fit"):
            arena.view(offset, shape, torch.float32)
    assert MemoryArena(0, CPU).nbytes > 0


def test_kept_contents_come_back_on_the_cpu() -> None:
    arena = MemoryArena(4 * MIB, CPU)
    arena.contents.fill_(3)
    arena.release(keep_contents=True)
    assert not arena.is_present and arena.bytes_held == arena.nbytes, "the CPU has no cheaper place for kept contents"
    assert arena.resume() is True and (arena.contents == 3).all()
    arena.release()
    assert arena.resume() is False and (arena.contents == 0).all()


def test_the_last_view_gives_the_memory_back() -> None:
    arena = MemoryArena(64 * MIB, CPU)
    view = arena.view(0, (16 * MIB,), torch.float32).fill_(1.0)
    del arena
    gc.collect()
    assert (view == 1.0).all()
    full = resident_bytes()
    del view
    gc.collect()
    assert full - resident_bytes() > 60 * MIB


def test_memory_that_the_system_refuses_is_named() -> None:
    with pytest.raises(ServerUnavailableError, match=r"refused 1073741824\.00 GiB .* smaller kv_cache_gib"):
        MemoryArena(2**60, CPU)


# -- a fake driver ---------------------------------------------------------------------------------------------


class FakeDriver:
    """A CUDA driver that records reserved, held and mapped memory.

    Each (name, code) in `fail` makes the next call of that name return the code.
    """

    def __init__(self) -> None:
        self.fail: list[tuple[str, int]] = []
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: dict[int, int] = {}
        self._next = 1

    @property
    def held_bytes(self) -> int:
        return sum(self.handles.values()) + sum(self.mapped.values())

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self), f"_{name}")

        def call(*arguments: Any) -> int:
            for i, (failing, code) in enumerate(self.fail):
                if failing == name:
                    del self.fail[i]
                    return code
            return int(method(self, *arguments) or 0)

        return call

    def _cuMemGetAllocationGranularity(self, size: Any, prop: Any, option: int) -> None:
        size._obj.value = 2 * MIB

    def _cuMemAddressReserve(self, address: Any, nbytes: int, *zeros: int) -> None:
        address._obj.value = 2 << 40
        self.reserved[2 << 40] = nbytes
        assert zeros == (0, 0, 0)

    def _cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes and address not in self.mapped

    def _cuMemCreate(self, handle: Any, nbytes: int, prop: Any, flags: int) -> None:
        assert (prop._obj.type, prop._obj.location.type, prop._obj.location.id) == (1, 1, 3)
        self._next += 1
        handle._obj.value = self._next
        self.handles[self._next] = nbytes

    def _cuMemRelease(self, handle: Any) -> None:
        self.handles.pop(handle.value)

    def _cuMemMap(self, address: int, nbytes: int, offset: int, handle: Any, flags: int) -> None:
        assert self.reserved[address] == nbytes == self.handles[handle.value] and address not in self.mapped
        self.mapped[address] = nbytes

    def _cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> None:
        assert (access._obj.flags, access._obj.location.id, count) == (3, 3, 1)
        self.accessible[address] = nbytes

    def _cuMemUnmap(self, address: int, nbytes: int) -> int:
        self.accessible.pop(address, None)
        return 0 if self.mapped.pop(address, None) == nbytes else 1

    def _cuGetErrorName(self, code: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR_OF_A_TEST"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(cuda_memory, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (MIB, 4 * MIB))
    yield fake
    gc.collect()  # regions must end while the fake driver is in place
    assert fake.held_bytes == 0 and not fake.reserved


def test_structures_are_laid_out_as_in_cuda_h() -> None:
    assert (ctypes.sizeof(AllocationProp), ctypes.sizeof(AccessDesc)) == (32, 12)
    offsets = [getattr(AllocationProp, name).offset for name, *_ in AllocationProp._fields_]
    assert offsets == [0, 4, 8, 16, 24] and AccessDesc.flags.offset == 8


def test_a_region_maps_unmaps_and_ends_with_nothing_held(driver: FakeDriver) -> None:
    region = DeviceRegion(3 * MIB, torch.device("cuda", 3))
    assert region.nbytes == 4 * MIB
    for _ in range(3):
        assert region.is_mapped and not driver.handles
        assert driver.mapped == driver.accessible == {region.address: 4 * MIB}
        region.unmap()
        assert not region.is_mapped and driver.held_bytes == 0 and driver.reserved
        region.map()
    del region
    gc.collect()
    assert driver.held_bytes == 0 and not driver.reserved


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_is_short_leaves_nothing_half_mapped(driver: FakeDriver, call: str) -> None:
    region = DeviceRegion(4 * MIB, torch.device("cuda", 3))
    region.unmap()
    driver.fail = [(call, 2), (call, 2)]
    with pytest.raises(ServerUnavailableError, match=r"cuda:3 has 0\.00 GiB of .* free, .* mem_fraction_static"):
        region.map()
    assert not region.is_mapped and driver.held_bytes == 0 and driver.reserved
    driver.fail = [(call, 2)]  # as if torch's cache had returned enough memory for the second try
    region.map()
    assert region.is_mapped and driver.mapped == driver.accessible == {region.address: 4 * MIB}
    driver.fail = [(call, 999)]
    region.unmap()
    with pytest.raises(DriverError, match=rf"{call} failed: CUDA_ERROR_OF_A_TEST \(999\)"):
        region.map()
    assert driver.held_bytes == 0


def test_a_region_that_cannot_be_made_leaves_nothing(driver: FakeDriver) -> None:
    driver.fail = [("cuMemCreate", 2), ("cuMemCreate", 2)]
    with pytest.raises(ServerUnavailableError):
        DeviceRegion(4 * MIB, torch.device("cuda", 3))
    gc.collect()
    assert driver.held_bytes == 0 and not driver.reserved


class ForgetfulRegion(HostRegion):
    """A device's region as the arena sees it: unmapped contents are lost, and `map` raises while `short` is True."""

    short = False

    def __init__(self, nbytes: int, device: torch.device) -> None:
        super().__init__(nbytes)

    def map(self) -> None:
        if self.short:
            raise ServerUnavailableError("too little")
        super().map()
        self.tensor().fill_(0xAA)


@pytest.mark.parametrize("pinned", [True, False])
def test_kept_contents_come_back_from_host_memory(monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    regions: list[int] = []

    def pin(memory: torch.Tensor, device: torch.device) -> None:
        if not pinned:
            raise DriverError("cuMemHostRegister", 2)
        regions.append(memory.data_ptr())

    monkeypatch.setattr(cuda_memory, "_driver", FakeDriver)
    monkeypatch.setattr(memory_arena, "DeviceRegion", ForgetfulRegion)
    monkeypatch.setattr(memory_arena, "pin", pin)
    monkeypatch.setattr(memory_arena, "unpin", lambda memory, device: regions.remove(memory.data_ptr()))
    arena = MemoryArena(MIB, CUDA)
    for value in (1, 2):
        arena.contents.fill_(value)
        arena.release(keep_contents=True)
        assert arena.bytes_held == 0
        monkeypatch.setattr(ForgetfulRegion, "short", True)
        with pytest.raises(ServerUnavailableError):
            arena.resume()
        assert not arena.is_present
        arena.release()  # does not lose the kept contents
        monkeypatch.setattr(ForgetfulRegion, "short", False)
        assert arena.resume() is True and (arena.contents == value).all()
    assert len(regions) == (1 if pinned else 0), "pinned once, however often it is used"
    arena.release()
    assert arena.resume() is False
    del arena
    gc.collect()
    assert not regions


# -- on a GPU --------------------------------------------------------------------------------------------------

ARENA = 1024 * MIB
"""Bytes of an arena on the GPU. An arena is freed as a whole or not at all, so half of it tells the two apart.

The other half is for what these tests do not measure, such as code that CUDA loads at the first launch of a kernel.
"""


def free_bytes() -> int:
    torch.cuda.synchronize(CUDA)
    return int(torch.cuda.mem_get_info(CUDA)[0])


def use_once(arena: MemoryArena) -> None:
    """Use an arena as the tests do: CUDA loads code and reserves stacks at the first launch, and keeps both."""
    numbers = arena.view(0, (1024,), torch.int64)
    torch.arange(1024, device=CUDA, out=numbers)
    arena.release(keep_contents=True)
    arena.resume()
    assert (numbers == 1).sum() == 1
    arena.contents.fill_(0)
    graph, _ = multiply_in_a_graph(arena.view(0, (256, 256), torch.float32).fill_(1.0))
    graph.replay()
    torch.cuda.synchronize(CUDA)


def multiply_in_a_graph(matrix: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture the product of the matrix [n, n] and a vector of ones. Return (graph, product [n]).

    The graph reads the ones at their address, so it keeps them.
    """
    ones = torch.ones(len(matrix), device=CUDA)
    out = torch.zeros_like(ones)
    out.copy_(matrix @ ones)  # the set-up of the first call must not be captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(matrix @ ones)
    graph.input = ones  # type: ignore[attr-defined]
    return graph, out


@pytest.fixture
def free_before() -> Iterator[int]:
    """Return the free bytes of the device. At the end of the test, assert that no arena is left."""
    use_once(MemoryArena(4 * MIB, CUDA))
    gc.collect()
    torch.cuda.empty_cache()
    before = free_bytes()
    yield before
    gc.collect()
    torch.cuda.empty_cache()
    assert before - free_bytes() < ARENA // 2


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_a_graph_survives_release_and_resume(free_before: int) -> None:
    arena = MemoryArena(ARENA, CUDA)
    matrix = arena.view(aligned(10_000), (1024, 1024), torch.float32)
    address = matrix.data_ptr()
    assert matrix.device == CUDA and address % 512 == 0
    graph, out = multiply_in_a_graph(matrix.fill_(1.0))
    for value in (2.0, 3.0):
        held = free_bytes()
        arena.release()
        assert free_bytes() - held > ARENA // 2
        arena.resume()
        assert matrix.data_ptr() == address
        matrix.fill_(value)
        graph.replay()
        torch.cuda.synchronize(CUDA)
        assert (out == 1024 * value).all()


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_many_cycles_leak_nothing(free_before: int) -> None:
    """Cycles that keep only one page of the device each (2 MiB) keep twice the bound in all."""
    arena, cycles = MemoryArena(ARENA // 2, CUDA), 100
    held = free_bytes()
    for i in range(cycles):
        arena.contents.fill_(i)
        arena.release()
        arena.resume()
    assert abs(held - free_bytes()) < cycles * MIB


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_memory_short_on_the_device(free_before: int) -> None:
    arena = MemoryArena(2 * ARENA, CUDA)
    arena.release()
    hog = MemoryArena(free_bytes() - ARENA, CUDA)
    with pytest.raises(ServerUnavailableError, match=r"2\.00 GiB are needed"):
        arena.resume()
    assert not arena.is_present
    del hog
    gc.collect()
    arena.resume()
    arena.contents.fill_(1)
    assert int(arena.contents[-1]) == 1


@pytest.mark.cuda
@pytest.mark.gpu_alone
@pytest.mark.parametrize("released", [True, False])
def test_the_end_of_an_arena_frees_the_device(free_before: int, released: bool) -> None:
    arena = MemoryArena(ARENA, CUDA)
    assert free_before - free_bytes() > ARENA // 2
    view = arena.view(0, (16,), torch.float32).fill_(1.0)
    if released:
        arena.release()
    del arena
    gc.collect()
    if not released:
        assert (view == 1.0).all(), "a view keeps the memory"
        assert free_before - free_bytes() > ARENA // 2
    del view
    gc.collect()
    assert free_before - free_bytes() < ARENA // 2


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_contents_come_back_from_pinned_memory(free_before: int) -> None:
    arena = MemoryArena(ARENA, CUDA)
    numbers = arena.view(0, (1 << 20,), torch.int64)
    for start in (0, 5):
        torch.arange(start, start + (1 << 20), device=CUDA, out=numbers)
        held = free_bytes()
        arena.release(keep_contents=True)
        assert free_bytes() - held > ARENA // 2
        assert arena.resume() is True
        assert torch.equal(numbers.cpu(), torch.arange(start, start + (1 << 20)))
