"""Nothing reaches a server that the caller did not prove: router keys x servers' keys x caller's key x access."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.fakes import FakeServer, run, running
from verl_server.errors import BadRequestError, ForbiddenError, UnauthorizedError
from verl_server.fleet.keys import Caller, RouterKeys
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.options import RouterArgs

API, ADMIN, SERVERS_API, SERVERS_ADMIN = "router-api", "router-admin", "servers-api", "servers-admin"
SESSION = "vs-" + "s" * 43
PASS, STRIP = None, b""
OPTIONS = {
    "api_key_file": API,
    "admin_api_key_file": ADMIN,
    "server_api_key_file": SERVERS_API,
    "server_admin_api_key_file": SERVERS_ADMIN,
}


def keys(tmp_path: Path, *options: str, host: str = "127.0.0.1") -> RouterKeys:
    files: dict[str, Any] = {}
    for option in options:
        files[option] = tmp_path / option
        files[option].write_text(OPTIONS[option])
    return RouterKeys(RouterArgs(server=("h:1",), host=host, allow_unauthenticated=True, **files))


def scope(*sent: str, **headers: str) -> dict[str, Any]:
    first, rest = ([f"Bearer {sent[0]}"], sent[1:]) if sent else ([], ())
    given = [(b"authorization", each.encode()) for each in first] + [(b"x-api-key", each.encode()) for each in rest]
    given += [(b"host", b"127.0.0.1:30080")] if "host" not in headers else []
    given += [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "method": "POST", "path": "/x", "headers": given}


def operation(access: str, in_session: bool = False) -> RoutedOperation:
    return RoutedOperation(("/x",), ("POST",), "sglang", access, in_session)


NONE: tuple[str, ...] = ()
SERVERS = ("server_api_key_file", "server_admin_api_key_file")
BOTH = ("api_key_file", "admin_api_key_file", *SERVERS)
ACCESSES = ("open", "key", "control", "owner", "local_owner")
#                 options, caller's keys             -> what a server gets, by access ("no": refused)
MATRIX: list[tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...]]] = [
    (NONE, (), (PASS, PASS, PASS, PASS, PASS)),
    (NONE, ("any",), (PASS, PASS, PASS, PASS, PASS)),
    (SERVERS, (), (PASS, PASS, PASS, PASS, PASS)),
    (SERVERS, (SERVERS_API,), (PASS, PASS, PASS, PASS, PASS)),
    (BOTH, (), (STRIP, "no", "no", "no", "no")),
    (BOTH, ("wrong",), (STRIP, "no", "no", "no", "no")),
    (BOTH, (SERVERS_API,), (STRIP, "no", "no", "no", "no")),
    (BOTH, (SERVERS_ADMIN,), (STRIP, "no", "no", "no", "no")),
    (BOTH, (API,), (b"servers-api", b"servers-api", "no", b"servers-api", b"servers-api")),
    (BOTH, (ADMIN,), (b"servers-admin",) * 5),
    (BOTH, ("wrong", ADMIN), (b"servers-admin",) * 5),
    (BOTH, (API, ADMIN), (b"servers-admin",) * 5),
    (BOTH, (SESSION,), (SESSION.encode(), "no", "no", "no", "no")),
    (BOTH, (SESSION, ADMIN), (SESSION.encode(), "no", "no", "no", "no")),
    (("api_key_file", *SERVERS), (API,), (b"servers-api",) * 5),
    (("api_key_file", *SERVERS), (), (STRIP, "no", "no", "no", "no")),
    (("admin_api_key_file", *SERVERS), (), (STRIP, PASS, "no", "no", "no")),
    (("admin_api_key_file", *SERVERS), (SERVERS_API,), (STRIP, PASS, "no", "no", "no")),
    (("admin_api_key_file", *SERVERS), (ADMIN,), (b"servers-admin",) * 5),
    (("api_key_file", "admin_api_key_file"), (ADMIN,), (STRIP,) * 5),
    (("api_key_file", "admin_api_key_file"), (API,), (STRIP, STRIP, "no", STRIP, STRIP)),
    (("api_key_file", "admin_api_key_file", "server_api_key_file"), (ADMIN,), (b"servers-api",) * 5),
    (("api_key_file", "server_admin_api_key_file"), (API,), (STRIP,) * 5),
]


@pytest.mark.parametrize(("options", "sent", "expected"), MATRIX)
def test_what_a_server_gets(
    tmp_path: Path, options: tuple[str, ...], sent: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    rules = keys(tmp_path, *options)
    for access, attached in zip(ACCESSES, expected, strict=True):
        if attached == "no":
            with pytest.raises(ForbiddenError) as raised:
                rules.caller(scope(*sent), operation(access), None)
            assert not any(key in str(raised.value) for key in (*OPTIONS.values(), SESSION)), access
        else:
            assert rules.caller(scope(*sent), operation(access), None).attached == attached, access


@pytest.mark.parametrize("options", [BOTH, ("api_key_file",), ("admin_api_key_file",)])
def test_a_session_key_passes_alone(tmp_path: Path, options: tuple[str, ...]) -> None:
    rules, turn = keys(tmp_path, *options), operation("key", in_session=True)
    for sent in [(SESSION,), (SESSION, ADMIN), (SESSION, API), (ADMIN, SESSION), ("wrong", SESSION)]:
        assert rules.caller(scope(*sent), turn, None) == Caller(SESSION.encode()), sent
    for sent in [(), (ADMIN,), (API,), (SESSION,)]:
        assert rules.caller(scope(*sent), turn, SESSION.encode()) == Caller(b""), sent
    for sent, path_key in [((SESSION, "vs-other"), None), ((SESSION,), b"vs-other"), ((SESSION,), b"")]:
        with pytest.raises(UnauthorizedError, match="several session keys"):
            rules.caller(scope(*sent), turn, path_key)
    for access in ("key", "control", "owner", "local_owner"):
        with pytest.raises(ForbiddenError, match="own session only"):
            rules.caller(scope(ADMIN), operation(access), SESSION.encode())


FOREIGN = {
    "cross-site": ({"sec_fetch_site": "cross-site"}, 403),
    "host": ({"host": "evil.example"}, 403),
    "origin": ({"origin": "http://evil.example"}, 403),
    "form": ({"content_type": "text/plain"}, 415),
}


@pytest.mark.parametrize("case", list(FOREIGN))
@pytest.mark.parametrize("options", [NONE, BOTH])
def test_requests_of_web_pages(tmp_path: Path, options: tuple[str, ...], case: str) -> None:
    headers, status = FOREIGN[case]
    rules = keys(tmp_path, *options)
    sent = scope(ADMIN, **headers)
    for access in ("control", "owner", "local_owner"):
        with pytest.raises(ForbiddenError) as raised:
            rules.caller(sent, operation(access), None)
        assert raised.value.status_code == status
    with pytest.raises(ForbiddenError):
        rules.check_own_control(sent)
    assert rules.caller(sent, operation("key"), None).is_foreign == (options == NONE)


def test_a_router_beyond_loopback_opens_no_session_without_a_key(tmp_path: Path) -> None:
    rules = keys(tmp_path, host="0.0.0.0")
    with pytest.raises(ForbiddenError, match="loopback only"):
        rules.caller(scope(), operation("local_owner"), None)
    for access in ("control", "owner", "local_owner"):
        assert rules.caller(scope("k"), operation(access), None) == Caller(None), "the servers check the key"
    assert rules.caller(scope(), operation("key"), None).is_foreign


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        (NONE, None),
        (SERVERS, SERVERS_ADMIN),
        (("server_api_key_file",), SERVERS_API),
        (("api_key_file", *SERVERS), API),
        (BOTH, ADMIN),
    ],
)
def test_who_may_commit_and_retire(tmp_path: Path, options: tuple[str, ...], needed: str | None) -> None:
    rules = keys(tmp_path, *options)
    for sent in (None, "wrong", SESSION, *OPTIONS.values()):
        given = scope(sent) if sent else scope()
        if needed is None or sent == needed:
            rules.check_own_control(given)
        else:
            with pytest.raises(UnauthorizedError):
                rules.check_own_control(given)


@pytest.mark.parametrize("option", list(OPTIONS))
@pytest.mark.parametrize("content", [None, "", "two keys", "ü"])
def test_key_files_that_hold_no_key(tmp_path: Path, option: str, content: str | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    args: dict[str, Any] = {option: file}
    with pytest.raises(BadRequestError, match="--" + option.replace("_", "-")):
        RouterKeys(RouterArgs(server=("h:1",), **args))


ABORTS = [
    ("/abort_request", {"rid": "x"}, False),
    ("/abort_request", {"rid": "", "abort_all": False}, False),
    ("/abort_request", {"abort_all": True}, True),
    ("/abort_request", {"rid": "x", "abort_all": 1}, True),
    ("/abort_requests", {"request_ids": ["x"]}, False),
    ("/abort_requests", {"request_ids": []}, True),
    ("/abort_requests", {}, True),
    ("/inference/v1/abort_requests", {}, False),
]


@pytest.mark.parametrize(("path", "body", "is_control"), ABORTS)
@pytest.mark.parametrize("servers_keys", [{}, {"api_key": SERVERS_API}])
def test_aborting_the_requests_of_others_needs_the_admin_key(
    tmp_path: Path, path: str, body: dict[str, Any], is_control: bool, servers_keys: dict[str, str]
) -> None:
    async def scenario() -> None:
        files = {name: tmp_path / name for name in ("api_key_file", "admin_api_key_file", "server_api_key_file")}
        for name, file in files.items():
            file.write_text(OPTIONS[name])
        servers = [FakeServer(**servers_keys) for _ in range(2)]
        async with running(*servers, **files) as fleet:
            plain = await fleet.post(path, body, headers={"authorization": f"Bearer {API}"})
            assert plain.status_code == (401 if is_control else 200), plain.text
            assert [path in server.paths for server in servers] == [not is_control] * 2
            assert (await fleet.post(path, body, headers={"x-api-key": ADMIN})).status_code == 200
            page = {"x-api-key": ADMIN, "sec-fetch-site": "cross-site"}
            assert (await fleet.post(path, body, headers=page)).status_code == (403 if is_control else 200)

    run(scenario())


def test_a_made_up_session_key_opens_nothing_on_servers_without_keys(tmp_path: Path) -> None:
    async def scenario() -> None:
        files = {name: tmp_path / name for name in ("api_key_file", "admin_api_key_file")}
        for name, file in files.items():
            file.write_text(OPTIONS[name])
        server = FakeServer()
        server.answers["/s/x"] = server.answers["/v1/models"] = (401, {}, b"{}")
        async with running(server, **files) as fleet:
            for headers in ({"authorization": f"Bearer {SESSION}"}, {"x-api-key": SESSION}):
                for path, status in (("/generate", 401), ("/pause_generation", 403), ("/tokenize", 403)):
                    assert (await fleet.post(path, headers=headers)).status_code == status, path
                assert (await fleet.get("/sessions", headers=headers)).status_code == 403
            assert (await fleet.post(f"/s/{SESSION}/pause_generation")).status_code == 403
            assert (await fleet.post(f"/s/{SESSION}/generate")).status_code == 401
            assert set(server.paths) <= {"/v1/models"}

    run(scenario())


def test_a_page_owns_no_session_on_servers_without_keys() -> None:
    async def scenario() -> None:
        server = FakeServer()
        async with running(server) as fleet:
            for headers, _ in FOREIGN.values():
                sent = {name.replace("_", "-"): value for name, value in headers.items()}
                await fleet.post("/generate", {"session_params": {"id": "x"}}, headers=sent)
                assert server.received[-1].headers["sec-fetch-site"] == "cross-site"
            await fleet.post("/generate", {"session_params": {"id": "x"}}, headers={"sec-fetch-site": "same-origin"})
            assert "sec-fetch-site" not in server.received[-1].headers

    run(scenario())


def test_keys_appear_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secrets = [*OPTIONS.values(), SESSION]

    async def scenario() -> None:
        files = {name: tmp_path / name for name in OPTIONS}
        for name, file in files.items():
            file.write_text(OPTIONS[name])
        servers = [FakeServer(api_key=SERVERS_API, admin_key=SERVERS_ADMIN) for _ in range(2)]
        async with running(*servers, hold_seconds=0.1, **files) as fleet:
            texts = []
            for key in secrets:
                for path in (
                    "/generate",
                    f"/s/{key}/v1/messages",
                    f"/nothing/{key}",
                    "/pause_generation",
                    "/fleet/commit",
                ):
                    for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {}):
                        answer = await fleet.post(f"{path}?key={SESSION}", headers=headers)
                        if key == SESSION or "/s/" not in path:
                            texts.append(answer.text.replace(f"/nothing/{key}", ""))
                        texts.append(json.dumps(dict(answer.headers)))
            await servers[0].stop()
            await servers[1].stop()
            for path in ("/generate", f"/s/{SESSION}/v1/messages", "/pause_generation"):
                texts.append((await fleet.post(path, headers={"x-api-key": ADMIN})).text)
            for path in ("/fleet", "/metrics"):
                for accept in ("application/json", "text/html"):
                    texts.append((await fleet.get(path, headers={"accept": accept})).text)
            texts += [record.getMessage() for record in caplog.records]
            for text in texts:
                assert not any(key in text for key in secrets), text

    with caplog.at_level(logging.DEBUG, logger="verl_server"):
        run(scenario())
