"""Kill -9 of a whole server with sessions open: what a client received in full is in the store, exactly once."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
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

STREAMS = 6
"""Streams that are open when the server is killed."""
LONG = 300
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "model": "m"},
    "/v1/responses": {"input": "a", "max_output_tokens": 4},
    "/v1/completions": {"prompt": "a", "max_tokens": 4},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 4}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=4096)


@dataclass
class Reply:
    turn: int
    ids: list[int]
    logprobs: list[float]


@dataclass(eq=False)
class Agent:
    """An agent that talks until its server is away. `replies` are those that it received in full.

    Each request has an idempotency key of its own. `sent` is the newest one, `answered` the newest with a reply.
    """

    id: str
    key: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    began: list[str | None] = field(default_factory=list)
    refused: str = ""
    sent: tuple[str, dict[str, Any]] = ("", {})
    answered: tuple[str, dict[str, Any]] = ("", {})
    seen: int = 0
    """Bytes of the stream that `leave_open` read."""

    def post(self, client: httpx.Client, url: str, request: tuple[str, dict[str, Any]]) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": request[0]}
        return client.post(f"{url}/v1/chat/completions", json=request[1], headers=headers)

    def leave_open(self, url: str) -> None:
        """Read a long stream until its connection breaks."""
        body = {"messages": [*self.messages, {"role": "user", "content": "long"}], "max_tokens": LONG}
        self.sent = f"long-{len(self.replies)}", body | {"stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": self.sent[0]}
        path = f"{url}/v1/chat/completions"
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(timeout=60, trust_env=False) as client,
            client.stream("POST", path, json=self.sent[1], headers=headers) as answer,
        ):
            for piece in answer.iter_bytes():
                self.seen += len(piece)

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
        self.sent = f"{len(self.replies)}-{url}", body
        answer = self.post(client, url, self.sent)
        if answer.status_code != 200:
            return answer
        reply, text, began = _read(answer, streams)
        self.replies.append(reply)
        self.began.append(began)
        self.answered = self.sent
        self.messages = [*asked, {"role": "assistant", "content": text}]
        return answer

    def go_on(self, client: httpx.Client, url: str) -> None:
        """Take two turns, which must both be answered. The second one continues the first one."""
        for _ in range(2):
            answer = self.turn(client, url)
            assert answer.status_code == 200, answer.text
        assert self.began[-1] is None, "the conversation goes on where it was"

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


def _read(answer: httpx.Response, streams: bool) -> tuple[Reply, str, str | None]:
    """Return a reply, its text and why its branch began. Raise httpx.ReadError if the end of a stream is missing."""
    choices = _events(answer.text) if streams else answer.json()["choices"]
    shown = [each.get("delta") or each.get("message") or {} for each in choices]
    session = next(each["meta_info"]["session"] for each in choices if "meta_info" in each)
    ids = [token for each in choices for token in each.get("token_ids") or []]
    logprobs = [e["logprob"] for each in choices for e in (each.get("logprobs") or {}).get("content") or []]
    text = "".join(each.get("content") or "" for each in shown)
    return Reply(session["turn"], ids, logprobs), text, session["began"]


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


def tree(server: LiveServer, agent: Agent) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = server.owner("GET", f"/sessions/{agent.id}").get("tree", [])
    return turns


def sampled(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return turns without the note that a client took the reply."""
    return [turn | {"delivered": True} for turn in turns]


def check_refusals(server: LiveServer, agent: Agent, client: httpx.Client) -> None:
    """Assert that everything that generates in a session is refused for now, so that clients try again."""
    for path, body in ROUTES.items():
        refused = client.post(f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {agent.key}"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1"), path
        assert refused.headers.get("x-should-retry") != "false"
        assert "version 7" in refused.text and "accept_restart" in refused.text
    created = client.post(f"{server.url}/sessions", json={}, headers={"Authorization": f"Bearer {server.api_key}"})
    assert (created.status_code, created.headers["Retry-After"]) == (503, "1")


def check_keys(server: LiveServer, agent: Agent, client: httpx.Client) -> bool:
    """Send the agent's newest requests again, with their keys. Return True if the newest one was unfinished.

    A finished turn is not sampled again. An unfinished one is, and its turn says so.
    """
    before = tree(server, agent)
    if agent.answered[0]:
        answer = agent.post(client, server.url, agent.answered)
        assert answer.status_code == 200, answer.text
        same = _read(answer, agent.answered[1]["stream"])[0] == agent.replies[-1]
        assert same and sampled(tree(server, agent)) == sampled(before), "a finished turn is never sampled again"
    other = agent.answered[0], {"messages": [{"role": "user", "content": "another body"}]}
    assert not agent.answered[0] or agent.post(client, server.url, other).status_code == 409
    if agent.sent == agent.answered:
        return False
    answer = agent.post(client, server.url, agent.sent)
    after = tree(server, agent)
    if len(before) > len(agent.replies):
        assert _read(answer, agent.sent[1]["stream"])[0].turn == before[-1]["turn"]
        assert sampled(after) == sampled(before), "its turn was stored, and its reply was lost"
        return False
    assert answer.status_code == 200, answer.text
    (new,) = after[len(before) :]
    assert not any(turn["resampled"] for turn in before) and not new["aborted"]
    # The kill may have come before the note that a turn began was written; never for a stream that was read.
    assert new["resampled"] or not agent.seen
    again = agent.post(client, server.url, agent.sent)
    assert (again.status_code, again.content) == (200, answer.content) and tree(server, agent) == after
    return True


@pytest.mark.parametrize(("seed", "sessions"), at_depth([(0, 8), (1, 64), (2, 64)]))
def test_a_killed_server_keeps_every_turn_that_was_answered(
    folder: Path, tmp_path: Path, seed: int, sessions: int
) -> None:
    chance = random.Random(seed)
    store = ["--session-store", str(tmp_path / "store")]
    log = tmp_path / "log"
    with LiveServer(folder, log, *store, "--weight-version", "7", admin_key=ADMIN_KEY) as server:
        made = [server.owner("POST", "/sessions", {"id": f"s{i}", "seed": i}) for i in range(sessions)]
        agents = [Agent(each["id"], each["key"]) for each in made]
        streaming = agents[:STREAMS]
        threads = [threading.Thread(target=agent.talk, args=(server.url,)) for agent in agents[STREAMS:]]
        for thread in threads:
            thread.start()
        turns = chance.randint(2 * sessions, 4 * sessions)
        assert eventually(lambda: sum(len(agent.replies) for agent in agents) >= turns, 120)
        for agent in streaming:
            threads.append(threading.Thread(target=agent.leave_open, args=(server.url,)))
            threads[-1].start()
        assert eventually(lambda: all(agent.seen for agent in streaming), 60)
        threading.Event().wait(chance.random() * 0.2)  # not when a reply has just come
        server.kill()
        for thread in threads:
            thread.join(60)
        assert not any(agent.refused for agent in agents), [agent.refused for agent in agents if agent.refused][:1]
    with LiveServer(folder, log, *store, admin_key=ADMIN_KEY) as server:
        more = sum(check(server, agent) for agent in agents)  # readable at once
        assert 0 <= more <= sessions, "only what ran at the end may be there without a client that has it"
        server.owner("POST", "/sessions/s0/reward", {"reward": 0.5})
        with httpx.Client(timeout=60, trust_env=False) as client:
            check_refusals(server, agents[0], client)
            HttpServerEngineAdapter.attach(server.url, server.api_key, ADMIN_KEY).accept_restart()
            anew = [agent for agent in (*streaming, *agents[STREAMS::4]) if check_keys(server, agent, client)]
            assert set(anew) >= set(streaming), "a stream that was not at its end is unfinished"
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda agent: agent.go_on(client, server.url), agents))
        for agent in agents:
            others = check(server, agent)
            assert others <= 1, "the reply of one turn was lost, or was read as that of a key"
            branches = server.owner("GET", f"/sessions/{agent.id}/trajectory")["branches"]
            known = [reply.turn for reply in agent.replies]
            assert known in [[turn["turn"] for turn in branch["turns"]] for branch in branches]
        held = {agent.id: tree(server, agent) for agent in agents}
        server.kill()
    with LiveServer(folder, log, *store, "--weight-version", "default", admin_key=ADMIN_KEY) as server:
        for agent in agents:
            check(server, agent)
            assert tree(server, agent) == held[agent.id]
        assert server.owner("GET", "/sessions/s0")["reward"] == 0.5
        with httpx.Client(timeout=60, trust_env=False) as client:
            assert agents[0].turn(client, server.url).status_code == 200, "the journal ends at the loaded version"
