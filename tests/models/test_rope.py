"""The rotary embedding of every rope type, against transformers, within the original context and beyond it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.parity.harness import Driver, Reference, make_runner, random_prompt
from verl_server.errors import BadRequestError
from verl_server.models.config import load_model_config
from verl_server.models.layers import RotaryEmbedding
from verl_server.models.tiny import make_model_folder

_CPU = torch.device("cpu")
_ORIGINAL = 64
_LONGEST = 256
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [1.0 + 0.6 * i for i in range(8)],
    "original_max_position_embeddings": _ORIGINAL,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": _ORIGINAL}
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "theta below 1": {"rope_type": "default", "rope_theta": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        **{"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": _ORIGINAL,
    },
    "yarn": _YARN,
    "yarn, attention factor": _YARN | {"attention_factor": 0.7},
    "yarn, mscale": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2},
    "yarn, not truncated": _YARN | {"truncate": False},
    "yarn, factor null": _YARN | {"factor": None},
    "yarn, factor below 1": _YARN | {"factor": 0.5},
    "longrope": _LONGROPE,
    "longrope, attention factor": _LONGROPE | {"attention_factor": 1.3},
    "longrope, factor": _LONGROPE | {"factor": 2.0},
}


def folder_with(path: Path, rope: dict[str, Any], arch: Any = "llama", **shape: Any) -> Path:
    rope = {"rope_theta": 10000.0} | rope
    return make_model_folder(path, arch, max_position_embeddings=_LONGEST, rope_parameters=rope, **shape)


@pytest.mark.parametrize("length", [_ORIGINAL, _LONGEST])
@pytest.mark.parametrize("name", list(_ROPES))
def test_tables_equal_those_of_transformers(tmp_path: Path, name: str, length: int) -> None:
    folder = folder_with(tmp_path, _ROPES[name], weights=False)
    config = load_model_config(folder)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))
    cos, sin = theirs(torch.zeros(1), torch.arange(length).unsqueeze(0))
    got_cos, got_sin = RotaryEmbedding(config.head_dim, length, config.rope, _CPU).tables
    half = config.head_dim // 2
    torch.testing.assert_close(got_cos[:, 0], cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(got_sin[:, 0, half:], sin[0, :, half:], atol=1e-5, rtol=0)
    torch.testing.assert_close(-got_sin[:, 0, :half], sin[0, :, :half], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e-300},
        {"rope_type": "linear", "factor": 1e-320},
        _YARN | {"attention_factor": 1e39},
        _LONGROPE | {"long_factor": [1e-60] * 8},
    ],
)
def test_frequencies_beyond_fp32_are_refused(tmp_path: Path, rope: dict[str, Any]) -> None:
    """The tables would hold NaN, and so would every output."""
    config = load_model_config(folder_with(tmp_path, rope, weights=False))
    with pytest.raises(BadRequestError, match=rf"{rope['rope_type']}.* range of fp32.*config\.json"):
        RotaryEmbedding(config.head_dim, _LONGEST, config.rope, _CPU)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("name", ["yarn", "longrope"])
def test_logprobs_beyond_the_original_context_equal_those_of_transformers(tmp_path: Path, name: str, arch: str) -> None:
    """The prompt crosses the original context in a chunk, and its first keys are read from the cache."""
    folder = folder_with(tmp_path, _ROPES[name], arch, init_std=0.1)
    driver = Driver(make_runner(folder))
    sequence = driver.add(random_prompt(3 * _ORIGINAL, seed=1))
    driver.finish([sequence], new_tokens=8, chunk=40)
    Reference(folder).check(sequence, tolerance=1e-5)


def test_yarn_permits_its_factor_times_the_original_context(tmp_path: Path) -> None:
    """`max_position_embeddings` is often still the original context, where YaRN was added to the config later."""
    runner = make_runner(folder_with(tmp_path, _YARN | {"original_max_position_embeddings": _LONGEST}))
    assert runner.context_length == 4 * _LONGEST
    with pytest.raises(BadRequestError, match="context of 1024 tokens"):
        make_runner(tmp_path, context_length=1025)


def test_dynamic_is_refused_where_it_would_change_cached_keys(tmp_path: Path) -> None:
    folder_with(tmp_path, _ROPES["dynamic"])
    assert make_runner(tmp_path).context_length == _LONGEST
    with pytest.raises(BadRequestError, match=r"max_position_embeddings=256.*dynamic"):
        make_runner(tmp_path, context_length=_LONGEST + 1)
