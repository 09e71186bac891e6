"""The bound on a step's memory grows with the work of the step, and with nothing else."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.harness import GREEDY, spec_of
from verl_server.models.config import load_model_config
from verl_server.models.tiny import make_model_folder
from verl_server.sampling.spec import SampleSpec
from verl_server.sampling_params import SamplingParams
from verl_server.worker.step_memory import StepMemory, log_uncaptured, most_decodes

QWEN3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@pytest.fixture
def memory(tmp_path: Path) -> StepMemory:
    folder = make_model_folder(tmp_path, "qwen3", weights=False, **QWEN3_8B)
    return StepMemory.of(load_model_config(folder), 1, torch.bfloat16)


def spec(**params: Any) -> SampleSpec:
    return spec_of([1, 2, 3], **(GREEDY | params))


def test_the_default_share_of_a_large_gpu_is_enough_for_any_step(memory: StepMemory) -> None:
    """256 requests and a chunk of 8,192 tokens beside an 8B model take far less than 15 % of 140 GiB."""
    assert 2**30 < memory.largest(8192 + 256, 256) + memory.graphs(256, 256) < 5 * 2**30


def test_decode_graphs_follow_the_number_of_requests_within_a_bound() -> None:
    assert [most_decodes(None, rows) for rows in (1, 256, 512, 1024, 4096)] == [1, 256, 512, 1024, 1024]
    assert [most_decodes(given, 2000) for given in (8, 1500, 3000)] == [8, 1500, 2000], "an explicit number is kept"


def test_steps_without_a_graph_are_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_uncaptured(512, 512)
    assert not caplog.records, "nothing is lost"
    log_uncaptured(1024, 2048)
    (text,) = (record.getMessage() for record in caplog.records)
    assert "Steps of 1025 to 2048 requests" in text and "cuda_graph_max_bs=2048" in text


def test_the_reserve_holds_the_largest_graph_of_each_kind(memory: StepMemory) -> None:
    """Neither can use the memory of the other, because their tensors have other sizes."""
    for rows in (256, 1024):
        largest = memory.graph(rows, rows) + memory.graph(4096, rows)
        assert memory.graphs(rows, rows) == largest
    assert memory.graphs(64, 256) < memory.graphs(256, 256) < memory.graphs(256, 512)


def test_each_request_of_sampling_adds_what_it_takes(memory: StepMemory) -> None:
    plain = memory.special(spec(temperature=1.0))
    filtered = memory.special(spec(temperature=1.0, top_p=0.9))
    penalized = memory.special(spec(temperature=1.0, frequency_penalty=1.0))
    both = memory.special(spec(temperature=1.0, top_p=0.9, frequency_penalty=1.0))
    assert plain == 0 < penalized < filtered < both < 32 * 2**20
    masked = SampleSpec(SamplingParams(), 0, [1], [], [], return_logprob=True, has_grammar=True)
    assert not masked.special and memory.special(masked) > 0, "a copy of the model's logits, for the policy's logprob"
    few, many = spec(), spec()
    few.top_logprobs_num, few.special = 5, True
    many.token_ids_logprob, many.special = list(range(1_000_000)), True
    assert memory.special(many) > memory.special(few) + 2**24


def test_prompt_logprobs_take_no_more_for_more_candidates(memory: StepMemory) -> None:
    """With more candidates, fewer positions are computed at a time, so that the total memory stays the same."""
    plain = memory.prompt_positions(0, None)
    assert plain > memory.prompt_positions(151_936, None) > 0
    assert plain > memory.prompt_positions(0, list(range(100_000))) > memory.prompt_positions(0, [1] * 10**6) > 0
    assert memory.prompt_positions(0, range(10**9)) == 1


def test_ranks_share_activations_but_not_logits(tmp_path: Path) -> None:
    config = load_model_config(make_model_folder(tmp_path, "qwen3", weights=False, **QWEN3_8B))
    one, four = (StepMemory.of(config, size, torch.bfloat16) for size in (1, 4))
    assert one.token_bytes > four.token_bytes and 3 * one.logit_bytes == four.logit_bytes
    assert dataclasses.replace(one, token_bytes=0).largest(10**6, 1) == dataclasses.replace(one, token_bytes=0).largest(
        0, 1
    )
