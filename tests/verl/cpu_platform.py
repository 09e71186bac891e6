"""A platform "cpu" for verl, so that its workers and trainer run without a GPU: `VERL_PLATFORM=cpu`.

verl imports this module in every process, through `VERL_USE_EXTERNAL_MODULES`. Ray's GPUs are a fiction: they are
counted, and no process uses one.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> types.ModuleType:
    """Return torch.cpu with the functions of torch.cuda that verl also calls."""
    module = types.ModuleType("cpu_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_, **__: 0)
    for name in ("reset_peak_memory_stats", "ipc_collect", "manual_seed", "manual_seed_all", "set_device"):
        setattr(module, name, lambda *_, **__: None)
    others: dict[str, Any] = {
        "current_device": lambda: "cpu",
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (8 << 30, 16 << 30),
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=16 << 30),
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }
    for name, function in others.items():
        setattr(module, name, function)
    return module


_DEVICE_MODULE = _device_module()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The CPU in the place of an accelerator."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "verl_server")
    device_module = property(lambda self: _DEVICE_MODULE)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """Return "gloo", and create the default process group where verl is about to create it.

        verl passes the backend "cpu:gloo,cpu:gloo", which torch refuses, unless a group exists already.
        """
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not dist.is_initialized():
            dist.init_process_group(
                "cpu:gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
