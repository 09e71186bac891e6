"""A server process on the first GPU that reads a trainer's memory on the second one, for tests of the receiver.

`python -m tests.weight_sync.cuda_peer_reader` reads the weights of a `cuda_owner` once, and prints as JSON whether they
arrived, and whether this process has a CUDA context on each of the two GPUs. It is a process of its own, because a
context that another test made would stay.
"""

from __future__ import annotations

import ctypes
import json

import torch

from tests.weight_sync.fakes import FakeRunner
from tests.weight_sync.receiver.test_open_memory import Owner
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver


def has_context(ordinal: int) -> bool:
    """Ask the driver, because asking CUDA's runtime for the memory of a device would make a context on it."""
    driver = ctypes.CDLL("libcuda.so.1")
    device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    assert driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0
    assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)


def main() -> None:
    with torch.device("cuda", 0):
        runner = FakeRunner(dtype=torch.bfloat16)
    receiver = WeightReceiver(runner.weight_map, 0, 1, torch.device("cuda", 0))
    owner = Owner("cuda_owner", "1")
    try:
        receiver.register(owner.description, strict_dtype=False)
        plan = receiver.registrations.get(owner.description.id)
        assert plan is not None
        plan.commit()
        plan.discard()
        torch.cuda.synchronize(0)
        arrived = torch.equal(runner.embed.cpu(), torch.arange(32.0).reshape(8, 4).bfloat16())
        print(json.dumps({"arrived": arrived, "contexts": [has_context(0), has_context(1)]}), flush=True)
        receiver.registrations.forget(None)
    finally:
        owner.end()


if __name__ == "__main__":
    main()
