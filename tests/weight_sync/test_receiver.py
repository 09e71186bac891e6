"""What comes over the wire is opened, checked and copied, or refused before a byte is written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.weight_sync.fakes import EMBED, NORM, FakeRunner, Q, random_weights
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation, LocalSerializedTensor, TensorHandle
from verl_server.weight_sync.receiver import OpenAllocations, WeightReceiver
from verl_server.weight_sync.sender import describe_tensors

CPU = torch.device("cpu")


class Owner:
    """`owner.py` in a process of its own."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.weight_sync.owner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.tensors = dict(msgspec.json.decode(line, type=list[tuple[str, LocalSerializedTensor]]))

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


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def receiver(runner: FakeRunner) -> WeightReceiver:
    return WeightReceiver(runner.weight_map, 0, 1, CPU)


def stage(receiver: WeightReceiver, tensors: dict[str, torch.Tensor], **options: Any) -> Any:
    return receiver.stage(describe_tensors(tensors.items()), **({"strict_dtype": False, "partial": True} | options))


# -- memory of another process -------------------------------------------------------------------------------


def test_another_process_is_read_as_it_writes(owner: Owner) -> None:
    memory = OpenAllocations(CPU)
    handle = owner.tensors["a"].get(0)
    first = memory.view("a", handle)
    assert torch.equal(first, torch.arange(6.0).reshape(2, 3))
    owner.tell("write")
    assert torch.equal(memory.view("a", handle), torch.arange(6.0).reshape(2, 3) * 10)
    assert memory.view("a", handle).data_ptr() == first.data_ptr(), "opened once"


def test_mappings_are_closed_when_unused_and_when_their_owner_is_gone(owner: Owner) -> None:
    memory = OpenAllocations(CPU)
    view = memory.view("a", owner.tensors["a"].get(0))
    assert memory._open
    memory.keep_only([])
    assert not memory._open
    view = memory.view("a", owner.tensors["a"].get(0))
    owner.end()
    deadline = time.monotonic() + 10
    while memory._open and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not memory._open
    assert float(view[1, 2]) == 5.0, "an update under way still reads what it opened"


def test_an_owner_that_is_gone_is_named_with_the_possible_causes(owner: Owner) -> None:
    owner.end()
    with pytest.raises(WeightUpdateError, match=rf"{owner.process.pid}.*same user.*PID namespace"):
        OpenAllocations(CPU).view("a", owner.tensors["a"].get(0))


def test_memory_that_was_freed_is_not_taken_for_what_came_after(owner: Owner) -> None:
    handle = owner.tensors["a"].get(0)
    reused = msgspec.structs.replace(handle.allocation, inode=handle.allocation.inode + 1)
    pipe = msgspec.structs.replace(handle.allocation, fd=0)
    for other in (reused, pipe):
        with pytest.raises(WeightUpdateError, match="not the memory that was described"):
            OpenAllocations(CPU).view("a", msgspec.structs.replace(handle, allocation=other))
    owner.tell("free")
    with pytest.raises(WeightUpdateError, match="Cannot open"):
        OpenAllocations(CPU).view("a", handle)


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
    tensor = torch.ones(4)
    handle = describe_tensors([("a", tensor)])[0][1].get(0)
    huge = msgspec.structs.replace(handle.allocation, nbytes=1 << 40)
    with pytest.raises(WeightUpdateError, match="1,099,511,627,776 were described"):
        OpenAllocations(CPU).view("a", msgspec.structs.replace(handle, allocation=huge))


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
        ({"shape": [0, 2**62, 2**62], "stride": [1, 1, 1]}, "do not describe"),
        ({"dtype": "int64"}, "int64"),
        ({"dtype": "load"}, "load"),
    ],
)
def test_a_view_outside_its_allocation_is_refused(change: dict[str, Any], message: str) -> None:
    tensor = torch.ones(4)
    handle = describe_tensors([("a", tensor)])[0][1].get(0)
    small = msgspec.structs.replace(handle.allocation, nbytes=16)
    forged = msgspec.structs.replace(handle, **({"allocation": small} | change))
    with pytest.raises(WeightUpdateError, match=f"'a': .*{message}"):
        OpenAllocations(CPU).view("a", forged)


def test_gpu_memory_is_refused_by_a_cpu_server() -> None:
    handle = TensorHandle(allocation=Allocation(id="x", kind="cuda", nbytes=4), dtype="float32", shape=[1], stride=[1])
    with pytest.raises(WeightUpdateError, match="Push CPU tensors"):
        OpenAllocations(CPU).view("a", handle)


# -- what fits the model -------------------------------------------------------------------------------------


def test_a_full_update_is_copied(receiver: WeightReceiver, runner: FakeRunner) -> None:
    weights = random_weights(1)
    plan = stage(receiver, weights, partial=False, strict_dtype=True)
    assert runner.holds({name: torch.zeros_like(w) for name, w in weights.items()}), "staging writes nothing"
    plan.commit()
    assert runner.holds(weights)


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_takes_its_slices_and_dtypes_convert(size: int) -> None:
    weights = random_weights(1, torch.float64)
    handles = describe_tensors(weights.items())
    for rank in range(size):
        runner = FakeRunner(rank, size, dtype=torch.bfloat16)
        receiver = WeightReceiver(runner.weight_map, rank, size, CPU)
        receiver.stage(handles, strict_dtype=False, partial=False).commit()
        assert runner.holds(weights)


def test_rank_i_reads_value_i() -> None:
    both = [random_weights(seed) for seed in (1, 2)]
    described = [dict(describe_tensors(weights.items())) for weights in both]
    merged = [(n, LocalSerializedTensor(values=[d[n].get(0) for d in described])) for n in both[0]]
    for rank, weights in enumerate(both):
        runner = FakeRunner(rank, 2)
        WeightReceiver(runner.weight_map, rank, 2, CPU).stage(merged, strict_dtype=False, partial=False).commit()
        assert runner.holds(weights)
    with pytest.raises(WeightUpdateError, match="2 values, but this server has 1"):
        WeightReceiver(FakeRunner().weight_map, 0, 1, CPU).stage(merged, strict_dtype=False, partial=False)


def test_names_as_trainers_have_them(receiver: WeightReceiver, runner: FakeRunner) -> None:
    weights = random_weights(1)
    wrapped = {
        f"module._orig_mod.{name.replace('layers', '_fsdp_wrapped_module.layers')}": w for name, w in weights.items()
    }
    stage(receiver, wrapped, partial=False).commit()
    assert runner.holds(weights)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"model.norm.wieght": torch.ones(4)}, {}, "no parameter 'model.norm.wieght'.*like 'model.norm.weight'"),
        ({NORM: torch.ones(5)}, {}, r"\[5\], but the model's is \[4\]"),
        ({NORM: torch.ones(2, 2)}, {}, r"\[2, 2\]"),
        ({NORM: torch.ones(4, dtype=torch.int32)}, {}, "int32"),
        ({NORM: torch.ones(4, dtype=torch.float16)}, {"strict_dtype": True}, "strict_dtype"),
        ({NORM: torch.ones(4)}, {"partial": False}, f"missing: '{EMBED}', '{Q}'"),
        ({NORM: torch.ones(4), f"module.{NORM}": torch.ones(4)}, {}, "twice"),
        ({}, {}, "no tensors"),
    ],
)
def test_what_does_not_fit_is_refused(
    receiver: WeightReceiver, runner: FakeRunner, tensors: dict[str, torch.Tensor], options: Any, message: str
) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        stage(receiver, tensors, **options)
    assert runner.holds({name: torch.zeros_like(w) for name, w in random_weights(0).items()})


def test_a_tied_head_may_be_absent_equal_or_alone_but_not_different(
    receiver: WeightReceiver, runner: FakeRunner
) -> None:
    weights = random_weights(1)
    stage(receiver, weights | {"lm_head.weight": weights[EMBED]}, partial=False).commit()
    assert runner.holds(weights)
    stage(receiver, weights | {"lm_head.weight": weights[EMBED].clone()}, partial=False).commit()
    with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
        stage(receiver, weights | {"lm_head.weight": weights[EMBED] + 1})
    stage(receiver, {"lm_head.weight": weights[EMBED] + 1}).commit()
    assert runner.holds(weights | {EMBED: weights[EMBED] + 1})


def test_ten_thousand_updates_leave_nothing(receiver: WeightReceiver) -> None:
    weights = random_weights(1)
    stage(receiver, weights)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2000):
        stage(receiver, weights).commit()
    for seed in range(200):
        stage(receiver, random_weights(seed)).commit()
    assert len(os.listdir("/proc/self/fd")) - before <= 4
    assert len(receiver._memory._open) == 1
