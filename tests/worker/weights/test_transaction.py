"""Transactions in the `WeightUpdater` of every rank, over real plans and without rank 0's control queue."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch

from tests.weight_sync.described import Trainer, described
from tests.weight_sync.fakes import EMBED, NORM, O_PROJ, SHAPES, K, Q, Ranks, random_weights
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromTensorReq,
    WeightsCheckerReq,
)
from verl_server.weight_sync.checksum import tensor_checksum
from verl_server.weight_sync.receiver.plan import UpdatePlan

SIZES = pytest.mark.parametrize("ranks", [1, 2], indirect=True)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    ranks = Ranks(getattr(request, "param", 1))
    assert push(ranks, random_weights(0)).success
    return ranks


def push(ranks: Ranks, weights: dict[str, torch.Tensor], **options: Any) -> Any:
    _, description = described(weights)
    return ranks.handle(UpdateWeightsFromTensorReq(description=description, **options))


def part(ranks: Ranks, weights: dict[str, torch.Tensor], **options: Any) -> Any:
    """Push in the transaction that `begin` opened."""
    return push(ranks, weights, transaction_id="t", **options)


def begin(ranks: Ranks, **options: Any) -> Any:
    return ranks.handle(BeginWeightUpdateReq(**({"transaction_id": "t"} | options)))


def end(ranks: Ranks, **options: Any) -> Any:
    return ranks.handle(EndWeightUpdateReq(**({"transaction_id": "t"} | options)))


def some(weights: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: weights[name] for name in names}


def fail_once(monkeypatch: pytest.MonkeyPatch, ranks: Ranks, call: Any) -> Any:
    """Return the result of `call()`, during which every copy fails after it wrote."""
    whole = UpdatePlan.commit

    def commit(plan: UpdatePlan) -> None:
        whole(plan)
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr(UpdatePlan, "commit", commit)
        return call()


@SIZES
def test_many_calls_are_one_version(ranks: Ranks) -> None:
    new, epoch = random_weights(1), ranks.updaters[0].epoch
    assert begin(ranks).success
    assert ranks.updaters[0].epoch == epoch and ranks.refusal is None
    for name in SHAPES:
        reply = part(ranks, some(new, name))
        assert reply.success and reply.message == "Success" and "weight_version" not in reply.payload
        assert ranks.number == 1 and "has not ended" in (ranks.refusal or "")
    reply = end(ranks)
    assert reply.success and reply.payload["weight_version"] == ranks.version and ranks.number == 2
    assert ranks.updaters[0].epoch == epoch + 1 and ranks.refusal is None and ranks.hold(new)


@SIZES
def test_the_newest_label_of_its_calls_counts_unless_the_end_brings_one(ranks: Ranks) -> None:
    begin(ranks, full=False)
    part(ranks, some(random_weights(1), NORM), weight_version="a")
    part(ranks, some(random_weights(1), Q), weight_version="b")
    assert end(ranks).success and ranks.version == "b"
    begin(ranks, full=False)
    part(ranks, some(random_weights(2), NORM), weight_version="c")
    assert end(ranks, weight_version="d").success and ranks.version == "d"


@SIZES
@pytest.mark.parametrize("way", ["full=False", "partial=True", "no id"])
def test_a_partial_transaction_over_whole_weights_serves(ranks: Ranks, way: str) -> None:
    """A transaction is whole unless its begin or its end says otherwise, or it has no id, as SGLang opens it."""
    begin(ranks, **{"full=False": {"full": False}, "no id": {"transaction_id": None}}.get(way, {}))
    push(ranks, some(random_weights(1), NORM, Q), partial=True)
    reply = end(ranks, partial=way == "partial=True")
    assert reply.success and "Not covered: 3 of 5 parameters" in reply.message
    assert reply.payload["not_covered"] == {"count": 3, "names": [EMBED, K, O_PROJ]}
    assert ranks.state == "serving" and ranks.hold(random_weights(0) | some(random_weights(1), NORM, Q))


@SIZES
@pytest.mark.parametrize("options", [{}, {"full": True}, {"full": True, "transaction_id": None}])
def test_a_transaction_cannot_end_before_everything_was_brought(ranks: Ranks, options: dict[str, Any]) -> None:
    """A refused end leaves the transaction open, and names what to do: bring the rest, or end it in another way."""
    new = random_weights(1)
    begin(ranks, **options)
    part(ranks, some(new, EMBED, Q))
    reply = end(ranks)
    assert reply.status_code == 400 and "3 parameters are missing" in reply.message and f"'{NORM}'" in reply.message
    assert "partial=True" in reply.message and "discard=True" in reply.message
    assert ranks.state == "torn" and ranks.number == 1
    part(ranks, {name: w for name, w in new.items() if name not in (EMBED, Q)})
    reply = end(ranks)
    assert reply.success and reply.payload["not_covered"] == {"count": 0, "names": []}
    assert ranks.hold(new) and ranks.state == "serving" and ranks.number == 2


@SIZES
def test_a_whole_transaction_that_wrote_nothing_does_not_end(ranks: Ranks) -> None:
    """A trainer whose iterator was empty did not push the version that it names."""
    begin(ranks)
    assert end(ranks, weight_version="7").status_code == 400 and ranks.number == 1
    reply = end(ranks, weight_version="7", partial=True)
    assert reply.success and reply.payload["not_covered"] == {"count": 5, "names": list(SHAPES)}
    assert ranks.version == "7" and ranks.hold(random_weights(0)) and ranks.refusal is None


class LackingLoader:
    """The loader of an engine that installs q and k together."""

    names: frozenset[str] = frozenset()
    refusal = ""

    def lacking(self, names: list[str]) -> list[str]:
        return [K] if Q in names and K not in names else []


def test_an_end_that_one_rank_refuses_no_rank_carries_out() -> None:
    """Otherwise the transaction would be open on one rank only."""
    ranks = Ranks(2)
    push(ranks, random_weights(0))
    ranks.runners[1].weight_map.loader = LackingLoader()  # type: ignore[assignment]
    new = random_weights(1)
    begin(ranks)
    part(ranks, {name: w for name, w in new.items() if name != K})
    reply = end(ranks, partial=True)
    assert reply.status_code == 400 and "tensor-parallel rank 1: This engine installs fused modules" in reply.message
    part(ranks, some(new, K))
    assert end(ranks).success and ranks.hold(new) and ranks.refusal is None


@SIZES
def test_a_refused_end_may_be_followed_by_a_discard(ranks: Ranks) -> None:
    begin(ranks)
    part(ranks, some(random_weights(1), NORM))
    assert end(ranks).status_code == 400
    assert end(ranks, discard=True).success and ranks.state == "torn"
    assert push(ranks, random_weights(2)).success and ranks.hold(random_weights(2)) and ranks.refusal is None


@SIZES
@pytest.mark.parametrize("wrote", [False, True])
def test_a_discarded_transaction_is_torn_if_it_wrote_and_nothing_else(ranks: Ranks, wrote: bool) -> None:
    epoch = ranks.updaters[0].epoch
    begin(ranks)
    assert part(ranks, {"no.such": torch.ones(1)}).status_code == 400, "a refused call writes nothing"
    if wrote:
        part(ranks, some(random_weights(1), NORM))
    assert end(ranks, discard=True).success
    assert (ranks.state, ranks.updaters[0].epoch) == (("torn", epoch + 1) if wrote else ("serving", epoch))
    assert ranks.number == 1 and (wrote or ranks.hold(random_weights(0)))
    assert push(ranks, random_weights(2)).success and ranks.refusal is None and ranks.hold(random_weights(2))


@SIZES
def test_a_write_that_failed_makes_the_transaction_bring_everything(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = random_weights(1)
    begin(ranks)
    part(ranks, some(new, EMBED))
    assert fail_once(monkeypatch, ranks, lambda: part(ranks, some(new, NORM))).status_code == 500
    part(ranks, some(new, NORM))
    for partial_end in (False, True):
        reply = end(ranks, partial=partial_end)
        assert reply.status_code == 400 and "a write failed" in reply.message and EMBED in reply.message
        assert "partial=True" not in reply.message, "nobody knows the values of what was not written again"
    part(ranks, new)
    assert end(ranks).success and ranks.hold(new) and ranks.refusal is None


@SIZES
def test_a_transaction_brings_not_loaded_weights_back_in_parts(ranks: Ranks) -> None:
    new = random_weights(1)
    ranks.handle(ReleaseMemoryOccupationReq(tags=["weights"]))
    assert begin(ranks).status_code == 400, "there is no memory to write to"
    ranks.handle(ResumeMemoryOccupationReq(tags=["weights"]))
    begin(ranks, full=False)
    part(ranks, some(new, EMBED, Q))
    reply = end(ranks)
    assert reply.success and "Not serving yet: update the remaining 3 of 5" in reply.message
    assert ranks.state == "not_loaded"
    begin(ranks)
    part(ranks, {name: w for name, w in new.items() if name not in (EMBED, Q)})
    assert end(ranks, partial=True).success and ranks.state == "serving" and ranks.hold(new)


@SIZES
def test_weights_that_a_backup_restored_serve_as_before(ranks: Ranks) -> None:
    for runner in ranks.runners:
        runner.has_backup = True
    push(ranks, random_weights(1), weight_version="v1")
    epoch = ranks.updaters[0].epoch
    ranks.handle(ReleaseMemoryOccupationReq(tags=["weights"]))
    assert ranks.state == "asleep"
    ranks.handle(ResumeMemoryOccupationReq(tags=["weights"]))
    assert (ranks.state, ranks.version, ranks.refusal) == ("serving", "v1", None)
    assert ranks.updaters[0].epoch > epoch
    ranks.handle(WeightsCheckerReq(action="reset_tensors"))
    push(ranks, some(random_weights(2), NORM), partial=True)
    ranks.handle(ReleaseMemoryOccupationReq(tags=["weights"]))
    ranks.handle(ResumeMemoryOccupationReq(tags=["weights"]))
    assert ranks.state == "torn" and "remaining 4 of 5" in (ranks.refusal or ""), (
        "a backup of torn weights restores torn weights"
    )


def test_a_backup_that_one_rank_lost_restores_none() -> None:
    ranks = Ranks(2)
    ranks.runners[0].has_backup = True
    ranks.handle(ReleaseMemoryOccupationReq())
    ranks.handle(ResumeMemoryOccupationReq())
    assert ranks.state == "not_loaded"


# -- registrations -------------------------------------------------------------------------------------------


def register(ranks: Ranks, trainer: Trainer, id: str, **options: Any) -> Any:
    return ranks.handle(RegisterWeightsReq(description=trainer.description(id), **options))


def by_id(ranks: Ranks, id: str, **options: Any) -> Any:
    return ranks.handle(UpdateWeightsFromTensorReq(registration=id, **options))


@SIZES
def test_a_registration_is_pushed_many_times(ranks: Ranks) -> None:
    trainer, _ = described(random_weights(1))
    reply = register(ranks, trainer, "r")
    assert reply.success and reply.payload == {"registration": "r"} and ranks.hold(random_weights(0))
    for seed in range(1, 5):
        new = random_weights(seed)
        for name, (view,) in trainer.placed.items():
            view.copy_(new[name])
        reply = by_id(ranks, "r", partial=False)
        assert reply.success and reply.payload["num_tensors"] == len(SHAPES)
        assert ranks.hold(new) and ranks.number == 1 + seed


@SIZES
def test_a_pushed_description_is_kept_if_asked_and_forgets_another(ranks: Ranks) -> None:
    _, first = described(random_weights(1), "first")
    trainer, second = described(random_weights(2), "second")
    assert ranks.handle(UpdateWeightsFromTensorReq(description=first)).success
    assert by_id(ranks, "first").status_code == 404
    assert ranks.handle(UpdateWeightsFromTensorReq(description=first, keep=True)).success
    assert by_id(ranks, "first").success
    assert ranks.handle(UpdateWeightsFromTensorReq(description=second, keep=True, forget=["first", "unknown"])).success
    assert by_id(ranks, "first").status_code == 404 and by_id(ranks, "second").success
    assert register(ranks, trainer, "third", forget=["second"]).success
    assert by_id(ranks, "second").status_code == 404 and by_id(ranks, "third").success
    assert ranks.hold(random_weights(2))


@SIZES
@pytest.mark.parametrize("how", ["unregister", "unregister all", "release"])
def test_a_registration_is_a_cache(ranks: Ranks, how: str) -> None:
    trainer, _ = described(random_weights(1))
    register(ranks, trainer, "r")
    if how == "release":
        ranks.handle(ReleaseMemoryOccupationReq(tags=["weights"]))
        ranks.handle(ResumeMemoryOccupationReq(tags=["weights"]))
    else:
        ranks.handle(UnregisterWeightsReq(registrations=None if how == "unregister all" else ["r"]))
    reply = by_id(ranks, "r")
    assert reply.status_code == 404 and "Send their description" in reply.message
    assert all(len(sources._receiver._memory) == 0 for sources in ranks.sources), "nothing stays mapped"


def test_a_registration_that_only_some_ranks_have_is_a_404_and_nothing_is_written() -> None:
    ranks = Ranks(2)
    push(ranks, random_weights(0))
    trainer, _ = described(random_weights(1))
    register(ranks, trainer, "r")
    ranks.sources[1].registrations.forget(["r"])
    reply = by_id(ranks, "r")
    assert reply.status_code == 404 and ranks.state == "serving" and ranks.hold(random_weights(0))
    assert ranks.number == 1


def test_a_push_by_id_must_be_what_it_claims(ranks: Ranks) -> None:
    trainer, _ = described({NORM: torch.ones(4, dtype=torch.float64)})
    register(ranks, trainer, "r")
    assert by_id(ranks, "r", partial=False).status_code == 400
    assert by_id(ranks, "r", partial=True, strict_dtype=True).status_code == 400
    refused = by_id(ranks, "r")
    assert refused.status_code == 400 and f"'{EMBED}'" in refused.message and "partial=True" in refused.message
    assert ranks.hold(random_weights(0)) and ranks.number == 1 and by_id(ranks, "r", partial=True).success
    assert register(ranks, trainer, "s", strict_dtype=True).status_code == 400


@SIZES
def test_checksums_are_compared_before_and_after_the_copy(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    new = random_weights(1)
    trainer, description = described(new)
    sums = {name: tensor_checksum(w) for name, w in new.items()}
    wrong = ranks.handle(UpdateWeightsFromTensorReq(description=description, checksums=sums | {NORM: "0" * 64}))
    assert wrong.status_code == 400 and NORM in wrong.message and ranks.hold(random_weights(0))
    register(ranks, trainer, "r")
    assert by_id(ranks, "r", checksums=sums).success and ranks.hold(new)
    whole = UpdatePlan.commit

    def commit(plan: UpdatePlan) -> None:
        """Copy, then change the trainer's memory, as if the trainer wrote during the copy."""
        whole(plan)
        trainer.placed[NORM][0].zero_()

    with monkeypatch.context() as patch:
        patch.setattr(UpdatePlan, "commit", commit)
        reply = by_id(ranks, "r", checksums=sums)
    assert reply.status_code == 500 and ranks.state == "torn", "the copied values are unknown"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"registration": "r", "serialized_named_tensors": ["x"]},
        {"named_tensors": [], "registration": "r"},
        {"named_tensors": [], "keep": True},
        {"named_tensors": [], "load_format": "flattened_bucket"},
        {"serialized_named_tensors": ["a", "b", "c"]},
        {"serialized_named_tensors": ["gASV"]},
    ],
)
def test_a_push_has_exactly_one_source(ranks: Ranks, fields: dict[str, Any]) -> None:
    reply = ranks.handle(UpdateWeightsFromTensorReq(**fields))
    assert reply.status_code == 400 and ranks.hold(random_weights(0))


# -- at random -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_transactions_serves_one_version_or_refuses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a model of the state table: the expected weights, and the parameters that must be written again."""
    dice, ranks = random.Random(seed), Ranks(1 + seed % 2)
    meant = random_weights(0)
    push(ranks, meant)
    transaction: set[str] | None = None
    full: bool | None = None
    failed = False
    unwritten: set[str] = set()
    for step in range(150):
        version, weights = ranks.version, random_weights(step + 1)
        names = dice.sample(list(SHAPES), dice.randint(1, len(SHAPES)))
        match dice.choice(["push", "push", "bad", "torn", "begin", "end", "end", "discard"]):
            case "push":
                how = {"partial": True} if transaction is None else {"transaction_id": "t"}
                assert push(ranks, some(weights, *names), **how).success
                meant |= some(weights, *names)
                if transaction is None:
                    unwritten -= set(names)
                else:
                    transaction |= set(names)
            case "bad":
                assert push(ranks, some(weights, *names) | {"no": torch.ones(1)}).status_code == 400
            case "torn":
                reply = fail_once(monkeypatch, ranks, partial(push, ranks, some(weights, *names), partial=True))
                assert reply.status_code == 500
                meant |= some(weights, *names)
                if transaction is None:
                    unwritten = set(SHAPES)
                else:
                    transaction, failed = set(), True
            case "begin" if transaction is None:
                full, failed, transaction = dice.choice([None, True, False]), False, set()
                assert begin(ranks, full=full).success
            case "end" if transaction is not None:
                partly = dice.random() < 0.3
                missing = set(SHAPES) - transaction if failed or (full is not False and not partly) else set()
                assert end(ranks, partial=partly).success == (not missing)
                if not missing:
                    assert (ranks.version != version) == bool(transaction)
                    unwritten = set() if failed else unwritten - transaction
                    transaction = None
            case "discard" if transaction is not None:
                assert end(ranks, discard=True).success
                unwritten = set(SHAPES) if transaction or failed else unwritten
                transaction = None
        touched = transaction is not None and (bool(transaction) or failed)
        assert (ranks.refusal is None) == (not unwritten and not touched), ranks.refusal
        if ranks.refusal is None:
            assert ranks.hold(meant)
        if transaction is not None:
            assert ranks.version == version
