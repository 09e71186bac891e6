"""An environment server refuses what the rollout server refuses: pages, missing keys, odd paths, bodies without end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.rollout.fakes import env_server
from verl_server import BadRequestError
from verl_server.rollout.environment import KEY_VARIABLE, EnvError, RemoteEnvironment, environment_schema
from verl_server.rollout.environments import env_server as module
from verl_server.rollout.environments.env_process import EnvServerArgs, serve
from verl_server.rollout.environments.env_server import EnvServer

MADE: list[Echo] = []


class Echo:
    action_schema: ClassVar = {"type": "object"}

    def __init__(self) -> None:
        MADE.append(self)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        return {"text": "hello"}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        return {"text": "bye"}, 1.0, True


@asynccontextmanager
async def asked(**settings: Any) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    MADE.clear()
    async with env_server(Echo, **settings) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        yield url, client


def run(check: Callable[[], Any]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await check()

    asyncio.run(bounded())


PAGES = [
    {"Origin": "http://page.example"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Host": "rebound.example"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/x-www-form-urlencoded"},
]


@pytest.mark.parametrize("headers", PAGES, ids=str)
def test_a_web_page_does_not_drive_an_environment(headers: dict[str, str]) -> None:
    async def check() -> None:
        async with asked() as (url, client):
            for method, path in (
                ("POST", "/reset"),
                ("POST", "/step"),
                ("POST", "/mcp"),
                ("DELETE", "/mcp"),
                ("GET", "/state"),
            ):
                answer = await client.request(method, path, content=b"{}", headers=headers)
                assert answer.status_code in (403, 415), (method, path)
                assert "detail" in answer.json()
            for path in ("/ws", "/mcp"):
                if "Content-Type" in headers:
                    continue  # a page cannot set it for a WebSocket
                plain = {name: value for name, value in headers.items() if name != "Host"}
                with pytest.raises(InvalidStatus) as refused:
                    async with connect(
                        url.replace("http", "ws") + path,
                        additional_headers=plain or {"Origin": "http://page.example"},
                        proxy=None,
                    ):
                        pass
                assert refused.value.response.status_code == 403
        assert not MADE

    run(check)


def test_programs_play() -> None:
    async def check() -> None:
        async with asked() as (url, client):
            assert (await client.post("/reset", json={})).json()["observation"] == {"text": "hello"}
            assert (await client.post("/reset")).status_code == 200
            same = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
            assert (await client.post("/reset", json={}, headers=same)).status_code == 200
            async with RemoteEnvironment(url) as environment:
                assert (await environment.reset(1)).observation == {"text": "hello"}

    run(check)


def test_a_key_is_needed_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)

    async def check() -> None:
        async with asked(api_key="secret") as (url, client):
            assert (await client.get("/health")).status_code == 200
            for method, path in (("POST", "/reset"), ("GET", "/schema"), ("POST", "/mcp"), ("GET", "/nothing")):
                answer = await client.request(method, path)
                assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer", path
                said = answer.json()["detail"]
                assert f"{method} {path} needs" in said and "VERL_ENV_API_KEY" in said and "has no key" in said
                assert "`Authorization: Bearer KEY` or `x-api-key: KEY`" in said
                wrong = {"Authorization": "Bearer wrong"}
                assert (await client.request(method, path, headers=wrong)).status_code == 401, path
            for path in ("/health%0A", "/reset%0A", "/health%00"):
                assert (await client.post(path)).status_code == 400
            for path in ("/health/", "//health", "/Health"):
                assert (await client.get(path)).status_code == 401
            with pytest.raises(InvalidStatus) as refused:
                async with connect(url.replace("http", "ws") + "/ws", proxy=None):
                    pass
            assert b"x-api-key: KEY" in (refused.value.response.body or b"")
            with pytest.raises(EnvError, match=r"401.*VERL_ENV_API_KEY"):
                await RemoteEnvironment(url).reset(1)
            assert not MADE
            monkeypatch.setenv(KEY_VARIABLE, "secret")
            assert await asyncio.to_thread(environment_schema, url, 10) == {"type": "object"}
            async with RemoteEnvironment(url) as environment:
                assert (await environment.reset(1)).observation == {"text": "hello"}

    run(check)


def test_errors_of_every_route_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("the reason")

    monkeypatch.setattr(module._EnvApp, "health", broken)

    async def check() -> None:
        async with asked() as (_, client):
            paths = ("/reset", "/step", "/state", "/health", "/metadata", "/schema", "/nothing", "/ws", "/")
            for path in paths:
                answer = await client.patch(path)
                assert answer.status_code in (404, 405) and f"PATCH {path}" in answer.json()["detail"]
                assert answer.status_code == 404 or answer.headers["Allow"] in answer.json()["detail"]
            assert (await client.patch("/mcp")).json()["detail"]
            assert "no session" in (await client.delete("/mcp")).json()["error"]["message"]
            crashed = await client.get("/health")
            assert crashed.status_code == 500 and "the reason" in crashed.json()["detail"]

    run(check)


def test_a_body_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", 1000)

    async def check() -> None:
        async with asked() as (_, client):
            for path in ("/reset", "/step"):
                answer = await client.post(path, content=b" " * 1001)
                assert answer.status_code == 413
                assert (await client.post(path, content=b" " * 998 + b"{}")).status_code != 413

    run(check)


def test_requests_without_a_connection_take_room_too() -> None:
    async def check() -> None:
        async with asked(max_concurrent_envs=1) as (url, client), RemoteEnvironment(url) as environment:
            await environment.reset(1)
            answer = await client.post("/reset", json={})
            assert (answer.status_code, len(MADE)) == (503, 1)
            assert "All 1 environments are taken" in answer.text

    run(check)


def test_an_open_address_needs_a_key() -> None:
    for start in (
        lambda: EnvServer("tests.rollout.environments.test_env_door:Echo", host="0.0.0.0"),
        lambda: serve(
            EnvServerArgs("tests.rollout.environments.test_env_door:Echo", host="0.0.0.0", port=0), None, print
        ),
    ):
        with pytest.raises(BadRequestError, match=r"Refusing to bind 0.0.0.0 without a key.*VERL_ENV_API_KEY"):
            start()
