"""Names that wrappers derive from a parameter's name are understood. Unknown names are refused."""

from __future__ import annotations

import pytest

from tests.weight_sync.fakes import EMBED, NORM, FakeRunner, K, Q
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.receiver.names import ModelNames, bounded, lacking, listed

HEAD = "lm_head.weight"


@pytest.fixture
def names() -> ModelNames:
    return ModelNames(FakeRunner().weight_map)


@pytest.mark.parametrize(
    "given",
    [
        Q,
        f"module.{Q}",
        f"_orig_mod.{Q}",
        f"_orig_mod.module._fsdp_wrapped_module.{Q}",
        Q.replace("layers.0", "layers.0._checkpoint_wrapped_module"),
        Q.replace("layers.0", "layers._fsdp_wrapped_module.0._orig_mod"),
        f"base_model.model.{Q}",
        f"base_model.model.{Q}".replace("q_proj", "q_proj.base_layer"),
        f"_fsdp_wrapped_module.base_model.model.{Q}".replace("q_proj", "q_proj.base_layer"),
        f"base_model.model.{Q}".replace("q_proj", "q_proj.modules_to_save.default"),
    ],
)
def test_wrappers_are_taken_off(names: ModelNames, given: str) -> None:
    assert names.settle([given]) == [Q]


def test_order_is_kept_and_buffers_are_left_out(names: ModelNames) -> None:
    buffer = "module.model.layers.0.self_attn.rotary_emb.inv_freq"
    assert names.settle([NORM, buffer, HEAD, EMBED]) == [NORM, None, HEAD, EMBED]


def test_the_frozen_copy_of_a_trained_module_is_left_out(names: ModelNames) -> None:
    frozen = "base_model.model.model.embed_tokens.original_module.weight"
    trained = "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    assert names.settle([frozen, trained]) == [None, EMBED]
    with pytest.raises(WeightUpdateError, match=r"from before the training.*modules_to_save"):
        names.settle([frozen, NORM])


def test_adapters_are_refused_with_the_remedy(names: ModelNames) -> None:
    lora = [f"base_model.model.{Q}".replace("weight", f"lora_{ab}.default.weight") for ab in "AB"]
    base = f"base_model.model.{Q}".replace("q_proj", "q_proj.base_layer")
    with pytest.raises(WeightUpdateError, match=r"^Merge.*merge_adapter\(\).*lora_A.*lora_B.*not served.*leave out"):
        names.settle([base, *lora])
    assert names.settle([base]) == [Q]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["model.norm.wieght"], "no parameter 'model.norm.wieght'.*like 'model.norm.weight'"),
        (["nothing.like.it"], f"no parameter 'nothing.like.it'. The model has, for example, '{EMBED}'"),
        ([NORM, f"module.{NORM}"], f"'{NORM}' twice, as '{NORM}' and as 'module.{NORM}'"),
        ([HEAD, HEAD], f"'{HEAD}' twice"),
        ([NORM, NORM + ".original_module.bias"], "no parameter"),
        ([f"x{i}" for i in range(100)], "'x7' and 92 more"),
    ],
)
def test_what_is_not_understood_is_refused(names: ModelNames, given: list[str], message: str) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        names.settle(given)


def test_names_of_any_length_cost_little_and_are_cut(names: ModelNames) -> None:
    with pytest.raises(WeightUpdateError) as refused:
        names.settle(["model." * 200_000])
    assert len(str(refused.value)) < 1000
    assert len(listed([K * 100] * 1000)) < 3000


def test_a_refusal_lists_the_first_names_and_says_how_many_there_are() -> None:
    message = lacking([f"x{i}" for i in range(100)], 300)
    assert "lacks 100 of 300; missing: 'x0', " in message and "'x7' and 92 more" in message and "x8" not in message
    assert "partial=True" in message and "begin_weight_update" in message
    assert bounded([K * 100] * 1000)["count"] == 1000 and len(str(bounded([K * 100] * 1000))) < 3000
