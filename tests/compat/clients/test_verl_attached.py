"""verl's asynchronous adapter, attached to an address that it did not start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from conftest import Server

import verl_server.compat.sglang

pytestmark = pytest.mark.client("verl", "verl")

PROMPT = [70, 71, 72, 73]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture
def attached(server: Server) -> Any:
    verl_server.compat.sglang.install()
    from verl.workers.rollout.sglang_rollout.http_server_engine import AsyncHttpServerAdapter

    return AsyncHttpServerAdapter(
        model_path=server.model, host="127.0.0.1", port=server.port, launch_server=False, trust_remote_code=False
    )


def test_attached(attached: Any, server: Server) -> None:
    """`AsyncHttpServerAdapter`, attached, without pushes: 32 `async_generate` at once, memory, flush, abort, models."""

    async def run() -> None:
        answers = await asyncio.gather(
            *(attached.async_generate(input_ids=PROMPT, sampling_params=GREEDY) for _ in range(32))
        )
        assert all(answer["output_ids"] == answers[0]["output_ids"] for answer in answers)
        assert (await attached.available_models())["data"][0]["id"] == server.model
        await attached.release_memory_occupation(["kv_cache"])
        await attached.resume_memory_occupation(["kv_cache"])
        assert "Cache flushed" in (await attached.flush_cache())["text"]
        assert await attached.abort_request(rid="unknown") == {}
        again = await attached.async_generate(input_ids=PROMPT, sampling_params=GREEDY)
        assert again["output_ids"] == answers[0]["output_ids"]

    asyncio.run(run())
