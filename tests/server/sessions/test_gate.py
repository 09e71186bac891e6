"""A server that was started again holds its sessions until its weights are those that sampled them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.sessions.building import caller, plan, turn
from verl_server.errors import SessionUnavailableError
from verl_server.messages.session_types import CreateSession
from verl_server.server.app import create_app
from verl_server.server.sessions.service import SessionService

OWNER = {"Authorization": "Bearer owner"}


class Server:
    """A server with a session store, without its socket."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.service = SessionService(stack.manager, stack.args)
        self.ledger = self.service.ledger
        stack.app = create_app(stack.manager, stack.args, self.service)

    def open(self) -> None:
        self.stack.manager.run_sync(self.service.open(), 20)

    def close(self) -> None:
        self.stack.manager.run_sync(self.service.close(), 20)

    def turn(self, session_id: str, *args: Any, **fields: Any) -> None:
        self.stack.manager.run_sync(turn(self.ledger, caller(session_id), *args, **fields), 20)


@pytest.fixture
def start(make_stack: MakeStack, tmp_path: Path) -> Any:
    def run(**settings: Any) -> Server:
        return Server(make_stack(api_key="owner", session_store=str(tmp_path / "store"), **settings))

    return run


def _with_a_turn(start: Any, version: str) -> str:
    """Run a server once, with a session whose last turn was sampled by `version`. Return its key."""
    first = start()
    first.open()
    _, key = first.ledger.create(CreateSession(id="s"))
    first.turn("s", plan([1]), [2], spans=[("other", 0), (version, 0)])
    first.close()
    return str(key)


def test_sessions_wait_for_confirmed_weights(start: Any) -> None:
    key = _with_a_turn(start, "v7")
    server = start()
    server.open()
    with pytest.raises(SessionUnavailableError, match=r"serves version default; the session store ends at version v7"):
        server.service.turns.view(caller("s"))
    with pytest.raises(SessionUnavailableError, match=r"accept_restart\(\), or start with --weight-version v7"):
        server.service.turns.begin(caller("s"), plan([1]), None, b"")
    # A new session would have to wait, too, and its owner knows how to wait.
    refused = server.stack.post("/sessions", {}, headers=OWNER)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
    # Reading, rewards and the key work at once.
    assert server.stack.get("/sessions/s", headers=OWNER).json()["turns"] == 1
    assert server.stack.get("/sessions/s/trajectory", headers=OWNER).json()["branches"][0]["ids"] == [1, 2]
    assert server.stack.post("/sessions/s/reward", {"reward": 1}, headers=OWNER).status_code == 200
    assert server.stack.get("/v1/models", headers={"x-api-key": key}).status_code == 200
    server.stack.manager.controls.weights_confirmed = True
    assert server.stack.post("/sessions", {}, headers=OWNER).status_code == 201
    assert len(server.service.turns.view(caller("s")).decoded().replies) == 1
    server.stack.manager.controls.weights_confirmed = False
    server.service.turns.view(caller("s"))  # the gate stays open
    server.close()


@pytest.mark.parametrize(
    ("last", "served", "stated", "opens"),
    [
        ("v7", "v7", "v7", True),
        ("default", "default", "default", True),
        ("default", "default", None, False),  # both are what a server calls the weights that it loads
        ("13", "13", None, False),
        ("13", "13", "12", False),
        ("13@aaaaaaaa", "13@aaaaaaaa", None, True),
        ("13@aaaaaaaa", "13@bbbbbbbb", None, False),  # the run was killed, and has trained another step 13
        ("13@aaaaaaaa", "13", "13", False),
    ],
)
def test_only_a_label_that_proves_the_weights_opens_the_gate(
    start: Any, last: str, served: str, stated: str | None, opens: bool
) -> None:
    _with_a_turn(start, last)
    server = start(weight_version=stated)
    server.stack.manager.controls.versions.note(served)
    server.open()
    if opens:
        server.service.turns.view(caller("s"))
    else:
        with pytest.raises(SessionUnavailableError, match=rf"serves version {served}; .* ends at version {last}"):
            server.service.turns.view(caller("s"))
    server.close()


def test_a_store_without_open_sessions_has_no_gate(start: Any) -> None:
    _with_a_turn(start, "v7")
    server = start()
    server.open()
    server.stack.post("/sessions/s/finish", {}, headers=OWNER)
    server.close()
    again = start()
    again.open()
    again.ledger.create(CreateSession(id="new"))
    again.service.turns.view(caller("new"))
    again.close()


def test_sessions_are_refused_until_the_store_was_read(start: Any) -> None:
    """A server answers before it knows its sessions. "Unknown key" or "no such session" would be final and untrue."""
    key = _with_a_turn(start, "v7")
    server = start()
    chat = {"messages": [{"role": "user", "content": "a"}]}

    def answers() -> dict[str, Any]:
        post, get = server.stack.post, server.stack.get
        named = OWNER | {"X-Session-ID": "s"}
        return {
            "create": post("/sessions", {}, headers=OWNER),
            "list": get("/sessions", headers=OWNER),
            "read": get("/sessions/s", headers=OWNER),
            "trajectory": get("/sessions/s/trajectory", headers=OWNER),
            "reward": post("/sessions/s/reward", {"reward": 1}, headers=OWNER),
            "finish": post("/sessions/s/finish", {}, headers=OWNER),
            "delete": server.stack.request("DELETE", "/sessions/s", headers=OWNER),
            "key": post("/v1/chat/completions", chat, headers={"x-api-key": key}),
            "key in the path": post(f"/s/{key}/v1/chat/completions", chat),
            "header": post("/v1/chat/completions", chat, headers=named),
        }

    for name, answer in answers().items():
        assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "1"), (name, answer.text)
        assert "reads its session store" in answer.text and "x-should-retry" not in answer.headers, name
    assert server.stack.get("/sessions").status_code == 401, "without a key, nothing is said about sessions"
    server.open()
    assert server.stack.get("/sessions/s", headers=OWNER).json()["turns"] == 1
    assert server.stack.post("/sessions", {}, headers=OWNER).status_code == 503, "the weights are not confirmed"
    server.close()


def test_metrics_count_sessions(start: Any) -> None:
    server = start()
    server.open()
    server.ledger.create(CreateSession(id="s"))
    server.turn("s", plan([1]), [2])
    server.ledger.finish("s")
    text = server.stack.get("/metrics").text
    for line in (
        "verl_server:sessions_created_total{",
        'verl_server:sessions_ended_total{model_name="',
        "verl_server:session_turns_total{",
        'reason="root"} 1.0',
        "verl_server:session_bytes{",
    ):
        assert line in text
    server.close()
