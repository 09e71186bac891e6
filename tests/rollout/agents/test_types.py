"""The clients that an agent gets from its session."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx
import pytest

from verl_server.engine import http_clients
from verl_server.rollout.agents.types import AgentSession

KINDS = ("http", "openai", "anthropic")
SESSION = AgentSession("vs-1", "http://127.0.0.1:9/s/vs-1/v1", "http://127.0.0.1:9/s/vs-1", "key")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list that grows by each loading of certificates."""
    made: list[Any] = []
    load = ssl.create_default_context

    def create(*args: Any, **kwargs: Any) -> ssl.SSLContext:
        made.append(args)
        return load(*args, **kwargs)

    monkeypatch.setattr(ssl, "create_default_context", create)
    http_clients.certificates.cache_clear()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_certificates_are_loaded_once_for_all_clients(kind: str, loaded: list[Any]) -> None:
    if kind != "http":
        pytest.importorskip(kind)
    for _ in range(3):
        asyncio.run(getattr(SESSION, kind)().__aenter__())
    assert len(loaded) == 1


def test_a_client_of_ones_own_is_kept() -> None:
    pytest.importorskip("openai")
    own = httpx.AsyncClient(verify=False)
    assert SESSION.openai(http_client=own)._client is own


def test_the_session_client_sends_the_key() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200)

    async def call() -> None:
        async with SESSION.http(transport=httpx.MockTransport(answer), headers={"X-Own": "1"}) as client:
            await client.post("/chat/completions")

    asyncio.run(call())
    assert str(seen[0].url) == "http://127.0.0.1:9/s/vs-1/v1/chat/completions"
    assert (seen[0].headers["authorization"], seen[0].headers["x-own"]) == ("Bearer key", "1")


@pytest.mark.parametrize("kind", KINDS)
def test_no_proxy_is_asked_for_the_sessions_server(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "http":
        pytest.importorskip(kind)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    client = getattr(SESSION, kind)()
    assert not getattr(client, "_client", client)._mounts
