"""Staging of weights from a process group: when tensors are received, and the state after a trainer's death."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.weight_sync.fakes import EMBED, NORM, SHAPES, Ranks, random_weights
from verl_server.errors import ControlTimeoutError, WeightUpdateError
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    UpdateWeightsFromDistributedReq,
)
from verl_server.worker.weights import weight_groups
from verl_server.worker.weights.weight_groups import ReceiveBudget

NBYTES = sum(torch.Size(shape).numel() * 4 for shape in SHAPES.values())
SIZES = pytest.mark.parametrize("size", [1, 2])


class Trainer:
    """A trainer that is rank 0 of a group, and broadcasts `weights` to fakes of `WeightGroup`."""

    def __init__(self) -> None:
        self.weights = random_weights(0)
        self.dies_after: int | None = None
        """The number of windows that the trainer sends before it dies (None: it does not die)."""
        self.absent_for: list[int] = []
        self.groups: list[Group] = []


class Group:
    """A fake of one server rank's `WeightGroup`."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.broken, self._trainer, self._rank = "", trainer, rank
        self.windows: list[int] = []
        self.trainer_is_gone = False
        """The number of tensors in each received window."""

    def receive(
        self, names: list[str], _: list[str], shapes: list[list[int]], load_format: str | None, window: int, *__: int
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        if self.broken:
            raise WeightUpdateError(f"broken ({self.broken})")
        total = sum(torch.Size(shape).numel() * 4 for shape in shapes)
        step = len(names) if total <= window else 1
        for sent, start in enumerate(range(0, len(names), step)):
            lost = sent == self._trainer.dies_after or self._rank in self._trainer.absent_for
            if self.broken or lost:
                self.broken = self.broken or "lost"
                raise WeightUpdateError("The trainer went away.")
            part = names[start : start + step]
            self.windows.append(len(part))
            yield [(name, self._trainer.weights.get(name, torch.ones(1)).clone()) for name in part]

    @property
    def has_ended(self) -> bool:
        return bool(self.broken) or self.trainer_is_gone

    def close(self) -> None:
        self.broken = self.broken or "destroyed"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()

    def join(req: InitWeightsUpdateGroupReq, rank: int, device: torch.device, timeout: float) -> Group:
        if rank in trainer.absent_for:
            raise WeightUpdateError("no trainer there")
        trainer.groups.append(Group(trainer, rank))
        return trainer.groups[-1]

    monkeypatch.setattr(weight_groups.WeightGroup, "join", join)
    return trainer


def init(ranks: Ranks) -> Any:
    req = InitWeightsUpdateGroupReq(master_address="h", master_port=1, rank_offset=1, world_size=len(ranks.runners) + 1)
    return ranks.handle(req)


def destroy(ranks: Ranks) -> Any:
    return ranks.handle(DestroyWeightsUpdateGroupReq())


def update(ranks: Ranks, *names: str, **fields: Any) -> Any:
    chosen = list(names or SHAPES)
    shapes = [list(SHAPES.get(name, (1,))) for name in chosen]
    return ranks.handle(
        UpdateWeightsFromDistributedReq(names=chosen, dtypes=["torch.float32"] * len(chosen), shapes=shapes, **fields)
    )


def served(size: int, trainer: Trainer, limit: int) -> Ranks:
    ranks = Ranks(size, args={"weight_receive_bytes": limit})
    assert init(ranks).message == "Succeeded to initialize custom process group."
    assert update(ranks, partial=False).success and ranks.hold(trainer.weights)
    trainer.weights = random_weights(1)
    return ranks


@SIZES
def test_what_fits_is_received_whole_before_anything_is_written(size: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, NBYTES)
    assert [group.windows for group in trainer.groups] == [[len(SHAPES)]] * size
    trainer.dies_after = 0
    reply = update(ranks)
    assert reply.status_code == 500 and "went away" in reply.message
    assert ranks.hold(random_weights(0)) and ranks.refusal is None and ranks.number == 1


@SIZES
def test_more_is_streamed_by_the_commit_and_torn_if_it_ends_half_way(size: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, NBYTES - 1)
    assert [group.windows for group in trainer.groups] == [[1] * len(SHAPES)] * size
    trainer.dies_after = 2
    assert update(ranks).status_code == 500
    assert ranks.state == "torn" and "update failed before it was complete" in (ranks.refusal or "")
    trainer.dies_after = None
    assert update(ranks).status_code == 500, "the group is broken"
    assert destroy(ranks).success and init(ranks).success and update(ranks).success
    assert ranks.hold(random_weights(1)) and ranks.refusal is None


@SIZES
@pytest.mark.parametrize("limit", [NBYTES, 1])
def test_a_refused_update_is_received_all_the_same(size: int, limit: int, trainer: Trainer) -> None:
    """The refused update is received to its end, so that the group stays in step with the trainer's broadcasts."""
    ranks = served(size, trainer, limit)
    reply = update(ranks, EMBED, "no.such")
    assert reply.status_code == 400 and "no.such" in reply.message and ranks.hold(random_weights(0))
    assert update(ranks, EMBED, partial=False).status_code == 400
    assert update(ranks).success and ranks.hold(random_weights(1))


@SIZES
@pytest.mark.parametrize("limit", [NBYTES, 1], ids=["received", "streamed"])
def test_a_group_sends_parts_and_the_answer_names_the_rest(size: int, limit: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, limit)
    rest = [name for name in SHAPES if name != EMBED]
    assert update(ranks, EMBED).payload["not_covered"] == {"count": len(rest), "names": rest}
    assert ranks.handle(BeginWeightUpdateReq(transaction_id="t")).success
    assert update(ranks, EMBED, transaction_id="t").success
    assert ranks.handle(EndWeightUpdateReq(transaction_id="t")).status_code == 400
    assert update(ranks, *rest, transaction_id="t").success
    assert ranks.handle(EndWeightUpdateReq(transaction_id="t")).payload["not_covered"]["count"] == 0
    assert ranks.hold(random_weights(1))


def test_a_group_that_one_rank_lost_is_lost_to_all(trainer: Trainer) -> None:
    """All ranks leave the group, because the next broadcast would wait forever for the missing rank."""
    ranks = served(2, trainer, NBYTES)
    trainer.absent_for = [1]
    assert "rank 1" in update(ranks).message and ranks.hold(random_weights(0))
    assert all(group.broken for group in trainer.groups)
    trainer.absent_for = []
    assert update(ranks).status_code == 500
    assert destroy(ranks).success and init(ranks).success and update(ranks).success


def test_a_group_that_one_rank_could_not_join_nobody_joined(trainer: Trainer) -> None:
    ranks = Ranks(2)
    trainer.absent_for = [1]
    assert init(ranks).status_code == 400
    assert all(group.broken for group in trainer.groups), "rank 0 left the group again"
    trainer.absent_for = []
    assert init(ranks).success
    assert "exists" in init(ranks).message


@SIZES
@pytest.mark.parametrize("end", ["in an update", "between updates"])
def test_the_next_trainer_joins_in_the_place_of_one_that_is_gone(size: int, end: str, trainer: Trainer) -> None:
    ranks = served(size, trainer, NBYTES)
    old = list(trainer.groups)
    if end == "in an update":
        trainer.dies_after = 0
        assert update(ranks).status_code == 500
        trainer.dies_after = None
    else:
        assert "exists" in init(ranks).message, "a living trainer keeps its group"
        for group in old:
            group.trainer_is_gone = True
    assert init(ranks).success and update(ranks, partial=False).success
    assert ranks.hold(trainer.weights) and all(group.broken for group in old)


def test_unknown_groups_and_malformed_lists(trainer: Trainer) -> None:
    ranks = Ranks(1)
    assert destroy(ranks).status_code == 400 and "does not exist" in destroy(ranks).message
    assert update(ranks).status_code == 400 and "init_weights_update_group" in update(ranks).message
    for fields in (
        {"names": [NORM], "dtypes": [], "shapes": [[4]]},
        {"names": [], "dtypes": [], "shapes": []},
        {"names": [NORM], "dtypes": ["float33"], "shapes": [[4]]},
        {"names": [NORM], "dtypes": ["float32"], "shapes": [[-4]]},
        {"names": [NORM], "dtypes": ["float32"], "shapes": [[4]], "load_format": "pickle"},
        {"names": [NORM], "dtypes": ["float32"], "shapes": [[4]], "selector": "draft"},
    ):
        assert ranks.handle(UpdateWeightsFromDistributedReq(**fields)).status_code == 400


@pytest.mark.parametrize("limit", [NBYTES, NBYTES - 1])
def test_what_is_given_up_gives_its_room_back(limit: int, trainer: Trainer) -> None:
    """A dropped update frees its memory. A stream that was not read to its end also breaks the group.

    The group cannot know which tensor the trainer broadcasts next.
    """
    ranks = served(1, trainer, limit)
    shapes = [list(shape) for shape in SHAPES.values()]
    req = UpdateWeightsFromDistributedReq(names=list(SHAPES), dtypes=["float32"] * len(SHAPES), shapes=shapes)
    for _ in range(2):
        (prepared,) = ranks.on_all_ranks(lambda rank: ranks.stage(rank, req))
        prepared.discard()
        assert bool(trainer.groups[0].broken) == (limit < NBYTES)
        trainer.groups[0].broken = ""
    assert update(ranks).success


def test_an_update_that_is_never_received_breaks_its_group(trainer: Trainer) -> None:
    """The group breaks, because the next receive would get the broadcasts of the abandoned update."""
    ranks = served(1, trainer, NBYTES)
    shapes = [list(shape) for shape in SHAPES.values()]
    req = UpdateWeightsFromDistributedReq(names=list(SHAPES), dtypes=["float32"] * len(SHAPES), shapes=shapes)
    ranks.sources[0].abandoned(req)
    assert update(ranks).status_code == 500 and ranks.hold(random_weights(0)) and ranks.refusal is None


def test_received_tensors_wait_for_room() -> None:
    budget = ReceiveBudget(10, timeout=10.0)
    budget.acquire(6)
    got = threading.Event()

    def second() -> None:
        budget.acquire(5)
        got.set()

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert not got.is_set()
    budget.release(6)
    assert got.wait(10)
    thread.join(10)
    with pytest.raises(ControlTimeoutError, match="weight_receive_bytes"):
        ReceiveBudget(1, timeout=0.0).acquire(2)
