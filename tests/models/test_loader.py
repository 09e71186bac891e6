"""Checkpoints of all layouts load, with the same weights for any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.models.config import load_model_config
from verl_server.models.loader import WeightMap, fill_dummy, iter_checkpoint, load_checkpoint
from verl_server.models.tiny import make_model_folder
from verl_server.models.transformer import Decoder

CPU = torch.device("cpu")


def decoder_map(folder: Path, rank: int = 0, size: int = 1) -> WeightMap:
    decoder = Decoder(load_model_config(folder), TpGroup(rank, size), 64, CPU)
    for parameter in decoder.parameters():
        parameter.data.fill_(torch.nan)  # parameters that nothing writes stay NaN
    return decoder.weight_map()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("m"), "qwen3", vocab_size=323)


def edit(folder: Path, target: Path, change: Any) -> Path:
    """Copy `folder` to `target` with its tensors after `change(tensors)`, and return `target`."""
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_every_name_reads_back(folder: Path) -> None:
    weight_map = decoder_map(folder)
    load_checkpoint(weight_map, folder)
    checkpoint = dict(iter_checkpoint(folder))
    assert list(checkpoint) and sorted(weight_map.slots) == sorted(checkpoint)
    for name, tensor in checkpoint.items():
        assert weight_map.slots[name].shape == tuple(tensor.shape)
        assert torch.equal(weight_map.read(name), tensor)


def test_sharded_and_consolidated_copies(tmp_path: Path) -> None:
    sharded = make_model_folder(tmp_path / "s", "llama", max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    save_file({"other.name": torch.zeros(1)}, sharded / "consolidated.safetensors")  # as in Mistral's folders
    weight_map = decoder_map(sharded)
    load_checkpoint(weight_map, sharded)
    assert all(weight_map.read(name).isfinite().all() for name in weight_map.slots)
    next(iter(sharded.glob("model-*.safetensors"))).unlink()
    with pytest.raises(BadRequestError, match="files that do not exist"):
        load_checkpoint(weight_map, sharded)


def test_bf16_checkpoint_into_fp32(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama", dtype=torch.bfloat16)
    assert load_model_config(folder).dtype == torch.bfloat16
    weight_map = decoder_map(folder)
    load_checkpoint(weight_map, folder)
    for name, tensor in iter_checkpoint(folder):
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(weight_map.read(name), tensor.float())


def test_missing_extra_and_wrong_are_listed_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.self_attn.q_norm.weight"]
        tensors["model.layers.0.mlp.experts.weight"] = torch.zeros(1)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(2, 3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)  # stored by old checkpoints

    weight_map = decoder_map(folder)
    with pytest.raises(BadRequestError) as error:
        load_checkpoint(weight_map, edit(folder, tmp_path, change))
    message = str(error.value)
    for word in ("q_norm", "experts", "down_proj.weight: [2, 3] instead of [64, 128]"):
        assert word in message, message
    assert "inv_freq" not in message
    assert weight_map.read("model.norm.weight").isnan().all()


@pytest.mark.parametrize("stored", [True, False])
def test_tied_head_may_be_stored_or_absent(tmp_path: Path, stored: bool) -> None:
    tied = make_model_folder(tmp_path / "a", "qwen2", tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("lm_head.weight", None)
        if stored:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    weight_map = decoder_map(tied)
    load_checkpoint(weight_map, edit(tied, tmp_path / "b", change))
    assert "lm_head.weight" not in weight_map.slots
    assert torch.equal(weight_map.read("lm_head.weight"), weight_map.read("model.embed_tokens.weight"))


@pytest.mark.parametrize("beside", [True, False], ids=["beside the embedding", "alone"])
def test_a_tied_head_of_other_values_is_refused_and_a_single_one_is_both(tmp_path: Path, beside: bool) -> None:
    tied = make_model_folder(tmp_path / "a", "qwen2", tie_word_embeddings=True)
    head = torch.randn(decoder_map(tied).slots["model.embed_tokens.weight"].shape)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = head
        if not beside:
            del tensors["model.embed_tokens.weight"]

    weight_map, folder = decoder_map(tied), edit(tied, tmp_path / "b", change)
    if not beside:
        load_checkpoint(weight_map, folder)
        assert torch.equal(weight_map.read("model.embed_tokens.weight"), head)
        return
    with pytest.raises(BadRequestError, match=r"lm_head\.weight differs .*tie_word_embeddings=true.*remove"):
        load_checkpoint(weight_map, folder)
    assert weight_map.read("model.norm.weight").isnan().all(), "nothing was written"


def test_the_newer_of_two_checkpoints_in_a_folder_is_served_or_none(tmp_path: Path) -> None:
    old = make_model_folder(tmp_path / "old", "llama", seed=1, max_shard_size="50KB")
    new = make_model_folder(tmp_path / "new", "llama", seed=2)
    shutil.copy(new / "model.safetensors", old)  # as transformers saves one file where shards were
    weight_map = decoder_map(old)
    load_checkpoint(weight_map, old)
    for name, tensor in iter_checkpoint(new):
        assert torch.equal(weight_map.read(name), tensor)

    (old / "model.safetensors").unlink()
    (old / "model-00001-of-00099.safetensors").touch()
    with pytest.raises(BadRequestError, match=r"index does not name: model-00001-of-00099\.safetensors"):
        load_checkpoint(weight_map, old)


def test_untied_head_is_required(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"missing: lm_head\.weight"):
        load_checkpoint(decoder_map(folder), edit(folder, tmp_path, lambda tensors: tensors.pop("lm_head.weight")))


def test_no_safetensors_and_truncated_file(folder: Path, tmp_path: Path) -> None:
    weight_map = decoder_map(folder)
    with pytest.raises(BadRequestError, match=r"no \*\.safetensors"):
        load_checkpoint(weight_map, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadRequestError, match="complete"):
        load_checkpoint(weight_map, tmp_path)


def test_a_parameter_of_integers_is_refused_and_nothing_is_written(folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.ones(64, dtype=torch.int32)

    weight_map = decoder_map(folder)
    with pytest.raises(BadRequestError, match=r"model\.safetensors: model\.norm\.weight is stored as I32"):
        load_checkpoint(weight_map, edit(folder, tmp_path, change))
    assert weight_map.read("model.norm.weight").isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_checkpoint_with_nonfinite_weights_is_refused(folder: Path, tmp_path: Path, value: float) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][3] = value
        tensors["lm_head.weight"][5, 6] = value

    match = r"model\.safetensors: \S+ and 1 other tensors of the checkpoint have NaN or infinity"
    with pytest.raises(BadRequestError, match=match):
        load_checkpoint(decoder_map(folder), edit(folder, tmp_path, change))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_the_whole_model_between_them(folder: Path, size: int) -> None:
    """The vocabulary of 323 needs padding, 2 KV heads on 4 ranks are replicated, and the pieces cover each tensor."""
    maps = [decoder_map(folder, rank, size) for rank in range(size)]
    for weight_map in maps:
        load_checkpoint(weight_map, folder)
    for name, full in iter_checkpoint(folder):
        rebuilt = torch.full_like(full, torch.nan)
        for weight_map in maps:
            slot = weight_map.slots[name]
            assert slot.shape == tuple(full.shape)
            for destination, index in slot.pieces:
                rebuilt[index] = destination
        assert torch.equal(rebuilt, full), name


def test_dummy_weights_are_the_same_at_every_start_on_any_number_of_ranks(folder: Path) -> None:
    def dummy(rank: int = 0, size: int = 1) -> WeightMap:
        weight_map = decoder_map(folder, rank, size)
        fill_dummy(weight_map, CPU)
        return weight_map

    whole, again = dummy(), dummy()
    ranks = [dummy(rank, 2) for rank in range(2)]
    for name in whole.slots:
        full = whole.read(name)
        assert torch.equal(full, again.read(name))
        for destination, index in (piece for rank in ranks for piece in rank.slots[name].pieces):
            assert torch.equal(destination, full[index])


def test_tp_size_that_does_not_divide_is_refused(folder: Path) -> None:
    with pytest.raises(BadRequestError, match=r"tp_size=3 does not divide .*num_attention_heads=4"):
        decoder_map(folder, 0, 3)
