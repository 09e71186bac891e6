"""Updates whose tensors the trainer announces as it broadcasts them: old weights, new weights, or torn weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.weight_sync.fakes import EMBED, NORM, SHAPES, K, Q, Ranks, random_weights
from tests.weight_sync.prime_rl_trainer import StateDict, broadcasts, layers
from verl_server.errors import WeightUpdateError
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq, UpdateWeightsFromDistributedReq
from verl_server.weight_sync.group.broadcast import init_weights_update_group
from verl_server.weight_sync.group.group_connection import in_thread
from verl_server.worker.weights import weight_groups

NBYTES = sum(torch.Size(shape).numel() * 4 for shape in SHAPES.values())
SIZES = pytest.mark.parametrize("size", [1, 2])
LIMITS = pytest.mark.parametrize("limit", [NBYTES, 1])
"""All of an update is received before the first write, or only its first state dict."""


class Trainer:
    """A trainer that sends `state_dicts` to fakes of `WeightGroup`."""

    def __init__(self) -> None:
        self.state_dicts: list[StateDict] = layers(random_weights(0))
        self.dies_after: int | None = None
        """The number of state dicts that the trainer sends before it dies (None: it does not die)."""
        self.groups: list[Group] = []


class Group:
    """A fake of one server rank's `WeightGroup`."""

    def __init__(self, trainer: Trainer) -> None:
        self.broken, self._trainer, self.received = "", trainer, 0

    def receive_state_dicts(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.received = 0
        for state_dict in self._trainer.state_dicts:
            if self.received == self._trainer.dies_after or self.broken:
                self.broken = self.broken or "lost"
                raise WeightUpdateError("The trainer went away.")
            self.received += 1
            yield [(name, tensor.clone()) for name, tensor in state_dict.items()]

    def close(self) -> None:
        self.broken = self.broken or "destroyed"


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    trainer = Trainer()

    def join(*_: Any) -> Group:
        trainer.groups.append(Group(trainer))
        return trainer.groups[-1]

    monkeypatch.setattr(weight_groups.WeightGroup, "join", join)
    return trainer


def update(ranks: Ranks, **fields: Any) -> Any:
    fields = {"names": [], "dtypes": [], "shapes": [], "load_format": "state_dicts", "partial": False} | fields
    return ranks.handle(UpdateWeightsFromDistributedReq(**fields))


def served(size: int, trainer: Trainer, limit: int) -> Ranks:
    """Ranks that hold the weights of seed 0. The trainer has those of seed 1."""
    ranks = Ranks(size, args={"weight_receive_bytes": limit})
    req = InitWeightsUpdateGroupReq(master_address="h", master_port=1, rank_offset=1, world_size=size + 1)
    assert ranks.handle(req).success
    reply = update(ranks)
    assert reply.success and reply.payload["num_tensors"] == len(SHAPES), reply.message
    assert ranks.hold(random_weights(0)) and ranks.number == 1 and ranks.refusal is None
    trainer.state_dicts = layers(random_weights(1))
    return ranks


@SIZES
@LIMITS
def test_an_update_replaces_every_parameter(size: int, limit: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, limit)
    assert update(ranks, weight_version="v7").success
    assert ranks.hold(random_weights(1)) and ranks.version == "v7" and ranks.refusal is None
    assert all(not group.broken and group.received == 2 for group in trainer.groups)


@SIZES
def test_a_trainer_that_dies_leaves_the_old_weights_if_all_would_be_received_first(size: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, NBYTES)
    trainer.dies_after = 1
    reply = update(ranks)
    assert reply.status_code == 500 and "went away" in reply.message
    assert ranks.hold(random_weights(0)) and ranks.refusal is None and ranks.number == 1
    assert all(group.broken for group in trainer.groups)


@SIZES
def test_a_trainer_that_dies_within_a_larger_update_leaves_torn_weights(size: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, 1)
    trainer.dies_after = 1
    assert update(ranks).status_code == 500
    assert ranks.state == "torn" and "update failed before it was complete" in (ranks.refusal or "")
    assert all(group.broken for group in trainer.groups)


WRONG = {
    "an unknown name in the first state dict": (0, {"no.such": torch.ones(1)}, "no.such"),
    "an unknown name in a later state dict": (1, {"no.such": torch.ones(1)}, "no.such"),
    "another shape": (1, {Q: torch.ones(5, 4)}, r"has shape \[5, 4\]"),
    "a parameter twice": (1, {NORM: torch.ones(4)}, "twice"),
    "integers": (1, {Q: torch.ones(4, 4, dtype=torch.int32)}, "floating point"),
}


@SIZES
@LIMITS
@pytest.mark.parametrize("case", WRONG)
def test_a_refused_update_is_received_to_its_end(size: int, limit: int, case: str, trainer: Trainer) -> None:
    """An update that is received first is refused. A larger one may be torn, if its later part is wrong."""
    index, change, message = WRONG[case]
    ranks = served(size, trainer, limit)
    trainer.state_dicts[index] = trainer.state_dicts[index] | change
    reply = update(ranks)
    assert not reply.success and re.search(message, reply.message), reply.message
    assert all(not group.broken and group.received == 2 for group in trainer.groups), "the ranks are still in step"
    if limit == NBYTES or index == 0:
        assert reply.status_code == 400 and ranks.hold(random_weights(0)) and ranks.refusal is None
    else:
        assert reply.status_code == 500 and ranks.state == "torn"
    trainer.state_dicts = layers(random_weights(2))
    assert update(ranks).success and ranks.hold(random_weights(2)) and ranks.refusal is None


@SIZES
@LIMITS
def test_a_parameter_that_is_missing(size: int, limit: int, trainer: Trainer) -> None:
    ranks = served(size, trainer, limit)
    del trainer.state_dicts[1][K]
    reply = update(ranks)
    assert not reply.success and f"missing: '{K}'" in reply.message
    assert ranks.state == ("serving" if limit == NBYTES else "torn")
    trainer.state_dicts = layers(random_weights(2))
    assert update(ranks).success and ranks.refusal is None


@LIMITS
def test_a_part_may_be_sent_if_the_request_says_so(limit: int, trainer: Trainer) -> None:
    ranks = served(1, trainer, limit)
    trainer.state_dicts = [{EMBED: random_weights(1)[EMBED]}]
    assert update(ranks, partial=True).success
    assert ranks.hold(random_weights(0) | {EMBED: random_weights(1)[EMBED]}) and ranks.refusal is None


@LIMITS
def test_nan_tears_the_weights(limit: int, trainer: Trainer) -> None:
    ranks = served(1, trainer, limit)
    trainer.state_dicts[1][Q][0, 0] = torch.nan
    reply = update(ranks)
    assert reply.status_code == 400 and "NaN or infinity" in reply.message and Q in reply.message
    assert ranks.state == "torn"


@LIMITS
def test_what_is_given_up_gives_its_room_back(limit: int, trainer: Trainer) -> None:
    """A dropped update frees its memory, and breaks the group if it was not received to its end."""
    ranks = served(1, trainer, limit)
    req = UpdateWeightsFromDistributedReq(names=[], dtypes=[], shapes=[], load_format="state_dicts")
    for _ in range(2):
        (prepared,) = ranks.on_all_ranks(lambda rank: ranks.stage(rank, req))
        prepared.discard()
        assert bool(trainer.groups[0].broken) == (limit < NBYTES)
        trainer.groups[0].broken = ""
    assert update(ranks).success


def test_the_request_must_not_describe_tensors(trainer: Trainer) -> None:
    ranks = served(1, trainer, NBYTES)
    reply = update(ranks, names=[NORM], dtypes=["float32"], shapes=[[4]])
    assert reply.status_code == 400 and "must be empty" in reply.message


@LIMITS
def test_prime_rls_broadcasts_over_gloo(limit: int) -> None:
    """The bytes of prime-rl's trainers pass through a real group of two ranks and become their weights."""
    ranks = Ranks(2, args={"weight_receive_bytes": limit})

    class Engine:
        def init_weights_update_group(self, **fields: Any) -> None:
            assert ranks.handle(InitWeightsUpdateGroupReq(**fields)).success

        def update_weights_from_distributed(self, **_: Any) -> None: ...

    with init_weights_update_group([Engine()], "127.0.0.1", tp_size=2, backend="gloo", device="cpu") as group:
        for seed in range(2):
            weights = {name: tensor.bfloat16() for name, tensor in random_weights(seed).items()}
            weights[NORM] = weights[NORM].float()
            answer = in_thread(lambda: update(ranks))
            group.broadcast(broadcasts(layers(weights)))
            assert answer.result(20).success and ranks.hold(weights), seed
    for source in ranks.sources:
        source.groups.destroy("weight_update_group")
