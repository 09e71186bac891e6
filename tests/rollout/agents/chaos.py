"""Agents that die and environments that hang, answer 500 or are slow, all by a plan that a seed draws.

`FaultPlan` decides each fault by (seed, task, call), never by time. `environments` serves the environments over HTTP.
The same agent exists as a function (`player`) and as a program (`program`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.rollout.agents.common import PROGRAM_HEAD
from verl_server.errors import BadRequestError
from verl_server.ipc.sockets import bind_socket
from verl_server.rollout.agents.types import AgentSession, AgentTask
from verl_server.rollout.trajectory import StopReason

MOST_TOKENS = 16
LEFT: dict[str, Any] = {"stream": True, "max_tokens": 30_000, "ignore_eos": True}
"""Fields of the request that a dying agent leaves behind. Unless it is aborted, it runs for half a minute or more,
because on a busy machine seconds pass before the server notices that the agent is gone."""
Death = Literal["before its turn", "during its generation"]


@dataclass(frozen=True)
class FaultPlan:
    """Shares of faulty calls and agents. Call 0 of a task resets its environment, call k is the step of turn k."""

    seed: int = 0
    hangs: float = 0.0
    errors: float = 0.0
    deaths: float = 0.0
    """Share of the agents that die in one of their turns."""
    slowness: float = 0.002
    """Shortest time of a call in seconds. The times are Pareto distributed: few calls take most of the time."""

    def _chance(self, what: str, task: int, call: int = 0) -> float:
        digest = hashlib.blake2b(f"{self.seed}/{what}/{task}/{call}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64

    def turns(self, task: int) -> int:
        return 3 + int(3 * self._chance("turns", task))

    def seconds(self, task: int, call: int) -> float:
        """Time of a call, with a heavy tail up to half a second."""
        return min(0.5, self.slowness * (1 - self._chance("seconds", task, call)) ** (-1 / 1.1))

    def call_fault(self, task: int, call: int) -> Literal["hangs", "answers 500"] | None:
        chance = self._chance("call", task, call)
        if chance < self.hangs:
            return "hangs"
        return "answers 500" if chance < self.hangs + self.errors else None

    def death(self, task: int) -> tuple[int, Death] | None:
        """The turn in which the agent dies, and where."""
        if self._chance("dies", task) >= self.deaths:
            return None
        turn = 1 + int(self.turns(task) * self._chance("dies at", task))
        return turn, "before its turn" if self._chance("dies how", task) < 0.5 else "during its generation"

    def end(self, task: int, is_program: bool) -> StopReason:
        """The end of the task's episode."""
        ends = {"hangs": StopReason.ENV_TIMEOUT, "answers 500": StopReason.ENV_ERROR}
        death = self.death(task)
        for call in range(self.turns(task) + 1):
            if death is not None and call == death[0]:
                return StopReason.AGENT_KILLED if is_program else StopReason.AGENT_ERROR
            fault = self.call_fault(task, call)
            if fault is not None:
                return ends[fault]
        return StopReason.DONE


@dataclass
class Environments:
    """The environment server. `waiting` counts calls that have no answer yet."""

    plan: FaultPlan
    url: str = ""
    waiting: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    """Number of calls by their fault."""

    async def call(self, request: Request) -> Response:
        body = await request.json()
        task, call = body["task"], body["call"]
        fault = self.plan.call_fault(task, call)
        self.calls[fault or "none"] = self.calls.get(fault or "none", 0) + 1
        self.waiting += 1
        try:
            await asyncio.sleep(self.plan.seconds(task, call))
            while fault == "hangs" and (await request.receive())["type"] != "http.disconnect":
                pass
        finally:
            self.waiting -= 1
        if fault is not None:
            return JSONResponse({"error": "the environment has a bug"}, 500)
        # The observation depends on every letter that the agent played.
        digest = hashlib.blake2b(f"{task}/{call}/{body['text']}".encode(), digest_size=6).hexdigest()
        done = call == self.plan.turns(task)
        return JSONResponse({"observation": f"{call} {digest}", "reward": float(done), "done": done})


class HttpEnvironment:
    """A `TextEnvironment` of one task on the environment server."""

    def __init__(self, url: str, task: int) -> None:
        self.tools: list[dict[str, Any]] = []
        self._task, self._call = task, -1
        self._client = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=None)

    async def _called(self, text: str) -> dict[str, Any]:
        self._call += 1
        answer = await self._client.post("/call", json={"task": self._task, "call": self._call, "text": text})
        answer.raise_for_status()
        content: dict[str, Any] = answer.json()
        return content

    async def reset(self, seed: int | None) -> str:
        return str((await self._called(""))["observation"])

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        content = await self._called(text)
        return content["observation"], content["reward"], content["done"]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise BadRequestError("no tools")

    async def close(self) -> None:
        await self._client.aclose()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def environments(plan: FaultPlan) -> AsyncIterator[Environments]:
    """Serve the environments on this event loop until the block ends."""
    served = Environments(plan)
    app = Starlette(routes=[Route("/call", served.call, methods=["POST"])])
    # After uvicorn's 5 s an agent could send its next call on a connection that the server is closing.
    bounds: dict[str, Any] = {"timeout_keep_alive": 600, "timeout_graceful_shutdown": 1}
    server = _Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", **bounds))
    with bind_socket("127.0.0.1", 0) as sock:
        served.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        serving = asyncio.create_task(server.serve([sock]))
        try:
            yield served
        finally:
            server.should_exit = True
            await serving


class AgentDiedError(Exception):
    """A fault of the plan."""


def player(plan: FaultPlan) -> Callable[[AgentSession, AgentTask], Awaitable[None]]:
    """Return an agent function. It reads every other reply as a stream."""

    async def play(session: AgentSession, task: AgentTask) -> None:
        death = plan.death(task.seed)
        assert session.environment is not None
        messages = [{"role": "user", "content": session.environment.observation}]
        turn, done = 0, False
        url = f"{session.base_url}/chat/completions"
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=120) as client:
            while not done:
                turn += 1
                body: dict[str, Any] = {
                    "model": "m",
                    "messages": messages,
                    "max_tokens": MOST_TOKENS,
                    "temperature": 1.0,
                }
                body |= {"stream": turn % 2 == 0}
                dies = None if death is None or death[0] != turn else death[1]
                if dies == "before its turn":
                    raise AgentDiedError(dies)
                async with client.stream("POST", url, json=body | (LEFT if dies else {})) as answer:
                    answer.raise_for_status()
                    if dies is not None:
                        await anext(aiter(answer.aiter_bytes()))
                        raise AgentDiedError(dies)
                    text = _said(await answer.aread(), body["stream"])
                observation, done = await session.environment.step(text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]

    return play


def _said(body: bytes, streamed: bool) -> str:
    """Return the content of a reply. Programs have a copy of this function."""
    if not streamed:
        return json.loads(body)["choices"][0]["message"]["content"] or ""
    events = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", "the stream has no end"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def program(plan: FaultPlan, mark: str) -> str:
    """Return the code of the same agent as a program. `mark` is in its command line."""
    deaths = {task: death for task in range(1024) if (death := plan.death(task)) is not None}
    plan_of_agent = f"deaths = {deaths!r}\nmost = {MOST_TOKENS}\nleft = {LEFT!r}\n"
    return f"# {mark}\n{PROGRAM_HEAD}\n{inspect.getsource(_said)}\n{plan_of_agent}{_PLAY}"


_PLAY = """
import signal
url, model = os.environ["VERL_ENVIRONMENT_URL"], os.environ["OPENAI_BASE_URL"] + "/chat/completions"
death = deaths.get(json.load(open(os.environ["VERL_TASK_FILE"]))["seed"])
observation = json.load(urllib.request.urlopen(url + "/observation"))["observation"]
messages, turn, done = [{"role": "user", "content": observation}], 0, False
while not done:
    turn += 1
    body = {"model": "m", "messages": messages, "max_tokens": most, "temperature": 1.0}
    dies = death[1] if death is not None and death[0] == turn else None
    if dies == "before its turn":
        os.kill(os.getpid(), signal.SIGKILL)
    body = body | {"stream": turn % 2 == 0} | (left if dies else {})
    request = urllib.request.Request(model, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        if dies is not None:
            answer.read(1)
            os.kill(os.getpid(), signal.SIGKILL)
        text = _said(answer.read(), body["stream"])
    step = post(url + "/step", {"text": text})
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": step["observation"]}]
    done = step["done"]
"""
