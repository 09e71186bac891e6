"""An environment serves its tools over `/mcp` and over `/ws`, as OpenEnv's clients and clients of MCP ask for them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from tests.rollout.fakes import env_server
from verl_server.errors import BadRequestError
from verl_server.rollout.environment import EnvError, RemoteEnvironment
from verl_server.rollout.environments.env_server import create_env_app
from verl_server.rollout.environments.tools import tool


class Notebook:
    """An environment with tools. `step` answers how many notes there are."""

    closed = 0

    def reset(self, seed: int | None = None) -> str:
        self.notes: list[str] = []
        return "empty"

    def step(self, action: dict[str, Any]) -> tuple[str, float, bool]:
        return f"{len(self.notes)} notes", 1.0, True

    @tool
    def write(self, note: Annotated[str, msgspec.Meta(description="The note.")], times: int = 1) -> list[str]:
        """Write a note.

        The second paragraph is for programmers.
        """
        self.notes += [note] * times
        return self.notes

    @tool
    async def read(self, order: Literal["first", "last"] = "first") -> str:
        return self.notes[0 if order == "first" else -1]

    @tool
    def leak(self) -> Any:
        return object()

    def close(self) -> None:
        type(self).closed += 1


class Echo:
    """An environment without tools, whose actions have a schema."""

    action_schema: Any = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}  # noqa: RUF012

    def reset(self, seed: int | None = None) -> str:
        self.left = 2
        return "go"

    def step(self, action: dict[str, Any]) -> tuple[str, float, bool]:
        self.left -= 1
        return action["text"], 0.5, self.left == 0


class Plain:
    """An environment with neither tools nor a schema."""

    def reset(self, seed: int | None = None) -> str:
        return "go"

    def step(self, action: dict[str, Any]) -> tuple[str, float, bool]:
        return json.dumps(action), 0.0, False


Ask = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def _asking(factory: Callable[[], Any], **settings: Any) -> AsyncIterator[Ask]:
    """Yield `ask(method, **params)`, which posts a request to the application and returns the response's JSON."""
    transport = httpx.ASGITransport(create_env_app(factory, **settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

        async def ask(method: str, headers: dict[str, str] | None = None, **params: Any) -> Any:
            message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
            response = await client.post("/mcp", json=message, headers=headers)
            assert response.status_code == 200
            return response.json()

        ask.client = client  # type: ignore[attr-defined]
        yield ask


def _run(main: Awaitable[None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


def test_declared_tools_are_described_by_their_signatures() -> None:
    async def main() -> None:
        async with _asking(Notebook) as ask:
            answer = await ask("tools/list")
        assert (answer["jsonrpc"], answer["id"]) == ("2.0", 7)
        write, read, leak = answer["result"]["tools"]
        assert write == {
            "name": "write",
            "description": "Write a note.",
            "inputSchema": {
                "type": "object",
                "properties": {
                    "note": {"type": "string", "description": "The note."},
                    "times": {"type": "integer", "default": 1},
                },
                "required": ["note"],
                "additionalProperties": False,
            },
        }
        assert read["inputSchema"]["properties"]["order"]["enum"] == ["first", "last"]
        assert leak["inputSchema"]["properties"] == {}

    _run(main())


def test_a_session_keeps_its_environment_until_it_is_closed() -> None:
    class Kept(Notebook):
        closed = 0

    async def main() -> None:
        async with _asking(Kept, max_concurrent_envs=2) as ask:
            first, second = [(await ask("openenv/session/create"))["result"]["session_id"] for _ in range(2)]
            full = await ask("openenv/session/create")
            assert full["error"]["code"] == -32000
            assert "All 2 environments are taken" in full["error"]["message"]
            written = await ask("tools/call", session_id=first, name="write", arguments={"note": "a", "times": 2})
            assert written["result"]["data"] == ["a", "a"]
            assert written["result"]["structuredContent"] == {"result": ["a", "a"]}
            assert written["result"]["content"] == [{"type": "text", "text": '["a","a"]'}]
            await ask("tools/call", session_id=second, name="write", arguments={"note": "b"})
            for session, note in [(first, "a"), (second, "b")]:
                read = await ask("tools/call", session_id=session, name="read", arguments={"order": "last"})
                assert read["result"]["data"] == note
            closed = await ask("openenv/session/close", session_id=first)
            assert closed["result"] == {"session_id": first, "closed": True}
            assert Kept.closed == 1
            gone = await ask("tools/call", session_id=first, name="read")
            assert gone["error"]["code"] == -32602
            assert "Unknown session_id" in gone["error"]["message"]
            # A request without a session has an environment of its own, which ends with the request.
            for _ in range(3):
                alone = await ask("tools/call", name="write", arguments={"note": "c"})
                assert alone["result"]["data"] == ["c"]
            assert Kept.closed == 4

    _run(main())


def test_a_client_of_mcp_names_its_session_in_a_header() -> None:
    async def main() -> None:
        async with _asking(Notebook) as ask:
            client: httpx.AsyncClient = ask.client  # type: ignore[attr-defined]
            hello = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {"protocolVersion": "2025-03-26"}}
            begun = await client.post("/mcp", json=hello)
            assert begun.json()["result"] == {
                "protocolVersion": "2025-03-26",
                "capabilities": {"tools": {"listChanged": False}},
                "serverInfo": {"name": "Notebook", "version": "1.0.0"},
            }
            header = {"Mcp-Session-Id": begun.headers["Mcp-Session-Id"]}
            ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
            told = await client.post("/mcp", json=ready, headers=header)
            assert (told.status_code, told.content) == (202, b"")
            assert (await ask("ping", header))["result"] == {}
            await ask("tools/call", header, name="write", arguments={"note": "a"})
            assert (await ask("tools/call", header, name="read"))["result"]["data"] == "a"
            assert (await client.delete("/mcp", headers=header)).status_code == 204
            assert (await client.post("/mcp", json=ready, headers=header)).status_code == 404
            assert (await client.delete("/mcp", headers=header)).status_code == 404
            assert (await client.get("/mcp")).status_code == 405

    _run(main())


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        (b"{", -32700, "Invalid JSON"),
        (b"[" * 100_000, -32700, "Invalid JSON"),
        (b"\xff", -32700, "Invalid JSON"),
        (b"[]", -32600, "Expected `object`"),
        (b'{"method":"tools/list"}', -32600, "missing required field `jsonrpc`"),
        (b'{"jsonrpc":"2.0","method":"tools/list","params":[]}', -32600, r"at `\$.params`"),
        (b'{"jsonrpc":"2.0","method":"tools/list","id":{}}', -32600, r"at `\$.id`"),
        (b'{"jsonrpc":"2.0","method":"tools/list","params":{"session_id":[1]}}', -32602, "Unknown session_id"),
        (b'{"jsonrpc":"2.0","method":"resources/list"}', -32601, "Unknown method 'resources/list'; the methods: init"),
        (b'{"jsonrpc":"2.0","method":"openenv/session/close"}', -32602, "needs params.session_id"),
        (b'{"jsonrpc":"2.0","method":"tools/call"}', -32602, "needs params.name"),
    ],
)
def test_a_malformed_request_is_an_error_that_names_its_fault(body: bytes, code: int, says: str) -> None:
    async def main() -> None:
        async with _asking(Notebook) as ask:
            response = await ask.client.post("/mcp", content=body)  # type: ignore[attr-defined]
        assert response.status_code == 200
        error = response.json()["error"]
        assert error["code"] == code
        with pytest.raises(ValueError, match=says):
            raise ValueError(error["message"])

    _run(main())


@pytest.mark.parametrize(
    ("name", "arguments", "code", "says"),
    [
        ("erase", {}, -32602, "Notebook has no tool 'erase'; its tools: write, read, leak."),
        ({"a": 1}, {}, -32602, "has no tool {'a': 1}"),
        ("write", [], -32602, "The arguments of write must be an object, not list."),
        ("write", {"note": 3}, -32602, "Expected `str`, got `int` - at `$.note`. Its arguments: note, times."),
        ("write", {"note": "a", "to": "b"}, -32602, "unknown field `to`"),
        ("read", {"order": "middle"}, -32602, "Invalid enum value 'middle' - at `$.order`"),
        ("read", {}, -32603, "The tool read of Notebook raised IndexError: list index out of range"),
        ("leak", None, -32603, "What the tool leak returned cannot be written as JSON"),
    ],
)
def test_a_failed_call_says_why(name: Any, arguments: Any, code: int, says: str) -> None:
    async def main() -> None:
        async with _asking(Notebook) as ask:
            error = (await ask("tools/call", name=name, arguments=arguments))["error"]
        assert error["code"] == code
        assert says in error["message"]

    _run(main())


def test_a_call_that_hangs_fails_in_time_and_holds_up_nobody() -> None:
    release = threading.Event()

    class Slow(Plain):
        @tool
        def wait(self) -> bool:
            return release.wait(20)

        @tool
        async def never(self) -> None:
            await asyncio.Event().wait()

    async def main() -> None:
        async with _asking(Slow, tool_timeout=0.05) as ask:
            session = (await ask("openenv/session/create"))["result"]["session_id"]
            for name in ("never", "wait", "wait"):  # the second wait finds the environment's thread taken
                error = (await ask("tools/call", session_id=session, name=name))["error"]
                assert error["code"] == -32000
                assert f"The tool {name} of Slow took longer than 0.05 s (tool_timeout" in error["message"]
            assert len((await ask("tools/list"))["result"]["tools"]) == 2
            release.set()
            assert (await ask("openenv/session/close", session_id=session))["result"]["closed"]

    _run(main())


def test_a_call_that_waits_while_its_session_is_closed_fails() -> None:
    class Slow(Plain):
        played = 0

        @tool
        async def play(self) -> int:
            type(self).played += 1
            playing.set()
            await release.wait()
            return self.played

    playing, release = asyncio.Event(), asyncio.Event()

    async def main() -> None:
        async with _asking(Slow) as ask:
            session = (await ask("openenv/session/create"))["result"]["session_id"]
            first = asyncio.create_task(ask("tools/call", session_id=session, name="play"))
            await playing.wait()
            second = asyncio.create_task(ask("tools/call", session_id=session, name="play"))
            await asyncio.sleep(0)
            assert (await ask("openenv/session/close", session_id=session))["result"]["closed"]
            release.set()
            assert (await first)["result"]["data"] == 1
            assert "closed while this call waited" in (await second)["error"]["message"]
        assert Slow.played == 1

    _run(main())


def test_an_idle_session_is_closed() -> None:
    async def main() -> None:
        async with _asking(Notebook, idle_timeout=0.01, max_concurrent_envs=1) as ask:
            session = (await ask("openenv/session/create"))["result"]["session_id"]
            while "error" in await ask("openenv/session/create"):
                await asyncio.sleep(0)  # without a network, a request does not yield to the timer
            assert "Unknown session_id" in (await ask("tools/list", session_id=session))["error"]["message"]

    _run(main())


def test_an_environment_without_tools_serves_its_step_as_one() -> None:
    async def main() -> None:
        async with _asking(Echo) as ask:
            (act,) = (await ask("tools/list"))["result"]["tools"]
            assert (act["name"], act["inputSchema"]) == ("act", Echo.action_schema)
            session = (await ask("openenv/session/create"))["result"]["session_id"]
            played = [
                (await ask("tools/call", session_id=session, name="act", arguments={"text": text}))["result"]["data"]
                for text in ("a", "b")
            ]
            assert played == [
                {"observation": {"text": "a"}, "reward": 0.5, "done": False},
                {"observation": {"text": "b"}, "reward": 0.5, "done": True},
            ]
            refused = (await ask("tools/call", name="act", arguments={"txt": 1}))["error"]
            assert refused["code"] == -32602
            assert "violates Echo.action_schema" in refused["message"]
        async with _asking(Plain) as ask:
            assert (await ask("tools/list"))["result"] == {"tools": []}
            assert "its tools: none" in (await ask("tools/call", name="act"))["error"]["message"]

    _run(main())


def test_the_same_requests_over_websockets() -> None:
    def rpc(method: str, **params: Any) -> dict[str, Any]:
        return {"jsonrpc": "2.0", "id": "x", "method": method, "params": params}

    async def main() -> None:
        async with env_server(Notebook, max_concurrent_envs=1) as url:
            address = url.replace("http", "ws")
            async with connect(f"{address}/mcp") as socket:

                async def ask(message: Any) -> Any:
                    await socket.send(message if isinstance(message, str) else json.dumps(message))
                    return json.loads(await socket.recv())

                assert "error" in await ask("{")
                assert "serverInfo" in (await ask(rpc("initialize")))["result"]
                await socket.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}))
                await ask(rpc("tools/call", name="write", arguments={"note": "a"}))
                assert (await ask(rpc("tools/call", name="read")))["result"]["data"] == "a"
                own = (await ask(rpc("openenv/session/create")))["result"]["session_id"]
                kept = await ask(rpc("openenv/session/close", session_id=own))
                assert kept["error"]["code"] == -32600
                async with connect(f"{address}/mcp") as other:
                    assert json.loads(await other.recv())["error"]["code"] == -32000
        # A server of its own: the first one may still be closing the environment, and it has room for one only.
        async with env_server(Notebook) as url, connect(f"{url.replace('http', 'ws')}/ws") as socket:
            played = []
            for message in (
                {"type": "mcp", "data": rpc("tools/call", name="write", arguments={"note": "a"})},
                {"type": "mcp", "data": {"method": "tools/list"}},
                {"type": "step", "data": {"any": "action"}},
            ):
                await socket.send(json.dumps(message))
                played.append(json.loads(await socket.recv()))
            assert played[0]["type"] == "mcp"
            assert played[0]["data"]["result"]["data"] == ["a"]
            assert played[1]["data"]["error"]["code"] == -32600
            assert played[2]["data"]["observation"] == {"text": "1 notes"}  # the same episode

    _run(main())


def test_tools_as_the_actions_of_a_step() -> None:
    async def main() -> None:
        async with env_server(Notebook) as url, RemoteEnvironment(url) as environment:
            await environment.reset(1)
            listed = await environment.step({"type": "list_tools"})
            assert [entry["name"] for entry in listed.observation["tools"]] == ["write", "read", "leak"]
            call = {"type": "call_tool", "tool_name": "write", "arguments": {"note": "a"}}
            written = await environment.step(call)
            assert written.observation["result"]["data"] == ["a"]
            assert (written.reward, written.done, written.observation["error"]) == (None, False, None)
            failed = (await environment.step(call | {"arguments": {"text": 1}})).observation["error"]
            assert failed["error_type"] == "invalid_args"
        async with env_server(Echo) as url, RemoteEnvironment(url) as environment:
            await environment.reset(1)
            call = {"type": "call_tool", "tool_name": "act", "arguments": {"text": "a"}}
            assert (await environment.step(call)).reward == 0.5
            # The schema permits this action, so that it is no tool call.
            assert (await environment.step({"type": "call_tool", "text": "b"})).observation == {"text": "b"}
        async with env_server(Plain) as url, RemoteEnvironment(url) as environment:
            await environment.reset(1)
            assert (await environment.step({"type": "list_tools"})).observation == {"text": '{"type": "list_tools"}'}
            with pytest.raises(EnvError, match="UNKNOWN_TYPE"):
                await environment._exchange({"type": "tools", "data": {}}, "mcp", "step")

    _run(main())


def test_a_tool_that_cannot_be_served_is_refused_before_the_server_starts() -> None:
    class Odd(Plain):
        @tool
        def draw(self, canvas: object) -> str:
            return ""

    class Many(Plain):
        @tool
        def draw(self, *points: int) -> str:
            return ""

    for factory, says in ((Odd, "Odd.draw has no JSON schema: .*Annotate"), (Many, "named parameters only, not")):
        with pytest.raises(BadRequestError, match=says):
            create_env_app(factory)
    with pytest.raises(BadRequestError, match="step cannot be a tool"):
        tool(Plain.step)
    with pytest.raises(BadRequestError, match="must be a plain method, not an object of type staticmethod"):
        tool(staticmethod(len))
