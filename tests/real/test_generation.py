"""Greedy tokens and log-probabilities of 50 prompts are those of transformers, however a request is computed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import CHUNK
from prompts import CONVERSATIONS, TEXTS
from reference import Reference

from verl_server import HttpServerEngineAdapter

NEW_TOKENS = 16
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
PAGE = 16


def check(reference: Reference, prompt: list[int], result: dict[str, Any]) -> None:
    meta = result["meta_info"]
    read = meta["input_token_logprobs"]
    if read:
        assert [token for _, token, _ in read] == prompt
    sampled = [found for found, _, _ in meta["output_token_logprobs"]]
    reference.check(prompt, result["output_ids"], sampled, [found for found, _, _ in read[1:]])


def test_texts_in_one_batch(engine: HttpServerEngineAdapter, reference: Reference, tokenizer: Any) -> None:
    """The server tokenizes the texts itself, and returns the log-probabilities of prompts, too."""
    results: Any = engine.generate(TEXTS, GREEDY, return_logprob=True, logprob_start_len=0, timeout=120)
    for text, result in zip(TEXTS, results, strict=True):
        check(reference, tokenizer.encode(text), result)
        assert result["text"] == tokenizer.decode(result["output_ids"])
    assert results[0]["text"].startswith(" Paris"), "it is the model that is meant"


def test_conversations_at_one_time(client: httpx.Client, reference: Reference, tokenizer: Any) -> None:
    """The server renders the chat template itself. The requests arrive one by one and run together."""

    def ask(messages: list[dict[str, Any]]) -> Any:
        body = {"messages": messages, "temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": True}
        return client.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()

    with ThreadPoolExecutor(len(CONVERSATIONS)) as threads:
        answers = list(threads.map(ask, CONVERSATIONS))
    ends = 0
    for messages, answer in zip(CONVERSATIONS, answers, strict=True):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == prompt
        sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        reference.check(prompt, choice["token_ids"], sampled)
        ends += choice["finish_reason"] == "stop"
        assert (choice["finish_reason"] == "stop") == (choice["token_ids"][-1] == tokenizer.eos_token_id)
        assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    assert "Paris" in answers[0]["choices"][0]["message"]["content"]
    assert 0 < ends < len(answers), "some answers end by themselves, and some are cut"


def test_prompts_from_the_cache(engine: HttpServerEngineAdapter, reference: Reference, tokenizer: Any) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS[-6:]]
    engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 1}, timeout=120)
    results: Any = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_logprob=True, timeout=120)
    for prompt, result in zip(prompts, results, strict=True):
        assert result["meta_info"]["cached_tokens"] == (len(prompt) - 1) // PAGE * PAGE
        check(reference, prompt, result)


def test_long_prompts_in_chunks(engine: HttpServerEngineAdapter, reference: Reference, tokenizer: Any) -> None:
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts = [prompt for prompt in prompts if len(prompt) > CHUNK]
    assert len(prompts) >= 3 and max(map(len, prompts)) > 2 * CHUNK
    for prompt in prompts:
        result: Any = engine.generate(input_ids=prompt, sampling_params=GREEDY, return_logprob=True, timeout=120)
        assert not result["meta_info"]["cached_tokens"] or prompt is prompts[1], "the first two begin alike"
        check(reference, prompt, result)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_that_are_interrupted(
    engine: HttpServerEngineAdapter, reference: Reference, tokenizer: Any, mode: Any
) -> None:
    """A retracted request computes its KV cache again from prompt and output."""
    prompts = [tokenizer.encode(text) for text in TEXTS[:8]]

    def generate(prompt: list[int]) -> dict[str, Any]:
        """Interrupt all requests when this one has some tokens."""
        frames = engine.generate(
            input_ids=prompt, sampling_params=GREEDY, return_logprob=True, stream=True, timeout=120
        )
        paused = prompt is not prompts[0]
        result: Any = None
        for result in frames:
            if not paused and len(result["output_ids"]) >= 3:
                engine.pause_generation(mode)
                engine.continue_generation()
                paused = True
        return result

    with ThreadPoolExecutor(len(prompts)) as threads:
        results = list(threads.map(generate, prompts))
    retracted = sum(result["meta_info"]["num_retractions"] > 0 for result in results)
    assert retracted > 2 if mode == "retract" else retracted == 0
    for prompt, result in zip(prompts, results, strict=True):
        check(reference, prompt, result)
