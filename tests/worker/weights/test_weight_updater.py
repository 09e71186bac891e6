"""The state table of the weights: all ranks agree, and the weights are exactly old, exactly new, or refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from tests.weight_sync.fakes import EMBED, NORM, O_PROJ, SHAPES, Q, Ranks, random_weights
from verl_server.messages.weight_requests import (
    GetWeightsByNameReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)
from verl_server.weight_sync.checksum import tensor_checksum
from verl_server.weight_sync.receiver.plan import UpdatePlan
from verl_server.weight_sync.trainer.sender import describe_tensors

SIZES = pytest.mark.parametrize("ranks", [1, 2], indirect=True)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(getattr(request, "param", 1))


def push(ranks: Ranks, weights: dict[str, torch.Tensor], **options: Any) -> Any:
    return ranks.handle(UpdateWeightsFromTensorReq(named_tensors=describe_tensors(weights.items()), **options))


def release(ranks: Ranks, *tags: str) -> Any:
    return ranks.handle(ReleaseMemoryOccupationReq(tags=list(tags) or None))


def resume(ranks: Ranks, *tags: str) -> Any:
    return ranks.handle(ResumeMemoryOccupationReq(tags=list(tags) or None))


def some(weights: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: weights[name] for name in names}


def break_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every copy fail after it wrote."""
    whole = UpdatePlan.commit

    def commit(plan: UpdatePlan) -> None:
        whole(plan)
        raise RuntimeError("device lost")

    monkeypatch.setattr(UpdatePlan, "commit", commit)


@SIZES
def test_an_update_replaces_everything_and_counts(ranks: Ranks) -> None:
    assert ranks.version == "default"
    for i in range(1, 4):
        weights = random_weights(i)
        reply = push(ranks, weights, partial=False)
        assert reply.success, reply.message
        assert reply.payload["weight_version"] == ranks.version and ranks.number == i
        assert reply.message == f"Success Weight version updated to {ranks.version}."
        assert ranks.hold(weights)


@SIZES
def test_labels_count_the_pushes_without_one(ranks: Ranks) -> None:
    """A number in a caller's label means nothing to the server."""
    weights = random_weights(1)
    seen = []
    for label in (None, "step-7", None, "41", None, "run/final", "50@5f2c9a1e"):
        push(ranks, weights, weight_version=label)
        seen.append(ranks.version)
    assert ranks.handle(UpdateWeightVersionReq(new_version="100")).success
    push(ranks, weights)
    own = ranks.version.partition("@")[2]
    assert seen == [f"1@{own}", "step-7", f"2@{own}", "41", f"3@{own}", "run/final", "50@5f2c9a1e"]
    assert ranks.number == 4


@pytest.mark.parametrize("size", [1, 2])
def test_a_server_that_was_started_again_makes_other_labels(size: int) -> None:
    labels = set()
    for _ in range(2):
        ranks = Ranks(size)
        push(ranks, random_weights(1))
        assert ranks.number == 1
        labels.add(ranks.version)
    assert len(labels) == 2


@SIZES
@pytest.mark.parametrize("number", [2, 10**18 - 1])
def test_a_caller_that_takes_the_servers_incarnation_gets_no_label_twice(ranks: Ranks, number: int) -> None:
    weights = random_weights(1)
    push(ranks, weights)
    taken = f"{number}@{ranks.version.partition('@')[2]}"
    assert ranks.handle(UpdateWeightVersionReq(new_version=taken)).success
    for _ in range(2):
        push(ranks, weights)
        assert ranks.version.partition("@")[2] != taken.partition("@")[2]


@pytest.mark.parametrize("label", ["9" * 5000, "²", "-4", "1_000", "٣"])
def test_a_label_that_is_no_plain_number_is_only_a_label(ranks: Ranks, label: str) -> None:
    weights = random_weights(1)
    push(ranks, weights, weight_version=label)
    assert ranks.version == label
    push(ranks, weights)
    assert ranks.number == 1


@SIZES
@pytest.mark.parametrize(
    ("change", "options"),
    [
        ({"model.unknown": torch.ones(2)}, {}),
        ({NORM: torch.ones(5)}, {}),
        ({NORM: torch.ones(4, dtype=torch.int64)}, {}),
        ({}, {"load_format": "flattened_bucket"}),
        ({NORM: torch.ones(4, dtype=torch.float64)}, {"strict_dtype": True}),
    ],
)
def test_a_refused_update_changes_nothing(ranks: Ranks, change: dict[str, torch.Tensor], options: Any) -> None:
    old = random_weights(1)
    push(ranks, old)
    reply = push(ranks, random_weights(2) | change, **options)
    assert (reply.success, reply.status_code) == (False, 400)
    assert ranks.hold(old)
    assert (ranks.number, ranks.state, ranks.refusal) == (1, "serving", None)
    assert push(ranks, random_weights(3)).success, "the next update succeeds"


def test_what_one_rank_cannot_open_no_rank_writes() -> None:
    ranks = Ranks(2)
    old = random_weights(1)
    push(ranks, old)

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no such GPU")

    ranks.sources[1]._receiver.stage_named = unreachable  # type: ignore[method-assign,assignment]
    reply = push(ranks, random_weights(2))
    assert not reply.success
    assert "rank 1: OSError: no such GPU" in reply.message
    assert ranks.hold(old)
    assert ranks.refusal is None


@SIZES
def test_a_failure_after_the_first_write_tears_until_everything_was_written(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(ranks, random_weights(1))
    with monkeypatch.context() as patch:
        break_copy(patch)
        reply = push(ranks, random_weights(2))
    assert (reply.success, reply.status_code, ranks.state, ranks.number) == (False, 500, "torn", 1)
    assert "device lost" in reply.message
    assert "update the remaining 5 of 5 parameters" in (ranks.refusal or "")
    new = random_weights(3)
    assert "Not serving yet" in push(ranks, some(new, EMBED, Q)).message
    assert ranks.state == "torn"
    assert not push(ranks, {"unknown": torch.ones(1)}).success, "a refused update changes nothing"
    assert "remaining 3 of 5" in (ranks.refusal or "")
    rest = {name: w for name, w in new.items() if name not in (EMBED, Q)}
    assert push(ranks, rest).success
    assert (ranks.state, ranks.refusal) == ("serving", None)
    assert ranks.hold(new)


def test_a_copy_that_fails_on_one_rank_tears_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    ranks.runners[1].fail["synchronize"] = RuntimeError("ECC error")
    reply = push(ranks, random_weights(1))
    assert "rank 1: RuntimeError: ECC error" in reply.message
    assert ranks.state == "torn"
    del ranks.runners[1].fail["synchronize"]
    assert push(ranks, random_weights(2)).success
    assert ranks.hold(random_weights(2))


@SIZES
def test_sleep_and_wake(ranks: Ranks) -> None:
    push(ranks, random_weights(1))
    assert release(ranks).success
    assert ranks.state == "asleep"
    assert "resume_memory_occupation(['weights'])" in (ranks.refusal or "")
    for refused in (
        push(ranks, random_weights(2)),
        ranks.handle(GetWeightsByNameReq(name=NORM)),
        ranks.handle(WeightsCheckerReq()),
        release(ranks),
        release(ranks, "weights"),
    ):
        assert (refused.success, refused.status_code) == (False, 400)
    assert resume(ranks, "weights").success
    assert (resume(ranks, "weights").status_code, ranks.state) == (400, "not_loaded")
    assert "not loaded" in (ranks.refusal or "")
    new = random_weights(3)
    assert push(ranks, new).success
    assert ranks.state == "serving"
    assert "KV cache is released" in (ranks.refusal or "")
    assert resume(ranks).success
    assert ranks.refusal is None
    assert resume(ranks).status_code == 400
    assert [call for call in ranks.runners[-1].calls if call != "synchronize"] == [
        "release_kv_cache",
        "release_weights",
        "release_cuda_graphs",
        "resume_weights",
        "resume_kv_cache",
        "resume_cuda_graphs",
    ]


def test_unknown_memory_tags_are_refused_before_anything_is_released(ranks: Ranks) -> None:
    reply = release(ranks, "kv_cache", "kvcache")
    assert "['kvcache']" in reply.message
    assert ranks.refusal is None


def test_memory_that_one_rank_cannot_take_no_rank_takes() -> None:
    ranks = Ranks(2)
    release(ranks, "weights")
    ranks.runners[1].fail["resume_weights"] = torch.OutOfMemoryError("10 GiB")
    reply = resume(ranks, "weights")
    assert "rank 1: OutOfMemoryError: 10 GiB" in reply.message
    assert ranks.state == "asleep"
    assert ranks.runners[0].calls[-1] == "release_weights"
    ranks.runners[1].fail.clear()
    assert resume(ranks, "weights").success


# -- reading weights -----------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("name", [*SHAPES, "lm_head.weight"])
def test_a_full_tensor_is_put_together_from_all_ranks(ranks: Ranks, name: str) -> None:
    weights = random_weights(1)
    push(ranks, weights)
    expected = weights[EMBED if name == "lm_head.weight" else name]
    assert ranks.handle(GetWeightsByNameReq(name=name)).payload == expected.tolist()
    assert ranks.handle(GetWeightsByNameReq(name=name, truncate_size=3)).payload == expected[:3].tolist()


def test_looking_does_not_pin_storages(ranks: Ranks) -> None:
    ranks.handle(GetWeightsByNameReq(name=NORM))
    ranks.handle(WeightsCheckerReq())
    assert all(t.untyped_storage().resizable() for t in (ranks.runners[0].norm, ranks.runners[0].qk))


@pytest.mark.parametrize("req", [GetWeightsByNameReq(name="no"), GetWeightsByNameReq(name=NORM, truncate_size=0)])
def test_a_bad_look_is_refused(ranks: Ranks, req: GetWeightsByNameReq) -> None:
    assert ranks.handle(req).status_code == 400


def test_the_checksum_is_the_trainers_own(ranks: Ranks) -> None:
    weights = random_weights(1)
    push(ranks, weights)
    payload = ranks.handle(WeightsCheckerReq()).payload
    assert payload["ranks"][0]["checksums"] == {name: tensor_checksum(w) for name, w in weights.items()}
    skipped = ranks.handle(WeightsCheckerReq(skip_tensor_list=["self_attn"])).payload
    assert list(skipped["ranks"][0]["checksums"]) == [EMBED, NORM]


@SIZES
def test_snapshot_compare_and_reset(ranks: Ranks) -> None:
    assert ranks.handle(WeightsCheckerReq(action="compare")).status_code == 400
    push(ranks, random_weights(1))
    assert ranks.handle(WeightsCheckerReq(action="snapshot")).success
    assert ranks.handle(WeightsCheckerReq(action="compare")).success
    push(ranks, some(random_weights(2), O_PROJ))
    reply = ranks.handle(WeightsCheckerReq(action="compare"))
    assert "1 parameters differ" in reply.message
    assert O_PROJ in reply.message
    assert ranks.handle(WeightsCheckerReq(action="reset_tensors")).success
    assert "reset" in (ranks.refusal or "")
    assert ranks.handle(WeightsCheckerReq(action="dance")).status_code == 400
    payload = ranks.handle(WeightsCheckerReq()).payload
    assert [r["parallelism_info"][0]["tp_rank"] for r in payload["ranks"]] == list(range(len(ranks.runners)))


# -- disk ----------------------------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded_only_if_the_settings_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def download(name: str, **options: Any) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    save_file(random_weights(1), tmp_path / "model.safetensors")
    req = UpdateWeightsFromDiskReq(model_path="org/model")
    refused = Ranks().handle(req)
    assert (refused.success, refused.status_code) == (False, 400) and "allow_hub_updates" in refused.message
    assert not asked
    assert Ranks(args={"allow_hub_updates": True}).handle(req).success
    assert asked == ["org/model"]


@SIZES
def test_disk_replaces_everything_or_nothing(ranks: Ranks, tmp_path: Path) -> None:
    old, new = random_weights(1), random_weights(2)
    push(ranks, old)
    for name, tensors in {"good": new, "short": some(new, EMBED), "odd": new | {NORM: torch.ones(9)}}.items():
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "cut").mkdir()
    whole = (tmp_path / "good" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:-8])
    for folder, message in (
        ("short", "missing"),
        ("odd", NORM),
        ("cut", "complete"),
        ("none", "does not exist"),
        ("adapter", "Merge the adapter"),
    ):
        reply = ranks.handle(UpdateWeightsFromDiskReq(model_path=str(tmp_path / folder)))
        assert (reply.success, reply.status_code) == (False, 400), folder
        assert message in reply.message
        assert ranks.hold(old)
    assert ranks.handle(UpdateWeightsFromDiskReq(model_path=str(tmp_path / "good"), weight_version="9")).success
    assert ranks.hold(new)
    assert ranks.version == "9"


@SIZES
def test_a_checkpoint_that_stores_a_tied_head_besides(ranks: Ranks, tmp_path: Path) -> None:
    """A tied head in the checkpoint is compared when the update is planned, before the other tensors are read."""
    old, new = random_weights(1), random_weights(2)
    push(ranks, old)
    other = new[EMBED].clone()
    other[-1, -1] += 1
    heads = {"other": other, "wider": new[EMBED].double(), "equal": new[EMBED].clone()}
    for name, head in heads.items():
        (tmp_path / name).mkdir()
        save_file(new | {"lm_head.weight": head}, tmp_path / name / "model.safetensors")
        reply = ranks.handle(UpdateWeightsFromDiskReq(model_path=str(tmp_path / name)))
        assert reply.success == (name == "equal"), reply.message
        assert reply.success or (reply.status_code == 400 and "ties them" in reply.message)
        assert ranks.hold(new if reply.success else old)
    (tmp_path / "alone").mkdir()
    renamed = {("lm_head.weight" if name == EMBED else name): tensor for name, tensor in old.items()}
    save_file(renamed, tmp_path / "alone" / "model.safetensors")
    assert ranks.handle(UpdateWeightsFromDiskReq(model_path=str(tmp_path / "alone"))).success
    assert ranks.hold(old)


# -- at random -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_serves_exactly_one_version_or_refuses(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a model of the state table: the expected weights, and the parameters that must be written again."""
    dice, ranks = random.Random(seed), Ranks(1 + seed % 2)
    meant = random_weights(0)
    push(ranks, meant)
    asleep, kv, unwritten = False, True, set()
    for step in range(120):
        version = ranks.version
        weights = random_weights(step + 1)
        match dice.choice(["full", "part", "bad", "torn", "sleep", "wake", "kv"]):
            case "full" | "part" as kind:
                names = list(SHAPES) if kind == "full" else dice.sample(list(SHAPES), 2)
                ok = push(ranks, some(weights, *names)).success
                assert ok == (not asleep)
                if ok:
                    meant |= some(weights, *names)
                    unwritten -= set(names)
                assert (ranks.version != version) == ok
            case "bad":
                assert not push(ranks, weights | {"no": torch.ones(1)}).success
                assert ranks.version == version
            case "torn":
                with monkeypatch.context() as patch:
                    break_copy(patch)
                    assert not push(ranks, weights).success
                unwritten = unwritten if asleep else set(SHAPES)
                assert ranks.version == version
            case "sleep":
                assert release(ranks, "weights").success == (not asleep)
                asleep = True
            case "wake":
                assert resume(ranks, "weights").success == asleep
                unwritten = set(SHAPES) if asleep else unwritten
                asleep = False
            case "kv":
                assert (release if kv else resume)(ranks, "kv_cache").success
                kv = not kv
        serves = not asleep and kv and not unwritten
        assert (ranks.refusal is None) == serves, ranks.refusal
        if not asleep and not unwritten:
            assert ranks.hold(meant)
