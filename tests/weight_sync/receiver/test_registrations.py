"""Registrations, which pushes name by id: what they keep, when they end, and that nothing remains of them."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.weight_sync.described import SharedMemory, Trainer, described
from tests.weight_sync.fakes import EMBED, NORM, FakeRunner, random_weights
from tests.weight_sync.receiver.test_open_memory import Owner
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.copying.fused_copy import CopyPlan
from verl_server.weight_sync.handles import DescribedTensor, WeightsDescription
from verl_server.weight_sync.receiver.weight_receiver import REGISTRATIONS, WeightReceiver

CPU = torch.device("cpu")


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def receiver(runner: FakeRunner) -> WeightReceiver:
    return WeightReceiver(runner.weight_map, 0, 1, CPU)


@pytest.fixture
def owner() -> Iterator[Owner]:
    process = Owner()
    yield process
    process.end()


def stage(receiver: WeightReceiver, description: WeightsDescription, keep: bool = True) -> object:
    return receiver.stage(description, strict_dtype=False, partial=True, keep=keep)


def push(receiver: WeightReceiver, id: str) -> bool:
    """Push by id as the loop does. Return False if the id is not registered."""
    plan = receiver.registrations.get(id)
    if plan is None:
        return False
    plan.ready()
    plan.commit()
    plan.discard()
    return True


def open_memory() -> tuple[int, int]:
    """Count this process's (descriptors, mappings) of shared memory. Process descriptors count as the former."""
    gc.collect()
    links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.lexists(link)]
    return sum("memfd:" in n or "pidfd" in n for n in names), Path("/proc/self/maps").read_text().count("memfd:")


def test_a_registration_is_pushed_many_times(receiver: WeightReceiver, runner: FakeRunner) -> None:
    trainer, description = described(random_weights(1))
    receiver.register(description, strict_dtype=True)
    assert runner.holds({name: torch.zeros_like(w) for name, w in random_weights(1).items()}), "nothing is written"
    for seed in (1, 2, 3):
        weights = random_weights(seed)
        for name, (view,) in trainer.placed.items():
            view.copy_(weights[name])
        assert push(receiver, description.id)
        assert runner.holds(weights)
    receiver.registrations.forget([description.id, "unknown"])
    assert not push(receiver, description.id)
    assert len(receiver._memory) == 0


def test_an_update_is_kept_only_if_it_says_so(receiver: WeightReceiver) -> None:
    _, description = described(random_weights(1))
    for keep in (False, True):
        plan = receiver.stage(description, strict_dtype=False, partial=True, keep=keep)
        plan.commit()
        plan.discard()
        assert len(receiver._memory) == int(keep)
        assert push(receiver, description.id) == keep
    receiver.registrations.forget(None)
    assert (len(receiver._memory), receiver.registrations.get(description.id)) == (0, None)
    with pytest.raises(WeightUpdateError, match="unregistered meanwhile"):
        plan.commit()


def test_a_refused_registration_leaves_nothing(receiver: WeightReceiver) -> None:
    _, description = described(random_weights(1) | {NORM: torch.ones(5)})
    _, doubles = described(random_weights(1, torch.float64))
    for bad, strict in ((description, False), (doubles, True)):
        with pytest.raises(WeightUpdateError):
            receiver.register(bad, strict_dtype=strict)
        assert (len(receiver._memory), receiver.registrations.get(bad.id)) == (0, None)


def test_what_a_request_asks_of_a_registration_is_checked_again(receiver: WeightReceiver) -> None:
    _, description = described({NORM: torch.ones(4, dtype=torch.float64)})
    receiver.register(description, strict_dtype=False)
    plan = receiver.registrations.get(description.id)
    assert plan is not None
    plan.check(strict_dtype=False, partial=True)
    with pytest.raises(WeightUpdateError, match="missing"):
        plan.check(strict_dtype=False, partial=False)
    with pytest.raises(WeightUpdateError, match=r"float64.*strict_dtype"):
        plan.check(strict_dtype=True, partial=True)


def test_the_one_used_longest_ago_makes_room(receiver: WeightReceiver) -> None:
    _, description = described(random_weights(1))
    for i in range(REGISTRATIONS):
        receiver.register(msgspec.structs.replace(description, id=str(i)), strict_dtype=False)
    assert push(receiver, "0")
    receiver.register(msgspec.structs.replace(description, id="new"), strict_dtype=False)
    assert [push(receiver, id) for id in ("0", "1", "2", "new")] == [True, False, True, True]
    assert len(receiver._memory) == 1, "the registrations share the memory"


def test_an_id_can_be_registered_again(receiver: WeightReceiver, runner: FakeRunner) -> None:
    _, first = described(random_weights(1))
    _, second = described(random_weights(2))
    receiver.register(first, strict_dtype=False)
    receiver.register(second, strict_dtype=False)
    assert len(receiver._memory) == 1, "the memory of the first registration is closed"
    assert push(receiver, second.id)
    assert runner.holds(random_weights(2))


# -- the end of an owner -------------------------------------------------------------------------------------


def wait_for_end(receiver: WeightReceiver, owner: Owner) -> None:
    watch = receiver.registrations._watched[owner.process.pid]
    owner.end()
    watch.join(timeout=10)
    assert not watch.is_alive()


def merged(first: WeightsDescription, second: WeightsDescription) -> WeightsDescription:
    """Return a description with the embedding of `first` and the norm of `second`."""
    (embed,) = (t for t in first.tensors if t.name == EMBED)
    (norm,) = (t for t in second.tensors if t.name == NORM)
    (shard,) = norm.shards
    norm = msgspec.structs.replace(norm, shards=[msgspec.structs.replace(shard, allocation=1)])
    return WeightsDescription(id="both", allocations=first.allocations + second.allocations, tensors=[embed, norm])


def test_the_end_of_an_owner_closes_what_it_owned_and_nothing_else(
    receiver: WeightReceiver, runner: FakeRunner, owner: Owner
) -> None:
    _, mine = described(random_weights(1))
    receiver.register(mine, strict_dtype=False)
    second = Trainer()
    second.place(NORM, torch.ones(4))
    both = merged(owner.description, second.description())
    before = open_memory()
    receiver.register(owner.description, strict_dtype=False)
    receiver.register(both, strict_dtype=False)
    assert push(receiver, "both")
    wait_for_end(receiver, owner)
    assert [push(receiver, id) for id in (mine.id, "theirs", "both")] == [True, False, False]
    assert len(receiver._memory) == 1, "closed without waiting for the garbage collector"
    assert open_memory() == before
    assert owner.process.pid not in receiver.registrations._watched


def test_a_commit_that_runs_while_its_owner_ends_reads_to_the_end(
    receiver: WeightReceiver, runner: FakeRunner, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(receiver, owner.description)
    plan = receiver.registrations.get(owner.description.id)
    assert plan is not None
    started, ended = threading.Event(), threading.Event()
    run = CopyPlan.run

    def slow(self: CopyPlan) -> None:
        started.set()
        assert ended.wait(timeout=10)
        run(self)

    monkeypatch.setattr(CopyPlan, "run", slow)
    committing = threading.Thread(target=plan.commit)
    committing.start()
    assert started.wait(timeout=10)
    wait_for_end(receiver, owner)
    assert receiver.registrations.get(owner.description.id) is None
    assert len(receiver._memory) == 1, "the commit still reads it"
    ended.set()
    committing.join(timeout=10)
    assert torch.equal(runner.embed, torch.arange(32.0).reshape(8, 4))
    plan.discard()
    assert len(receiver._memory) == 0


def test_a_dead_owner_is_not_registered(receiver: WeightReceiver, owner: Owner) -> None:
    plan = receiver.stage(owner.description, strict_dtype=False, partial=True)
    owner.end()
    with pytest.raises(WeightUpdateError, match=f"Process {owner.process.pid}"):
        receiver._keep("late", plan)
    assert receiver.registrations.get("late") is None


def test_an_owner_that_ends_while_it_is_registered_is_not_kept(
    receiver: WeightReceiver, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = receiver.registrations._watch

    def watch_and_end(pid: int) -> None:
        watch(pid)
        wait_for_end(receiver, owner)

    monkeypatch.setattr(receiver.registrations, "_watch", watch_and_end)
    with pytest.raises(WeightUpdateError, match="cannot be watched"):
        receiver.register(owner.description, strict_dtype=False)
    assert receiver.registrations.get("theirs") is None


def test_memory_that_is_cut_off_between_pushes_is_not_read(receiver: WeightReceiver, runner: FakeRunner) -> None:
    trainer = Trainer()
    trainer.ranks = [SharedMemory(sealed=False)]
    trainer.place(NORM, torch.ones(4))
    receiver.register(trainer.description(), strict_dtype=False)
    assert push(receiver, "weights")
    os.ftruncate(trainer.ranks[0].fd, 0)
    plan = receiver.registrations.get("weights")
    assert plan is not None
    with pytest.raises(WeightUpdateError, match=f"'{NORM}': .* was cut off while it was read, at byte 0"):
        plan.ready()
    assert torch.equal(runner.norm, torch.ones(4))


def test_memory_that_is_cut_off_during_a_push_was_read_before(receiver: WeightReceiver, runner: FakeRunner) -> None:
    trainer = Trainer()
    trainer.ranks = [SharedMemory(sealed=False)]
    trainer.place(NORM, torch.ones(4))
    plan = receiver.stage(trainer.description(), strict_dtype=False, partial=True, keep=True)
    trainer.placed[NORM][0].fill_(2)
    plan.ready()
    os.ftruncate(trainer.ranks[0].fd, 0)  # the copy would be SIGBUS
    plan.commit()
    assert torch.equal(runner.norm, torch.full((4,), 2.0))


def test_every_push_copies_the_present_values_of_memory_that_is_not_sealed(
    receiver: WeightReceiver, runner: FakeRunner
) -> None:
    trainer = Trainer()
    trainer.ranks = [SharedMemory(sealed=False)]
    trainer.place(NORM, torch.ones(4))
    receiver.register(trainer.description(), strict_dtype=False)
    for value in (2.0, 3.0):
        trainer.placed[NORM][0].fill_(value)
        assert push(receiver, "weights")
        assert torch.equal(runner.norm, torch.full((4,), value))


def test_a_tensor_that_takes_long_to_read_is_not_kept(receiver: WeightReceiver, runner: FakeRunner) -> None:
    memory = SharedMemory()
    norm = memory.put(torch.arange(4.0)[:, None].repeat(1, 99)[:, 0])
    tensor = DescribedTensor(name=NORM, dtype="float32", shape=[4], shards=[memory.shard(norm, [0])])
    description = WeightsDescription(id="weights", allocations=[memory.allocation], tensors=[tensor])
    with pytest.raises(WeightUpdateError, match=f"'{NORM}' lie far apart"):
        receiver.register(description, strict_dtype=False)
    receiver.stage(description, strict_dtype=False, partial=True, keep=True).commit()
    assert torch.equal(runner.norm, torch.arange(4.0)) and receiver.registrations.ids == []


# -- tied heads ----------------------------------------------------------------------------------------------


def test_a_tied_head_with_memory_of_its_own_is_compared_at_every_push(
    receiver: WeightReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    weights = random_weights(1)
    trainer, description = described(weights | {"lm_head.weight": weights[EMBED].clone()})
    with pytest.raises(WeightUpdateError, match=r"'lm_head.weight' has memory of its own.*Leave it out"):
        receiver.register(description, strict_dtype=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stage(receiver, description)
    assert len(caplog.records) == 1, "one warning"
    assert receiver.registrations.get(description.id) is None, "not kept, so that the next push is checked too"
    trainer.placed["lm_head.weight"][0][0, 0] += 1
    with pytest.raises(WeightUpdateError, match="differs"):
        stage(receiver, description)


# -- no leaks ------------------------------------------------------------------------------------------------


def test_thousands_of_updates_leave_nothing(receiver: WeightReceiver, runner: FakeRunner, owner: Owner) -> None:
    description = owner.description
    stage(receiver, description)  # starts the thread that watches the owner, and that runs as long as the owner does
    receiver.registrations.forget(None)
    before, threads = open_memory(), threading.active_count()
    files = len(os.listdir("/proc/self/fd"))
    for i in range(1500):
        plan = receiver.stage(msgspec.structs.replace(description, id=str(i)), strict_dtype=False, partial=True)
        plan.commit()
        plan.discard()
    assert open_memory() == before
    for i in range(500):
        receiver.register(msgspec.structs.replace(description, id=str(i)), strict_dtype=False)
        assert push(receiver, str(i))
    for _ in range(2000):
        assert push(receiver, "499")
    assert len(receiver._memory) == 1
    bad = msgspec.structs.replace(description, tensors=[*description.tensors, description.tensors[0]])
    for _ in range(200):
        with pytest.raises(WeightUpdateError):
            receiver.register(bad, strict_dtype=False)
    receiver.registrations.forget(None)
    assert open_memory() == before
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)
