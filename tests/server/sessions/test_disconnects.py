"""Clients that disconnect before a reply or in the middle of a stream: the turn is recorded, and nothing is left."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.sessions.live import LiveServer
from tests.waiting import eventually
from verl_server.models.tiny import make_model_folder

LONG = 3000
USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": LONG},
    "/v1/messages": {"messages": USER, "max_tokens": LONG, "model": "m"},
    "/v1/responses": {"input": "a", "max_output_tokens": LONG},
    "/v1/completions": {"prompt": "a", "max_tokens": LONG},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": LONG}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("qwen3")
    make_model_folder(folder, "qwen3", init_std=0.2, max_position_embeddings=4096)
    log = tmp_path_factory.mktemp("log") / "log"
    with LiveServer(folder, log, "--session-store", str(log.parent / "store"), "--replay-grace", "0.05") as server:
        yield server


def gauge(server: LiveServer, name: str) -> float:
    """Return a figure of `/metrics`, NaN if it is left out: the scheduler was too busy to answer."""
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", httpx.get(f"{server.url}/metrics", trust_env=False).text, re.M)
    return math.nan if found is None else float(found[1])


def settled(server: LiveServer, session: str, turns: int) -> list[dict[str, Any]]:
    """Wait until no turn of the session runs and it has so many. Return them."""

    def told() -> Any:
        return server.owner("GET", f"/sessions/{session}")

    assert eventually(lambda: told().get("in_flight", 0) == 0 and told()["turns"] >= turns), told()
    tree: list[dict[str, Any]] = told()["tree"]
    assert len(tree) == turns
    return tree


@pytest.mark.parametrize("count", [1, 3], ids=["one sample", "three samples"])
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_a_stream(server: LiveServer, path: str, count: int) -> None:
    if count > 1 and path in ("/v1/messages", "/v1/responses"):
        return  # these dialects have no samples
    before = gauge(server, "verl_server:session_bytes")
    made = server.owner("POST", "/sessions", {"forced_sampling_params": {"ignore_eos": True}})
    headers = {"Authorization": f"Bearer {made['key']}"}
    body = BODIES[path] | {"stream": True}
    if count > 1:
        body = body | (
            {"n": count} if path != "/generate" else {"sampling_params": body["sampling_params"] | {"n": count}}
        )
    seen = b""
    with (
        httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=30) as client,
        client.stream("POST", path, json=body) as answer,
    ):
        assert answer.status_code == 200
        for piece in answer.iter_bytes():
            seen += piece
            if seen.count(b"data: ") > 40:  # each sample has tokens
                break
    tree = settled(server, made["id"], count)
    assert all(t["aborted"] and not t["delivered"] and 0 < t["output_tokens"] < LONG for t in tree), tree
    again = httpx.post(f"{server.url}{path}", json=_short(path), headers=headers, trust_env=False, timeout=30)
    assert again.status_code == 200, again.text
    tree = settled(server, made["id"], count + 1)
    assert (tree[-1]["parent"], tree[-1]["sibling"]) == (-1, count), "the retry is a sibling"
    assert tree[-1]["delivered"] and not tree[-1]["aborted"]
    branches = server.owner("GET", f"/sessions/{made['id']}/trajectory")["branches"]
    assert [turn["turn"] for branch in branches for turn in branch["turns"]] == [count], "lost turns are left out"
    server.owner("DELETE", f"/sessions/{made['id']}")
    assert gauge(server, "verl_server:session_bytes") == before
    assert eventually(lambda: gauge(server, "sglang:num_running_reqs") == 0)


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_before_the_reply(server: LiveServer, path: str) -> None:
    before = gauge(server, "verl_server:session_bytes")
    made = server.owner("POST", "/sessions", {"forced_sampling_params": {"ignore_eos": True}})
    headers = {"Authorization": f"Bearer {made['key']}"}
    body = json.dumps(BODIES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {made['key']}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port), timeout=30) as sock:
        sock.sendall(head.encode() + body)
        assert eventually(lambda: server.owner("GET", f"/sessions/{made['id']}").get("in_flight") == 1)
        assert eventually(lambda: gauge(server, "sglang:num_running_reqs") == 1)
    (turn,) = settled(server, made["id"], 1)
    assert turn["aborted"] and not turn["delivered"]
    again = httpx.post(f"{server.url}{path}", json=_short(path), headers=headers, trust_env=False, timeout=30)
    assert again.status_code == 200, again.text
    assert settled(server, made["id"], 2)[1]["sibling"] == 1
    server.owner("DELETE", f"/sessions/{made['id']}")
    assert gauge(server, "verl_server:session_bytes") == before


@pytest.mark.parametrize("end", ["finish", "delete"])
def test_a_session_that_ends_while_a_turn_runs(server: LiveServer, end: str) -> None:
    before = gauge(server, "verl_server:session_bytes")
    made = server.owner("POST", "/sessions", {"forced_sampling_params": {"ignore_eos": True}})
    headers = {"Authorization": f"Bearer {made['key']}"}
    answers: list[httpx.Response] = []
    path = "/v1/chat/completions"

    def ask() -> None:
        answers.append(
            httpx.post(f"{server.url}{path}", json=BODIES[path], headers=headers, trust_env=False, timeout=30)
        )

    thread = threading.Thread(target=ask)
    thread.start()
    assert eventually(lambda: server.owner("GET", f"/sessions/{made['id']}").get("in_flight") == 1)
    assert eventually(lambda: gauge(server, "sglang:num_running_reqs") == 1)
    if end == "finish":
        ended = server.owner("POST", f"/sessions/{made['id']}/finish", {})
        assert ended.get("in_flight", 0) == 0 and [turn["aborted"] for turn in ended["tree"]] == [True]
    server.owner("DELETE", f"/sessions/{made['id']}")
    thread.join(30)
    assert answers[0].status_code == (200 if end == "finish" else 404)
    assert gauge(server, "verl_server:session_bytes") == before


def test_more_samples_than_may_run_at_once_are_no_reason_to_retry(server: LiveServer) -> None:
    made = server.owner("POST", "/sessions", {"limits": {"max_concurrent": 2, "max_turns": 3}})
    headers = {"Authorization": f"Bearer {made['key']}"}

    def ask(n: int) -> httpx.Response:
        body = _short("/v1/chat/completions") | {"n": n}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=30)

    refused = ask(3)
    assert (refused.status_code, refused.headers["x-should-retry"]) == (403, "false")
    assert "max_concurrent=2" in refused.text
    assert ask(2).status_code == 200
    refused = ask(2)
    assert refused.status_code == 403 and "used 2 of its max_turns=3" in refused.text
    assert ask(1).status_code == 200
    server.owner("DELETE", f"/sessions/{made['id']}")


def _short(path: str) -> dict[str, Any]:
    body = dict(BODIES[path])
    if path == "/generate":
        return body | {"sampling_params": {"max_new_tokens": 4}}
    return body | {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
