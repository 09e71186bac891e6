"""Weights with NaN or infinity, from any source, are named and never served, unless the request allows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import multiprocessing

from tests.weight_sync import sglang_payloads as sglang
from tests.weight_sync.described import Trainer as Owner
from tests.weight_sync.described import described, split_over
from tests.weight_sync.fakes import EMBED, NORM, O_PROJ, SHAPES, Q, Ranks, random_weights
from tests.worker.weights import test_weight_groups
from tests.worker.weights.test_weight_fuzz import WeighedHarness
from tests.worker.weights.test_weight_groups import NBYTES, Trainer, init, update
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    RegisterWeightsReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.weight_sync.trainer.sender import describe_tensors

SIZES = pytest.mark.parametrize("size", [1, 2])
BAD = [float("nan"), float("inf"), -float("inf")]
Weights = dict[str, torch.Tensor]

trainer = test_weight_groups.trainer  # a fixture


def spoiled(seed: int, *names: str, bad: float = BAD[0]) -> Weights:
    """Return random weights in which the last element of each of `names` is `bad`."""
    weights = random_weights(seed)
    for name in names:
        weights[name].view(-1)[-1] = bad
    return weights


def as_handles(weights: Weights, folder: Path) -> Any:
    return UpdateWeightsFromTensorReq(named_tensors=describe_tensors(weights.items()))


def as_description(weights: Weights, folder: Path) -> Any:
    return UpdateWeightsFromTensorReq(description=described(weights)[1])


def as_shards(weights: Weights, folder: Path) -> Any:
    owner = Owner(3)
    for name, tensor in weights.items():
        owner.place(name, tensor, split_over(0, 3)(tensor.shape))
    return UpdateWeightsFromTensorReq(description=owner.description())


def as_pickles(weights: Weights, folder: Path) -> Any:
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        payload = sglang.serialized(list(weights.items()))
    finally:
        multiprocessing.set_sharing_strategy(before)
    return UpdateWeightsFromTensorReq(serialized_named_tensors=[payload])


def as_checkpoint(weights: Weights, folder: Path) -> Any:
    save_file(weights, folder / "model.safetensors")
    return UpdateWeightsFromDiskReq(model_path=str(folder))


SOURCES = pytest.mark.parametrize("source", [as_handles, as_description, as_shards, as_pickles, as_checkpoint])


def push(ranks: Ranks, weights: Weights, **options: Any) -> Any:
    return ranks.handle(UpdateWeightsFromTensorReq(description=described(weights)[1], **options))


def assert_torn(ranks: Ranks, reply: Any, *names: str) -> None:
    assert (reply.success, reply.status_code) == (False, 400)
    assert "NaN or infinity" in reply.message and all(name in reply.message for name in names)
    assert not any(name in reply.message for name in SHAPES if name not in names)
    assert (ranks.state, ranks.number) == ("torn", 1)
    assert "NaN or infinity" in (ranks.refusal or "")


@SIZES
@SOURCES
def test_they_are_named_and_refused(size: int, source: Any, tmp_path: Path) -> None:
    ranks = Ranks(size)
    assert push(ranks, random_weights(0)).success
    epoch = ranks.updaters[0].epoch
    weights = spoiled(1, Q, NORM)  # its memory is read until the reply
    reply = ranks.handle(source(weights, tmp_path))
    assert_torn(ranks, reply, Q, NORM)
    assert "in 2 of 5 tensors" in reply.message
    assert ranks.updaters[0].epoch > epoch, "no page that was computed before is reused"
    weights = random_weights(2)
    assert ranks.handle(source(weights, tmp_path)).success
    assert (ranks.refusal, ranks.number) == (None, 2) and ranks.hold(weights)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", list(SHAPES))
def test_one_number_on_one_rank_is_enough(name: str, bad: float) -> None:
    ranks = Ranks(2)
    push(ranks, random_weights(0))
    reply = push(ranks, spoiled(1, name, bad=bad))
    assert_torn(ranks, reply, name)
    assert ("tensor-parallel rank 1" in reply.message) == (name != NORM), "both ranks hold the whole norm"


@SIZES
def test_a_registered_push_is_looked_at_each_time(size: int) -> None:
    ranks = Ranks(size)
    owner, description = described(random_weights(0))
    assert ranks.handle(RegisterWeightsReq(description=description)).success

    def by_id(weights: Weights) -> Any:
        for name, (view,) in owner.placed.items():
            view.copy_(weights[name])
        return ranks.handle(UpdateWeightsFromTensorReq(registration=description.id))

    assert by_id(random_weights(0)).success
    for _ in range(2):
        assert_torn(ranks, by_id(spoiled(1, EMBED, bad=BAD[2])), EMBED)
    assert by_id(random_weights(2)).success and ranks.refusal is None and ranks.hold(random_weights(2))


@SIZES
@pytest.mark.parametrize("limit", [NBYTES, NBYTES - 1], ids=["received", "streamed"])
def test_a_process_group_brings_them(size: int, limit: int, trainer: Trainer) -> None:
    ranks = Ranks(size, args={"weight_receive_bytes": limit})
    assert init(ranks).success and update(ranks).success
    trainer.weights = spoiled(1, Q, NORM)
    assert_torn(ranks, update(ranks), Q, NORM)
    trainer.weights = random_weights(2)
    assert update(ranks).success, "all windows were received, so the group is whole"
    assert ranks.refusal is None and ranks.hold(random_weights(2))


@SIZES
def test_a_number_that_the_models_dtype_cannot_hold_is_infinity(size: int) -> None:
    ranks = Ranks(size, dtype=torch.float16)
    push(ranks, random_weights(0))
    assert_torn(ranks, push(ranks, spoiled(1, O_PROJ, bad=70_000.0)), O_PROJ)
    assert push(ranks, spoiled(1, O_PROJ, bad=65_000.0)).success


@SIZES
def test_who_wants_them_gets_them(size: int, caplog: pytest.LogCaptureFixture) -> None:
    ranks = Ranks(size)
    push(ranks, random_weights(0))
    reply = push(ranks, spoiled(1, Q, bad=BAD[1]), allow_nonfinite=True)
    assert reply.success and (ranks.state, ranks.number) == ("serving", 2)
    assert ranks.hold(spoiled(1, Q, bad=BAD[1])) and Q in caplog.text
    assert push(ranks, {NORM: torch.zeros(4)}, partial=True).success, "only the pushed values are checked"


@SIZES
def test_one_call_spoils_its_transaction(size: int) -> None:
    """A call with bad values leaves the transaction open. All parameters must then be pushed again."""
    ranks = Ranks(size)
    push(ranks, random_weights(0))
    assert ranks.handle(BeginWeightUpdateReq()).success
    new = random_weights(1)
    assert push(ranks, {EMBED: new[EMBED]}, partial=True).success
    assert_torn(ranks, push(ranks, {Q: spoiled(1, Q)[Q]}, partial=True), Q)
    assert ranks.handle(EndWeightUpdateReq()).status_code == 400
    assert push(ranks, {Q: new[Q]}, partial=True).success
    reply = ranks.handle(EndWeightUpdateReq())
    assert reply.status_code == 400 and EMBED in reply.message
    assert push(ranks, new).success and ranks.handle(EndWeightUpdateReq()).success
    assert (ranks.refusal, ranks.number) == (None, 2) and ranks.hold(new)


def test_a_long_list_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    reply = push(ranks, spoiled(1, *SHAPES))
    assert "in 5 of 5 tensors" in reply.message and ", ..." in reply.message


# -- generation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("mode", ["in_place", "retract", "wait", "abort"])
def test_no_token_is_sampled_from_them(mode: Any, overlaps: bool) -> None:
    """No token is sampled from bad weights, not even between the copy and the verdict.

    The harness compares the weights of every step with the pushed ones. A step in flight fails if the weights change
    during the step.
    """
    h = WeighedHarness(num_pages=64, overlaps=overlaps)
    h.add("r", [10, 11, 12], 30)
    h.steps(4)
    before = len(h.tokens["r"])
    assert before

    def send(id: int, weights: Weights) -> None:
        req = UpdateWeightsFromTensorReq(id=id, description=described(weights, str(id))[1], mode=mode)
        h.book.sent[id] = (req, weights, False)
        h.scheduler.handle(req)
        h.turned.turn()
        while id not in h.replies:
            h.steps()

    send(1, spoiled(1, Q))
    reply = h.replies[1]
    assert reply.status_code == 400 and Q in reply.message
    h.run()
    assert set(h.versions["r"]) == {"default"}
    if mode in ("in_place", "retract"):
        assert h.finished["r"].status_code == 503 and "NaN or infinity" in (h.finished["r"].message or "")
    h.add("late", [10, 11], 3)
    h.steps()
    assert h.finished["late"].status_code == 503
    send(2, random_weights(2))
    assert h.replies[2].success
    h.add("again", [10, 11], 3)
    h.run()
    assert h.versions["again"] == [h.updater.version] * 3 and h.updater.version.startswith("1@")
