"""The tools of an MCP server, as an environment: a server over streamable HTTP, or a program on stdio.

One task owns the connection, because the `mcp` package must open and close a connection in the same task. Calls are
passed to this task. A call that takes too long ends the connection, and with it the program.

A server that refuses connections is tried again until it has listed its tools. A call is never repeated, because the
tool may have run before the connection broke.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.rollout.away import Tries, is_refused
from verl_server.rollout.environment import EnvAwayError, EnvError, EnvTimeoutError


class McpTools:
    """A `TextEnvironment` with the tools of one server. Its episodes have no reward, so pass a reward function."""

    def __init__(
        self,
        server: str | Sequence[str],
        prompt: str = "",
        *,
        seconds: float = 30.0,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`server` is a URL, or the command of a program as a list.

        `prompt` is the first observation. `seconds` bounds the start and each call. `env` has further variables of the
        program, which otherwise gets only PATH, HOME and others that a shell needs. Needs the extra `mcp`.
        """
        _mcp()
        if isinstance(server, str) and "://" not in server:
            raise BadRequestError(f"{server!r} is no URL. Pass a command as a list, for example {server.split()!r}.")
        self._server = server
        self._prompt = prompt
        self._seconds = seconds
        self._env = dict(env or {})
        self._owner: asyncio.Task[None] | None = None
        self._session: Any = None
        self._closing = asyncio.Event()
        self.tools: list[dict[str, Any]] = []

    async def reset(self, seed: int | None) -> str:
        tries = Tries(self._seconds)
        try:
            async with asyncio.timeout(self._seconds):
                listed = await self._listed(tries)
        except TimeoutError:
            await self.close()
            if tries.error is not None:
                raise self._away(tries) from tries.error
            raise EnvTimeoutError(
                f"The MCP server {self._server} did not start within {self._seconds:.3g} s."
            ) from None
        self.tools = [_openai_tool(tool) for tool in listed]
        return self._prompt

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        """End the episode: the text is the final answer."""
        return "", None, True

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result, or its own error, as text.

        Raise EnvTimeoutError if the server does not answer, and EnvError if it fails or has ended.
        """
        if self._owner is None or self._owner.done() or self._session is None:
            raise EnvError(f"The MCP server {self._server} has ended.")
        answer = asyncio.ensure_future(self._session.call_tool(name, arguments))
        try:
            done, _ = await asyncio.wait(
                [answer, self._owner], timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            answer.cancel()  # the caller has its own bound; the connection stays
            raise
        if answer in done:
            try:
                return _text(answer.result())
            except Exception as error:
                raise EnvError(f"The MCP server {self._server} failed in {name}: {error}") from error
        answer.cancel()
        ended = self._owner.done()
        await self.close()
        if ended:
            raise EnvError(f"The MCP server {self._server} ended during {name}.")
        raise EnvTimeoutError(f"The MCP server {self._server} did not answer {name} within {self._seconds:.3g} s.")

    async def close(self) -> None:
        owner, self._owner = self._owner, None
        if owner is None:
            return
        self._closing.set()
        await asyncio.wait([owner], timeout=self._seconds)
        if not owner.done():
            owner.cancel()
            await asyncio.wait([owner], timeout=5.0)

    async def _listed(self, tries: Tries) -> list[Any]:
        """Connect, and return the tools of the server. Try again while the server refuses the connection."""
        while True:
            ready: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            self._owner = asyncio.ensure_future(self._own(ready))
            try:
                return await ready
            except EnvError as error:
                if not is_refused(error):
                    raise
                if not await tries.again(error):
                    raise self._away(tries) from error

    def _away(self, tries: Tries) -> EnvAwayError:
        return EnvAwayError(
            f"The MCP server {self._server} did not accept a connection within {self._seconds:.3g} s, tried "
            f"{tries.failed} times: {tries.error}"
        )

    async def _own(self, ready: asyncio.Future[list[Any]]) -> None:
        """Hold the connection open from its start to `close`."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                streams = await stack.enter_async_context(self._connected())
                self._session = await stack.enter_async_context(_mcp().ClientSession(streams[0], streams[1]))
                await self._session.initialize()
                ready.set_result((await self._session.list_tools()).tools)
                await self._closing.wait()
        except Exception as error:
            if not ready.done():
                failure = EnvError(f"The MCP server {self._server} did not start: {error!r}")
                failure.__cause__ = error
                ready.set_exception(failure)

    def _connected(self) -> Any:
        if isinstance(self._server, str):
            return importlib.import_module("mcp.client.streamable_http").streamable_http_client(self._server)
        stdio = importlib.import_module("mcp.client.stdio")
        command, *args = self._server
        return stdio.stdio_client(stdio.StdioServerParameters(command=command, args=args, env=self._env))


def _openai_tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _text(result: Any) -> str:
    parts = [part.text if getattr(part, "type", "") == "text" else f"({part.type})" for part in result.content]
    text = "\n".join(parts)
    return f"Error: {text}" if getattr(result, "is_error", False) else text


def _mcp() -> Any:
    try:
        return importlib.import_module("mcp")
    except ImportError as error:
        raise BadRequestError("McpTools needs the package mcp: pip install 'verl-server[mcp]'.") from error
