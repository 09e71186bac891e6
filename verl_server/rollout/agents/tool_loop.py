"""`ToolLoop`: an agent of our own, which lets the policy call the tools of an environment and Python functions.

Pass it to `run_agents`, or `--agent tools` on the command line. The loop sends chat messages, not token ids: the
session's server builds each prompt from the ids that it stored, plus the rendered new messages, so the ids, masks and
log-probabilities of the trajectory are those that were sampled. A second renderer and a second parser of tool calls in
the client would have to repeat the server's, for every template. The loop sends each reply back unchanged, so that an
episode without retries is one branch.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

from verl_server.chat.formats import TOOL_FORMATS
from verl_server.errors import BadRequestError, ContextLengthError
from verl_server.rollout.agents.ends import End
from verl_server.rollout.agents.gateway import GuardedEnvironment
from verl_server.rollout.agents.prompts import task_prompt
from verl_server.rollout.agents.threads import in_thread
from verl_server.rollout.agents.types import AgentSession, AgentTask
from verl_server.rollout.environments.tools import Tool, ToolError, converted, function_tool, value_text
from verl_server.rollout.running_loop import run_all
from verl_server.rollout.trajectory import StopReason

DEFAULT_MAX_TURNS = 16
_RETRY_SECONDS = 1.0
"""Pause before a request is repeated. The runner bounds the repetitions with `AgentLimits.restart_timeout`."""
_REPEATED = (429, 503)
"""Statuses with which a request is repeated: the session, or the server, takes no further request now."""
_OPENING_TAGS = tuple({tool_format.open for tool_format in TOOL_FORMATS.values()})
_OWN_FIELDS = ("model", "messages", "tools", "stream", "n")


class ToolLoop:
    """An agent for `run_agents`. It asks the policy, runs the calls of the reply side by side, and asks again.

    The first message is the task's `input`, then the environment's observation. A reply without calls is played as the
    environment's step; without an environment it ends the episode. The result is the last reply's text.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] = (),
        *,
        max_turns: int = DEFAULT_MAX_TURNS,
        system: str | None = None,
        tool_seconds: float = 20.0,
        result_characters: int = 20_000,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        """`tools` are functions, async or not, beside the tools of the environment. Their names, docstrings and
        annotations describe them to the policy. `system` is the system message.

        `max_turns` bounds the number of replies. `tool_seconds` bounds each call, and `result_characters` bounds the
        length of its result. Instead of a late or failed result, the policy reads an error message. `request` has
        further fields of each chat request (`max_tokens`, `temperature`, `tool_choice`, `chat_template_kwargs`). Raise
        BadRequestError for a function that cannot be a tool.
        """
        if max_turns < 1 or result_characters < 1 or tool_seconds <= 0:
            raise BadRequestError("ToolLoop: max_turns, result_characters and tool_seconds must be positive.")
        taken = [name for name in _OWN_FIELDS if name in (request or {})]
        if taken:
            raise BadRequestError(f"ToolLoop: request must not have {taken[0]!r}, which the loop sets itself.")
        described = [(function_tool(function), function) for function in tools]
        self._functions = {tool.name: (tool, function) for tool, function in described}
        if len(self._functions) < len(described):
            raise BadRequestError("ToolLoop: two functions of `tools` have the same name.")
        self._max_turns = max_turns
        self._system = system
        self._seconds = tool_seconds
        self._characters = result_characters
        self._request = dict(request or {})

    def __repr__(self) -> str:
        """Return all settings, because a resumed run must have the same ones."""
        return (
            f"ToolLoop(tools={list(self._functions)}, max_turns={self._max_turns}, system={self._system!r}, "
            f"tool_seconds={self._seconds}, result_characters={self._characters}, request={self._request})"
        )

    async def __call__(self, session: AgentSession, task: AgentTask) -> str:
        """Play one episode. Raise End with the reason if a limit ends it."""
        environment = session.environment
        tools = self._tools(environment)
        messages = self._first_messages(task, environment)
        body = {"model": "policy", **self._request} | ({"tools": tools} if tools else {})
        async with session.http() as client:
            for _ in range(self._max_turns):
                choice = await _asked(client, body | {"messages": messages})
                reply = choice["message"]
                text, calls = reply.get("content") or "", reply.get("tool_calls") or []
                if choice["finish_reason"] == "length":
                    raise End(StopReason.MAX_TOKENS, "The reply was cut (finish_reason length).", result=text)
                if choice["finish_reason"] == "abort":
                    raise End(StopReason.GENERATION_ERROR, "The server aborted the reply (finish_reason abort).")
                messages.append(_returned(reply))
                if calls:
                    # If one call ends the episode, the others are cancelled.
                    messages += await run_all(self._answer(call, environment) for call in calls)
                    continue
                if tools and any(tag in text for tag in _OPENING_TAGS):
                    messages.append(_user("Error: your tool call could not be read. Its format is wrong."))
                    continue
                if environment is None:
                    return text
                try:
                    observation, done = await environment.step(text)
                except BadRequestError as error:
                    observation, done = f"Error: {error}", False
                if done:
                    return text
                messages.append(_user(observation))
        raise End(StopReason.MAX_TURNS, f"The episode had {self._max_turns} turns (ToolLoop.max_turns).", result=text)

    def _tools(self, environment: GuardedEnvironment | None) -> list[dict[str, Any]]:
        offered = list(environment.tools) if environment is not None else []
        names = {tool["function"]["name"] for tool in offered}
        for name in self._functions:
            if name in names:
                raise BadRequestError(f"ToolLoop: the environment has a tool {name!r} too. Rename the function.")
        return offered + [_openai_tool(tool) for tool, _ in self._functions.values()]

    def _first_messages(self, task: AgentTask, environment: GuardedEnvironment | None) -> list[dict[str, Any]]:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, _user(task_prompt(task, environment))]

    async def _answer(self, call: Mapping[str, Any], environment: GuardedEnvironment | None) -> dict[str, Any]:
        """Return the message that answers one call: the result, or the reason why the call failed."""
        name = call["function"]["name"]
        try:
            async with asyncio.timeout(self._seconds):
                result = await self._called(name, call["function"]["arguments"], environment)
        except TimeoutError:
            result = f"Error: {name} did not answer within {self._seconds:.3g} s."
        except (ToolError, BadRequestError) as error:
            result = f"Error: {error}"
        if len(result) > self._characters:
            result = f"{result[: self._characters]}\n(The result had {len(result)} characters. The rest was cut.)"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": result}

    async def _called(self, name: str, text: str, environment: GuardedEnvironment | None) -> str:
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            raise ToolError("invalid_args", f"The arguments of {name} are no JSON: {error}") from None
        if not isinstance(arguments, dict):
            raise ToolError("invalid_args", f"The arguments of {name} must be a JSON object.")
        if name in self._functions:
            return await _function_result(*self._functions[name], arguments)
        known = [tool["function"]["name"] for tool in self._tools(environment)]
        if environment is None or name not in known:
            raise ToolError("tool_not_found", f"There is no tool {name!r}. The tools: {', '.join(known) or 'none'}.")
        return await environment.call(name, arguments)


async def _asked(client: httpx.AsyncClient, body: Mapping[str, Any]) -> dict[str, Any]:
    """Send a chat request and return its choice.

    Repeat it while the server is away, or the session is busy: the runner bounds the wait.
    """
    headers = {"Idempotency-Key": secrets.token_hex(16)}
    while True:
        answer = None
        with contextlib.suppress(httpx.TransportError):
            answer = await client.post("/chat/completions", json=body, headers=headers)
        if answer is None or answer.status_code in _REPEATED:
            await asyncio.sleep(_RETRY_SECONDS)
            continue
        if _error_code(answer) == ContextLengthError.code:
            raise End(StopReason.CONTEXT_FULL, answer.text[:500])
        if answer.is_error:
            text = f"{client.base_url.copy_with(path='/')} answered HTTP {answer.status_code}: {answer.text[:500]}"
            raise httpx.HTTPStatusError(text, request=answer.request, response=answer)
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice


def _error_code(answer: httpx.Response) -> Any:
    """Return the code in the body of an error, None if there is none."""
    if not answer.is_error:
        return None
    try:
        error = answer.json().get("error")
    except (ValueError, AttributeError):  # not JSON, or no object
        return None
    return error.get("code") if isinstance(error, dict) else None


async def _function_result(tool: Tool, function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """Call a function, in a thread if it is not async.

    Raise ToolError for wrong arguments, and if the function raises.
    """
    work = functools.partial(function, **converted(tool, arguments))
    try:
        value = await work() if inspect.iscoroutinefunction(function) else await in_thread(work, f"tool-{tool.name}")
    except Exception as error:
        raise ToolError("execution_error", f"{tool.name} raised {type(error).__name__}: {error}") from error
    return value_text(tool.name, value)


def _returned(reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return a reply as a message of the next request, unchanged, so that the session recognizes it."""
    names = ("role", "content", "reasoning_content", "tool_calls")
    return {name: reply[name] for name in names if reply.get(name) is not None}


def _openai_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
