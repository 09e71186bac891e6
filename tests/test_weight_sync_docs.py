"""The examples of docs/weight-sync.md run as they are written, with a tiny model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_server.weight_sync.trainer.shards import local_tensor, parts_of

PAGE = Path(__file__).parents[1] / "docs" / "weight-sync.md"
FRAGMENTS = ("hugging_face_names(hf_config", "peft_model", "read_all_ranks=True")
"""Text of the examples that need a real trainer or several engines (`test_verl_engine.py` tests the latter)."""


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def block(part: str) -> str:
    (found,) = [text for text in blocks() if part in text]
    return found


def of_tiny_model(code: str, folder: Path) -> str:
    return code.replace('"Qwen/Qwen3-0.6B"', repr(str(folder)))


@pytest.mark.timeout(240)
def test_the_examples_of_one_process_run_in_their_order(tiny_qwen3: Path, tmp_path: Path) -> None:
    names: dict[str, Any] = {"folder": str(tmp_path / "checkpoint")}
    skipped = (*FRAGMENTS, "torchrun", "def hugging_face_names")
    runnable = [code for code in blocks() if not any(part in code for part in skipped)]
    assert len(runnable) == 9, "the number of examples on the page has changed"
    try:
        for code in runnable:
            exec(compile(of_tiny_model(code, tiny_qwen3), str(PAGE), "exec"), names)
    finally:
        if "engine" in names:
            four_tokens = {"max_new_tokens": 4, "ignore_eos": True}
            served = names["engine"].generate(input_ids=[5, 6, 7], sampling_params=four_tokens)
            names["engine"].shutdown()
    assert len(served["output_ids"]) == 4


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_the_fsdp2_example_runs(tiny_qwen3: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    code = of_tiny_model(block("torchrun"), tiny_qwen3).replace("0, 1000", "0, 300")
    script.write_text(code.replace("mem_fraction_static=0.4", 'device="cpu", kv_cache_gib=0.05'))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=PAGE.parents[1])
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_rest_compiles() -> None:
    for code in blocks():
        compile(code, str(PAGE), "exec")


# -- the mapping of Megatron's names ---------------------------------------------------------------------------


def megatron_tensors(model: Any, rank: int, size: int) -> list[tuple[str, torch.Tensor]]:
    """Return the named tensors that a Megatron-Core rank holds of a Qwen3: fused, cut, with a padded vocabulary."""
    config, full = model.config, model.state_dict()
    heads, kv, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    vocab = -(-config.vocab_size // (48 * size)) * 48 * size
    rows = slice(rank * vocab // size, (rank + 1) * vocab // size)

    def padded(weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight, torch.full((vocab - len(weight), weight.shape[1]), 9.0)])[rows].clone()

    named = [
        ("embedding.word_embeddings.weight", padded(full["model.embed_tokens.weight"])),
        ("output_layer.weight", padded(full["lm_head.weight"])),
        ("decoder.final_layernorm.weight", full["model.norm.weight"]),
    ]
    for i in range(config.num_hidden_layers):
        layer = {n.removeprefix(f"model.layers.{i}."): t for n, t in full.items() if f"layers.{i}." in n}
        q, k, v = (layer[f"self_attn.{x}_proj.weight"].view(kv, -1, config.hidden_size) for x in "qkv")
        groups = torch.cat([q, k, v], 1)[rank * kv // size : (rank + 1) * kv // size]
        assert q.shape[1] == heads // kv * dim
        halves = [layer[f"mlp.{x}_proj.weight"].chunk(size)[rank] for x in ("gate", "up")]
        named += [
            (f"decoder.layers.{i}.{name}", tensor)
            for name, tensor in {
                "self_attention.linear_qkv.weight": groups.reshape(-1, config.hidden_size).clone(),
                "self_attention.linear_qkv.layer_norm_weight": layer["input_layernorm.weight"],
                "self_attention.q_layernorm.weight": layer["self_attn.q_norm.weight"],
                "self_attention.k_layernorm.weight": layer["self_attn.k_norm.weight"],
                "self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"].chunk(size, 1)[rank].clone(),
                "mlp.linear_fc1.layer_norm_weight": layer["post_attention_layernorm.weight"],
                "mlp.linear_fc1.weight": torch.cat(halves),
                "mlp.linear_fc2.weight": layer["mlp.down_proj.weight"].chunk(size, 1)[rank].clone(),
            }.items()
        ]
    return named


@pytest.mark.parametrize("size", [1, 2])
def test_the_megatron_mapping_finds_every_element(tiny_qwen3: Path, size: int) -> None:
    names: dict[str, Any] = {}
    exec(compile(block("def hugging_face_names"), str(PAGE), "exec"), names)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32)
    found = {name: torch.full(p.shape, torch.nan) for name, p in model.named_parameters()}
    for rank in range(size):
        mapping = names["hugging_face_names"](model.config, rank, size)
        for name, tensor in megatron_tensors(model, rank, size):
            for ours, part in mapping(name, tensor):
                assert local_tensor(part).untyped_storage()._cdata == tensor.untyped_storage()._cdata, (
                    "the part must be a view of the tensor"
                )
                shape, boxes = parts_of(ours, part)
                assert shape == found[ours].shape
                for box in boxes:
                    window = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
                    found[ours][window] = local_tensor(part)
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
