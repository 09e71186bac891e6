"""`HttpServerEngineAdapter.attach` to a genuine vLLM server, which this test launches by vLLM's own command."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.backends.launched import GREEDY, PROMPT, check, launched
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadRequestError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

START_SECONDS = 240


@pytest.fixture(scope="module")
def vllm(folders: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServerEngineAdapter]:
    """An adapter that is attached to a vLLM server, which serves the first checkpoint."""
    options = "--dtype float32 --max-model-len 4096 --logprobs-mode processed_logprobs --enforce-eager"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folders["qwen3"][0])]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    command += [*options.split(), "--enable-prompt-tokens-details"]
    with (
        launched(command, environment, log, "/health", START_SECONDS) as server,
        HttpServerEngineAdapter.attach(server.url) as adapter,
    ):
        yield adapter


@pytest.fixture(scope="module")
def models(folders: dict[str, list[Path]]) -> list[Any]:
    auto: Any = AutoModelForCausalLM
    return [auto.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders["qwen3"]]


def test_the_server_is_recognized(vllm: HttpServerEngineAdapter) -> None:
    info = vllm.get_server_info()
    assert info["internal_states"][0]["engine_version"].startswith("vLLM ")
    assert info["scheduler_info"]["context_length"] == 4096


def test_tokens_and_logprobs_are_those_of_transformers(vllm: HttpServerEngineAdapter, models: list[Any]) -> None:
    result: Any = vllm.generate(
        input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2
    )
    check(models[0], PROMPT, result)
    meta = result["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert meta["logprobs_mode"] == "default"
    with torch.inference_mode():
        rows = models[0](torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == PROMPT
    assert meta["input_token_logprobs"][0][0] is None
    for row, (value, token, _) in zip(rows, meta["input_token_logprobs"][1:], strict=False):
        assert abs(value - float(row[token])) < 1e-3
    for (value, token, _), best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(best) == 2
        assert [*best[0][:2]] == [value, token] and best[1][0] <= value
    assert len(meta["input_top_logprobs"]) == len(PROMPT)


def test_batches_samples_and_text(vllm: HttpServerEngineAdapter, models: list[Any]) -> None:
    prompts = [PROMPT, PROMPT[:20]]
    results: Any = vllm.generate(input_ids=prompts, sampling_params=[GREEDY, GREEDY], return_logprob=True)
    for prompt, result in zip(prompts, results, strict=True):
        check(models[0], prompt, result)
    drawn: Any = vllm.generate("Hello", {"n": 3, "temperature": 1.0, "max_new_tokens": 4, "sampling_seed": 7})
    assert len(drawn) == 3 and all(len(result["output_ids"]) <= 4 for result in drawn)
    again: Any = asyncio.run(vllm.async_generate("Hello", {"n": 3, "max_new_tokens": 4, "sampling_seed": 7}))
    assert [result["output_ids"] for result in again] == [result["output_ids"] for result in drawn]


def test_a_stream_holds_everything_so_far(vllm: HttpServerEngineAdapter, models: list[Any]) -> None:
    frames: list[Any] = list(vllm.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, stream=True))
    assert all(b["output_ids"][: len(a["output_ids"])] == a["output_ids"] for a, b in itertools.pairwise(frames))
    check(models[0], PROMPT, frames[-1])
    assert frames[-1]["meta_info"]["finish_reason"]["type"] == "length"


def test_stop_tokens(vllm: HttpServerEngineAdapter) -> None:
    ids: Any = vllm.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    params = GREEDY | {"stop_token_ids": [ids[3]], "ignore_eos": False}
    result = vllm.generate(input_ids=PROMPT, sampling_params=params)
    assert result["output_ids"] == ids[:4]
    assert result["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[3]}


def test_abort_returns_what_was_generated(vllm: HttpServerEngineAdapter) -> None:
    params = GREEDY | {"max_new_tokens": 3000}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(vllm.generate, input_ids=PROMPT, sampling_params=params, rid="long", timeout=60.0)
        assert eventually(lambda: (vllm.abort_request("long"), running.done())[1], 30)
        result: Any = running.result(60)
    assert result["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(result["output_ids"]) < 3000


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
def test_weights_from_disk(
    vllm: HttpServerEngineAdapter, models: list[Any], folders: dict[str, list[Path]], mode: Any
) -> None:
    for checkpoint in (1, 0):
        vllm.update_weights_from_disk(
            str(folders["qwen3"][checkpoint]), mode=mode, weight_version=f"{mode}{checkpoint}"
        )
        result: Any = vllm.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
        check(models[checkpoint], PROMPT, result)
        assert result["meta_info"]["weight_versions"] == [{"version": f"{mode}{checkpoint}", "start": 0, "end": 8}]


def test_a_pause_holds_requests(vllm: HttpServerEngineAdapter) -> None:
    vllm.pause_generation("in_place")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(vllm.generate, input_ids=PROMPT, sampling_params=GREEDY, timeout=60.0)
        assert not eventually(held.done, 1)
        vllm.continue_generation()
        assert len(held.result(60)["output_ids"]) == 8
    assert vllm.flush_cache()


def test_what_the_wire_lacks_is_refused_by_name(vllm: HttpServerEngineAdapter, models: list[Any]) -> None:
    with pytest.raises(BadRequestError, match="CUDA memory only"):
        vllm.update_weights_from_tensor(models[0].state_dict().items())
    with pytest.raises(BadRequestError, match="keeps no registered weights"):
        vllm.register_weights(models[0])
    with pytest.raises(BadRequestError, match="no transactions"):
        vllm.update_weights_from_disk("/nowhere", transaction_id="t")
    with pytest.raises(BadRequestError, match="token_ids_logprob"):
        vllm.generate("Hello", token_ids_logprob=[1])
    with pytest.raises(BadRequestError, match="does not offer"):
        vllm.get_weights_by_name("model.norm.weight")
