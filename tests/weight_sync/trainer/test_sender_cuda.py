"""CUDA memory on the trainer's side: moves are detected, and memory that a server may map is held."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from tests.busy_gpu import queue_late
from tests.fake_engine import FakeEngine
from verl_server.weight_sync.trainer.exports import allocation_id
from verl_server.weight_sync.trainer.sender import WeightSender

pytestmark = pytest.mark.cuda
SEGMENT = 64 << 20
"""Size in bytes for which the allocator makes a segment of its own."""


def allocated_without_garbage() -> int:
    """Return the bytes that tensors of this process use. Garbage of earlier tests would be freed at any time later."""
    gc.collect()
    return torch.cuda.memory_allocated()


def test_an_allocation_has_one_number_for_life() -> None:
    tensor = torch.zeros(SEGMENT, dtype=torch.uint8, device="cuda")
    number = allocation_id(tensor.data_ptr())
    assert number
    assert allocation_id(tensor.data_ptr() + SEGMENT - 1) == number
    in_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_thread.append(allocation_id(tensor.data_ptr())))
    thread.start()
    thread.join(10)
    assert in_thread == [number], "also in a thread that never used CUDA"
    assert allocation_id(torch.zeros(4).data_ptr()) == 0


def test_another_allocation_at_the_same_address_has_another_number() -> None:
    seen: dict[int, int] = {}
    for _ in range(50):
        tensor = torch.zeros(SEGMENT, dtype=torch.uint8, device="cuda")
        address, number = tensor.data_ptr(), allocation_id(tensor.data_ptr())
        if address in seen:
            assert seen[address] != number
            return
        seen[address] = number
        del tensor
        torch.cuda.empty_cache()
    pytest.skip("no address came twice")


def test_memory_freed_and_allocated_again_in_place_is_seen() -> None:
    sender = WeightSender()
    tensor = torch.zeros(SEGMENT, dtype=torch.uint8, device="cuda")
    before = sender.describe([("w", tensor)]).description
    for _ in range(2):  # from the second time on, the allocator's count of frees replaces a query of the driver
        assert sender.describe([("w", tensor)]).description is before
    storage = tensor.untyped_storage()
    storage.resize_(0)
    torch.cuda.empty_cache()
    storage.resize_(SEGMENT)
    after = sender.describe([("w", tensor)]).description
    assert after.id != before.id
    assert after.allocations[0].handle != before.allocations[0].handle


def test_unmoved_memory_has_one_description() -> None:
    model, sender = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).cuda(), WeightSender()
    first = sender.describe(list(model.named_parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    optimizer.step()
    second = sender.describe(list(model.named_parameters()))
    assert second.description is first.description
    assert second.can_be_kept
    assert all(allocation.kind == "cuda" for allocation in first.description.allocations)


def test_writes_of_any_stream_are_done_before_the_ranks_meet() -> None:
    sender, tensor, stream = WeightSender(), torch.zeros(1024, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1)
        tensor.add_(0)  # load the kernel now, because loading waits for the device
    for _ in range(2):  # the first description is new, the second one is reused
        written = queue_late(stream, lambda: tensor.add_(1))
        sender.describe([("w", tensor)])
        assert written.query()


def test_registered_memory_is_held_until_the_server_has_closed_it() -> None:
    engine, before = FakeEngine(), allocated_without_garbage()
    weights = {"w": torch.zeros(SEGMENT, dtype=torch.uint8, device="cuda")}
    engine.register_weights(lambda: weights.items())
    weights["w"] = torch.zeros(4, device="cuda")
    assert torch.cuda.memory_allocated() - before >= SEGMENT, "a server may map it"
    engine.push_weights()
    assert torch.cuda.memory_allocated() - before < SEGMENT, "the server was asked to forget it"
    engine.unregister_weights()
    weights.clear()
    assert torch.cuda.memory_allocated() <= before


def test_one_shot_memory_is_not_held() -> None:
    engine, before = FakeEngine(), allocated_without_garbage()
    for _ in range(3):
        engine.update_weights_from_tensor([("w", torch.zeros(SEGMENT, dtype=torch.uint8, device="cuda"))])
    assert torch.cuda.memory_allocated() <= before


def test_expandable_segments_travel_through_shared_memory() -> None:
    script = (
        "import torch\nfrom tests.weight_sync.reading import read\n"
        "from verl_server.weight_sync.trainer.sender import WeightSender\n"
        "tensor, sender = torch.zeros(1000, device='cuda'), WeightSender()\n"
        "first = sender.describe([('w', tensor)]).description\n"
        "assert [a.kind for a in first.allocations] == ['shm']\n"
        "tensor.fill_(3)\n"
        "assert sender.describe([('w', tensor)]).description is first\n"
        "assert (read(first)['w'] == 3).all()\n"
    )
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, timeout=100, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "expandable segments" in done.stderr
