"""The server actor in this process, without Ray: what happens around an abort, and after the server has died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import PROMPT, SERVER, run

from verl_server.errors import BadRequestError, ServerDiedError
from verl_server.integrations.verl import server_actor
from verl_server.integrations.verl.server_actor import ServerActor
from verl_server.integrations.verl.settings import ServingOptions

GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": True}


@asynccontextmanager
async def launched(model: Path) -> AsyncIterator[ServerActor]:
    """A launched actor in this process."""
    actor = ServerActor({"model_path": str(model), "device": "cpu", "dtype": "float32"} | SERVER)
    await actor.launch()
    assert actor._server is not None
    try:
        yield actor
    finally:
        await asyncio.to_thread(actor._server.shutdown)


class Launched(Exception):
    """Raised in the place of a launch."""


def test_the_environment_of_the_server(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the GPUs that Ray's node sees, more threads than an actor without a CPU, and its share of the memory."""

    def launch(server_args: Any) -> None:
        environment = os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("OMP_NUM_THREADS")
        raise Launched(*environment, server_args.mem_fraction_static)

    monkeypatch.setattr(server_actor, "HttpServerEngineAdapter", launch)
    monkeypatch.setattr(server_actor, "share_of_free_memory", lambda gpu_uuids, utilization: utilization / 0.8)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    settings = {"model_path": str(tiny_model), "device": "cuda", "gpu_uuids": ("GPU-a",)}
    options = ServingOptions(gpu_memory_utilization=0.4)
    for given, expected in (({}, 0.5), ({"mem_fraction_static": 0.3}, 0.3)):
        with pytest.raises(Launched) as launched:
            run(ServerActor(settings | given, options).launch())
        assert launched.value.args == ("4,5", None, expected)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BadRequestError, match="CUDA_VISIBLE_DEVICES is empty"):
        run(ServerActor(settings).launch())


def test_a_request_that_arrives_after_the_pause(tiny_model: Path) -> None:
    """A rejecting abort ends it, too. A plain abort lets requests wait on the server again."""

    async def scenario() -> None:
        async with launched(tiny_model) as actor:
            server: Any = actor._server
            send, pause, is_paused = server.async_generate, server.pause_generation, asyncio.Event()
            loop = asyncio.get_running_loop()

            async def send_late(**request: Any) -> Any:
                await is_paused.wait()
                return await send(**request)

            def pause_and_tell(mode: str) -> None:
                pause(mode)
                loop.call_soon_threadsafe(is_paused.set)

            server.async_generate, server.pause_generation = send_late, pause_and_tell
            late = asyncio.create_task(actor.generate(PROMPT, GREEDY, "late"))
            await asyncio.sleep(0)  # the request passes the check
            assert actor._num_sent == 1
            await actor.abort_all_requests(reject_request=True)
            output = await asyncio.wait_for(late, 30)
            assert (output.token_ids, output.stop_reason) == ([], "aborted")
            rejected = await actor.generate(PROMPT, GREEDY, "rejected")
            assert (rejected.token_ids, rejected.stop_reason) == ([], "aborted")

            await actor.abort_all_requests()
            waiting = asyncio.create_task(actor.generate(PROMPT, GREEDY, "waiting"))
            while not server.get_internal_state()["num_waiting_reqs"]:
                await asyncio.sleep(0.01)
            await actor.resume_generation()
            assert len((await waiting).token_ids) == 4
            empty = await actor.generate(PROMPT, GREEDY | {"max_tokens": 0}, "no room is left")
            assert (empty.token_ids, empty.log_probs, empty.stop_reason) == ([], [], "completed")

    run(scenario())


def test_a_request_whose_logprobs_the_actor_cannot_compute_warns_once(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with launched(tiny_model) as actor:
            sampled = GREEDY | {"temperature": 1.0}
            for more, warnings in (
                ({}, 0),
                ({"top_p": 0.9}, 0),
                ({"presence_penalty": 1.0}, 1),
                ({"min_tokens": 2}, 1),
            ):
                await actor.generate(PROMPT, sampled | more, "x")
                assert caplog.text.count("are not those that verl's actor computes") == warnings

    with caplog.at_level("WARNING", logger=server_actor.__name__):
        run(scenario())


def test_calls_of_a_dead_server(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every control call raises its last words at once, a request after a delay, so that the balancer avoids it."""
    monkeypatch.setattr(server_actor, "_DEATH_DELAY", 3600.0)

    async def scenario() -> None:
        async with launched(tiny_model) as actor:
            assert actor._server is not None
            waiting = asyncio.create_task(actor.wait_dead())
            os.kill(actor._server.pid or 0, signal.SIGKILL)
            assert "SIGKILL" in await asyncio.wait_for(waiting, 60)
            request = asyncio.create_task(actor.generate(PROMPT, GREEDY, "x"))
            for call in (
                actor.get_server_address,
                actor.get_connection,
                actor.abort_all_requests,
                actor.resume_generation,
                actor.sleep,
                actor.wake_up,
                actor.clear_kv_cache,
                actor.release_kv_cache,
                actor.resume_kv_cache,
                actor.start_profile,
                actor.stop_profile,
                lambda: actor.set_version("1@5f2c9a1e"),
                lambda: actor.resume_memory(["weights"]),
                lambda: actor.release_memory(["weights"]),
            ):
                with pytest.raises(ServerDiedError, match="SIGKILL"):
                    await call()
            assert not request.done()
            request.cancel()
            monkeypatch.setattr(server_actor, "_DEATH_DELAY", 0.0)
            with pytest.raises(ServerDiedError, match="SIGKILL"):
                await actor.generate(PROMPT, GREEDY, "x")

    run(scenario())
