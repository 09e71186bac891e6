"""An engine sends the session of its requests, and its end. A rollout does so for each episode."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.engine.restartable_server import Server
from tests.rollout.fakes import FakeEnvironment, WordRenderer, says
from verl_server import BadRequestError, ContextLengthError, EngineBase, HttpServerEngineAdapter, VerlEngine
from verl_server.messages.io_struct import FinishSessionReq, TokenizedGenerateReq
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.trajectory import Task

ONE = {"max_new_tokens": 1}


def sent(server: Server, count: int) -> list[str]:
    return [m.session_id for m in server.stack.scheduler.wait_for(TokenizedGenerateReq, count)]


def finished(server: Server, count: int) -> list[str]:
    return [m.session_id for m in server.stack.scheduler.wait_for(FinishSessionReq, count)]


def test_each_way_to_generate_sends_the_session(engine: EngineBase, server: Server) -> None:
    async def awaited() -> None:
        await engine.async_generate(input_ids=[5], sampling_params=ONE, session_id="b")
        async for _ in await engine.async_generate(input_ids=[5], sampling_params=ONE, session_id="c", stream=True):
            pass

    engine.generate(input_ids=[5], sampling_params=ONE, session_id="a")
    asyncio.run(awaited())
    assert list(engine.generate(input_ids=[5], sampling_params=ONE, session_id="d", stream=True))
    engine.generate(input_ids=[[5], [6], [7]], sampling_params=ONE, session_id=["e", None, "f"])
    engine.generate(input_ids=[[5], [6]], sampling_params=ONE, session_id="g")
    engine.generate(input_ids=[5], sampling_params=ONE)
    hints = ["hint:a", "hint:b", "hint:c", "hint:d", "hint:e", "", "hint:f", "hint:g", "hint:g", ""]
    assert sent(server, len(hints)) == hints


def test_a_long_prompt_has_a_session_too(server: Server) -> None:
    with HttpServerEngineAdapter.attach(server.url) as engine:
        with pytest.raises(BadRequestError, match="prompt is too long"):
            engine.generate(input_ids=[5] * 2000, session_id="a")
        engine.generate(input_ids=[5] * 2000, sampling_params=ONE, truncate_prompt_tokens=4, session_id="a")
    assert sent(server, 1) == ["hint:a"]


def test_a_length_that_does_not_fit_is_one_error(engine: EngineBase) -> None:
    """In this process and over HTTP."""

    async def streamed() -> None:
        async for _ in await engine.async_generate(input_ids=[5] * 256, stream=True):
            pass

    with pytest.raises(ContextLengthError, match="prompt is too long: 256 tokens > 255 maximum"):
        engine.generate(input_ids=[5] * 256)
    with pytest.raises(ContextLengthError, match="you requested 300 tokens"):
        engine.generate(input_ids=[5] * 200, sampling_params={"max_new_tokens": 100})
    with pytest.raises(ContextLengthError, match="prompt is too long"):
        engine.generate("a" * 100_000)  # read in a text worker
    with pytest.raises(ContextLengthError, match="prompt is too long"):
        asyncio.run(streamed())


def test_a_wrong_id_is_refused(engine: EngineBase) -> None:
    with pytest.raises(BadRequestError, match="session_id has 129 characters"):
        engine.generate(input_ids=[5], session_id="x" * 129)


def test_close_session(engine: EngineBase, server: Server) -> None:
    engine.close_session("a")
    asyncio.run(engine.async_close_session("b"))
    engine.close_session("a")
    assert finished(server, 3) == ["hint:a", "hint:b", "hint:a"]


def test_verl_engine(server: Server) -> None:
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with VerlEngine(init_device_mesh("cpu", (1,)), server_url=server.url) as engine:
            engine.generate(input_ids=[[5], [6]], sampling_params=ONE, session_id=["a", "b"])
            engine.close_session("a")
    finally:
        dist.destroy_process_group()
    assert sent(server, 2) == ["hint:a", "hint:b"] and finished(server, 1) == ["hint:a"]


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("settings", [{}, {"admin_api_key": "admin"}], ids=["open", "admin key"])
def test_a_rollout_names_each_episode_and_says_when_it_ends(
    server: Server, settings: dict[str, str], lockstep: bool
) -> None:
    """The loop has no key: whoever may generate may end a session."""
    server.restart(**settings)

    def episode() -> FakeEnvironment:
        return FakeEnvironment(says("a"), says("b"), says("c", 1.0, True))

    with AgentLoop(server.url, episode, WordRenderer(), sampling_params=ONE) as loop:
        (loop.run_lockstep if lockstep else loop.run)([Task(seed=i) for i in range(4)])
    turns = Counter(sent(server, 8))
    assert set(turns.values()) == {2} and len(turns) == 4
    assert sorted(finished(server, 4)) == sorted(turns)
