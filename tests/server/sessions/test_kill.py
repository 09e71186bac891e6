"""Kill -9 of a whole server with 64 sessions open: what a client received in full is in the store, exactly once."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.depth import at_depth
from tests.server.sessions.live import ADMIN_KEY, LiveServer
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder

SESSIONS = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=4096)


@dataclass
class Reply:
    turn: int
    ids: list[int]
    logprobs: list[float]


@dataclass
class Agent:
    """An agent that talks until its server is away. `replies` are those that it received in full."""

    id: str
    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    began: list[str | None] = field(default_factory=list)
    refused: str = ""

    def turn(self, client: httpx.Client, url: str) -> httpx.Response:
        """Send the next message. Raise httpx.HTTPError if the reply does not arrive in full."""
        streams = len(self.replies) % 2 == 1
        asked = [*self.messages, {"role": "user", "content": f"message {len(self.replies)}"}]
        body = {
            "messages": asked,
            "max_tokens": 6,
            "temperature": 1.0,
            "logprobs": True,
            "return_token_ids": True,
            "stream": streams,
        }
        answer = client.post(f"{url}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {self.key}"})
        if answer.status_code != 200:
            return answer
        choices = _events(answer.text) if streams else answer.json()["choices"]
        shown = [each.get("delta") or each.get("message") or {} for each in choices]
        session = next(each["meta_info"]["session"] for each in choices if "meta_info" in each)
        self.replies.append(
            Reply(
                session["turn"],
                [token for each in choices for token in each.get("token_ids") or []],
                [e["logprob"] for each in choices for e in (each.get("logprobs") or {}).get("content") or []],
            )
        )
        self.began.append(session["began"])
        self.messages = [*asked, {"role": "assistant", "content": "".join(e.get("content") or "" for e in shown)}]
        return answer

    def talk(self, url: str) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while True:
                try:
                    answer = self.turn(client, url)
                except (httpx.HTTPError, ConnectionError):
                    return
                if answer.status_code != 200:
                    self.refused = answer.text
                    return


def _events(text: str) -> list[dict[str, Any]]:
    """Return the choices of a stream. Raise httpx.ReadError if its end is missing."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise httpx.ReadError("the stream has no end")
    return [choice for each in data[:-1] for choice in json.loads(each)["choices"]]


def check(server: LiveServer, agent: Agent) -> int:
    """Assert that each reply of the agent is in its trajectory exactly once. Return the number of other turns."""
    trajectory = server.owner("GET", f"/sessions/{agent.id}/trajectory?retries=true")
    held: dict[int, tuple[list[int], list[float]]] = {}
    for branch in trajectory["branches"]:
        for turn in branch["turns"]:
            place = slice(turn["prompt_end"], turn["end"])
            if any(branch["loss_mask"][place]):
                assert turn["turn"] not in held, "the tokens of a turn count once"
                held[turn["turn"]] = branch["ids"][place], branch["logprobs"][place]
    for reply in agent.replies:
        ids, logprobs = held[reply.turn]
        assert ids == reply.ids
        assert logprobs == pytest.approx(reply.logprobs, abs=1e-6)
    assert len({reply.turn for reply in agent.replies}) == len(agent.replies)
    return len(held) - len(agent.replies)


@pytest.mark.parametrize("seed", at_depth(range(3)))
def test_a_killed_server_keeps_every_turn_that_was_answered(folder: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    store = ["--session-store", str(tmp_path / "store")]
    log = tmp_path / "log"
    with LiveServer(folder, log, *store, "--weight-version", "7", admin_key=ADMIN_KEY) as server:
        made = [server.owner("POST", "/sessions", {"id": f"s{i}", "seed": i}) for i in range(SESSIONS)]
        agents = [Agent(each["id"], each["key"]) for each in made]
        threads = [threading.Thread(target=agent.talk, args=(server.url,)) for agent in agents]
        for thread in threads:
            thread.start()
        turns = chance.randint(2 * SESSIONS, 4 * SESSIONS)
        assert eventually(lambda: sum(len(agent.replies) for agent in agents) >= turns, 120)
        threading.Event().wait(chance.random() * 0.2)  # not when a reply has just come
        server.kill()
        for thread in threads:
            thread.join(60)
        assert not any(agent.refused for agent in agents), [agent.refused for agent in agents if agent.refused][:1]
    with LiveServer(folder, log, *store, admin_key=ADMIN_KEY) as server:
        more = sum(check(server, agent) for agent in agents)  # readable at once
        assert 0 <= more <= SESSIONS, "only what ran at the end may be there without a client that has it"
        server.owner("POST", "/sessions/s0/reward", {"reward": 0.5})
        with httpx.Client(timeout=60, trust_env=False) as client:
            refused = agents[0].turn(client, server.url)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
            assert "version 7" in refused.text and "accept_restart" in refused.text
            HttpServerEngineAdapter.attach(server.url, server.api_key, ADMIN_KEY).accept_restart()
            for agent in agents:
                for _ in range(2):
                    answer = agent.turn(client, server.url)
                    assert answer.status_code == 200, answer.text
                assert agent.began[-1] is None, "the conversation goes on where it was"
        for agent in agents:
            check(server, agent)
            (branch,) = server.owner("GET", f"/sessions/{agent.id}/trajectory")["branches"]
            assert [turn["turn"] for turn in branch["turns"]] == [reply.turn for reply in agent.replies]
        server.kill()
    with LiveServer(folder, log, *store, "--weight-version", "default", admin_key=ADMIN_KEY) as server:
        assert sum(check(server, agent) for agent in agents) == more
        assert server.owner("GET", "/sessions/s0")["reward"] == 0.5
        with httpx.Client(timeout=60, trust_env=False) as client:
            assert agents[0].turn(client, server.url).status_code == 200, "the journal ends at the loaded version"
