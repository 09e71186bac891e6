"""GPU memory of another process: reads see every write, stay inside the allocation, and leave nothing open."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.weight_sync.cuda_owner import LARGE
from tests.weight_sync.fakes import FakeRunner
from tests.weight_sync.receiver.test_open_memory import Owner
from tests.weight_sync.receiver.test_registrations import push, wait_for_end
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver

pytestmark = pytest.mark.cuda

EMBED = torch.arange(32.0).reshape(8, 4)


@pytest.fixture
def owner() -> Iterator[Owner]:
    process = Owner("cuda_owner")
    yield process
    process.end()


@pytest.fixture
def runner() -> FakeRunner:
    """A runner with bfloat16 parameters on the GPU, so that every update is converted."""
    with torch.device("cuda"):
        return FakeRunner(dtype=torch.bfloat16)


@pytest.fixture
def receiver(runner: FakeRunner) -> WeightReceiver:
    return WeightReceiver(runner.weight_map, 0, 1, torch.device("cuda", 0))


def holds(runner: FakeRunner, times: float) -> bool:
    torch.cuda.synchronize()
    return torch.equal(runner.embed.cpu(), (EMBED * times).bfloat16()) and bool((runner.norm == times).all())


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def is_freed(free_before: int) -> bool:
    """Return True if the owner's large allocation was freed since `free_before` bytes were free.

    The driver keeps it as long as a process maps it. Half of it is more than all else that may be freed or taken: the
    owner's context, and code that CUDA loads in this process.
    """
    return free_bytes() - free_before > LARGE // 2


@pytest.mark.gpu_alone
def test_an_update_is_read_and_closed(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    for _ in range(3):
        plan = receiver.stage(owner.description, strict_dtype=False, partial=True)
        plan.commit()
        plan.discard()
        assert holds(runner, 1)
        assert len(receiver._memory) == 0
    free = free_bytes()
    owner.tell("free")
    assert is_freed(free), "no mapping of this process keeps freed memory"


@pytest.mark.gpu_alone
def test_a_registration_sees_every_write(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    receiver.register(owner.description, strict_dtype=False)
    for times in (1, 10, 100):
        assert push(receiver, "theirs")
        assert holds(runner, times)
        owner.tell("write")
    receiver.registrations.forget(None)
    assert len(receiver._memory) == 0
    free = free_bytes()
    owner.tell("free")
    assert is_freed(free)


def test_forged_memory_is_refused_and_the_context_lives(
    receiver: WeightReceiver, runner: FakeRunner, owner: Owner
) -> None:
    """One owner serves all forgeries: the start of a process on a GPU takes seconds."""
    first, *others = owner.description.allocations
    for change, message in (
        ({"nbytes": 1 << 40}, "where 1,099,511,627,776 were described"),
        ({"storage_offset_bytes": 1 << 40}, "has 0 bytes"),
        ({"storage_offset_bytes": -4096}, "impossible"),
        ({"nbytes": 1 << 70}, "impossible"),
        ({"storage_offset_bytes": 2}, "not aligned|bytes from where"),
        ({"handle": b""}, "Cannot open GPU memory"),
        ({"handle": bytes(64)}, "Cannot open GPU memory"),
        ({"handle": b"\x01c" + bytes(64)}, "Cannot open GPU memory"),
        ({"handle": b"\x02e" + bytes(8)}, "expandable_segments"),
        ({"handle": b"\x02e" + bytes(64)}, "expandable_segments"),
        ({"handle": b"\xffc" + bytes(64)}, "Cannot open GPU memory"),
    ):
        forged: list[Allocation] = [msgspec.structs.replace(first, **change), *others]
        description = msgspec.structs.replace(owner.description, allocations=forged)
        with pytest.raises(WeightUpdateError, match=f"'model.embed_tokens.weight': .*({message})"):
            receiver.stage(description, strict_dtype=False, partial=True)
        assert len(receiver._memory) == 0
        runner.embed.zero_()
        plan = receiver.stage(owner.description, strict_dtype=False, partial=True)
        plan.commit()
        assert holds(runner, 1)
        plan.discard()


@pytest.mark.gpu_alone
def test_the_end_of_an_owner_closes_its_memory(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    receiver.register(owner.description, strict_dtype=False)
    assert push(receiver, "theirs")
    assert holds(runner, 1)
    free = free_bytes()
    wait_for_end(receiver, owner)
    assert len(receiver._memory) == 0, "closed without waiting for the garbage collector"
    assert is_freed(free)


@pytest.mark.gpu_alone
def test_the_end_of_an_owner_closes_its_memory_but_not_under_a_plan(
    receiver: WeightReceiver, runner: FakeRunner, owner: Owner
) -> None:
    plan = receiver.stage(owner.description, strict_dtype=False, partial=True, keep=True)
    free = free_bytes()
    wait_for_end(receiver, owner)
    assert receiver.registrations.get("theirs") is None
    plan.commit()
    assert holds(runner, 1), "the values from before the owner was killed"
    plan.discard()
    assert len(receiver._memory) == 0
    assert is_freed(free)


@pytest.mark.two_gpus
def test_a_peers_memory_is_read_without_a_context_on_its_gpu() -> None:
    command = [sys.executable, "-m", "tests.weight_sync.cuda_peer_reader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"arrived": True, "contexts": [True, False]}
