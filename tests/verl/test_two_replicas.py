"""verl's own server manager, clients and agent loop drive two replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from conftest import PROMPT, run
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

from verl_server.engine.http import HttpServerEngineAdapter

SAMPLE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
GREEDY = SAMPLE | {"temperature": 0, "ignore_eos": True}
LONG_PROMPT = PROMPT * 8
"""Two pages of the prefix cache."""


@pytest.fixture(scope="module")
def config(local_ray: None, make_config: Callable[..., Any]) -> Any:
    return make_config()


@pytest.fixture(scope="module")
def manager(config: Any) -> Iterator[LLMServerManager]:
    manager = LLMServerManager.create(config=config)
    yield manager
    for handle in manager.server_handles:
        ray.kill(handle)


async def generate_all(client: Any, count: int, params: dict[str, Any]) -> list[Any]:
    """Send `count` requests with prompts of their own, all at once."""
    return await asyncio.gather(
        *(client.generate(f"r{i}", prompt_ids=[*PROMPT, 80 + i], sampling_params=params) for i in range(count))
    )


def test_logprobs_are_those_of_transformers(manager: LLMServerManager, tiny_model: Path) -> None:
    """Requests are spread over both servers, and the log-probabilities are those of verl's actor."""
    params = SAMPLE | {"temperature": 0.7, "max_tokens": 8, "ignore_eos": True}
    outputs = run(generate_all(manager.get_client(), 8, params))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for i, output in enumerate(outputs):
        assert (output.stop_reason, len(output.token_ids)) == ("completed", 8)
        prompt = [*PROMPT, 80 + i]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(output.log_probs), expected, atol=1e-4)
    states = [HttpServerEngineAdapter.attach(f"http://{url}").get_internal_state() for url in manager.get_addresses()]
    assert all(state["num_requests"] > 0 for state in states)


def test_replicas_draw_different_samples(manager: LLMServerManager) -> None:
    drawn = [
        ray.get(handle.generate.remote(PROMPT, SAMPLE | {"max_tokens": 16, "ignore_eos": True}, "x"), timeout=60)
        for handle in manager.server_handles
    ]
    assert drawn[0].token_ids != drawn[1].token_ids


def test_a_second_turn_reuses_the_prefix_cache(manager: LLMServerManager) -> None:
    """Turns of one request id go to one server; the tokens that were sampled are sent back as they are."""
    client = manager.get_client()

    async def turns(name: str, first: int) -> None:
        prompt = [first, *LONG_PROMPT]
        output = await client.generate(name, prompt_ids=prompt, sampling_params=GREEDY | {"max_tokens": 16})
        assert output.extra_fields["num_cached_tokens"] == 0
        longer = prompt + output.token_ids + [90, 91]
        output = await client.generate(name, prompt_ids=longer, sampling_params=GREEDY | {"max_tokens": 4})
        assert output.extra_fields["num_cached_tokens"] >= len(LONG_PROMPT)

    async def both() -> None:
        await asyncio.gather(turns("a", 100), turns("b", 101))

    run(both())


def test_aborted_rollouts_continue_under_the_next_version(manager: LLMServerManager) -> None:
    """The resumed output is the one that an uninterrupted request has, and it spans the versions of both parts."""
    handles, params = manager.server_handles, GREEDY | {"max_tokens": 150}
    client, plain = manager.get_client(FullyAsyncLLMServerClient), manager.get_client()

    async def on_all(method: str, *args: Any) -> None:
        await asyncio.gather(*(getattr(handle, method).remote(*args) for handle in handles))

    async def started() -> None:
        """Wait until every server has produced tokens of the requests."""
        for url in manager.get_addresses():
            server = HttpServerEngineAdapter.attach(f"http://{url}")
            while server.get_internal_state()["num_running_reqs"] == 0:
                await asyncio.sleep(0.005)

    async def interrupted(client: Any, count: int) -> list[Any]:
        await on_all("set_version", "1@5f2c9a1e")
        rollout = asyncio.create_task(generate_all(client, count, params))
        await asyncio.wait_for(started(), 60)
        await asyncio.gather(*(replica.abort_all_requests() for replica in manager.get_replicas()))
        await on_all("set_version", "2@5f2c9a1e")
        await asyncio.gather(*(replica.resume_generation() for replica in manager.get_replicas()))
        return await rollout

    expected = run(generate_all(plain, 24, params))
    outputs = run(interrupted(client, 24))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert all(len(output.log_probs) == 150 for output in outputs)
    spans = {(o.extra_fields["min_global_steps"], o.extra_fields["max_global_steps"]) for o in outputs}
    assert (1, 2) in spans
    assert spans <= {(1, 1), (1, 2), (2, 2)}
    aborted = [output for output in run(interrupted(plain, 24)) if output.stop_reason == "aborted"]
    assert aborted
    for output in aborted:
        assert sum(count for _, count in output.extra_fields["weight_versions"]) == len(output.token_ids) < 150
        assert output.extra_fields["global_steps"] == 1


def test_rejected_requests_do_not_wait(manager: LLMServerManager) -> None:
    """A replica that leaves the balancer answers new requests at once; otherwise they wait for the resume."""
    replica, handle = manager.get_replicas()[0], manager.server_handles[0]

    async def scenario() -> None:
        await replica.abort_all_requests(reject_request=True)
        output = await handle.generate.remote(PROMPT, GREEDY | {"max_tokens": 4}, "x")
        assert (output.token_ids, output.stop_reason) == ([], "aborted")
        await replica.abort_all_requests()
        waiting = asyncio.wrap_future(handle.generate.remote(PROMPT, GREEDY | {"max_tokens": 4}, "x").future())
        await replica.sleep()
        await replica.sleep()
        await replica.wake_up()
        await replica.wake_up()
        assert not waiting.done()
        await replica.resume_generation()
        output = await waiting
        assert (len(output.token_ids), output.stop_reason) == (4, "completed")

    run(scenario())


def test_a_standalone_replica_sleeps_twice(manager: LLMServerManager) -> None:
    """A standalone server keeps its weights, and generates the same tokens after every sleep."""
    replica, client = manager.get_replicas()[0], manager.get_client()
    server = HttpServerEngineAdapter.attach(f"http://{replica.server_address}")

    async def scenario() -> None:
        expected = [o.token_ids for o in await generate_all(client, 2, GREEDY | {"max_tokens": 4})]
        for _ in range(2):
            await replica.sleep()
            assert server.get_internal_state()["released"] == ["kv_cache"]
            await replica.release_kv_cache()
            await replica.resume_kv_cache()
            await replica.wake_up()
            await replica.clear_kv_cache()
            assert server.get_internal_state()["released"] == []
            assert [o.token_ids for o in await generate_all(client, 2, GREEDY | {"max_tokens": 4})] == expected

    run(scenario())


def test_other_inputs_are_refused(manager: LLMServerManager) -> None:
    client = manager.get_client()
    with pytest.raises(ValueError, match="image_data"):
        run(client.generate("x", prompt_ids=PROMPT, sampling_params=GREEDY, image_data=["image"]))
    with pytest.raises(ValueError, match="maximum context length is 256"):
        run(client.generate("x", prompt_ids=PROMPT * 100, sampling_params=GREEDY))


def test_the_agent_loop(manager: LLMServerManager, config: Any) -> None:
    """verl's agent loop workers generate a batch, and the batch has tokens, log-probabilities and steps."""
    loop = AgentLoopManager.create(config=config, llm_client=manager.get_client())
    messages = [[{"role": "user", "content": text}] for text in ("a", "b", "c", "d")]
    raw = np.empty(len(messages), dtype=object)
    raw[:] = messages
    batch = DataProto(
        batch=TensorDict({"index": torch.arange(len(messages))}, batch_size=len(messages)),
        non_tensor_batch={"raw_prompt": raw},
        meta_info={"global_steps": 2, "validate": False},
    )
    output = loop.generate_sequences(batch)
    mask = output.batch["response_mask"].bool()
    assert output.batch["responses"].shape == (4, 32)
    assert mask.any(dim=1).all()
    assert (output.batch["rollout_log_probs"][mask] < 0).all()
    assert set(output.non_tensor_batch["min_global_steps"]) == {2}
