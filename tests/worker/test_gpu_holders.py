"""`gpu_holders` reads a stand-in for NVIDIA's management library."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.held_memory import smaller_card
from benchmarks.shapes import shape_folder
from verl_server import HttpServerEngineAdapter
from verl_server.errors import ServerLaunchError
from verl_server.worker import gpu_holders as module
from verl_server.worker.cuda_context import find_uuid
from verl_server.worker.device import device_uuid
from verl_server.worker.gpu_holders import GpuHolders, gpu_holders, holders_sentence

GIB = 2**30
UUID = "8a3a1b6e-0000-1111-2222-333344445555"


class Nvml:
    """The calls of NVML that the module makes, for one GPU of 80 GiB."""

    def __init__(self, free: int, processes: dict[int, int]) -> None:
        self.free, self.processes = free, processes
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> int:
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        return 0 if uuid == f"GPU-{UUID}".encode() else 6

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, device: Any) -> int:
        return 0 if index.value == 0 else 2

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 80 * GIB, self.free
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, device: Any, count: Any, into: Any) -> int:
        if into is None or count._obj.value < len(self.processes):
            count._obj.value = len(self.processes)
            return 7
        for slot, (pid, used) in zip(into, self.processes.items(), strict=False):
            slot.pid, slot.used = pid, used
        count._obj.value = len(self.processes)
        return 0


def replace_nvml(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setattr(module.ctypes, "CDLL", lambda _: nvml)


@pytest.mark.parametrize("name", [UUID, f"GPU-{UUID}", "0"])
def test_other_processes_are_listed_with_their_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    nvml = Nvml(16 * GIB, {os.getpid(): GIB, os.getppid(): 60 * GIB, 2**30: 3 * GIB})
    replace_nvml(monkeypatch, nvml)
    found = gpu_holders(name)
    assert found == GpuHolders(16 * GIB, 80 * GIB, {os.getppid(): 60 * GIB, 2**30: 3 * GIB}, own=GIB)
    parent = Path(f"/proc/{os.getppid()}/comm").read_text().strip()
    assert found.sentence() == (
        f"Other processes hold 63.00 GiB of the GPU's 80.00 GiB (process {os.getppid()} ({parent}): 60.00 GiB; "
        f"process {2**30}: 3.00 GiB)."
    )
    assert not nvml.is_open


def test_a_driver_that_lists_no_process_does_not_hide_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_nvml(monkeypatch, Nvml(16 * GIB, {}))
    assert "hold 64.00 GiB of the GPU's 80.00 GiB (the driver names none here" in holders_sentence(UUID)


def test_a_process_without_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_nvml(monkeypatch, Nvml(16 * GIB, {2**30: 2**64 - 1}))
    assert f"(process {2**30})." in holders_sentence(UUID)


def test_nobody_holds_memory_of_an_idle_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_nvml(monkeypatch, Nvml(80 * GIB - GIB // 2, {os.getpid(): GIB // 2}))
    assert holders_sentence(UUID) == ""


def test_an_unknown_gpu_or_a_missing_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_nvml(monkeypatch, Nvml(GIB, {}))
    assert gpu_holders("GPU-another") is None and gpu_holders("1") is None
    replace_nvml(monkeypatch, object())  # a library without these calls
    assert gpu_holders(UUID) is None

    def missing(_: str) -> ctypes.CDLL:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert holders_sentence(UUID) == ""


# -- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_the_library_and_torch_agree() -> None:
    free, total = torch.cuda.mem_get_info(0)
    uuid = device_uuid(torch.device("cuda", 0))
    found = gpu_holders(uuid)
    assert found is not None and find_uuid(0) == uuid
    assert abs(found.total - total) < 2 * GIB and abs(found.free - free) < 2 * GIB


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_a_start_beside_a_process_that_holds_the_rest_says_what_is_needed(tmp_path: Path) -> None:
    folder = shape_folder(tmp_path, "0.6b")
    settings: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cuda"}
    torch.cuda.empty_cache()
    with (
        smaller_card(3.0),
        pytest.raises(ServerLaunchError, match=r"does not fit this GPU \(cuda:0\): 4\.\d\d GiB are needed") as error,
    ):
        HttpServerEngineAdapter(model_path=str(folder), port=0, **settings)
    assert "Other processes hold" in str(error.value) and "Traceback" not in str(error.value)
    assert "chunked_prefill_size=" in str(error.value)
