"""The owner's routes over HTTP: sessions, rewards, ends and trajectories; and SGLang's two routes."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.sessions.building import caller, plan, turn
from verl_server.messages.session_types import RewardBody, SessionInfo, SessionTrajectory
from verl_server.server.app import create_app
from verl_server.server.sessions.service import SessionService
from verl_server.server.sessions.turn_ledger import TurnLedger

OWNER = {"Authorization": "Bearer owner"}


class Owner:
    """The owner of sessions on a server without an engine."""

    def __init__(self, stack: Stack) -> None:
        sessions = SessionService(stack.manager, stack.args)
        self.stack, self.ledger = stack, sessions.ledger
        stack.app = create_app(stack.manager, stack.args, sessions)

    def call(self, method: str, path: str, body: Any = None, status: int = 200, **kwargs: Any) -> Any:
        headers = OWNER | kwargs.pop("headers", {})
        response = self.stack.request(method, path, json=body, headers=headers, **kwargs)
        assert response.status_code == status, response.text
        return response

    def create(self, **body: Any) -> Any:
        return self.call("POST", "/sessions", body, 201).json()

    def turn(self, session_id: str, *args: Any, child: str | None = None, **fields: Any) -> None:
        """Let the ledger store a turn."""
        self.stack.manager.run_sync(turn(self.ledger, caller(session_id, child), *args, **fields), 10)


@pytest.fixture
def owner(make_stack: MakeStack) -> Owner:
    return Owner(make_stack(api_key="owner"))


def test_create_and_read(owner: Owner) -> None:
    limits = {"max_turns": 3, "seconds": 60}
    made = owner.create(group="g", metadata={"task": 1}, limits=limits, seed=1)
    assert made["base_url"] == f"/s/{made['key']}/v1"
    assert made["anthropic_base_url"] == f"/s/{made['key']}"
    assert made["expires"] > 0 and made["weight_version"] == "default"
    assert made["key"].startswith("vs-") and len(made["key"]) == 46
    owner.turn(made["id"], plan([1, 2]), [3])
    owner.turn(made["id"], plan([4], 0, 3), [5])
    owner.turn(made["id"], plan([9]), [8], child="helper")
    raw = owner.call("GET", f"/sessions/{made['id']}")
    assert made["key"] not in raw.text
    info = msgspec.json.decode(raw.content, type=SessionInfo)
    assert (info.state, info.turns, info.tokens, info.metadata) == ("open", 2, 2, {"task": 1})
    assert info.children == [f"{made['id']}.helper"]
    assert [(each.turn, each.parent, each.shared, each.prompt_tokens) for each in info.tree] == [
        (0, -1, 0, 2),
        (1, 0, 3, 4),
    ]
    assert owner.create(id="mine")["id"] == "mine"
    taken = owner.call("POST", "/sessions", {"id": "mine"}, 409)
    assert taken.headers["x-should-retry"] == "false" and taken.headers["x-verl-error"] == "SessionExistsError"


@pytest.mark.parametrize(
    "body",
    [{"unknown": 1}, {"limits": {"max_turns": "x"}}, {"history": "x"}, {"id": "a/b"}, [], {"limits": {"seconds": -1}}],
)
def test_bad_bodies(owner: Owner, body: Any) -> None:
    owner.call("POST", "/sessions", body, 400)
    assert not list(owner.ledger.table.roots())


def test_lists(owner: Owner) -> None:
    made = [owner.create(group=f"g{i % 2}", id=f"s{i}")["id"] for i in range(5)]
    owner.call("POST", "/sessions/s0/finish", {})

    def listed(query: str) -> tuple[list[str], str | None]:
        reply = owner.call("GET", f"/sessions?{query}").json()
        return [each["id"] for each in reply["sessions"]], reply["next"]

    assert listed("") == (made, None)
    assert listed("group=g0") == (["s0", "s2", "s4"], None)
    assert listed("state=open&group=g0") == (["s2", "s4"], None)
    assert listed("limit=2") == (["s0", "s1"], "s1")
    assert listed("limit=2&after=s1") == (["s2", "s3"], "s3")
    assert listed("limit=2&after=s3") == (["s4"], None)
    for bad in ("limit=0", "limit=x", "limit=9999", "limit=²", "limit=٣", "limit=+1", "limit=1_0", "state=x"):
        owner.call("GET", f"/sessions?{bad}", status=400)


def test_rewards_and_ends(owner: Owner) -> None:
    session = owner.create()["id"]
    path = f"/sessions/{session}"
    assert owner.call("POST", f"{path}/reward", {"reward": 1}).json() == {"reward": 1.0}
    assert owner.call("POST", f"{path}/finish", {"reason": "won"}).json()["reason"] == "won"
    assert owner.call("POST", f"{path}/finish", {}).json()["reason"] == "won"
    assert owner.call("POST", f"{path}/reward", {"reward": 2, "name": "late"}).json() == {"reward": 3.0}
    for bad in ({}, {"reward": "x"}, {"reward": 1, "turn": 0}, {"reward": None}):
        owner.call("POST", f"{path}/reward", bad, 400)
    for bad in ({"reward": 1, "name": "x" * 1025},):
        assert "1024 characters" in owner.call("POST", f"{path}/reward", bad, 400).text
    assert owner.call("DELETE", path).json() == {}
    for method, rest in (("DELETE", ""), ("GET", ""), ("POST", "/reward"), ("POST", "/finish"), ("GET", "/trajectory")):
        body = {"reward": 1} if rest == "/reward" else {} if method == "POST" else None
        gone = owner.call(method, path + rest, body, 404)
        assert gone.headers["x-verl-error"] == "SessionNotFoundError"


def test_trajectories(owner: Owner) -> None:
    session = owner.create(group="g", metadata={"m": 1})["id"]
    owner.turn(session, plan([1, 2]), [3, 4], spans=[("v1", 0), ("v2", 1)])
    owner.turn(session, plan([5], 0, 4), [6])
    owner.turn(session, plan([7], 0, 4), [8])
    TurnLedger(owner.ledger).delivered(session, 0)
    owner.turn(session, plan([9]), [9], child="helper")
    owner.ledger.reward(session, RewardBody(0.5))
    owner.ledger.reward(session, RewardBody(2.0, turn=1))
    found = msgspec.json.decode(owner.call("GET", f"/sessions/{session}/trajectory").content, type=SessionTrajectory)
    assert (found.reward, found.group, found.metadata, found.state) == (0.5, "g", {"m": 1}, "open")
    assert sum(sum(branch.loss_mask) for branch in found.branches) == 5
    assert [each.branch for each in found.branches] == list(range(len(found.branches)))
    by_ids = {tuple(each.ids): each for each in found.branches}
    first = by_ids[1, 2, 3, 4, 5, 6]
    assert first.loss_mask == [0, 0, 1, 1, 0, 1] and first.logprobs == [0, 0, -0.5, -0.5, 0, -0.5]
    assert [(each.version, each.start, each.end) for each in first.weight_versions][:2] == [("v1", 2, 3), ("v2", 3, 4)]
    assert [each.reward for each in first.rewards] == [2.0]
    assert by_ids[9, 9].session == f"{session}.helper"
    alone = owner.call("GET", f"/sessions/{session}/trajectory?children=false&mask=every").json()
    assert (9, 9) not in [tuple(each["ids"]) for each in alone["branches"]]
    assert sum(sum(branch["loss_mask"]) for branch in alone["branches"]) == 6
    for bad in ("mask=x", "retries=x", "children=1"):
        owner.call("GET", f"/sessions/{session}/trajectory?{bad}", status=400)

    packed = owner.call("GET", f"/sessions/{session}/trajectory", headers={"Accept": "application/msgpack"})
    columns = msgspec.msgpack.decode(packed.content, type=SessionTrajectory)
    for branch, plain in zip(columns.branches, found.branches, strict=True):
        assert np.frombuffer(branch.ids, "<i4").tolist() == plain.ids
        assert np.frombuffer(branch.loss_mask, "u1").tolist() == plain.loss_mask
        assert np.frombuffer(branch.logprobs, "<f4").tolist() == plain.logprobs
        assert branch.turns == plain.turns
    text = owner.call("GET", f"/sessions/{session}/trajectory?format=columns").json()
    assert isinstance(text["branches"][0]["ids"], str)
    empty = owner.create()["id"]
    for headers in ({}, {"Accept": "application/msgpack"}):
        reply = owner.call("GET", f"/sessions/{empty}/trajectory", headers=headers)
        decode = msgspec.msgpack.decode if headers else msgspec.json.decode
        assert decode(reply.content)["branches"] == []


def test_a_store_that_cannot_be_written_answers_503(owner: Owner) -> None:
    owner.ledger.store.failure = "full"  # type: ignore[misc]
    refused = owner.call("POST", "/sessions", {}, 503)
    assert refused.headers["retry-after"] == "1"


def test_sglang_routes(owner: Owner) -> None:
    body = {"capacity_of_str_len": 1000, "session_id": "mine", "timeout": 5}
    assert owner.call("POST", "/open_session", body).json() == "mine"
    assert owner.ledger.table.find("mine").limits.seconds == 5
    owner.call("POST", "/open_session", body, 400)
    assert isinstance(owner.call("POST", "/open_session", {"capacity_of_str_len": 1}).json(), str)
    assert owner.call("POST", "/close_session", {"session_id": "mine"}).content == b""
    assert "mine" not in owner.ledger.table
    owner.call("POST", "/close_session", {"session_id": "mine"})  # as in SGLang
    owner.call("POST", "/close_session", {}, 400)
    owner.call("POST", "/close_session", {"session_id": 5}, 400)
