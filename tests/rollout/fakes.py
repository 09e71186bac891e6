"""A scripted policy, scripted environments, and environment servers that misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from verl_server.ipc.sockets import bind_socket
from verl_server.rollout.environment import StepResult
from verl_server.rollout.environments.env_server import create_env_app, make_server


class FakePolicy:
    """Returns the next entry of a script from each `async_generate`, or raises the entry if it is an exception."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = list(outputs)
        self.requests: list[dict[str, Any]] = []

    async def async_generate(self, **request: Any) -> dict[str, Any]:
        self.requests.append(request)
        output = self.outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output


def generated(ids: list[int], finish: str = "stop", version: str = "0", **meta: Any) -> dict[str, Any]:
    """Return a result as `/generate` would."""
    return {
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[-0.5 * (i + 1), token, None] for i, token in enumerate(ids)],
            "weight_version": version,
        }
        | meta,
    }


class FakeEnvironment:
    """An environment that returns each answer of a list in turn, or raises it if it is an exception."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.actions: list[Any] = []
        self.closed = 0
        self.reset_with: dict[str, Any] = {}

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        self.reset_with = {"seed": seed} | options
        return await self._next()

    async def step(self, action: Any) -> StepResult:
        self.actions.append(action)
        return await self._next()

    async def close(self) -> None:
        self.closed += 1

    async def _next(self) -> StepResult:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            raise AssertionError("the event was never meant to be set")
        return answer


def says(text: str, reward: float | None = None, done: bool = False) -> StepResult:
    return StepResult({"text": text}, reward, done)


class WordRenderer:
    """Encodes every letter as its code point. The action is the text of the tokens."""

    def observation_tokens(self, observation: dict[str, Any], last_token: int | None) -> list[int]:
        return [ord(letter) for letter in observation["text"]]

    def action(self, token_ids: list[int], prompt_ids: list[int]) -> dict[str, Any]:
        return {"text": "".join(chr(token) for token in token_ids)}


@asynccontextmanager
async def env_server(factory: Callable[[], Any], **settings: Any) -> AsyncIterator[str]:
    """Run our environment server on this event loop; yield the URL."""
    server = make_server(create_env_app(factory, **settings), 1000)
    sock = bind_socket("127.0.0.1", 0)
    task = asyncio.create_task(server.serve([sock]))
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@asynccontextmanager
async def bad_server(behave: Callable[[ServerConnection], Any]) -> AsyncIterator[str]:
    """Run a WebSocket server that handles each connection with `behave`; yield the URL."""
    async with serve(behave, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def answering(*messages: Any) -> Callable[[ServerConnection], Any]:
    """Answer each message with the next of `messages` (bytes and str unchanged, others as JSON), then disconnect."""

    async def behave(connection: ServerConnection) -> None:
        for message in messages:
            await connection.recv()
            await connection.send(message if isinstance(message, str | bytes) else json.dumps(message))

    return behave


def observation(text: str = "hello", reward: Any = None, done: Any = False) -> dict[str, Any]:
    """Return an observation message of OpenEnv's protocol."""
    return {"type": "observation", "data": {"observation": {"text": text}, "reward": reward, "done": done}}


def error(code: str, message: str = "no") -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}
