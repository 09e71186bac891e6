"""The whole engine agrees with transformers in fp32, however a request is computed.

Greedy ids and log-probabilities of outputs and prompts are compared for requests computed alone, in mixed batches, in
chunks, from the prefix cache, after a retraction, by two tensor-parallel ranks, and after a weight update.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.parity.harness import CPU_KERNELS, random_prompt
from verl_server import Engine
from verl_server.models.tiny import random_model

LENGTHS = (5, 17, 40, 63, 90, 130)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
NEW_TOKENS = 12
TOLERANCE = 1e-4
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "cpu_threads": 1,
    "cpu_kernel_choice": CPU_KERNELS,
    "page_size": 8,
    "chunked_prefill_size": 48,
    "check_invariants": True,
    # Room for about half of the requests at once, so that the batch test retracts.
    "max_total_tokens": 256,
}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "qwen3-tp2"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path]]:
    arch, _, tp = request.param.partition("-tp")
    folder: Path = request.getfixturevalue(f"tiny_{arch}")
    with Engine(model_path=str(folder), tp_size=int(tp or 1), **SETTINGS) as engine:
        yield engine, folder


def load(folder: Path) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def check(model: Any, prompts: list[list[int]], results: list[dict[str, Any]]) -> None:
    """Assert ids and log-probabilities of each result against `model`, given the tokens before."""
    for prompt, result in zip(prompts, results, strict=True):
        output, meta = result["output_ids"], result["meta_info"]
        assert len(output) == meta["completion_tokens"] == meta["finish_reason"]["length"]
        logits = model(torch.tensor([prompt + output])).logits[0].float()
        logprobs = logits - logits.logsumexp(-1, keepdim=True)
        for position, (found, token, _) in enumerate(meta["output_token_logprobs"], start=len(prompt) - 1):
            best = logprobs[position].topk(2)
            gap = float(best.values[0] - best.values[1])
            assert token == int(best.indices[0]) or gap < 1e-4
            assert found == pytest.approx(float(logprobs[position, token]), abs=TOLERANCE)
        for position, (found, token, _) in enumerate(meta.get("input_token_logprobs", [])):
            assert token == prompt[position]
            if position:
                assert found == pytest.approx(float(logprobs[position - 1, token]), abs=TOLERANCE)


def generate(
    engine: Engine, prompts: list[list[int]], start: int = -1, new_tokens: int = NEW_TOKENS
) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        logprob_start_len=start,
        timeout=60,
    )
    return results


def test_alone_and_again_from_the_cache(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    model = load(folder)
    engine.flush_cache()
    for prompt in PROMPTS:
        check(model, [prompt], generate(engine, [prompt], start=0))
    again = generate(engine, PROMPTS[-1:])
    assert again[0]["meta_info"]["cached_tokens"] >= LENGTHS[-1] - 1 - SETTINGS["page_size"]
    check(model, PROMPTS[-1:], again)


def test_mixed_batch_with_chunks_and_retractions(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    engine.flush_cache()
    batch = PROMPTS + [random_prompt(30, 50 + seed) for seed in range(12)]
    results = generate(engine, batch, new_tokens=60)
    assert sum(r["meta_info"]["num_retractions"] for r in results) > 0, "the pool is too large to retract"
    check(load(folder), batch, results)


def test_the_next_turn_reuses_prompt_and_completion(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    first = generate(engine, PROMPTS[4:5])[0]
    turn = [*PROMPTS[4], *first["output_ids"], 7, 8, 9]
    second = generate(engine, [turn])
    assert second[0]["meta_info"]["cached_tokens"] >= len(PROMPTS[4])
    check(load(folder), [turn], second)


def test_new_weights_are_served_also_to_cached_prompts(served: tuple[Engine, Path]) -> None:
    engine, folder = served
    old, config = load(folder), AutoConfig.from_pretrained(folder)
    generate(engine, PROMPTS[2:])  # fills the prefix cache under the old weights
    new = random_model(config, seed=77)
    try:
        engine.update_weights_from_tensor(list(new.state_dict().items()), partial=False)
        results = generate(engine, PROMPTS[2:])
        assert all(not r["meta_info"]["cached_tokens"] for r in results), "a page of the old version was served"
        check(new, PROMPTS[2:], results)
        check(new, PROMPTS[2:], generate(engine, PROMPTS[2:]))
    finally:
        engine.update_weights_from_tensor(list(old.state_dict().items()), partial=False)
    check(old, PROMPTS[2:], generate(engine, PROMPTS[2:]))
