"""OpenEnv's own package works with ours in both directions. Needs the extra `openenv`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.rollout.fakes import env_server
from tests.rollout.test_environment import Counter
from verl_server.ipc.sockets import bind_socket
from verl_server.rollout.environment import EnvError, RemoteEnvironment
from verl_server.rollout.environments.env_server import make_server

pytest.importorskip("openenv", reason="needs openenv-core (extra `openenv`)")


def test_their_client_plays_our_environment() -> None:
    from openenv.core.generic_client import GenericEnvClient

    async def main() -> None:
        async with env_server(Counter) as url, GenericEnvClient(base_url=url) as client:
            first = await client.reset(seed=1)
            assert (first.observation, first.reward, first.done) == ({"text": "1 left"}, None, False)
            with pytest.raises(RuntimeError, match="the dice rolled"):
                await client.step({"text": "raise"})
            last = await client.step({"text": "x"})
            assert (last.observation, last.reward, last.done) == ({"text": "0 left"}, 1.0, True)
            assert await client.state() == {"step_count": 7}

    asyncio.run(main())


def _their_app() -> Any:
    from fastapi import FastAPI
    from openenv.core.env_server.http_server import HTTPEnvServer
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        text: str

    class Heard(Observation):
        text: str

    class Echo(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Heard:
            self.left = seed or 0
            return Heard(text=f"{episode_id}: {self.left} left")

        def step(self, action: Say, timeout_s: float | None = None, **_: Any) -> Heard:
            self.left -= 1
            return Heard(text=action.text, reward=0.5, done=self.left == 0)

        @property
        def state(self) -> State:
            return State(step_count=self.left)

    app = FastAPI()
    HTTPEnvServer(Echo, Say, Heard, max_concurrent_envs=4).register_routes(app)
    return app


def test_our_client_plays_their_environment() -> None:
    async def main() -> None:
        server = make_server(_their_app(), 1000)
        sock = bind_socket("127.0.0.1", 0)
        task = asyncio.create_task(server.serve([sock]))
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"

        async def play(seed: int) -> list[tuple[Any, ...]]:
            async with RemoteEnvironment(url) as environment:
                results = [await environment.reset(seed, episode_id="e")]
                with pytest.raises(EnvError, match="VALIDATION_ERROR"):
                    await environment.step({"wrong": 1})
                while not results[-1].done:
                    results.append(await environment.step({"text": "hello"}))
                assert (await environment.state())["step_count"] == 0
                return [(r.observation["text"], r.reward, r.done) for r in results]

        episodes = await asyncio.gather(*(play(seed) for seed in [1, 2] * 5))  # more than the server's 4 environments
        assert episodes[0] == [("e: 1 left", None, False), ("hello", 0.5, True)]
        assert len(episodes[1]) == 3
        server.should_exit = True
        await asyncio.wait_for(task, 10)

    asyncio.run(main())
