"""What `fakes` assumes about servers, at genuine fronts over fake schedulers: sessions, keys and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.restartable_server import Server
from tests.fleet.fakes import FakeServer, Running, router_of, run
from tests.fleet.test_sessions import WAYS, turn

API, ADMIN = "the-api-key", "the-admin-key"
OWNER = {"authorization": f"Bearer {API}"}


def fronts(folder: Path, **settings: Any) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(2):
            server = Server(folder)
            stack.callback(server.stop)
            server.stop()
            server.start(**settings)
            made.append(server)
        yield made


@pytest.fixture(scope="module")
def keyed(text_folder: Path) -> Iterator[list[Server]]:
    yield from fronts(text_folder, api_key=API, admin_api_key=ADMIN)


@pytest.fixture(scope="module")
def keyless(text_folder: Path) -> Iterator[list[Server]]:
    yield from fronts(text_folder)


@contextlib.asynccontextmanager
async def routed(servers: list[Server], key: str | None = None, **options: Any) -> AsyncIterator[Running]:
    stands = [FakeServer(url=server.url, api_key=key) for server in servers]
    async with router_of(stands, serve_loaded_weights=True, **options) as fleet:
        yield fleet


@pytest.mark.parametrize("way", [way for way in WAYS if way != "large"])
def test_a_session_is_found_after_a_restart_of_the_router(keyed: list[Server], way: str) -> None:
    async def scenario() -> None:
        async with routed(keyed, API) as fleet:
            made = [await fleet.post("/sessions", {}, headers=OWNER) for _ in range(4)]
            assert {each.status_code for each in made} == {201} and {fleet.at(each) for each in made} == {0, 1}
        async with routed(keyed, API) as fleet:
            for each in made:
                answer = await turn(fleet, way, each.json()["id"], each.json()["key"])
                assert fleet.at(answer) == fleet.at(each), (way, answer.status_code, answer.text)
                assert answer.status_code == 200, (way, answer.text)

    run(scenario())


def test_a_session_that_no_front_has(keyed: list[Server]) -> None:
    async def scenario() -> None:
        async with routed(keyed, API, hold_seconds=0.2) as fleet:
            key = "vs-" + "x" * 43
            for way, status in (("header", 401), ("x-api-key", 401), ("path", 401), ("params", 404), ("packed", 404)):
                answer = await turn(fleet, way, "nobody", key)
                assert answer.status_code == status and key not in answer.text, (way, answer.text)
            assert (await fleet.get("/sessions/nobody", headers=OWNER)).status_code == 404
            assert (await fleet.post("/close_session", {"session_id": "nobody"}, headers=OWNER)).status_code == 200

    run(scenario())


def test_names_exist_once_and_lists_are_merged(keyed: list[Server]) -> None:
    async def scenario() -> None:
        async with routed(keyed, API) as fleet:
            names = [f"listed-{number}" for number in range(5)]
            for name in names:
                assert (await fleet.post("/sessions", {"id": name}, headers=OWNER)).status_code == 201
        async with routed(keyed, API) as fleet:
            for name in names:
                assert (await fleet.post("/sessions", {"id": name}, headers=OWNER)).status_code == 409
                assert (await fleet.post("/open_session", {"session_id": name}, headers=OWNER)).status_code == 400
            found: list[str] = []
            query: dict[str, Any] = {"limit": 2}
            while query.get("after", "") is not None:
                page = (await fleet.get("/sessions", params=query, headers=OWNER)).json()
                found += [each["id"] for each in page["sessions"]]
                query["after"] = page["next"]
            assert len(found) == len(set(found)) and set(names) <= set(found)
            for name in names:
                assert (await fleet.client.delete(f"/sessions/{name}", headers=OWNER)).status_code == 200
                assert (await fleet.get(f"/sessions/{name}", headers=OWNER)).status_code == 404

    run(scenario())


def test_sglang_sessions_without_keys(keyless: list[Server]) -> None:
    async def scenario() -> None:
        async with routed(keyless) as fleet:
            opened = [await fleet.post("/open_session", {"session_id": f"open-{number}"}) for number in range(4)]
            assert {each.status_code for each in opened} == {200} and {fleet.at(each) for each in opened} == {0, 1}
        async with routed(keyless, hold_seconds=0.2) as fleet:
            for number, each in enumerate(opened):
                for _ in range(2):
                    answer = await turn(fleet, "params", f"open-{number}", "")
                    assert fleet.at(answer) == fleet.at(each) and answer.status_code == 200, answer.text
            assert (await turn(fleet, "params", "nobody", "")).status_code == 404
            page = await fleet.post(
                "/generate", {"text": "a", "session_params": {"id": "open-0"}}, headers={"sec-fetch-site": "cross-site"}
            )
            assert page.status_code == 400, "a page of another origin owns no session"

    run(scenario())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("key", [None, "wrong", API, ADMIN])
def test_the_servers_judge_keys_that_pass(keyed: list[Server], key: str | None, host: str) -> None:
    async def scenario() -> None:
        async with routed(keyed, API, host=host, allow_unauthenticated=True) as fleet:
            headers = {} if key is None else {"x-api-key": key}
            is_owner, is_admin = key in (API, ADMIN), key == ADMIN
            assert (await fleet.post("/generate", {"text": "a"}, headers=headers)).status_code == (
                200 if is_owner else 401
            )
            assert (await fleet.post("/pause_generation", headers=headers)).status_code == (200 if is_admin else 401)
            assert (await fleet.post("/continue_generation", headers=headers)).status_code == (200 if is_admin else 401)
            aborted = await fleet.post("/abort_request", {"abort_all": True}, headers=headers)
            assert aborted.status_code == (200 if is_admin else 401)
            created = await fleet.post("/sessions", {}, headers=headers)
            assert created.status_code == (201 if is_owner else 401)
            named = await fleet.post("/abort_request", {"rid": "nobody"}, headers=headers)
            assert named.status_code == (200 if is_owner else 401)

    run(scenario())


@pytest.mark.parametrize("headers", [{}, {"content-encoding": "gzip"}])
@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"\x1f\x8b\x08\x00", b"[" * 10**5])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"])
def test_a_body_that_is_refused_directly_is_refused_alike(
    keyless: list[Server], path: str, body: bytes, headers: dict[str, str]
) -> None:
    async def scenario() -> None:
        async with routed(keyless) as fleet:
            async with httpx.AsyncClient() as direct:
                theirs = await direct.post(keyless[0].url + path, content=body, headers=headers)
            ours = await fleet.client.post(path, content=body, headers=headers)
            assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)
            assert ours.status_code == 400
            kept = {name: value for name, value in theirs.headers.items() if name not in ("date", "x-verl-instance")}
            assert kept.items() <= dict(ours.headers).items()

    run(scenario())
