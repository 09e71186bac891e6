"""Traffic through the router while a process is killed: short requests, new sessions, and turns of sessions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fleet.servers import OWNER, Fleet

TOKENS = 4
SEEDS = range(4)
PATIENCE = 60.0
"""Seconds for which a client repeats a request."""


def again(send: Callable[[], httpx.Response]) -> tuple[httpx.Response, list[str]]:
    """Send a request until it is answered, as an SDK does. Return the answer, and what came before it."""
    before: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            answer = send()
        except httpx.HTTPError as error:
            before.append(type(error).__name__)
        else:
            if answer.status_code != 503:
                return answer, before
            assert "retry-after" in answer.headers, answer.text
            before.append(f"503 {answer.headers['x-verl-error']}")
        assert time.monotonic() < deadline, before
        threading.Event().wait(0.05)


def short(seed: int) -> dict[str, Any]:
    params = {"max_new_tokens": TOKENS, "temperature": 1.0, "sampling_seed": seed}
    return {"text": "a", "sampling_params": params}


@dataclass
class Reply:
    server: str
    version: str
    seed: int
    ids: list[int]
    began: float
    seconds: float
    trouble: list[str]


class Traffic:
    """Clients that send short requests through the router until the end of the context."""

    def __init__(self, fleet: Fleet, clients: int = 2) -> None:
        self._fleet = fleet
        self.replies: list[Reply] = []
        self.refused: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)

    def _run(self, client: int) -> None:
        seed = client
        while not self._stop.is_set():
            seed = (seed + 1) % len(SEEDS)
            body, began = short(seed), time.monotonic()
            answer, trouble = again(lambda body=body: self._fleet.client.post("/generate", json=body))  # type: ignore[misc]
            if answer.status_code != 200:
                self.refused.append(answer.text)
                continue
            found = answer.json()
            version, server = found["meta_info"]["weight_version"], answer.headers["x-verl-server"]
            seconds = time.monotonic() - began
            self.replies.append(Reply(server, version, seed, found["output_ids"], began, seconds, trouble))

    def since(self, began: float) -> list[Reply]:
        """Return the replies to requests that were sent after a time."""
        return [reply for reply in list(self.replies) if reply.began >= began]

    def wait_for(self, count: int) -> list[Reply]:
        """Wait for so many replies to requests that are sent from now on, and return them."""
        began, deadline = time.monotonic(), time.monotonic() + PATIENCE
        while len(found := self.since(began)) < count:
            assert time.monotonic() < deadline, "no request is answered"
            time.sleep(0.01)
        return found


@dataclass(eq=False)
class Talk:
    """An agent in a session, which repeats a turn until it is answered."""

    fleet: Fleet
    id: str
    key: str
    server: str
    """URL of the server of the session."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    began: list[str | None] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """Attempts that were answered with a retriable error before the answers."""

    @classmethod
    def on(cls, fleet: Fleet, server: str) -> Talk:
        """Create a session on a server. The router does not know it yet."""
        answer = httpx.post(f"{server}/sessions", json={"seed": 1}, headers=OWNER, trust_env=False, timeout=60)
        assert answer.status_code == 201, answer.text
        return cls(fleet, answer.json()["id"], answer.json()["key"], server)

    def turn(self, tokens: int = TOKENS) -> list[int]:
        asked = [*self.messages, {"role": "user", "content": f"message {len(self.replies)}"}]
        body = {"messages": asked, "max_tokens": tokens, "temperature": 1.0, "return_token_ids": True}
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": f"{self.id}-{len(self.replies)}"}
        answer, trouble = again(lambda: self.fleet.client.post("/v1/chat/completions", json=body, headers=headers))
        self.trouble += trouble
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-verl-server"] == self.server
        (choice,) = answer.json()["choices"]
        self.replies.append(choice["token_ids"])
        self.began.append(choice["meta_info"]["session"]["began"])
        self.messages = [*asked, {"role": "assistant", "content": choice["message"]["content"]}]
        return self.replies[-1]

    def recorded(self) -> list[list[int]]:
        """Return the ids of each sampled turn of the record, in their order."""
        answer = self.fleet.client.get(f"/sessions/{self.id}/trajectory?retries=true")
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-verl-server"] == self.server
        held: dict[int, list[int]] = {}
        for branch in answer.json()["branches"]:
            for turn in branch["turns"]:
                place = slice(turn["prompt_end"], turn["end"])
                if any(branch["loss_mask"][place]):
                    assert turn["turn"] not in held, "the tokens of a turn count once"
                    held[turn["turn"]] = branch["ids"][place]
        return [held[turn] for turn in sorted(held)]


class Creators:
    """Clients that create sessions with names and take one turn in each, until the end of the context."""

    def __init__(self, fleet: Fleet, clients: int = 2) -> None:
        self._fleet = fleet
        self.talks: list[Talk] = []
        self.names: list[str] = []
        self.unclear: list[str] = []
        """Names of sessions that exist although their creation was not answered."""
        self.failures: list[BaseException] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]

    def __enter__(self) -> Creators:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(100)

    def _run(self, client: int) -> None:
        try:
            while not self._stop.is_set():
                self._one(f"made-{client}-{len(self.names)}-{time.monotonic_ns()}")
        except BaseException as error:
            self.failures.append(error)

    def _one(self, name: str) -> None:
        self.names.append(name)
        body = {"id": name, "seed": 1}
        answer, trouble = again(lambda: self._fleet.client.post("/sessions", json=body))
        if answer.status_code == 409 and trouble:
            self.unclear.append(name)
            return
        assert answer.status_code == 201, answer.text
        talk = Talk(self._fleet, name, answer.json()["key"], answer.headers["x-verl-server"])
        talk.turn(1)
        self.talks.append(talk)
