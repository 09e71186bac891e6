"""verl's own server manager and clients drive two replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from conftest import PROMPT, run
from verl.workers.rollout.llm_server import LLMServerManager

SAMPLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def manager(local_ray: None, make_config: Callable[..., Any]) -> Iterator[LLMServerManager]:
    manager = LLMServerManager.create(config=make_config())
    yield manager
    for handle in manager.server_handles:
        ray.kill(handle)


def test_both_replicas_generate(manager: LLMServerManager) -> None:
    """Concurrent requests are spread over both servers, and every output has its log-probabilities."""
    client = manager.get_client()

    async def rollout() -> list[Any]:
        return await asyncio.gather(
            *(
                client.generate(f"request-{i}", prompt_ids=PROMPT, sampling_params=SAMPLE | {"max_tokens": 8})
                for i in range(8)
            )
        )

    outputs = run(rollout())
    for output in outputs:
        assert output.stop_reason == "completed"
        assert 0 < len(output.token_ids) <= 8
        assert len(output.log_probs) == len(output.token_ids)
    assert len(set(manager.get_addresses())) == 2
