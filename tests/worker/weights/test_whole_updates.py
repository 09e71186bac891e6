"""A weight update is whole unless its caller says that it is partial, whatever its source is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.weight_sync import sglang_payloads as sglang
from tests.weight_sync.described import Trainer as SharedTrainer
from tests.weight_sync.described import described, split_over
from tests.weight_sync.fakes import EMBED, NORM, O_PROJ, SHAPES, K, Q, Ranks, random_weights
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    RegisterWeightsReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.weight_sync.trainer.sender import describe_tensors

Weights = dict[str, torch.Tensor]
Source = Callable[[Ranks, Weights], dict[str, Any]]
"""Returns the fields of an update that carries these weights."""
SIZES = pytest.mark.parametrize("ranks", [1, 2], indirect=True)
HEAD = "lm_head.weight"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    ranks = Ranks(getattr(request, "param", 1))
    assert push(ranks, description(ranks, random_weights(0))).success
    return ranks


alive: list[Weights] = []
"""Tensors whose handles were made in the current test: their memory must outlive the update."""


@pytest.fixture(autouse=True)
def shared_files() -> Iterator[None]:
    """SGLang's pickles name files in /dev/shm."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    yield
    torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]
    alive.clear()


def description(_: Ranks, weights: Weights) -> dict[str, Any]:
    return {"description": described(weights)[1]}


def registration(ranks: Ranks, weights: Weights) -> dict[str, Any]:
    id = f"of {len(weights)}"
    assert ranks.handle(RegisterWeightsReq(description=described(weights, id)[1])).success
    return {"registration": id}


def handles(_: Ranks, weights: Weights) -> dict[str, Any]:
    alive.append(weights)
    return {"named_tensors": describe_tensors(weights.items())}


def sglang_pairs(ranks: Ranks, weights: Weights) -> dict[str, Any]:
    alive.append(weights)
    return {"serialized_named_tensors": [sglang.serialized(list(weights.items())) for _ in ranks.runners]}


def sglang_bucket(_: Ranks, weights: Weights) -> dict[str, Any]:
    bucket = sglang.bucket(list(weights.items()))
    alive.append({"": bucket["flattened_tensor"]})
    with sglang.stub_modules(**{f"{sglang.BUCKETS}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        payload = sglang.serialized(bucket)
    return {"serialized_named_tensors": [payload], "load_format": "flattened_bucket"}


OURS, OTHERS = [description, registration], [handles, sglang_pairs, sglang_bucket]


def push(ranks: Ranks, source: dict[str, Any], **fields: Any) -> Any:
    return ranks.handle(UpdateWeightsFromTensorReq(**source, **fields))


def without(weights: Weights, *names: str) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name not in names}


def assert_unchanged(ranks: Ranks) -> None:
    assert ranks.hold(random_weights(0)), "something was written"
    assert (ranks.state, ranks.number, ranks.refusal) == ("serving", 1, None)


@SIZES
@pytest.mark.parametrize("source", OURS)
def test_a_push_without_the_norm_is_refused_by_default(ranks: Ranks, source: Source) -> None:
    new = random_weights(1)
    epoch = ranks.updaters[0].epoch
    reply = push(ranks, source(ranks, without(new, NORM)))
    assert (reply.success, reply.status_code) == (False, 400)
    assert f"it lacks 1 of 5; missing: '{NORM}'." in reply.message
    assert "partial=True" in reply.message and "begin_weight_update" in reply.message, "the remedies"
    assert_unchanged(ranks)
    assert ranks.updaters[0].epoch == epoch, "the prefix cache stays valid"
    reply = push(ranks, source(ranks, new))
    assert reply.success and ranks.hold(new) and ranks.number == 2, "the next whole push works"
    assert reply.payload["not_covered"] == {"count": 0, "names": []} and "Not covered" not in reply.message


@SIZES
@pytest.mark.parametrize("source", [*OURS, *OTHERS])
def test_a_partial_push_is_accepted_and_the_answer_names_the_rest(ranks: Ranks, source: Source) -> None:
    new = random_weights(1)
    reply = push(ranks, source(ranks, without(new, NORM, EMBED)), partial=True)
    assert reply.success and reply.payload["not_covered"] == {"count": 2, "names": [EMBED, NORM]}
    assert f"Not covered: 2 of 5 parameters ({EMBED}, {NORM})." in reply.message
    assert ranks.hold(without(new, NORM, EMBED) | {name: random_weights(0)[name] for name in (NORM, EMBED)})
    assert (ranks.state, ranks.number) == ("serving", 2)


@SIZES
@pytest.mark.parametrize("source", OTHERS)
def test_tensors_of_sglang_stay_partial_unless_the_caller_says_whole(ranks: Ranks, source: Source) -> None:
    reply = push(ranks, source(ranks, without(random_weights(1), NORM)), partial=False)
    assert reply.status_code == 400 and f"missing: '{NORM}'" in reply.message
    assert_unchanged(ranks)
    reply = push(ranks, source(ranks, without(random_weights(1), NORM)))
    assert reply.success and reply.payload["not_covered"] == {"count": 1, "names": [NORM]}


def test_ranks_that_are_sent_other_tensors_write_nothing() -> None:
    """Each rank has a payload of its own. If one lacked a tensor, the ranks would serve different versions."""
    ranks = Ranks(2)
    push(ranks, description(ranks, random_weights(0)))
    new = random_weights(1)
    (first, _), (_, second) = (
        sglang_pairs(ranks, weights)["serialized_named_tensors"] for weights in (new, without(new, NORM))
    )
    reply = push(ranks, {"serialized_named_tensors": [first, second]})
    assert reply.status_code == 400 and "tensors of different names" in reply.message
    assert_unchanged(ranks)
    turned = dict(reversed(new.items()))
    (first, _), (_, second) = (sglang_pairs(ranks, weights)["serialized_named_tensors"] for weights in (new, turned))
    assert push(ranks, {"serialized_named_tensors": [first, second]}).success and ranks.hold(new)


@SIZES
def test_a_tied_head_covers_the_embedding(ranks: Ranks) -> None:
    new = random_weights(1)
    head = without(new, EMBED) | {HEAD: new[EMBED]}
    assert push(ranks, description(ranks, head)).success and ranks.hold(new)
    reply = push(ranks, description(ranks, without(new, EMBED)))
    assert reply.status_code == 400 and f"missing: '{EMBED}'" in reply.message


@SIZES
@pytest.mark.parametrize("lost", [Q, K])
def test_a_fused_parameter_needs_all_of_its_shards(ranks: Ranks, lost: str) -> None:
    """The model keeps q and k in one matrix."""
    reply = push(ranks, description(ranks, without(random_weights(1), lost)))
    assert reply.status_code == 400 and f"it lacks 1 of 5; missing: '{lost}'" in reply.message
    assert_unchanged(ranks)


@SIZES
@pytest.mark.parametrize("fields", [{}, {"partial": True}, {"transaction_id": "t"}])
def test_a_part_of_one_parameter_is_refused_in_any_case(ranks: Ranks, fields: dict[str, Any]) -> None:
    """A parameter is written whole or not at all, so coverage is a question of names."""
    if "transaction_id" in fields:
        ranks.handle(BeginWeightUpdateReq(transaction_id="t"))
    trainer = SharedTrainer(2)
    for name, tensor in random_weights(1).items():
        trainer.place(name, tensor, split_over(0, 2)(tensor.shape)[: 1 if name == O_PROJ else 2])
    reply = push(ranks, {"description": trainer.description()}, **fields)
    assert reply.status_code == 400 and O_PROJ in reply.message
    assert_unchanged(ranks)


@SIZES
@pytest.mark.parametrize("source", [*OURS, *OTHERS])
def test_two_parts_of_a_transaction_are_whole(ranks: Ranks, source: Source) -> None:
    new = random_weights(1)
    ranks.handle(BeginWeightUpdateReq(transaction_id="t"))
    assert push(ranks, source(ranks, without(new, NORM, K)), transaction_id="t").success
    refused = ranks.handle(EndWeightUpdateReq(transaction_id="t"))
    assert refused.status_code == 400 and f"2 parameters are missing ('{K}', '{NORM}')" in refused.message
    assert ranks.number == 1 and "has not ended" in (ranks.refusal or ""), "it is open, and requests wait"
    assert push(ranks, source(ranks, {name: new[name] for name in (NORM, K)}), transaction_id="t").success
    reply = ranks.handle(EndWeightUpdateReq(transaction_id="t"))
    assert reply.success and reply.payload["not_covered"]["count"] == 0
    assert ranks.hold(new) and (ranks.number, ranks.state) == (2, "serving")


def test_one_call_of_a_transaction_may_promise_to_be_whole(ranks: Ranks) -> None:
    ranks.handle(BeginWeightUpdateReq(transaction_id="t"))
    part = description(ranks, without(random_weights(1), NORM))
    assert push(ranks, part, transaction_id="t", partial=False).status_code == 400
    assert ranks.handle(EndWeightUpdateReq(transaction_id="t", discard=True)).success
    assert_unchanged(ranks)


@SIZES
def test_a_description_in_a_transaction_without_an_id_says_so(ranks: Ranks) -> None:
    """A call without an id is not known to be of a transaction until its turn, so it must say that it is partial."""
    new = random_weights(1)
    ranks.handle(BeginWeightUpdateReq())
    part = description(ranks, without(new, NORM))
    assert push(ranks, part).status_code == 400 and push(ranks, part, partial=True).success
    reply = ranks.handle(EndWeightUpdateReq())
    assert reply.success and reply.payload["not_covered"] == {"count": 1, "names": [NORM]}


@pytest.mark.parametrize("size", [1, 2])
def test_what_no_rank_reads_is_not_missing(size: int) -> None:
    """An engine may leave out layers of its checkpoint. They may come, alone or with others."""
    ranks = Ranks(size)
    for runner in ranks.runners:
        runner.weight_map.unserved = frozenset([NORM])
    new = random_weights(1)
    reply = push(ranks, description(ranks, without(new, NORM)))
    assert reply.success and reply.payload["not_covered"]["count"] == 0
    assert push(ranks, description(ranks, new)).success
    reply = push(ranks, description(ranks, {NORM: new[NORM]}), partial=True)
    assert reply.success and reply.payload["not_covered"] == {"count": 4, "names": [n for n in SHAPES if n != NORM]}
    ranks.handle(BeginWeightUpdateReq(transaction_id="t"))
    assert push(ranks, description(ranks, without(new, NORM)), transaction_id="t").success
    assert ranks.handle(EndWeightUpdateReq(transaction_id="t")).success
