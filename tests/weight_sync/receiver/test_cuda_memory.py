"""GPU memory of another process: reads see every write, stay inside the allocation, and leave nothing open."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch

from tests.weight_sync.fakes import FakeRunner
from tests.weight_sync.receiver.test_open_memory import Owner
from tests.weight_sync.receiver.test_registrations import push, wait_for_end
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver

pytestmark = pytest.mark.cuda

EMBED = torch.arange(32.0).reshape(8, 4)
LARGE = 64 << 20


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


def test_an_update_is_read_and_closed(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    for _ in range(3):
        plan = receiver.stage(owner.description, strict_dtype=False, partial=True)
        plan.commit()
        plan.discard()
        assert holds(runner, 1)
        assert len(receiver._memory) == 0
    free = torch.cuda.mem_get_info()[0]
    owner.tell("free")
    assert torch.cuda.mem_get_info()[0] >= free + LARGE, "no mapping of this process keeps freed memory"


def test_a_registration_sees_every_write(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    receiver.register(owner.description, strict_dtype=False)
    for times in (1, 10, 100):
        assert push(receiver, "theirs")
        assert holds(runner, times)
        owner.tell("write")
    receiver.forget(None)
    assert len(receiver._memory) == 0
    free = torch.cuda.mem_get_info()[0]
    owner.tell("free")
    assert torch.cuda.mem_get_info()[0] >= free + LARGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
    ],
)
def test_forged_memory_is_refused_and_the_context_lives(
    receiver: WeightReceiver, runner: FakeRunner, owner: Owner, change: dict[str, object], message: str
) -> None:
    first, *others = owner.description.allocations
    forged = [msgspec.structs.replace(first, **change), *others]
    description = msgspec.structs.replace(owner.description, allocations=forged)
    with pytest.raises(WeightUpdateError, match=f"'model.embed_tokens.weight': .*({message})"):
        receiver.stage(description, strict_dtype=False, partial=True)
    assert len(receiver._memory) == 0
    receiver.stage(owner.description, strict_dtype=False, partial=True).commit()
    assert holds(runner, 1)


def test_the_end_of_an_owner_closes_its_memory(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    receiver.register(owner.description, strict_dtype=False)
    assert push(receiver, "theirs")
    assert holds(runner, 1)
    free = torch.cuda.mem_get_info()[0]
    wait_for_end(receiver, owner)
    assert len(receiver._memory) == 0, "closed without waiting for the garbage collector"
    assert torch.cuda.mem_get_info()[0] >= free + LARGE


def test_the_end_of_an_owner_closes_its_memory_but_not_under_a_plan(
    receiver: WeightReceiver, runner: FakeRunner, owner: Owner
) -> None:
    plan = receiver.stage(owner.description, strict_dtype=False, partial=True, keep=True)
    free = torch.cuda.mem_get_info()[0]
    wait_for_end(receiver, owner)
    assert receiver.registered("theirs") is None
    plan.commit()
    assert holds(runner, 1), "the values from before the owner was killed"
    plan.discard()
    assert len(receiver._memory) == 0
    assert torch.cuda.mem_get_info()[0] >= free + LARGE


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_peers_memory_is_read_without_a_context_on_its_gpu(receiver: WeightReceiver, runner: FakeRunner) -> None:
    owner = Owner("cuda_owner", "1")
    free = torch.cuda.mem_get_info(1)[0]
    receiver.register(owner.description, strict_dtype=False)
    assert push(receiver, "theirs")
    assert holds(runner, 1)
    receiver.forget(None)
    owner.end()
    assert free - torch.cuda.mem_get_info(1)[0] < 64 << 20
