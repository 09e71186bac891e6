"""A server that is away for a moment costs time, and no episode and no replacement. What was sent is sent once."""

from __future__ import annotations

import asyncio
import contextlib
import http
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosedError

from tests.rollout.agents.common import Echo, player, run
from tests.rollout.fakes import (
    FakeEnvironment,
    WordRenderer,
    answering,
    bad_server,
    env_server,
    error,
    observation,
    says,
)
from tests.rollout.test_agent_loop import FakeEngine
from verl_server.errors import BadRequestError
from verl_server.rollout import agent_loop, environment
from verl_server.rollout.agent_loop import AgentLoop, Rollout
from verl_server.rollout.agents import attempts
from verl_server.rollout.away import Tries, is_refused
from verl_server.rollout.environment import EnvAwayError, EnvError, EnvTimeouts, RemoteEnvironment
from verl_server.rollout.environment_check import check_environment
from verl_server.rollout.environments import mcp_tools
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.environments.mcp_tools import McpTools
from verl_server.rollout.environments.openenv import OpenEnvEnvironment
from verl_server.rollout.episode import Limits
from verl_server.rollout.replacements import pause_before
from verl_server.rollout.trajectory import StopReason, Task

PATIENT = EnvTimeouts(connect=30)
GAME = answering(observation("a"), observation("z", 1.0, True))


@asynccontextmanager
async def listens_at(monkeypatch: pytest.MonkeyPatch, number: int, behave: Any = GAME) -> AsyncIterator[list[str]]:
    """Yield the URLs of all tries to connect, after that of a server which listens from the try `number` on.

    Until then its port is bound and does not listen, so that the kernel refuses each connection.
    """
    servers: list[Server] = []
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        tried = [f"http://127.0.0.1:{sock.getsockname()[1]}"]

        async def counted(url: str, **options: Any) -> Any:
            tried.append(url)
            if len(tried) - 1 == number:
                servers.append(await serve(behave, sock=sock))
            return await connect(url, **options)

        monkeypatch.setattr(environment, "connect", counted)
        yield tried
        for server in servers:
            server.close()
            await server.wait_closed()


def waited(main: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), 60))


def test_a_refused_connection_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with listens_at(monkeypatch, 4) as tried, RemoteEnvironment(tried[0], PATIENT) as remote:
            assert (await remote.reset(1)).observation == {"text": "a"}
            assert len(tried) - 1 == 4

    waited(main)


def test_a_server_that_stays_away_is_an_error_that_says_how_long_it_was_tried() -> None:
    async def main() -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            remote = RemoteEnvironment(f"127.0.0.1:{sock.getsockname()[1]}", EnvTimeouts(connect=0.2))
            says = r"not accept a connection within 0.2 s \(EnvTimeouts.connect\), tried [1-9] times: ConnectionRefused"
            with pytest.raises(EnvAwayError, match=says):
                await remote.reset(1)

    waited(main)


def test_a_bound_that_is_over_during_another_try_names_the_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses_then_hangs(url: str, **_: Any) -> Any:
        tried.append(url)
        if len(tried) == 1:
            raise ConnectionRefusedError(111, "refused")
        await asyncio.Event().wait()

    async def main() -> None:
        with pytest.raises(EnvAwayError, match="tried 1 times: ConnectionRefused"):
            await RemoteEnvironment("http://127.0.0.1:9", EnvTimeouts(connect=1.0)).reset(1)

    tried: list[str] = []
    monkeypatch.setattr(environment, "connect", refuses_then_hangs)
    waited(main)
    assert len(tried) == 2


def _aborts(connection: ServerConnection, _: Any) -> None:
    connection.transport.abort()


def _closes(connection: ServerConnection, _: Any) -> None:
    connection.transport.close()


def _answers(status: http.HTTPStatus) -> Any:
    return lambda connection, _: connection.respond(status, "")


@pytest.mark.parametrize("fault", [_aborts, _closes, *map(_answers, map(http.HTTPStatus, (502, 503, 504)))])
def test_a_handshake_that_the_servers_absence_ends_is_tried_again(fault: Any) -> None:
    seen: list[int] = []

    def fails_twice(connection: ServerConnection, request: Any) -> Any:
        seen.append(1)
        return fault(connection, request) if len(seen) < 3 else None

    async def main() -> None:
        async with serve(GAME, "127.0.0.1", 0, process_request=fails_twice) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with RemoteEnvironment(url, PATIENT) as remote:
                assert (await remote.reset(1)).observation == {"text": "a"}

    waited(main)
    assert len(seen) == 3


@pytest.mark.parametrize(
    "absent",
    [
        ConnectionResetError(104, "reset by peer"),
        ConnectionClosedError(None, None),  # with uvloop, if the server is gone before the handshake's first byte
        OSError("Multiple exceptions: [Errno 111] of ::1, [Errno 111] of 127.0.0.1"),
        socket.gaierror(-2, "Name or service not known"),
    ],
)
def test_each_error_of_a_server_that_is_away_is_tried_again(absent: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails_twice(url: str, **options: Any) -> Any:
        tried.append(url)
        if len(tried) < 3:
            raise absent
        return await connect(url, **options)

    async def main() -> None:
        async with bad_server(GAME) as url, RemoteEnvironment(url, PATIENT) as remote:
            assert (await remote.reset(1)).observation == {"text": "a"}

    tried: list[str] = []
    monkeypatch.setattr(environment, "connect", fails_twice)
    waited(main)
    assert len(tried) == 3


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_an_answer_of_the_server_itself_is_an_error_at_once(status: int) -> None:
    seen: list[int] = []

    def answers(connection: ServerConnection, _: Any) -> Any:
        seen.append(1)
        return connection.respond(http.HTTPStatus(status), "")

    async def main() -> None:
        async with serve(GAME, "127.0.0.1", 0, process_request=answers) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(EnvError, match=f"HTTP {status}"):
                await RemoteEnvironment(url, PATIENT).reset(1)

    waited(main)
    assert len(seen) == 1


def test_a_certificate_that_is_wrong_stays_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def untrusted(url: str, **_: Any) -> Any:
        tried.append(url)
        raise ssl.SSLCertVerificationError("self-signed certificate")

    async def main() -> None:
        with pytest.raises(EnvError, match="self-signed"):
            await RemoteEnvironment("https://127.0.0.1:9", PATIENT).reset(1)

    tried: list[str] = []
    monkeypatch.setattr(environment, "connect", untrusted)
    waited(main)
    assert len(tried) == 1


def test_a_connection_that_ends_before_the_reset_was_sent_is_opened_again() -> None:
    """A server that shuts down accepts a connection, and closes it at once."""
    seen: list[Any] = []

    async def behave(connection: ServerConnection) -> None:
        seen.append("connection")
        if len(seen) < 3:
            await connection.close(1012)
            return
        seen.append(json.loads(await connection.recv()))
        await connection.send(json.dumps(observation("a")))
        await connection.wait_closed()

    async def main() -> None:
        async with bad_server(behave) as url, RemoteEnvironment(url, PATIENT) as remote:
            assert (await remote.reset(1)).observation == {"text": "a"}

    waited(main)
    assert seen == ["connection"] * 3 + [{"type": "reset", "data": {"seed": 1}}]


def test_a_server_that_closes_each_connection_is_an_error_in_time() -> None:
    async def main() -> None:
        async with bad_server(lambda connection: connection.close(1012)) as url:
            with pytest.raises(EnvAwayError, match=r"tried [1-9] times.*before `reset`.*1012"):
                await RemoteEnvironment(url, EnvTimeouts(connect=0.2)).reset(1)

    waited(main)


async def _loses_patience(connection: ServerConnection) -> None:
    """Answer a reset, then say that the client is idle, and close the connection."""
    await connection.recv()
    await connection.send(json.dumps(observation("a")))
    await connection.send(json.dumps(error("SESSION_ERROR", "No message for 3600 s.")))


@pytest.mark.parametrize("behave", [answering(observation("a")), _loses_patience])
def test_a_connection_that_was_lost_between_two_episodes_is_opened_again(behave: Any) -> None:
    async def main() -> None:
        async with bad_server(behave) as url, RemoteEnvironment(url, PATIENT) as remote:
            await remote.reset(1)
            assert remote._socket is not None
            await remote._socket.wait_closed()
            assert (await remote.reset(2)).observation == {"text": "a"}

    waited(main)


@pytest.mark.parametrize("last", ["reset", "step"])
def test_what_was_sent_is_not_sent_again(last: str) -> None:
    """The server breaks the connection when it has read a message: it may have played it."""
    seen: list[str] = []

    async def behave(connection: ServerConnection) -> None:
        while True:
            seen.append(json.loads(await connection.recv())["type"])
            if seen[-1] == last:
                connection.transport.abort()
                return
            await connection.send(json.dumps(observation("a")))

    async def main() -> None:
        async with bad_server(behave) as url, RemoteEnvironment(url, PATIENT) as remote:
            with pytest.raises(EnvError, match=f"did not answer `{last}`") as raised:
                await remote.reset(1)
                await remote.step({})
            assert not isinstance(raised.value, EnvAwayError)

    waited(main)
    assert seen == ["reset", "step"][: len(seen)] and seen[-1] == last


def test_the_check_before_a_run_tries_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(url: str, **_: Any) -> Any:
        tried.append(url)
        raise ConnectionRefusedError(111, "refused")

    tried: list[str] = []
    monkeypatch.setattr(environment, "connect", refuses)
    with pytest.raises(BadRequestError, match=r"cannot be played: .*refused.*Start the environment server"):
        check_environment("http://127.0.0.1:9", None, PATIENT)
    assert len(tried) == 1


# -- what it costs the players -----------------------------------------------------------------------------------------


def play(where: str | Callable[[], Any], replacements: int) -> Awaitable[Rollout]:
    loop = AgentLoop(FakeEngine(), where, WordRenderer(), limits=Limits(env=PATIENT), replacements=replacements)

    async def played() -> Rollout:
        with contextlib.closing(loop):
            return await loop.arun([Task(seed=i) for i in range(3)])

    return played()


def test_episodes_wait_for_their_server_and_use_no_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with listens_at(monkeypatch, 8) as tried:
            rollout = await play(tried[0], 1)
            assert [t.reward for t in rollout.trajectories] == [1.0] * 3
            assert rollout.replaced == [] and len(tried) - 1 >= 8

    waited(main)


def test_an_agents_episode_waits_for_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with listens_at(monkeypatch, 4) as tried:
            remote = OpenEnvEnvironment(tried[0], timeouts=PATIENT)
            assert await remote.reset(1) == "a"
            await remote.close()

    waited(main)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The arguments of `pause_before`. Replacements do not pause."""
    asked: list[tuple[int, bool]] = []

    def noted(attempt: int, environment_away: bool) -> float:
        asked.append((attempt, environment_away))
        return 0.0

    for module in (agent_loop, attempts):
        monkeypatch.setattr(module, "pause_before", noted)
    return asked


def refused() -> EnvError:
    """An error as an environment of the user raises it, which connects to a server of its own."""
    error = EnvError("the game's server does not answer")
    error.__cause__ = ConnectionRefusedError(111, "refused")
    return error


@pytest.mark.parametrize(("error", "is_away"), [(refused(), True), (EnvAwayError("a"), True), (EnvError("b"), False)])
def test_a_replacement_waits_longer_if_the_environment_was_away(
    error: EnvError, is_away: bool, pauses: list[tuple[int, bool]]
) -> None:
    environments = [FakeEnvironment(error), FakeEnvironment(error), FakeEnvironment(says("a"), says("z", 1.0, True))]
    loop = AgentLoop(FakeEngine(), lambda: environments.pop(0), WordRenderer(), replacements=2)
    with loop:
        assert loop.run([Task(seed=1)]).trajectories[0].reward == 1.0
    assert pauses == [(1, is_away), (2, is_away)]


class Away(Echo):
    """An environment of an agent, which raises `error` until the third reset."""

    resets = 0

    def __init__(self, error: EnvError) -> None:
        super().__init__()
        self._error = error

    async def reset(self, seed: int | None) -> str:
        Away.resets += 1
        if Away.resets < 3:
            raise self._error
        return await super().reset(seed)


@pytest.mark.parametrize(("error", "is_away"), [(refused(), True), (EnvAwayError("a"), True), (EnvError("b"), False)])
def test_an_agents_replacement_waits_longer_if_the_environment_was_away(
    error: EnvError, is_away: bool, pauses: list[tuple[int, bool]]
) -> None:
    Away.resets = 0
    played = run(player, environment=lambda task: Away(error), reward="environment", retries=2)
    assert [e.reason for e in played.episodes] == [StopReason.ENV_ERROR] * 2 + [StopReason.DONE]
    assert [e.environment_away for e in played.episodes] == [is_away, is_away, False]
    assert pauses == [(1, is_away), (2, is_away)]


def test_the_replacements_of_a_group_last_for_seconds_while_its_environment_is_away() -> None:
    assert [pause_before(attempt, environment_away=True) for attempt in (1, 2, 3, 4)] == [1.0, 2.0, 4.0, 5.0]
    assert pause_before(1, environment_away=False) < 0.1


# -- tools of an MCP server --------------------------------------------------------------------------------------------


class FakeSession:
    """A session of the package `mcp`."""

    def __init__(self, *_: Any) -> None:
        self.calls: list[str] = []

    async def __aenter__(self) -> FakeSession:
        return self

    async def __aexit__(self, *_: Any) -> None:
        return

    async def initialize(self) -> None:
        return

    async def list_tools(self) -> Any:
        return SimpleNamespace(tools=[SimpleNamespace(name="add", description="", input_schema={})])

    async def call_tool(self, name: str, _: Any) -> Any:
        self.calls.append(name)
        raise ConnectionRefusedError(111, "refused")


@pytest.fixture
def mcp(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces the package `mcp`. Its first two connections are refused; the list has an entry for each."""
    tried: list[int] = []

    @asynccontextmanager
    async def connected(_: Any) -> AsyncIterator[tuple[None, None]]:
        tried.append(1)
        if len(tried) < 3:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [ConnectionRefusedError(111, "refused")])
        yield None, None

    monkeypatch.setattr(mcp_tools, "_mcp", lambda: SimpleNamespace(ClientSession=FakeSession))
    monkeypatch.setattr(McpTools, "_connected", connected)
    return tried


def test_an_mcp_server_that_refuses_is_tried_again_and_a_call_is_not(mcp: list[int]) -> None:
    async def main() -> None:
        tools = McpTools("http://127.0.0.1:9/mcp", "use the tools")
        assert await tools.reset(1) == "use the tools"
        assert len(mcp) == 3 and tools.tools[0]["function"]["name"] == "add"
        session = tools._session
        with pytest.raises(EnvError, match="failed in add"):
            await tools.call("add", {})
        assert session.calls == ["add"] and len(mcp) == 3
        await tools.close()

    waited(main)


def test_an_mcp_server_that_stays_away_is_an_error_that_says_so(mcp: list[int]) -> None:
    async def main() -> None:
        tools = McpTools("http://127.0.0.1:9/mcp", seconds=0.1)
        with pytest.raises(EnvAwayError, match=r"did not accept a connection within 0.1 s, tried [1-9] times.*refused"):
            await tools.reset(1)
        await tools.close()

    waited(main)


# -- the parts ---------------------------------------------------------------------------------------------------------


def test_the_pauses_between_tries_grow_until_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [100.0]

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 3))
        now[0] += seconds

    monkeypatch.setattr("verl_server.rollout.away.time.monotonic", lambda: now[0])
    monkeypatch.setattr("verl_server.rollout.away.asyncio.sleep", sleep)

    async def main() -> Tries:
        tries = Tries(5.0)
        while await tries.again(OSError(f"try {tries.failed}")):
            pass
        return tries

    tries = asyncio.run(main())
    assert slept == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert tries.failed == 9 and str(tries.error) == "try 8"


def test_a_refusal_is_found_among_the_causes_of_an_error() -> None:
    refusal, error = ConnectionRefusedError(111, "refused"), RuntimeError("any")
    assert is_refused(refusal) and not is_refused(error)
    error.__cause__ = ExceptionGroup("many", [ValueError(), refusal])
    refusal.__context__ = error  # a circle
    assert is_refused(error)
    reset = EnvError("late")
    reset.__context__ = ConnectionResetError(104, "reset")
    assert not is_refused(reset)


def test_a_server_at_its_limit_answers_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection has its own time for connecting, also behind those that found the server full."""

    async def main() -> None:
        async with env_server(GuessNumber, max_concurrent_envs=1) as url:
            first, second = RemoteEnvironment(url, PATIENT), RemoteEnvironment(url, PATIENT)
            await first.reset(1)
            waiting = asyncio.ensure_future(second.reset(2))
            await first.close()
            assert (await waiting).observation == {"text": "guess 1 to 12"}
            await second.close()

    waited(main)
