"""A server is killed while agents play, and started again with its store: the agents go on once its weights are pushed.

Some agents repeat their requests themselves, as the SDKs do. The episodes of the others end, and are tried again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.rollout.agents.common import program
from tests.server.sessions.live import ADMIN_KEY, LiveServer
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agents.run import arun_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentSession, AgentTask, Server
from verl_server.rollout.trajectory import StopReason

PATIENT, IMPATIENT, PROGRAMS = 8, 4, 3
TURNS, BEFORE = 6, 3
LIMITS = AgentLimits(seconds=200, idle_seconds=150, restart_timeout=120, kill_grace=0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=4096)


class Agents:
    """Agents that play `BEFORE` turns, wait until the server is about to be killed or was killed, and play the rest."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag
        """A file that appears when the server was killed."""
        self.about_to = threading.Event()
        self.waiting = 0
        self.statuses: list[int] = []
        self.said: dict[str, list[list[int]]] = {}
        """Session -> ids of each reply that the agent received."""

    async def _note(self, answer: httpx.Response) -> None:
        self.statuses.append(answer.status_code)

    def function(self, retries: int) -> Callable[[AgentSession, AgentTask], Any]:
        async def agent(session: AgentSession, task: AgentTask) -> None:
            said = self.said.setdefault(session.session_id, [])
            messages: list[Any] = []
            http = httpx.AsyncClient(trust_env=False, event_hooks={"response": [self._note]})
            async with session.openai(max_retries=retries, http_client=http, timeout=60) as client:
                for turn in range(TURNS):
                    if turn == BEFORE:
                        await self._hold(task)
                    messages.append({"role": "user", "content": f"message {turn}"})
                    reply = await client.chat.completions.create(
                        model="m",
                        messages=messages,
                        max_tokens=8,
                        temperature=1.0,
                        extra_body={"return_token_ids": True},
                    )
                    said.append(reply.choices[0].token_ids)
                    messages.append({"role": "assistant", "content": reply.choices[0].message.content})

        return agent

    async def _hold(self, task: AgentTask) -> None:
        """Half of the agents have a request on its way when the server is killed, the others none."""
        self.waiting += 1
        while not (self.flag.exists() or (task.seed % 2 and self.about_to.is_set())):
            await asyncio.sleep(0.005)

    def program(self) -> list[str]:
        ready = str(self.flag.with_name("program"))
        wait = f"while not os.path.exists({str(self.flag)!r}):\n    time.sleep(0.01)\n"
        return program(f"chat('one')\nopen({ready!r} + str(os.getpid()), 'w').close()\n{wait}chat('two')\n")


def weights(folder: Path, scale: float) -> list[tuple[str, torch.Tensor]]:
    auto: Any = AutoModelForCausalLM
    state = auto.from_pretrained(folder, dtype=torch.float32).state_dict()
    return [(name, tensor * scale) for name, tensor in state.items()]


def test_agents_outlive_a_killed_server(folder: Path, tmp_path: Path) -> None:
    store, log = ["--session-store", str(tmp_path / "store")], tmp_path / "log"
    agents = Agents(tmp_path / "killed")
    runs: list[AgentRun] = []

    async def play(url: str) -> None:
        options: dict[str, Any] = {"servers": [Server(url, first.api_key or "")], "limits": LIMITS, "retries": 1}

        def tasks(count: int) -> list[AgentTask]:
            return [AgentTask(seed=i) for i in range(count)]

        # Each failed episode has one attempt more, which must not begin before the server generates.
        runs.extend(
            await asyncio.gather(
                arun_agents(agents.function(60), tasks(PATIENT), reward=lambda e: 1.0, seed=1, **options),
                arun_agents(agents.function(0), tasks(IMPATIENT), reward=lambda e: 1.0, seed=2, **options),
                arun_agents(agents.program(), tasks(PROGRAMS), reward="exit", seed=3, **options),
            )
        )

    with LiveServer(folder, log, *store, "--weight-version", "7", admin_key=ADMIN_KEY) as first:
        thread = threading.Thread(target=lambda: asyncio.run(asyncio.wait_for(play(first.url), 250)))
        thread.start()
        try:
            assert eventually(lambda: agents.waiting == PATIENT + IMPATIENT, 60)
            assert eventually(lambda: len(list(tmp_path.glob("program*"))) == PROGRAMS, 60)
            agents.about_to.set()
            first.kill()
        finally:
            agents.flag.touch()
    port = int(first.url.rpartition(":")[2])
    with LiveServer(folder, log, *store, admin_key=ADMIN_KEY, port=port) as server:
        assert eventually(lambda: 503 in agents.statuses, 60), "an agent is refused until the weights are known"
        engine = HttpServerEngineAdapter.attach(server.url, server.api_key, ADMIN_KEY)
        assert engine.heal(weights(folder, 1.02), version="8")[0]
        thread.join(200)
        assert not thread.is_alive() and len(runs) == 3
        assert server.owner("GET", "/sessions")["sessions"] == []
    patient, impatient, programs = runs
    assert set(agents.statuses) == {200, 503}

    assert [(e.reason, e.attempt, e.error) for e in patient.episodes] == [(StopReason.DONE, 0, None)] * PATIENT
    assert len(patient.trajectories) == PATIENT, "a reply that was lost is no branch"
    for trajectory in patient.trajectories:
        places = [slice(*turn.action_span) for turn in trajectory.turns]
        assert [trajectory.tokens[place] for place in places] == agents.said[trajectory.session or ""]
        versions = [{*trajectory.weight_versions[place]} for place in places]
        old = versions.count({"7"})
        assert versions == [{"7"}] * old + [{"8"}] * (TURNS - old)
        assert old == BEFORE or (old > BEFORE and trajectory.task.seed % 2), "only a request on its way may be answered"

    for run, count in ((impatient, IMPATIENT), (programs, PROGRAMS)):
        ends = sorted((e.attempt, str(e.reason), e.reward, e.final) for e in run.episodes)
        lost = [(0, "generation_error", None, False)] * count
        assert ends == [*lost, *[(1, "done", 1.0, True)] * count], [e.error for e in run.episodes]
        assert all(set(t.weight_versions) <= {"", "8"} for t in run.trajectories)
