"""`ScriptedRelay`: stands between a runner and a rollout server, and makes the policy follow a script.

The relay hands every request on unchanged, but adds to each generating request the field `regex`, which matches one
text only: the policy's next one. The server samples this text under the mask of the grammar. So the ids, masks and
log-probabilities are real, and the policy solves its task.

A script is found by the text of its task in the request, and the step by the number of replies that the request
has. A request without tools is a side request, such as one for a title, and gets a short text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from verl_server.ipc.sockets import bind_socket

SIDE_TEXT = "A short text."
_GENERATING = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_OWN_HEADERS = ("host", "content-length", "transfer-encoding", "connection")
_START_SECONDS = 10.0


@dataclass(frozen=True)
class Call:
    """A step of a script: the policy runs a command of the shell."""

    command: str


@dataclass(frozen=True)
class Say:
    """The last step of a script: the policy's final answer."""

    text: str


Script = Sequence[Call | Say]


def forced_text(body: Mapping[str, Any], scripts: Mapping[str, Script]) -> str:
    """Return what the policy says to a request. Raise LookupError if no script fits."""
    tools = _tool_names(body)
    if not tools:
        return SIDE_TEXT
    content = json.dumps(body, ensure_ascii=False)
    found = [script for task, script in scripts.items() if json.dumps(task, ensure_ascii=False)[1:-1] in content]
    if len(found) != 1:
        raise LookupError(f"{len(found)} scripts are for this request: {content[:2000]}")
    step = found[0][replies(body)]
    return step.text if isinstance(step, Say) else _called(step.command, tools)


def replies(body: Mapping[str, Any]) -> int:
    """Return the number of the policy's earlier replies in a request of any of the three wires."""
    if "messages" in body:
        return sum(message["role"] == "assistant" for message in body["messages"])
    items = body["input"] if isinstance(body["input"], list) else []
    return sum(item.get("type") == "function_call" or item.get("role") == "assistant" for item in items)


def _tool_names(body: Mapping[str, Any]) -> list[str]:
    tools = [tool.get("function", tool) for tool in body.get("tools") or []]
    return [tool["name"] for tool in tools if "name" in tool]


def _called(command: str, tools: Sequence[str]) -> str:
    """Return the text of a call of the program's shell tool, in the Hermes format of the model's template."""
    forms: dict[str, dict[str, Any]] = {
        "Bash": {"command": command, "description": "Run a command"},
        "exec_command": {"cmd": command},
    }
    name = next(name for name in forms if name in tools)
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': forms[name]})}\n</tool_call>"


def exactly(text: str) -> str:
    """Return a regular expression that matches `text` only."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/-#&~" else char for char in text).replace("\n", "\\n")


class ScriptedRelay:
    """The relay. Start it with `running`, and use `url` in the place of the server's."""

    def __init__(self, target: str, scripts: Mapping[str, Script]) -> None:
        """`scripts` maps the text of each task to its script."""
        self._target = target
        self._scripts = scripts
        self._client: httpx.AsyncClient | None = None
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        """Path, body and status of each generating request, in the order of their answers."""
        self.unscripted: list[str] = []
        """Generating requests that no script fits. The policy said something short to them."""

    @contextlib.contextmanager
    def running(self) -> Iterator[ScriptedRelay]:
        """Serve in a thread until the block ends."""
        app = Starlette(routes=[Route("/{path:path}", self._answer, methods=_METHODS)], lifespan=self._lifespan)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        with bind_socket("127.0.0.1", 0) as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), daemon=True)
            thread.start()  # the socket listens already: a request waits until it is served
            try:
                yield self
            finally:
                server.should_exit = True
                thread.join(_START_SECONDS)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=None, trust_env=False) as self._client:
            yield

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        is_generating = request.method == "POST" and request.url.path.endswith(_GENERATING)
        content = json.loads(body) if is_generating else {}
        if is_generating:
            body = json.dumps(content | {"regex": exactly(self._forced(content))}).encode()
        assert self._client is not None
        forward = self._client.build_request(
            request.method,
            f"{self._target}{request.url.path}" + (f"?{request.url.query}" if request.url.query else ""),
            headers=[(name, value) for name, value in request.headers.items() if name not in _OWN_HEADERS],
            content=body,
        )
        answer = await self._client.send(forward, stream=True)
        if is_generating:
            self.requests.append({"path": request.url.path, "body": content, "status": answer.status_code})
        headers = {name: value for name, value in answer.headers.items() if name not in _OWN_HEADERS}
        return StreamingResponse(_bytes(answer), answer.status_code, headers)

    def _forced(self, content: Mapping[str, Any]) -> str:
        try:
            return forced_text(content, self._scripts)
        except LookupError as error:
            self.unscripted.append(str(error))
            return SIDE_TEXT


async def _bytes(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()
