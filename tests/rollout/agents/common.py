"""Agents, environments and a way to run them against a fake server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.rollout.fake_sessions import OWNER_KEY, FakeServer, Policy, fake_server
from verl_server.errors import BadRequestError
from verl_server.rollout.agents.program import ProgramExit, ProgramPlace, check_program, program_place
from verl_server.rollout.agents.run import arun_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentSession, AgentTask, Server
from verl_server.rollout.environment import EnvError

PROGRAM_HEAD = """
import json, os, sys, time, urllib.request
def post(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
def chat(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    answer = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    return answer["choices"][0]["message"]["content"]
"""


def program(code: str) -> list[str]:
    """A command that runs Python code with `post(url, body)` and `chat(text)`, and imports no site packages."""
    return [sys.executable, "-I", "-S", "-c", PROGRAM_HEAD + code]


async def chat(session: AgentSession, text: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with session.http(timeout=30) as client:
        answer = await client.post("/chat/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])


class Echo:
    """Says "say N", and rewards the answer N. `fault` is raised, or awaited, by the step."""

    def __init__(self, fault: Any = None) -> None:
        self.tools: list[dict[str, Any]] = []
        self.fault = fault
        self.closed = 0
        self.wanted = ""

    async def reset(self, seed: int | None) -> str:
        self.wanted = str(seed)
        return f"say {seed}"

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        if self.fault == "hang":
            await asyncio.Event().wait()
        if self.fault is not None:
            raise EnvError(str(self.fault))
        return "over", float(text == self.wanted), True

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise BadRequestError("no tools")

    async def close(self) -> None:
        self.closed += 1


async def player(session: AgentSession, task: AgentTask) -> str:
    """Send the observation to the policy and play its answer."""
    assert session.environment is not None
    answer = await chat(session, session.environment.observation)
    await session.environment.step(answer)
    return answer


def says_number(messages: list[dict[str, Any]]) -> str:
    """A policy that says what it was told to say."""
    return str(messages[-1]["content"]).split()[-1]


FAST = AgentLimits(seconds=20, idle_seconds=10, environment_seconds=5, restart_timeout=1, kill_grace=0.3)


def run(
    agent: Any,
    tasks: int | list[AgentTask] = 1,
    *,
    policy: Policy = says_number,
    check: Callable[[FakeServer], None] | None = None,
    **options: Any,
) -> AgentRun:
    """Run agents against one fake server, and pass the server to `check` afterwards."""

    async def main() -> AgentRun:
        async with fake_server(policy) as fake:
            played = [AgentTask(seed=i) for i in range(tasks)] if isinstance(tasks, int) else tasks
            settings = {"limits": FAST, "retries": 0} | options
            result = await arun_agents(agent, played, servers=[Server(fake.url, OWNER_KEY)], **settings)
            if check is not None:
                check(fake)
            return result

    return asyncio.run(asyncio.wait_for(main(), 60))


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait with a bound until a condition of another process holds."""
    import time

    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    """True if the process runs. A zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.asynccontextmanager
async def session_of(fake: FakeServer) -> AsyncIterator[AgentSession]:
    """A session of a fake server."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {OWNER_KEY}"}) as client:
        made = (await client.post(f"{fake.url}/sessions", json={})).json()
    yield AgentSession(made["id"], fake.url + made["base_url"], fake.url + made["anthropic_base_url"], made["key"])


async def run_isolated(
    code: str | list[str],
    session: AgentSession,
    folder: Path,
    *,
    workspace: bool = True,
    limits: AgentLimits | None = None,
    stdin: str | None = None,
    inspect: Callable[[ProgramPlace], Any] = lambda place: None,
    **options: Any,
) -> ProgramExit:
    """Run Python code, or a command, as an isolated program whose workspace is `folder`/workspace."""
    place_folder = folder / "workspace"
    place_folder.mkdir(exist_ok=True)
    argv = program(code) if isinstance(code, str) else code
    options = {"isolation": "bubblewrap", "restart_timeout": 1.0} | options
    async with program_place(session, workspace=place_folder if workspace else None, **options) as place:
        env = {"OPENAI_BASE_URL": place.openai_url}
        if place.environment_url is not None:
            env["VERL_ENVIRONMENT_URL"] = place.environment_url
        running = place.run(
            check_program(argv), env, limits=limits or FAST, log=folder / "log", stdin=stdin, stdout_bytes=10_000
        )
        exit = await running
        inspect(place)
        return exit


def play_isolated(code: str | list[str], folder: Path, policy: Policy = says_number, **options: Any) -> ProgramExit:
    """Run an isolated program in a session of a fake server."""

    async def main() -> ProgramExit:
        async with fake_server(policy) as fake, session_of(fake) as session:
            return await run_isolated(code, session, folder, **options)

    return asyncio.run(asyncio.wait_for(main(), 60))
