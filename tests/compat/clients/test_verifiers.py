"""The clients of verifiers: the one of training, which sends token ids to vLLM's route, and the one of evaluations."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tools import WEATHER
from conftest import Server
from transformers import AutoTokenizer

training = pytest.mark.client("verifiers TrainClient", "verifiers")
evaluation = pytest.mark.client("verifiers EvalClient", "verifiers")
rendering = pytest.mark.client("renderers", "renderers")

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def vf() -> Any:
    import verifiers.v1

    return verifiers.v1


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all tests: verifiers keeps renderers for the process."""
    with asyncio.Runner() as runner:
        yield runner


def body(server: Server, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"model": server.model, "messages": messages} | more


def respond(vf: Any, server: Server, config: Any, request: dict[str, Any], **sampling: Any) -> Coroutine[Any, Any, Any]:
    from verifiers.v1.dialects import ChatDialect

    async def run() -> Any:
        client = vf.resolve_client(config)
        try:
            return await client.get_response(
                ChatDialect(), request, vf.SamplingConfig(temperature=0.0, **sampling), session_id="trace-1"
            )
        finally:
            await client.close()

    return run()


def train_config(vf: Any, server: Server) -> Any:
    return vf.TrainClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY", renderer_model_name=server.model)


@training
def test_tokens_and_logprobs(vf: Any, runner: asyncio.Runner, server: Server, tiny_model: Path) -> None:
    """Token ids of the renderer go to `/inference/v1/generate`: ids, log-probabilities and usage return."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, return_dict=False)
    made = respond(vf, server, train_config(vf, server), body(server, HELLO), max_tokens=8, ignore_eos=True)
    response = runner.run(made)
    assert response.tokens.prompt_ids == prompt
    assert response.tokens.completion_ids == server.greedy(prompt)
    logprobs = response.tokens.completion_logprobs
    assert len(logprobs) == 8 and all(math.isfinite(value) and value <= 0.0 for value in logprobs)
    assert response.finish_reason == "length" and response.usage.completion_tokens == 8
    assert response.raw["choices"][0]["message"]["content"] == response.message.content


@training
def test_a_second_turn(vf: Any, runner: asyncio.Runner, server: Server, tiny_model: Path) -> None:
    """A conversation of two turns, and twelve requests at one time."""
    again = [*HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "More"}]

    async def run() -> Any:
        requests = [
            respond(vf, server, train_config(vf, server), body(server, again), max_tokens=4, ignore_eos=True)
            for _ in range(12)
        ]
        return await asyncio.gather(*requests)

    responses = runner.run(run())
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_model)
    prompt = tokenizer.apply_chat_template(again, add_generation_prompt=True, return_dict=False)
    expected = prompt, server.greedy(prompt, 4)
    assert all((r.tokens.prompt_ids, r.tokens.completion_ids) == expected for r in responses)


@training
def test_overlong_prompts(vf: Any, runner: asyncio.Runner, server: Server) -> None:
    """A prompt beyond `max_model_len` of `/v1/models` is refused before it is sent: ProviderError with status 400."""
    long = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(vf.ProviderError, match="maximum context length") as error:
        runner.run(respond(vf, server, train_config(vf, server), body(server, long), max_tokens=4))
    assert error.value.status_code == 400


@training
def test_errors(vf: Any, runner: asyncio.Runner, server: Server) -> None:
    """A refused sampling parameter is a ProviderError with the server's text and status."""
    with pytest.raises(vf.ProviderError, match="top_p") as error:
        runner.run(respond(vf, server, train_config(vf, server), body(server, HELLO), max_tokens=4, top_p=2.0))
    assert error.value.status_code == 400


@evaluation
def test_chat(vf: Any, runner: asyncio.Runner, server: Server) -> None:
    """The body of a harness is relayed to `/v1/chat/completions` unchanged, with tools: message, finish, usage."""
    config = vf.EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY")
    request = body(server, HELLO, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=0.0)
    response = runner.run(respond(vf, server, config, request))
    assert response.finish_reason in ("tool_calls", "length") and response.usage.completion_tokens > 0
    if response.finish_reason == "tool_calls":
        assert response.message.tool_calls[0].name == WEATHER["function"]["name"]


@evaluation
def test_stream(vf: Any, runner: asyncio.Runner, server: Server) -> None:
    """A streamed reply is relayed as whole events."""
    from verifiers.v1.dialects import ChatDialect

    async def run() -> list[bytes]:
        client = vf.resolve_client(vf.EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="NO_KEY"))
        reply = await client.relay(ChatDialect(), body(server, HELLO, stream=True, max_tokens=4))
        try:
            return [chunk async for chunk in reply.chunks]
        finally:
            await reply.close()
            await client.close()

    events = runner.run(run())
    assert len(events) > 2 and all(event.endswith(b"\n\n") for event in events)
    assert events[-1] == b"data: [DONE]\n\n"


@rendering
def test_renderers_generate(runner: asyncio.Runner, server: Server, tiny_model: Path) -> None:
    """`renderers.client.generate` alone, as prime-rl calls it, with the header that routes a rollout to one engine."""
    from openai import AsyncOpenAI
    from renderers import create_renderer
    from renderers.base import load_tokenizer
    from renderers.client import generate

    renderer = create_renderer(load_tokenizer(str(tiny_model)), None)

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=HELLO,
                model=server.model,
                sampling_params={"temperature": 0.0, "max_tokens": 6, "ignore_eos": True},
                extra_headers={"X-Session-ID": "trace-2"},
            )

    result = runner.run(run())
    assert result["completion_ids"] == server.greedy(result["prompt_ids"], 6)
    assert len(result["completion_logprobs"]) == 6 and result["finish_reason"] == "length"
