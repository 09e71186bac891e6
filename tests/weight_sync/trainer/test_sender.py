"""Moving storages into shared memory: everything that refers to a storage keeps working."""

from __future__ import annotations

import gc
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.weight_sync.reading import read, read_handle
from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.handles import TensorHandle
from verl_server.weight_sync.trainer import exports, sender
from verl_server.weight_sync.trainer.memory_layout import MemoryLayout, NamedTensors
from verl_server.weight_sync.trainer.sender import WeightSender, describe_tensors
from verl_server.weight_sync.trainer.shards import TensorShard

moves_storages = pytest.mark.skipif(not exports.can_swap_storages(), reason="torch before 2.12 moves them itself")


def describe(*tensors: torch.Tensor) -> list[TensorHandle]:
    return [value.get(0) for _, value in describe_tensors([(str(i), t) for i, t in enumerate(tensors)])]


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def test_views_and_optimizer_follow() -> None:
    model = nn.Linear(8, 8, bias=False)
    view, storage = model.weight.data.t(), model.weight.untyped_storage()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    (handle,) = describe(model.weight)
    assert torch.equal(model.weight, before)
    assert torch.equal(read_handle(handle), before)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert torch.equal(view.t(), model.weight)
    assert storage.data_ptr() == model.weight.data_ptr()
    assert torch.equal(read_handle(handle), model.weight), "the optimizer writes where the receiver reads"


@moves_storages
def test_a_second_push_of_the_same_storages_registers_nothing() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    before = open_files()
    first = describe(*model.parameters())
    assert open_files() - before <= 2, "one memfd for all of them"
    pointers = [p.data_ptr() for p in model.parameters()]
    assert describe(*model.parameters()) == first
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_moved_and_resized_storages_are_described_anew() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    (old,) = describe(parameter)
    parameter.data = torch.ones(4)
    (new,) = describe(parameter)
    assert new.allocation.id != old.allocation.id
    assert torch.equal(read_handle(new), torch.ones(4))
    grown = torch.zeros(2)
    (old,) = describe(grown)
    grown = torch.cat([grown, torch.ones(2)])
    (new,) = describe(grown)
    assert torch.equal(read_handle(new), torch.tensor([0.0, 0, 1, 1]))


@moves_storages
def test_memory_swapped_away_is_described_anew() -> None:
    tensor, other = torch.zeros(4), torch.ones(4)
    describe(tensor)
    tensor.untyped_storage()._swap_data_ptr_(other.untyped_storage())  # type: ignore[attr-defined]
    assert torch.equal(read_handle(describe(tensor)[0]), torch.ones(4))
    del tensor
    gc.collect()
    assert torch.equal(other, torch.zeros(4)), "the pages belong to the memory, not to the storage"


def test_tied_tensors_share_their_memory() -> None:
    embed = nn.Embedding(6, 3)
    head = nn.Linear(3, 6, bias=False)
    head.weight = embed.weight
    first, second = describe(embed.weight, head.weight)
    assert first == second


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base.t(),
        lambda base: base[1:3, 1:],
        lambda base: base[2].expand(3, 5),
        lambda base: base[::2],
        lambda base: base.flatten()[7],
        lambda base: base[:0],
        lambda base: base.unflatten(1, (5, 1)).permute(1, 2, 0),
    ],
)
def test_views_are_described_as_they_are(make: object) -> None:
    base = torch.arange(20.0).reshape(4, 5)
    view = make(base)  # type: ignore[operator]
    (handle,) = describe(view)
    assert handle.shape == list(view.shape)
    assert torch.equal(read_handle(handle), view)


def test_two_views_of_one_storage_share_an_allocation() -> None:
    base = torch.arange(20.0)
    first, second = describe(base[:10], base[10:])
    assert first.allocation.id == second.allocation.id
    assert torch.equal(read_handle(second), base[10:])


def test_empty_tensors_need_no_memory() -> None:
    (handle,) = describe(torch.empty(0, 4))
    assert handle.shape == [0, 4]
    assert read_handle(handle).shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_other_dtypes_are_described_and_refused_by_the_receiver(dtype: torch.dtype) -> None:
    (handle,) = describe(torch.zeros(3, dtype=dtype))
    assert handle.dtype == str(dtype).removeprefix("torch.")
    with pytest.raises(WeightUpdateError, match=handle.dtype):
        read_handle(handle)


@moves_storages
def test_freed_tensors_give_descriptors_and_memory_back() -> None:
    before = open_files()
    big, small = torch.zeros(4 << 20), torch.zeros(4)
    handle, _ = describe(big, small)
    path = f"/proc/self/fd/{handle.allocation.fd}"
    assert os.stat(path).st_blocks * 512 >= 16 << 20
    del big
    assert os.stat(path).st_blocks * 512 <= mmap.PAGESIZE, "the tensor's pages are freed while its neighbour lives"
    del small
    assert open_files() == before


def test_a_thousand_models_leave_nothing() -> None:
    own = WeightSender()
    before, exported = open_files(), len(sender._exports)
    for i in range(1000):
        own.describe([(f"w{i % 40}", torch.ones(100))])
    assert open_files() - before <= 2
    assert len(sender._exports) <= exported + 1
    assert len(own._known) <= 1, "the sender forgets sets of tensors that are gone"


def test_numpy_keeps_seeing_the_tensor() -> None:
    array = np.zeros(5, dtype=np.float32)
    tensor = torch.from_numpy(array)
    (first,) = describe(tensor)
    array[2] = 7.0
    (second,) = describe(tensor)
    assert first == second
    assert torch.equal(read_handle(second), torch.tensor([0.0, 0, 7, 0, 0]))


def test_a_model_from_a_checkpoint_is_moved_not_copied(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    weight = model.model.norm.weight
    (handle,) = describe(weight)
    with torch.no_grad():
        weight.fill_(3.0)
    assert torch.equal(read_handle(handle), torch.full_like(weight, 3.0))


def test_memory_that_torch_shares_already_stays_shared() -> None:
    tensor = torch.zeros(5).share_memory_()
    pointer = tensor.data_ptr()
    (handle,) = describe(tensor)
    assert tensor.data_ptr() == pointer
    tensor.fill_(2.0)
    assert torch.equal(read_handle(handle), torch.full((5,), 2.0))


def test_releases_of_torch_that_cannot_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "can_swap_storages", lambda: False)
    tensor = torch.arange(6.0)
    view = tensor.view(2, 3)
    (handle,) = describe(tensor)
    tensor.mul_(2)
    assert torch.equal(read_handle(handle), view.flatten())
    monkeypatch.setattr(os, "statvfs", lambda _: type("S", (), {"f_bavail": 1, "f_frsize": 8})())
    with pytest.raises(WeightUpdateError, match="80 bytes"):
        describe(torch.arange(20.0))


@moves_storages
@pytest.mark.parametrize(
    ("kind", "value", "remedy"), [("RLIMIT_FSIZE", 4096, "ulimit -f"), ("RLIMIT_NOFILE", 3, "ulimit -n")]
)
def test_no_shared_memory_left_names_bytes_and_remedy(kind: str, value: int, remedy: str) -> None:
    tensor = torch.arange(4096.0)
    pointer = tensor.data_ptr()
    with limit(getattr(resource, kind), value), pytest.raises(WeightUpdateError) as caught:
        describe(tensor)
    assert "16,384 bytes" in str(caught.value)
    assert remedy in str(caught.value)
    assert tensor.data_ptr() == pointer
    assert torch.equal(tensor, torch.arange(4096.0))
    assert torch.equal(read_handle(describe(tensor)[0]), tensor), "describing succeeds as soon as there is memory"


@moves_storages
def test_running_out_half_way_leaves_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((2048,), float(i)) for i in range(4)]
    real, calls = os.posix_fallocate, []

    def fallocate(fd: int, offset: int, length: int) -> None:
        calls.append(offset)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(WeightUpdateError, match="8,192 bytes"):
        describe(*tensors)
    assert [float(t.mean()) for t in tensors] == [0.0, 1.0, 2.0, 3.0]
    assert [float(read_handle(h).mean()) for h in describe(*tensors)] == [0.0, 1.0, 2.0, 3.0]


def test_whole_dtensors_are_described_without_a_copy_and_shards_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
        (handle,) = describe(tensor)
        tensor.to_local().mul_(3)
        assert torch.equal(read_handle(handle), torch.arange(8.0) * 3)
    finally:
        dist.destroy_process_group()


def test_what_has_no_plain_memory_is_refused() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta"), "weights"):
        with pytest.raises(BadRequestError, match="'0'"):
            describe(tensor)  # type: ignore[arg-type]


def test_a_process_with_shared_weights_exits_cleanly() -> None:
    script = (
        "import torch\nfrom verl_server.weight_sync.trainer.sender import describe_tensors\n"
        "model = torch.nn.Linear(100, 100)\ndescribe_tensors(model.named_parameters())\n"
        "torch.optim.SGD(model.parameters()).step()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# -- reused descriptions ----------------------------------------------------------------------------------------------


def test_unmoved_tensors_have_one_description() -> None:
    model, sender = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), WeightSender()
    first = sender.describe(list(model.named_parameters()))
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    second = sender.describe(list(model.named_parameters()))
    assert second.description is first.description
    assert torch.equal(read(second.description)["0.weight"], model[0].weight)
    assert len(first.description.allocations) == (1 if exports.can_swap_storages() else 8)


MOVES: dict[str, Callable[[nn.Parameter], torch.Tensor | TensorShard]] = {
    "another storage": lambda p: setattr(p, "data", torch.ones(6, 4)) or p,
    "another object with another storage": lambda p: nn.Parameter(torch.ones(6, 4)),
    "another view": lambda p: p.data.t().reshape(6, 4),
    "another offset": lambda p: torch.cat([p.data, p.data])[6:],
    "other strides": lambda p: p.data.view(4, 6).t(),
    "another dtype": lambda p: p.data.view(torch.int32).view(torch.float16)[:, ::2],
    "a shard": lambda p: TensorShard(p.data, (12, 4), (6, 0)),
}


def _swapped(parameter: nn.Parameter) -> nn.Parameter:
    parameter.untyped_storage()._swap_data_ptr_(torch.ones(6, 4).untyped_storage())  # type: ignore[attr-defined]
    return parameter


if exports.can_swap_storages():
    MOVES["another memory in the same storage"] = _swapped


@pytest.mark.parametrize("move", MOVES)
def test_whatever_moved_has_another_description(move: str) -> None:
    sender, parameter = WeightSender(), nn.Parameter(torch.arange(24.0).reshape(6, 4))
    before = sender.describe([("w", parameter)]).description
    value = MOVES[move](parameter)
    after = sender.describe([("w", value)]).description
    assert after.id != before.id
    expected = value.tensor if isinstance(value, TensorShard) else value
    seen = read(after)["w"]
    assert torch.equal(seen[6:] if isinstance(value, TensorShard) else seen, expected)


@moves_storages
def test_other_memory_at_the_same_address_is_another_description() -> None:
    """The storage, the address and the size are the same. Only the arena knows that the memory was freed."""
    sender, tensor = WeightSender(), torch.zeros(1024)
    before = sender.describe([("w", tensor)]).description
    sender._known["w",]._memories_alive = [lambda: None]
    assert sender.describe([("w", tensor)]).description.id != before.id


IN_PLACE: dict[str, Callable[[nn.Parameter], object]] = {
    "another storage": lambda p: setattr(p, "data", torch.ones(6, 6)),
    "another storage, while the first lives on": lambda p: (setattr(p, "old", p.data), p.set_(torch.ones(6, 6))),
    "set_": lambda p: p.set_(torch.ones(6, 6)),
    "another storage and shape": lambda p: setattr(p, "data", torch.ones(4, 9)),
    "the same memory in another shape": lambda p: setattr(p, "data", p.data.view(4, 9)),
    "the same memory in another order": lambda p: p.t_(),
    "the beginning of it": lambda p: setattr(p, "data", p.data[:3]),
    "another offset": lambda p: setattr(p, "data", p.data[1:]),
    "another dtype": lambda p: setattr(p, "data", p.data.view(torch.float16)[:, ::2]),
    "memory that is another's": lambda p: setattr(p, "data", torch.ones(7, 6)[1:]),
}
if exports.can_swap_storages():
    IN_PLACE["another memory in the same storage"] = lambda p: p.untyped_storage()._swap_data_ptr_(
        torch.ones(6, 6).untyped_storage()  # type: ignore[attr-defined]
    )


@moves_storages
@pytest.mark.parametrize("move", IN_PLACE)
def test_a_guard_of_the_same_objects_sees_what_changed_in_place(move: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, parameter = WeightSender(), nn.Parameter(torch.arange(36.0).reshape(6, 6))
    tensors = NamedTensors([("other", torch.zeros(3)), ("w", parameter)])
    before = sender.describe(tensors).description
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(MemoryLayout, "at", None)  # fails unless the guard alone recognizes the tensors
        parameter.add_(1.0)
        assert sender.describe(tensors).description is before
    with torch.no_grad():
        IN_PLACE[move](parameter)
    after = sender.describe(tensors).description
    assert after.id != before.id and torch.equal(read(after)["w"], parameter)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLayout, "at", None)
        assert sender.describe(tensors).description is after


@moves_storages
def test_a_guard_is_for_the_same_objects_in_memory_that_is_watched() -> None:
    sender, parameter = WeightSender(), nn.Parameter(torch.ones(6, 6))
    tensors = NamedTensors([("w", parameter)])
    before = sender.describe(tensors).description
    twin = NamedTensors([("w", nn.Parameter(torch.ones(6, 6)))])
    assert sender.describe(twin).description.id != before.id
    unwatched = NamedTensors([("shared", torch.ones(4).share_memory_())])
    assert sender.describe(unwatched).description is sender.describe(unwatched).description
    assert sender._known["shared",]._guard is None
    dying = sender.describe(tensors).description
    sender._known["w",]._memories_alive = [lambda: None]
    assert sender.describe(tensors).description.id != dying.id
    assert sender.describe(NamedTensors([])).description.tensors == []


def test_sets_of_names_are_remembered_beside_each_other() -> None:
    sender, tensors = WeightSender(), {name: torch.zeros(4) for name in "abc"}
    first = [sender.describe([pair]).description.id for pair in tensors.items()]
    assert [sender.describe([pair]).description.id for pair in tensors.items()] == first


def test_memory_that_cannot_be_moved_is_copied_at_every_push_under_one_id() -> None:
    array, sender = np.zeros(5, dtype=np.float32), WeightSender()
    tensor = torch.from_numpy(array)
    first = sender.describe([("w", tensor)]).description
    array[2] = 7.0
    assert sender.describe([("w", tensor)]).description is first
    assert read(first)["w"].tolist() == [0, 0, 7, 0, 0]


def test_shards_of_one_name_make_one_tensor() -> None:
    full = torch.arange(24.0).reshape(6, 4)
    shards = [("w", TensorShard(full[start:stop].clone(), (6, 4), (start, 0))) for start, stop in ((0, 2), (2, 6))]
    description = WeightSender().describe(shards).description
    assert [source.name for source in description.tensors] == ["w"]
    assert torch.equal(read(description)["w"], full)


@pytest.mark.parametrize(
    "second",
    [torch.zeros(6, 4), TensorShard(torch.zeros(2, 4), (6, 4), (0, 0)), TensorShard(torch.ones(1), (1,), (0,))],
)
def test_a_name_that_comes_twice_is_refused(second: torch.Tensor | TensorShard) -> None:
    first = TensorShard(torch.zeros(2, 4), (6, 4), (0, 0))
    with pytest.raises(BadRequestError, match="'w' comes twice"):
        WeightSender().describe([("w", first), ("w", second)])


def test_a_tensor_whose_memory_was_freed_under_it_is_refused() -> None:
    tensor = torch.zeros(8)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(BadRequestError, match=r"'w' has no memory any more.*from the module again"):
        WeightSender().describe([("w", tensor)])


def test_tensors_that_move_at_every_push_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    sender, stays = WeightSender(), torch.zeros(4)
    for _ in range(6):
        sender.describe([("stays", stays), ("moves", torch.zeros(4))])
    (record,) = [r for r in caplog.records if "every push" in r.message]
    assert "1 of 2" in record.message and "moves" in record.message


def test_a_forked_child_leaves_the_weights_alone() -> None:
    """A forked child does not free the weights, although it inherits their memory and its finalizers."""
    script = (
        "import os, torch\nfrom verl_server.weight_sync.trainer.sender import WeightSender, describe_tensors\n"
        "torch.set_num_threads(1)  # a forked child has no OpenMP threads\n"
        "tensors, sender = {n: torch.ones(1 << 16) for n in 'ab'}, WeightSender()\n"
        "(before, _) = describe_tensors(tensors.items())\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    tensors.pop('a')\n"
        "    mine = sender.describe(list(tensors.items())).description\n"
        "    os._exit(0 if mine.allocations[0].pid == os.getpid() else 1)\n"
        "print(os.waitpid(child, 0)[1], int(tensors['a'].sum()), int(tensors['b'].sum()))\n"
    )
    command = ["timeout", "60", sys.executable, "-c", script]  # `timeout` also ends the forked child
    done = subprocess.run(command, capture_output=True, timeout=90, text=True, check=False)
    assert (done.stdout, done.returncode) == ("0 65536 65536\n", 0), done.stderr
