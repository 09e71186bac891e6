"""A rotary embedding without frequencies is refused, with the key of config.json that is wrong.

`test_config.py` compares correct keys with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.test_config import LLAMA3, write_config
from verl_server.errors import BadRequestError
from verl_server.models.config import load_model_config

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_LONGROPE = {
    **{"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    "original_max_position_embeddings": 128,
}
_WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "linear, factor null": ({"type": "linear", "factor": None}, ["'linear'", "rope_scaling.factor", "null"]),
    "linear, factor infinite": ({"type": "linear", "factor": float("inf")}, ["rope_scaling.factor", "positive", "inf"]),
    "linear, factor beyond fp64": ({"type": "linear", "factor": 10**400}, ["rope_scaling.factor", "positive"]),
    "dynamic, factor null": ({"type": "dynamic", "factor": None}, ["'dynamic'", "rope_scaling.factor"]),
    "llama3, frequencies absent": ({"rope_type": "llama3", "factor": 8.0}, ["'llama3'", "low_freq_factor"]),
    "llama3, a frequency null": (
        {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": None},
        ["'llama3'", "rope_scaling.low_freq_factor", "null"],
    ),
    "llama3, frequencies equal": (
        {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4.0},
        ["rope_scaling.low_freq_factor", "less than high_freq_factor=4.0"],
    ),
    "type a list": ({"type": ["yarn"], "factor": 2.0}, ["rope type ['yarn']", "rope_scaling.rope_type", "longrope"]),
    "type an object": ({"rope_type": {}, "factor": 2.0}, ["rope type {}", "supported: default"]),
    "type a number": ({"rope_type": 0, "type": "yarn"}, ["rope type 0", "supported: default"]),
    "type empty": ({"rope_type": "", "factor": 2.0}, ["rope type ''", "supported: default"]),
    "yarn, factor a string": (_YARN | {"factor": "4"}, ["rope_scaling.factor", "positive number", "'4'"]),
    "yarn, theta 1": (_YARN | {"rope_theta": 1}, ["rope_scaling.rope_theta", "greater than 1", "YaRN"]),
    "yarn, original context 0": (
        _YARN | {"factor": None, "original_max_position_embeddings": 0},
        ["rope_scaling.original_max_position_embeddings", "positive number", "is 0"],
    ),
    "yarn, endless context": (_YARN | {"factor": 1e300}, ["rope_scaling.factor", "2147483647 tokens"]),
    "yarn, mscale negative": (
        _YARN | {"mscale_all_dim": -7.0},
        ["rope_scaling.mscale_all_dim", "positive number or 0"],
    ),
    "yarn, mscale a bool": (_YARN | {"mscale": False}, ["rope_scaling.mscale", "positive number or 0"]),
    "yarn, truncate a string": (_YARN | {"truncate": "no"}, ["rope_scaling.truncate", "true or false", "'no'"]),
    "longrope, one list": ({"rope_type": "longrope", "short_factor": [1.0]}, ["'longrope'", "long_factor"]),
    "longrope, too short": (_LONGROPE | {"short_factor": [1.0]}, ["rope_scaling.short_factor", "8 numbers"]),
    "longrope, zeros": (_LONGROPE | {"short_factor": [0] * 8}, ["rope_scaling.short_factor", "at index 0 it has 0"]),
    "longrope, negative": (
        _LONGROPE | {"long_factor": [2.0] * 7 + [-1.0]},
        ["rope_scaling.long_factor", "positive numbers", "at index 7 it has -1.0"],
    ),
    "longrope, a string": (_LONGROPE | {"long_factor": [2.0] * 7 + ["2"]}, ["long_factor", "at index 7 it has '2'"]),
    "longrope, NaN": (_LONGROPE | {"long_factor": [float("nan")] * 8}, ["long_factor", "at index 0 it has nan"]),
    "longrope, an object": (_LONGROPE | {"long_factor": {"a": 2.0}}, ["rope_scaling.long_factor", "8 numbers"]),
    "longrope, original context 1": (
        _LONGROPE | {"original_max_position_embeddings": 1},
        ["rope_scaling.original_max_position_embeddings", "greater than 1"],
    ),
    "half of a head rotated": (_YARN | {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    "layers differ": (
        {"full_attention": _YARN, "sliding_attention": {"rope_type": "default"}},
        ["full_attention, sliding_attention", "one rope type for all layers"],
    ),
}


@pytest.mark.parametrize("name", list(_WRONG))
def test_a_rope_without_frequencies_is_refused_by_key(tmp_path: Path, name: str) -> None:
    scaling, words = _WRONG[name]
    with pytest.raises(BadRequestError) as error:
        load_model_config(write_config(tmp_path, rope_scaling=scaling))
    assert all(word in str(error.value) for word in ["config.json", *words]), str(error.value)


@pytest.mark.parametrize("theta", [0, -5.0, "1e6", True, float("nan"), float("inf"), [10000.0]])
@pytest.mark.parametrize("source", ["root", "rope_parameters"])
def test_rope_theta_must_be_a_positive_number(tmp_path: Path, theta: Any, source: str) -> None:
    """Zero is refused, too. It must not be taken for an absent key."""
    changes = {"rope_theta": theta} if source == "root" else {"rope_parameters": {"rope_theta": theta}}
    with pytest.raises(BadRequestError, match=r"config\.json: .*rope_theta"):
        load_model_config(write_config(tmp_path, **changes))
