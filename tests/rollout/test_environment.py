"""OpenEnv's protocol as client and as server, and the ways in which the other side may fail."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection

from tests.rollout.fakes import answering, bad_server, env_server, error, observation
from verl_server.errors import BadRequestError
from verl_server.rollout.environment import (
    EnvBusyError,
    EnvError,
    EnvTimeoutError,
    EnvTimeouts,
    RemoteEnvironment,
    websocket_url,
)

QUICK = EnvTimeouts(connect=0.5, capacity=0.5, reset=0.3, step=0.3, close=0.3)


class Counter:
    """Counts down from the seed. Its methods are not async, so the server runs them in a thread."""

    closed = 0

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        self.left = seed or 0
        return {"text": f"{self.left} left"}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        if action.get("text") == "raise":
            raise RuntimeError("the dice rolled under the table")
        if action.get("text") == "nonsense":
            return "a string", float("nan"), False  # type: ignore[return-value]
        self.left -= 1
        return {"text": f"{self.left} left"}, (1.0 if self.left == 0 else None), self.left == 0

    @property
    def state(self) -> dict[str, Any]:
        return {"step_count": 7}

    def close(self) -> None:
        type(self).closed += 1


class Ready(Counter):
    """Needs no reset."""

    def __init__(self) -> None:
        self.left = 3

    @property
    def state(self) -> dict[str, Any]:
        return {"step_count": 3 - self.left, "episode_id": "first"}


class AsyncCounter(Counter):
    async def reset(self, seed: int | None = None, episode_id: str | None = None) -> dict[str, Any]:  # type: ignore[override]
        self.left = seed or 0
        return {"text": f"{episode_id}: {self.left} left"}

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:  # type: ignore[override]
        return Counter.step(self, action)


def test_an_episode_over_the_wire() -> None:
    async def main() -> None:
        Counter.closed = 0
        async with env_server(Counter) as url, RemoteEnvironment(url) as environment:
            first = await environment.reset(2, episode_id="ignored by this one")
            assert (first.observation, first.reward, first.done) == ({"text": "2 left"}, None, False)
            assert not (await environment.step({})).done
            last = await environment.step({})
            assert (last.observation, last.reward, last.done) == ({"text": "0 left"}, 1.0, True)
            assert await environment.state() == {"step_count": 7}
            await environment.reset(5)
            assert (await environment.step({})).observation == {"text": "4 left"}
            await environment.close()
            async with asyncio.timeout(5):
                while not Counter.closed:
                    await asyncio.sleep(0.005)

    asyncio.run(main())


def test_async_environments_and_reset_options() -> None:
    async def main() -> None:
        async with env_server(AsyncCounter) as url, RemoteEnvironment(url) as environment:
            assert (await environment.reset(3, episode_id="e")).observation == {"text": "e: 3 left"}

    asyncio.run(main())


def test_an_environment_that_raises_keeps_its_connection() -> None:
    async def main() -> None:
        async with env_server(Counter) as url, RemoteEnvironment(url) as environment:
            with pytest.raises(EnvError, match="not open"):
                await environment.step({})
            await environment.reset(2)
            with pytest.raises(EnvError, match="EXECUTION_ERROR: RuntimeError: the dice rolled"):
                await environment.step({"text": "raise"})
            with pytest.raises(EnvError):
                await environment.step({"text": "nonsense"})
            assert (await environment.step({})).observation == {"text": "1 left"}

    asyncio.run(main())


def test_connections_do_not_share_environments_and_are_bounded() -> None:
    async def main() -> None:
        async with env_server(Counter, max_concurrent_envs=2) as url:
            first, second, third = (RemoteEnvironment(url, QUICK) for _ in range(3))
            await first.reset(1)
            await second.reset(2)
            with pytest.raises(EnvBusyError, match=r"All 2 environments are taken.*EnvTimeouts\.capacity"):
                await third.reset(3)
            asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(first.close()))
            assert (await third.reset(3)).observation == {"text": "3 left"}  # as soon as an environment is free
            assert (await second.step({})).observation == {"text": "1 left"}
            await second.close()
            await third.close()

    asyncio.run(main())


def test_a_step_that_hangs_holds_up_no_other_connection() -> None:
    released = threading.Event()

    class Hanging(Counter):
        def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
            if action.get("text") == "hang":
                released.wait(30)
            return super().step(action)

    async def main() -> None:
        async with env_server(Hanging) as url:
            hung, other = RemoteEnvironment(url, QUICK), RemoteEnvironment(url)
            await hung.reset(1)
            await other.reset(2)
            with pytest.raises(EnvTimeoutError):
                await hung.step({"text": "hang"})
            assert (await other.step({})).observation == {"text": "1 left"}
            await hung.close()
            assert (await other.step({})).done
            await other.close()
            released.set()

    asyncio.run(main())


def test_the_wire_is_openenvs() -> None:
    """Messages have the form that OpenEnv's `EnvClient` sends and its server answers (openenv-core 0.3.0)."""
    exchanges: list[tuple[Any, Any]] = [
        ({"type": "reset", "data": {"seed": 1}}, observation("1 left")),
        ({"type": "state"}, {"type": "state", "data": {"step_count": 7}}),
        ({"type": "step", "data": {"text": "x"}}, observation("0 left", 1.0, True)),
        ("{", "INVALID_JSON"),
        ({"type": "dance"}, "UNKNOWN_TYPE"),
        ({"type": "step", "data": []}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"text": "raise"}}, "EXECUTION_ERROR"),
        ({"type": "reset", "data": {}}, observation("0 left")),
    ]

    async def main() -> None:
        async with env_server(Counter) as url, connect(websocket_url(url)) as socket:
            for message, expected in exchanges:
                await socket.send(message if isinstance(message, str) else json.dumps(message))
                answer = json.loads(await asyncio.wait_for(socket.recv(), 5))
                if isinstance(expected, str):
                    assert (answer["type"], answer["data"]["code"]) == ("error", expected)
                    assert isinstance(answer["data"]["message"], str)
                else:
                    assert answer == expected
            await socket.send(json.dumps({"type": "close"}))
            await asyncio.wait_for(socket.wait_closed(), 5)

    asyncio.run(main())


def test_the_environment_decides_what_a_step_before_a_reset_does() -> None:
    """As in OpenEnv's server, the environment exists from the first message on, whichever it is."""

    async def main() -> None:
        step, state = {"type": "step", "data": {}}, {"type": "state"}
        async with env_server(Ready) as url:
            async with connect(websocket_url(url)) as socket:
                for message, expected in (
                    (state, {"type": "state", "data": {"step_count": 0, "episode_id": "first"}}),
                    (step, observation("2 left")),
                    (state, {"type": "state", "data": {"step_count": 1, "episode_id": "first"}}),
                    ({"type": "reset", "data": {"seed": 1}}, observation("1 left")),
                ):
                    await socket.send(json.dumps(message))
                    assert json.loads(await asyncio.wait_for(socket.recv(), 5)) == expected
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
                stepped = await client.post("/step", json={"action": {}})
                assert stepped.json() == {"observation": {"text": "2 left"}, "reward": None, "done": False}
                assert (await client.get("/state")).json() == {"step_count": 0, "episode_id": "first"}
        async with env_server(Counter) as url, connect(websocket_url(url)) as socket:
            await socket.send(json.dumps(step))
            answer = json.loads(await asyncio.wait_for(socket.recv(), 5))
            assert answer["data"]["code"] == "EXECUTION_ERROR" and "before reset" in answer["data"]["message"]
            await socket.send(json.dumps({"type": "reset", "data": {"seed": 1}}))
            assert json.loads(await asyncio.wait_for(socket.recv(), 5)) == observation("1 left")

    asyncio.run(main())


def test_plain_http_routes() -> None:
    async def main() -> None:
        async with env_server(Counter) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.get("/health")).json() == {"status": "healthy"}
            assert (await client.get("/metadata")).json()["name"] == "Counter"
            assert set((await client.get("/schema")).json()) == {"action", "observation", "state"}
            assert (await client.get("/state")).json() == {"step_count": 7, "episode_id": None}
            reset = await client.post("/reset", json={"seed": 4})
            assert reset.json() == {"observation": {"text": "4 left"}, "reward": None, "done": False}
            assert (await client.post("/reset")).json()["observation"] == {"text": "0 left"}
            assert (
                await client.post("/step", json={"action": {}})
            ).status_code == 500  # this environment needs a reset
            assert (await client.post("/reset", content=b"[")).status_code == 422

    asyncio.run(main())


async def _silent(connection: ServerConnection) -> None:
    await connection.recv()
    await connection.wait_closed()


async def _hang_up(connection: ServerConnection) -> None:
    await connection.recv()
    connection.transport.abort()


@pytest.mark.parametrize(
    ("behave", "kind", "says"),
    [
        (_silent, EnvTimeoutError, "did not answer `reset` within 0.3 s \\(EnvTimeouts.reset"),
        (_hang_up, EnvError, "did not answer `reset`"),
        (answering("not json"), EnvError, "not JSON"),
        (answering(b"\xff\xfe"), EnvError, "not JSON"),
        (answering("[1, 2]"), EnvError, "without an object `data`"),
        (answering({"type": "observation"}), EnvError, "without an object `data`"),
        (answering({"type": "state", "data": {}}), EnvError, "instead of 'observation'"),
        (answering({"type": "observation", "data": {"observation": "text"}}), EnvError, "not an object"),
        (answering(observation(reward="much")), EnvError, "not a finite number"),
        (answering(observation(reward=True and float("inf"))), EnvError, "not JSON"),
        (answering(observation(done="perhaps")), EnvError, "not true or false"),
        (answering(error("SESSION_ERROR", "no such game")), EnvError, "SESSION_ERROR: no such game"),
    ],
)
def test_a_fault_is_one_error_in_time(behave: Any, kind: type[EnvError], says: str) -> None:
    async def main() -> None:
        async with bad_server(behave) as url, RemoteEnvironment(url, QUICK) as environment:
            start = time.monotonic()
            with pytest.raises(kind, match=says):
                await environment.reset(1)
            assert time.monotonic() - start < 3

    asyncio.run(main())


def test_a_full_server_that_closes_before_we_spoke_is_asked_again() -> None:
    async def behave(connection: ServerConnection) -> None:
        seen.append(1)
        if len(seen) < 3:
            await connection.send(json.dumps(error("CAPACITY_REACHED")))
            await connection.close()
        else:
            await answering(observation())(connection)

    seen: list[int] = []

    async def main() -> None:
        async with bad_server(behave) as url, RemoteEnvironment(url, QUICK) as environment:
            assert (await environment.reset(1)).observation == {"text": "hello"}

    asyncio.run(main())
    assert len(seen) == 3


def test_no_server_and_a_server_that_is_none() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 301 Moved\r\nLocation: http://[::bad\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def main() -> None:
        with pytest.raises(EnvError, match="accept a connection"):
            await RemoteEnvironment("http://127.0.0.1:9", QUICK).reset(1)
        faults = (
            (refuse, "HTTP 500"),
            (redirect, "did not accept a connection: ValueError"),
            (mute, "did not accept a connection within"),
        )
        for handler, says in faults:
            server = await asyncio.start_server(handler, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(EnvError, match=says):
                await RemoteEnvironment(f"http://127.0.0.1:{port}", QUICK).reset(1)
            server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1", "ws://h:1/ws"),
        ("https://h/env/", "wss://h/env/ws"),
        ("ws://h:1/ws", "ws://h:1/ws"),
        ("h:1", "ws://h:1/ws"),
    ],
)
def test_urls(url: str, expected: str) -> None:
    assert websocket_url(url) == expected


@pytest.mark.parametrize("url", ["ftp://h", "http://"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(BadRequestError, match="not the URL"):
        websocket_url(url)
