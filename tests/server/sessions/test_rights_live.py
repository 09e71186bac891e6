"""An agent tries every route of a running server: it can generate in its own session, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.sessions.live import ADMIN_KEY, API_KEY, LiveServer
from verl_server.models.tiny import make_model_folder

GENERATES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "model": "m"},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
}
REFUSED = {"/v1/messages/count_tokens", "/inference/v1/generate"}
"""Permitted routes that add no turn: the one counts, the other is not available in a session."""
READS = {"/", "/v1/models", "/v1/models/m"}
OPEN = re.compile(r"/(health|ready|metrics|ping|liveness)")
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=512)


class Caller:
    """One way in which an agent names itself: headers, and a prefix of the path."""

    def __init__(self, name: str, prefix: str = "", **headers: str) -> None:
        self.name, self.prefix, self.headers = name, prefix, headers


def _paths(server: LiveServer) -> list[str]:
    described = server.owner("GET", "/openapi.json")["paths"]
    return sorted({re.sub(r"{[^}]*}", "m", path) for path in described} | {"/sessions/b", "/sessions/b/trajectory"})


def _turns(server: LiveServer) -> dict[str, Any]:
    return {name: server.owner("GET", f"/sessions/{name}")["turns"] for name in ("a", "b")}


@pytest.mark.parametrize(
    ("api_key", "admin_key"),
    [
        pytest.param(API_KEY, ADMIN_KEY, id="both keys"),
        pytest.param(API_KEY, None, id="api key", marks=pytest.mark.exhaustive),
        pytest.param(None, ADMIN_KEY, id="admin key", marks=pytest.mark.exhaustive),
    ],
)
def test_an_agent_reaches_generation_in_its_own_session_only(
    folder: Path, tmp_path: Path, api_key: str | None, admin_key: str | None
) -> None:
    options = ["--session-store", str(tmp_path / "store"), "--log-level-http", "info", "--log-level", "debug"]
    with LiveServer(folder, tmp_path / "log", *options, api_key=api_key, admin_key=admin_key) as server:
        mine = server.owner("POST", "/sessions", {"id": "a", "limits": {"max_concurrent": 4}})["key"]
        other = server.owner("POST", "/sessions", {"id": "b"})["key"]
        ended = server.owner("POST", "/sessions", {"id": "c"})["key"]
        server.owner("POST", "/sessions/c/finish", {})
        bearer = {"Authorization": f"Bearer {mine}"}
        inside = [
            Caller("its key", **bearer),
            Caller("x-api-key", **{"x-api-key": mine}),
            Caller("its path", prefix=f"/s/{mine}"),
            Caller("its key and the other's name", **bearer, **{"X-Session-ID": "b"}),
        ]
        nobody = [
            Caller("two keys", prefix=f"/s/{other}", **bearer),
            Caller("two headers", **bearer, **{"x-api-key": other}),
            Caller("an ended key", Authorization=f"Bearer {ended}"),
            Caller("an unknown path", prefix="/s/vs-" + "x" * 43),
            Caller("a malformed path", prefix="/s/" + mine[:20]),
            Caller("a doubled slash", prefix=f"//s/{mine}"),
            Caller("a doubled slash inside", prefix=f"/s//{mine}"),
        ]
        outside = [Caller("no key"), Caller("no key and the session's name", **{"X-Session-ID": "b"})]
        with httpx.Client(timeout=30, trust_env=False) as client:

            def status(caller: Caller, method: str, path: str) -> int:
                body = GENERATES.get(path, {"messages": [], "max_tokens": 1, "model": "m"})
                given = None if method in ("GET", "HEAD", "DELETE") else body
                answer = client.request(
                    method, f"{server.url}{caller.prefix}{path}", json=given, headers=caller.headers
                )
                assert mine not in answer.text and other not in answer.text
                return answer.status_code

            paths = _paths(server)
            assert set(GENERATES) <= set(paths) and len(paths) > 50
            before = _turns(server)
            for caller in inside:
                for path in paths:
                    for method in METHODS:
                        got = status(caller, method, path)
                        if path in GENERATES and (method == "POST" or (method, path) == ("PUT", "/generate")):
                            assert got == 200, (caller.name, path, got)
                        elif OPEN.match(path) or (path in REFUSED and method == "POST"):
                            continue
                        elif path in READS and method in ("GET", "HEAD"):
                            assert got in (200, 404, 405), (caller.name, method, path, got)
                        else:
                            # 405: no operation serves this method, whoever asks.
                            assert got == 403 or got == 405, (caller.name, method, path, got)
            assert _turns(server) == {"a": before["a"] + len(inside) * (len(GENERATES) + 1), "b": 0}
            before = _turns(server)
            for caller in nobody:
                for path in paths:
                    for method in METHODS:
                        assert status(caller, method, path) == 401, (caller.name, method, path)
            for caller in outside:
                for path in paths:
                    for method in METHODS:
                        is_closed = path.startswith(("/sessions", "/open_session"))
                        if OPEN.match(path) or (api_key is None and not is_closed):
                            continue
                        assert status(caller, method, path) in (401, 405), (caller.name, method, path)
            if api_key is None:  # ordinary generation is open, and in nobody's session
                for caller in outside:
                    for path in GENERATES:
                        assert status(caller, "POST", path) == 200
                    for path in ("/update_weights_from_disk", "/pause_generation", "/flush_cache"):
                        assert status(caller, "POST", path) == 401, path
            assert _turns(server) == before
            assert server.owner("GET", "/sessions/b")["reward"] is None
            for path in (f"/v1/s/{mine}/x", f"/S/{mine}/v1/models", f"/x?key={mine}", f"/{mine}", f"/s/{mine}%2Fv1"):
                client.get(server.url + path)
                client.post(server.url + path, headers={"Authorization": f"Bearer {api_key or admin_key}"}, json={})
        text = server.text()
        assert "GET /v1/models" in text, "the access log is on"
        for key in (mine, other, ended, API_KEY, ADMIN_KEY):
            assert key not in text
        for file in (tmp_path / "store").iterdir():
            held = file.read_bytes()
            assert not any(key.encode() in held for key in (mine, other, ended, API_KEY, ADMIN_KEY))
