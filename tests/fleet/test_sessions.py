"""A session stays on its server: learned when it is created, asked for when it is not known, never guessed."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest

from tests.fleet.fakes import FakeServer, Received, Running, answered, refused, router_of, run, running
from verl_server.fleet.recent import Recent

API = "the-api-key"
OWNER = {"authorization": f"Bearer {API}"}


def three(**settings: Any) -> list[FakeServer]:
    return [FakeServer(api_key=API, **settings) for _ in range(3)]


def key_of(number: int) -> str:
    return f"vs-{number:0>43}"


def named(name: str) -> dict[str, str]:
    return OWNER | {"x-session-id": name}


async def created(fleet: Running, **body: Any) -> tuple[int, dict[str, Any]]:
    """Create a session through the router. Return its server and the answer."""
    answer = await fleet.post("/sessions", body, headers=OWNER)
    assert answer.status_code == 201, answer.text
    return fleet.at(answer), answer.json()


def generations(servers: list[FakeServer]) -> list[int]:
    return [sum("generate" in path or "chat" in path for path in server.paths) for server in servers]


WAYS = ["header", "x-api-key", "path", "name", "params", "packed", "large"]


async def turn(fleet: Running, way: str, name: str, key: str) -> Any:
    """Generate in a session, which the request names in one of several ways."""
    chat = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}
    match way:
        case "header":
            return await fleet.post("/v1/chat/completions", chat, headers={"authorization": f"Bearer {key}"})
        case "x-api-key":
            return await fleet.post("/v1/messages", chat, headers={"x-api-key": key})
        case "path":
            return await fleet.post(f"/s/{key}/v1/chat/completions", chat)
        case "name":
            return await fleet.post("/generate", {"text": "a"}, headers=named(name))
        case "packed":
            ids = struct.pack("<60i", *range(60))
            body = ids + json.dumps({"session_params": {"id": name}}).encode()
            return await fleet.post("/generate", body, headers=OWNER | {"x-verl-prompt-bytes": str(len(ids))})
        case _:
            body: dict[str, Any] = {"text": "a", "session_params": {"id": name}}
            if way == "large":  # the name is neither at the beginning nor at the end
                body |= {"text": "a" * 3 * 2**20, "sampling_params": {"stop": "b" * 70_000}}
            return await fleet.post("/generate", body, headers=OWNER)


@pytest.mark.parametrize("way", WAYS)
def test_a_session_that_was_created_through_the_router_is_known(way: str) -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            made = [await created(fleet) for _ in range(6)]
            assert {at for at, _ in made} == {0, 1, 2}
            for server in servers:
                server.received.clear()
            for at, session in made:
                answer = await turn(fleet, way, session["id"], session["key"])
                assert answer.status_code == 200 and fleet.at(answer) == at, (way, answer.text)
            asked = [path for server in servers for path in server.paths if path.startswith("/sessions/")]
            assert asked == [], "nobody was asked"

    run(scenario())


@pytest.mark.parametrize("way", WAYS)
def test_a_session_that_the_router_has_not_seen_is_asked_for(way: str) -> None:
    async def scenario() -> None:
        servers = three()
        for number, server in enumerate(servers):
            server.sessions[f"ses{number}"] = key_of(number)
        async with running(*servers) as fleet:
            for number in range(3):
                for _ in range(2):
                    answer = await turn(fleet, way, f"ses{number}", key_of(number))
                    assert answer.status_code == 200 and fleet.at(answer) == number, answer.text
            asked = [path for path in servers[0].paths if path.startswith("/sessions/") or path == "/v1/models"]
            assert len(asked) == 3, "each session is asked for once"

    run(scenario())


@pytest.mark.parametrize(
    ("way", "status"), [("header", 401), ("x-api-key", 401), ("path", 401), ("params", 404), ("packed", 404)]
)
def test_an_unknown_session_is_refused_only_if_every_server_says_so(way: str, status: int) -> None:
    async def scenario() -> None:
        servers = three()
        for server in servers:
            server.answers["/generate"] = refused(404, "no such session", "SessionNotFoundError")
        async with running(*servers, hold_seconds=0.2) as fleet:
            answer = await turn(fleet, way, "gone", key_of(9))
            assert answer.status_code == status, answer.text
            await servers[1].stop()
            answer = await turn(fleet, way, "other", key_of(8))
            assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
            assert servers[1].url in answer.text and key_of(8) not in answer.text
            await servers[1].start()
            await fleet.until_states("healthy", "healthy", "healthy")
            servers[1].sessions["other"] = key_of(8)
            servers[1].answers.clear()
            answer = await turn(fleet, way, "other", key_of(8))
            assert answer.status_code == 200 and fleet.at(answer) == 1, "what could not be found out is asked again"

    run(scenario())


def test_the_owner_of_a_session_is_away_after_a_restart_of_the_router() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            at, session = await created(fleet, id="mine")
            await servers[at].stop()
            async with router_of(servers, serve_loaded_weights=True, hold_seconds=0.2) as restarted:
                for way in WAYS:
                    answer = await turn(restarted, way, "mine", session["key"])
                    assert answer.status_code == 503 and answer.headers["retry-after"], (way, answer.text)
                assert generations(servers) == [0, 0, 0]
                await servers[at].start()
                await restarted.until_states("healthy", "healthy", "healthy")
                for way in WAYS:
                    answer = await turn(restarted, way, "mine", session["key"])
                    assert answer.status_code == 200 and restarted.at(answer) == at, (way, answer.text)

    run(scenario())


def test_a_hint_is_served_while_a_server_is_away() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            await servers[2].stop()
            await fleet.fleet.look_now()
            answers = [await fleet.post("/generate", headers=named("hint")) for _ in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            assert len({fleet.at(answer) for answer in answers}) == 1, "the hint keeps its server"

    run(scenario())


def test_a_caller_with_a_wrong_key_does_not_hide_a_session_from_its_owner() -> None:
    async def scenario() -> None:
        servers = three()
        servers[2].sessions["mine"] = key_of(2)
        async with running(*servers) as fleet:
            for wrong in ("wrong", "vs-wrong"):
                sent = {"authorization": f"Bearer {wrong}", "x-session-id": "mine"}
                assert (await fleet.post("/generate", headers=sent)).status_code == 401
            for _ in range(3):
                answer = await fleet.post("/generate", headers=named("mine"))
                assert answer.status_code == 200 and fleet.at(answer) == 2

    run(scenario())


def test_callers_that_ask_at_the_same_time_share_the_question() -> None:
    async def scenario() -> None:
        servers = three()
        servers[1].sessions["mine"] = key_of(1)
        async with running(*servers) as fleet:
            answers = await asyncio.gather(*(fleet.post(f"/s/{key_of(1)}/v1/messages") for _ in range(20)))
            assert {fleet.at(answer) for answer in answers} == {1}
            assert servers[0].paths == ["/v1/models"] and servers[1].paths.count("/v1/models") == 1

    run(scenario())


def test_one_caller_that_leaves_does_not_end_the_question_of_the_others() -> None:
    async def scenario() -> None:
        servers = three()
        servers[1].sessions["mine"] = key_of(1)
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow(got: Received) -> Any:
            asked.set()
            await go_on.wait()
            return answered({})

        servers[1].answers["/v1/models"] = slow
        async with running(*servers) as fleet:
            places = fleet.router.sessions
            first = asyncio.ensure_future(places.of_key(key_of(1).encode()))
            await asked.wait()
            second = asyncio.ensure_future(places.of_key(key_of(1).encode()))
            await asyncio.sleep(0)
            first.cancel()
            go_on.set()
            assert await second == servers[1].url

    run(scenario())


def test_random_keys_are_asked_for_once() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            for _ in range(5):
                assert (await fleet.post(f"/s/{key_of(7)}/v1/messages")).status_code == 401
            assert servers[0].paths == ["/v1/models"]

    run(scenario())


def test_a_session_id_exists_once_in_the_fleet() -> None:
    async def scenario() -> None:
        servers = three()
        servers[2].sessions["old"] = key_of(2)
        async with running(*servers) as fleet:
            await created(fleet, id="new")
            for name in ("old", "new"):
                for _ in range(4):
                    again = await fleet.post("/sessions", {"id": name}, headers=OWNER)
                    assert again.status_code == 409, name
                    opened = await fleet.post("/open_session", {"session_id": name}, headers=OWNER)
                    assert opened.status_code == 400, name
            assert sum("new" in server.sessions for server in servers) == 1

    run(scenario())


def test_a_session_that_was_deleted_is_forgotten() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            at, session = await created(fleet, id="mine")
            assert (await fleet.client.delete("/sessions/mine", headers=OWNER)).status_code == 200
            assert len(fleet.router.sessions) == 0 and not servers[at].sessions
            assert (await fleet.get("/sessions/mine", headers=OWNER)).status_code == 404
            assert (await turn(fleet, "header", "mine", session["key"])).status_code == 401
            assert (await fleet.client.delete("/sessions/mine", headers=OWNER)).status_code == 404

    run(scenario())


def test_a_delete_that_is_refused_forgets_nothing() -> None:
    async def scenario() -> None:
        async with running(*three()) as fleet:
            await created(fleet, id="mine")
            assert (await fleet.client.delete("/sessions/mine", headers={"x-api-key": "x"})).status_code == 401
            assert len(fleet.router.sessions) == 1

    run(scenario())


def test_sglang_sessions_open_and_close_on_one_server() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            opened = [await fleet.post("/open_session", {"session_id": f"s{n}"}, headers=OWNER) for n in range(4)]
            for number, answer in enumerate(opened):
                for _ in range(2):
                    assert fleet.at(await turn(fleet, "params", f"s{number}", "")) == fleet.at(answer)
                closed = await fleet.post("/close_session", {"session_id": f"s{number}"}, headers=OWNER)
                assert closed.status_code == 200 and fleet.at(closed) == fleet.at(answer)
            assert [server.sessions for server in servers] == [{}, {}, {}]

    run(scenario())


def test_the_end_of_a_hint_reaches_all_servers() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            assert (await fleet.post("/close_session", {"session_id": "hint"}, headers=OWNER)).status_code == 200
            assert all(server.paths[-1] == "/close_session" for server in servers)

    run(scenario())


def test_sglang_sessions_of_servers_without_keys_are_found_by_trying() -> None:
    """Such servers answer no question about sessions (403)."""

    async def scenario() -> None:
        servers = [FakeServer() for _ in range(3)]

        def of(server: FakeServer) -> Any:
            def generate(got: Received) -> Any:
                name = json.loads(got.body)["session_params"]["id"]
                if name in server.sessions:
                    return answered({})
                return refused(404, f"There is no session {name}.", "SessionNotFoundError")

            return generate

        for server in servers:
            server.answers["/generate"] = of(server)
        servers[2].sessions["mine"] = ""
        async with running(*servers, hold_seconds=0.2) as fleet:
            body = {"session_params": {"id": "mine"}}
            assert [fleet.at(await fleet.post("/generate", body)) for _ in range(4)] == [2] * 4
            assert generations(servers)[2] == 4 and sum(generations(servers)) <= 6, "the router remembers the server"
            answer = await fleet.post("/generate", {"session_params": {"id": "nobody's"}})
            assert answer.status_code == 404
            await servers[2].stop()
            await fleet.fleet.look_now()
            answer = await fleet.post("/generate", body)
            assert answer.status_code == 503 and servers[2].url in answer.text, answer.text

    run(scenario())


@pytest.mark.parametrize("body", [b'{"id": "\\ud800"}', b'{"id": 7}', b'{"id": ""}', b'{"id": "a/b?c"}', b"[", b""])
def test_odd_names_are_the_servers_matter(body: bytes) -> None:
    async def scenario() -> None:
        servers = three()
        for server in servers:
            server.answers["/sessions"] = refused(400, "the id is odd", "BadRequestError")
        async with running(*servers) as fleet:
            assert (await fleet.post("/sessions", body, headers=OWNER)).status_code == 400

    run(scenario())


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 100])
def test_the_pages_of_all_servers_are_one_list(limit: int) -> None:
    async def scenario() -> None:
        servers = three()
        names = [[f"a{n}" for n in range(3)], [], [f"c{n}" for n in range(3)]]
        for server, given in zip(servers, names, strict=True):
            server.sessions |= dict.fromkeys(given, "vs-x")
        async with running(*servers) as fleet:
            found: list[str] = []
            query: dict[str, Any] = {"limit": limit}
            while True:
                page = (await fleet.get("/sessions", params=query, headers=OWNER)).json()
                assert len(page["sessions"]) <= limit
                found += [each["id"] for each in page["sessions"]]
                if page["next"] is None:
                    break
                query["after"] = page["next"]
            assert found == [*names[0], *names[2]]

    run(scenario())


def test_a_list_is_whole_or_refused() -> None:
    async def scenario() -> None:
        servers = three()
        async with running(*servers) as fleet:
            for limit in ("0", "-1", "x", "1e3"):
                refusal = await fleet.get("/sessions", params={"limit": limit}, headers=OWNER)
                assert refusal.status_code == 400 and "limit" in refusal.text, limit
            assert (await fleet.get("/sessions")).status_code == 401
            await servers[1].stop()
            away = await fleet.get("/sessions", headers=OWNER)
            assert away.status_code == 503 and away.headers["retry-after"]
            while fleet.fleet.members[1].state != "dead":
                await fleet.fleet.look_now()
            fleet.fleet.retire(fleet.fleet.members[1], is_retired=True)
            assert (await fleet.get("/sessions", headers=OWNER)).status_code == 200

    run(scenario())


def test_names_are_bounded() -> None:
    recent = Recent(3)
    for name in "abcad":
        recent.put(name, name)
    assert [recent.get(name) for name in "abcd"] == ["a", None, "c", "d"] and len(recent) == 3
    recent.drop("a")
    recent.drop("nobody")
    assert recent.get("a") is None
