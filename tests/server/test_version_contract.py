"""A demand on the weight version over HTTP: in every dialect, as a field, a header and a session's default.

The fake scheduler serves the versions that a test names. tests/scheduler has the border between two versions.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.sessions.test_gate import OWNER, Server
from tests.server.test_error_shapes import check_shape, mounted
from tests.server.test_fields import BODIES, TEMPLATE
from tests.server.test_http_routes import events
from verl_server.errors import ServerStoppingError, ServerUnavailableError, VersionSupersededError
from verl_server.messages.io_struct import ControlReply, FinishReason, TokenizedGenerateReq
from verl_server.server.sessions.records import SessionRecord, decoded, payload
from verl_server.version_demand import ServedVersions

A, B = "aaaaaaaa", "bbbbbbbb"
V0, V1, V2, V3 = (f"{number}@{A}" for number in range(4))
MIN, EXACT = "X-Verl-Min-Weight-Version", "X-Verl-Exact-Weight-Version"
DIALECTS = {
    "/generate": "sglang",
    "/v1/completions": "openai",
    "/v1/chat/completions": "openai",
    "/v1/responses": "openai",
    "/v1/messages": "anthropic",
    "/inference/v1/generate": "vllm",
}
"""Every route that generates -> the shape of its errors."""
PATHS = pytest.mark.parametrize("path", DIALECTS)
RECORDED = [path for path in DIALECTS if path != "/inference/v1/generate"]
"""Routes that a session records."""


def serve(stack: Stack, *labels: str) -> None:
    """Make these labels the served ones, one after the other."""

    async def note() -> None:
        for label in labels:
            stack.manager.controls.versions.note(label)

    stack.manager.run_sync(note(), 20)
    stack.scheduler.version = labels[-1]


@pytest.fixture(scope="module")
def shared(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    stack = Stack(text_folder, chat_template=str(template), text_timeout=60.0, api_key="owner")
    yield stack
    stack.close()


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """A server that serves version 2 and served version 1, `free` and a version of another incarnation."""
    shared.scheduler.hold, shared.scheduler.script = False, None
    shared.scheduler.received.clear()
    shared.manager.controls.versions = ServedVersions("default")
    serve(shared, f"7@{B}", "free", V1, V2)
    return shared


def post(stack: Stack, path: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    return stack.post(path, BODIES[path] | fields, headers=OWNER | (headers or {}))


def demand(stack: Stack) -> str:
    """Return the demand in the last request that the scheduler received."""
    found = [m for m in stack.scheduler.received if isinstance(m, TokenizedGenerateReq)]
    return found[-1].weight_demand


def test_every_route_that_generates_is_in_the_table(stack: Stack) -> None:
    assert {each.path for each in mounted(stack) if each.generates} == DIALECTS.keys()


ACCEPTED = [
    ({}, {}, ""),
    ({"min_weight_version": V1}, {}, f">={V1}"),
    ({"min_weight_version": V2}, {}, f">={V2}"),
    ({"exact_weight_version": V2}, {}, V2),
    ({}, {MIN: V0}, f">={V0}"),
    ({}, {EXACT: V2}, V2),
    ({"min_weight_version": V1}, {EXACT: V1}, f">={V1}"),
    ({"exact_weight_version": V2}, {MIN: V3}, V2),
    ({"exact_weight_version": None, "min_weight_version": None}, {EXACT: V2}, V2),
]
"""(fields, headers, demand that the scheduler gets): the body wins over the headers."""


@PATHS
def test_a_satisfied_demand_reaches_the_scheduler(stack: Stack, path: str) -> None:
    for fields, headers, stated in ACCEPTED:
        answer = post(stack, path, headers, **fields)
        assert answer.status_code == 200, (fields, headers, answer.text)
        assert answer.headers["X-Verl-Weight-Version"] == V2
        assert demand(stack) == stated


UNSATISFIED = {
    "behind": [
        ({"min_weight_version": V3}, {}),
        ({"exact_weight_version": V3}, {}),
        ({"exact_weight_version": "never served"}, {}),
        ({}, {MIN: V3}),
        ({}, {EXACT: "1@cccccccc"}),
        ({"min_weight_version": V3}, {MIN: V1}),
    ],
    "superseded": [
        ({"exact_weight_version": V1}, {}),
        ({"exact_weight_version": V0}, {}),
        ({"exact_weight_version": "free"}, {}),
        ({"exact_weight_version": "default"}, {}),
        ({}, {EXACT: V1}),
        ({}, {MIN: f"8@{B}"}),
        ({"exact_weight_version": V1}, {EXACT: V2}),
    ],
}
CLASSES = {"behind": "VersionBehindError", "superseded": "VersionSupersededError"}


@PATHS
@pytest.mark.parametrize("verdict", UNSATISFIED)
def test_an_unsatisfied_demand_is_answered_409(stack: Stack, path: str, verdict: str) -> None:
    for fields, headers in UNSATISFIED[verdict]:
        for stream in (False, True):
            answer = post(stack, path, headers, stream=stream, **fields)
            case = fields, headers, answer.text
            assert answer.status_code == 409, case
            message = check_shape(DIALECTS[path], answer, case)
            assert f"the server serves {V2!r}" in message and repr({**headers, **fields}.popitem()[1]) in message, case
            assert answer.json()["error"]["code"] == f"weight_version_{verdict}", case
            assert answer.headers["X-Verl-Error"] == CLASSES[verdict]
            assert answer.headers["X-Verl-Weight-Version"] == V2
            retry = ("1", "true") if verdict == "behind" else (None, "false")
            assert (answer.headers.get("Retry-After"), answer.headers["x-should-retry"]) == retry, case
    assert not [m for m in stack.scheduler.received if isinstance(m, TokenizedGenerateReq)], "no work was done"


WRONG = [
    ({"min_weight_version": V1, "exact_weight_version": V2}, {}, "cannot both be set"),
    ({}, {MIN: V1, EXACT: V2}, f"{MIN} and {EXACT} cannot both be set"),
    ({"min_weight_version": "13"}, {}, "free labels have no order"),
    ({}, {MIN: "13"}, f"{MIN}: '13' is a free label, and free labels have no order"),
    ({"exact_weight_version": ""}, {}, "1 to 256 characters"),
    ({}, {EXACT: ""}, "1 to 256 characters"),
    ({"exact_weight_version": 3}, {}, "exact_weight_version"),
]


@PATHS
def test_a_wrong_demand_is_answered_400(stack: Stack, path: str) -> None:
    for fields, headers, message in WRONG:
        answer = post(stack, path, headers, **fields)
        assert answer.status_code == 400 and message in check_shape(DIALECTS[path], answer, fields), answer.text
        assert answer.headers["X-Verl-Weight-Version"] == V2


def test_labels_are_encoded_in_headers(stack: Stack) -> None:
    label = "50 % größer\r\nX-Injected: 1"
    serve(stack, label)
    encoded = "50%20%25%20gr%C3%B6%C3%9Fer%0D%0AX-Injected:%201"
    answer = post(stack, "/generate", {EXACT: encoded})
    assert answer.status_code == 200 and demand(stack) == label
    assert answer.headers["X-Verl-Weight-Version"] == encoded and "X-Injected" not in answer.headers


def test_other_routes_read_no_demand(stack: Stack) -> None:
    answer = stack.get("/model_info", headers=OWNER | {MIN: "13", EXACT: "x"})
    assert answer.status_code == 200 and "X-Verl-Weight-Version" not in answer.headers


def test_an_unauthorized_caller_learns_no_version(stack: Stack) -> None:
    answer = stack.post("/generate", BODIES["/generate"])
    assert answer.status_code == 401 and "X-Verl-Weight-Version" not in answer.headers


def test_while_the_weights_cannot_serve_the_scheduler_says_why(make_stack: MakeStack) -> None:
    stack = make_stack()
    asked = BODIES["/generate"] | {"exact_weight_version": V3}
    refusal: str | None = "The weights are torn."
    stack.scheduler.control = lambda req: ControlReply(id=req.id, success=True, weights_refusal=refusal)
    assert stack.post("/update_weight_version", {"new_version": V1}).status_code == 200
    assert stack.get("/weight_version").json()["accepts"] is False
    assert stack.post("/generate", asked).status_code == 200, "it reached the scheduler, and the fake refuses nothing"
    assert stack.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    assert stack.post("/generate", asked).status_code == 409, "it would wait for weights that may be others"
    assert stack.post("/continue_generation", {}).status_code == 200
    refusal = None
    assert stack.post("/update_weight_version", {"new_version": V1}).status_code == 200
    assert stack.get("/weight_version").json()["accepts"] is True
    assert stack.post("/generate", asked).status_code == 409


@pytest.mark.parametrize(("demanded", "requests"), [(V3, 2), (V1, 1)])
def test_openais_client_retries_what_may_come(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, demanded: str, requests: int
) -> None:
    """The package retries every 409 otherwise, also one that never changes."""
    answers: list[httpx.Response] = []
    waits: list[float] = []

    def answer(request: httpx.Request) -> httpx.Response:
        headers = {"content-type": "application/json", **OWNER}
        got = stack.request(request.method, request.url.path, content=request.content, headers=headers)
        answers.append(got)
        serve(stack, V3)
        return httpx.Response(got.status_code, headers=got.headers, content=got.content, request=request)

    monkeypatch.setattr("openai._base_client.time.sleep", waits.append)
    http = httpx.Client(transport=httpx.MockTransport(answer))
    with openai.OpenAI(base_url="http://localhost/v1", api_key="x", http_client=http, max_retries=5) as client:
        ask = functools.partial(client.completions.create, model="m", prompt="hi", max_tokens=2)
        if requests == 1:
            with pytest.raises(openai.ConflictError):
                ask(extra_body={"exact_weight_version": demanded})
        else:
            ask(extra_body={"exact_weight_version": demanded})
    assert [each.status_code for each in answers] == [409, 200][:requests]
    assert waits == [1.0] * (requests - 1)


# -- the border ------------------------------------------------------------------------------------------------


def end_at_border(stack: Stack, tokens: list[list[int]]) -> None:
    """Send these tokens of the requests that the scheduler has, and then their end under version 3."""
    reqs = stack.scheduler.wait_for(TokenizedGenerateReq, len(tokens))
    running = [stack.scheduler.running.pop(req.rid) for req in reqs]
    for each, ids in zip(running, tokens, strict=True):
        if ids:
            stack.scheduler.emit(each, ids, None)
    stack.scheduler.version = V3
    for each in running:
        error = VersionSupersededError("The request demands exact_weight_version, and another version is served.")
        stack.scheduler.emit(each, [], FinishReason.refused(error, at_border=True))


def held(stack: Stack, path: str, tokens: list[list[int]], **fields: Any) -> httpx.Response:
    """Return the answer to a request whose samples end at a border after these tokens."""
    stack.scheduler.hold = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, stack, path, exact_weight_version=V2, **fields)
        end_at_border(stack, tokens)
        return answer.result(20)


TEXT = [70, 71]


@PATHS
def test_an_output_that_ends_at_a_border_is_complete(stack: Stack, path: str) -> None:
    answer = held(stack, path, [TEXT])
    body = answer.json()
    assert answer.status_code == 200 and answer.headers["X-Verl-Weight-Version"] == V3, "at the start of the answer"
    versions = [{"version": V2, "start": 0, "end": 2}]
    match path:
        case "/generate":
            meta = body["meta_info"]
            reason = meta["finish_reason"]
            assert (reason["type"], reason["status_code"]) == ("abort", 409)
            assert "exact_weight_version" in reason["message"]
            assert meta["weight_versions"] == versions and body["output_ids"] == TEXT
            assert meta["weight_version"] == meta["weight_version_start"] == V2
        case "/v1/completions" | "/v1/chat/completions":
            choice = body["choices"][0]
            assert choice["finish_reason"] == "abort" and choice["weight_versions"] == versions
            assert body["metadata"] == {"weight_version": V2, "weight_version_start": V2}
        case "/v1/responses":
            assert body["status"] == "cancelled"
            assert body["metadata"] == {"weight_version": V2, "weight_version_start": V2}
        case "/v1/messages":
            assert body["stop_reason"] == "pause_turn" and body["usage"]["output_tokens"] == 2
        case _:
            choice = body["choices"][0]
            assert choice["finish_reason"] == "abort" and choice["weight_versions"] == versions
    assert body.get("usage", {}).get("completion_tokens", 2) == 2


@PATHS
def test_without_a_token_there_is_an_error(stack: Stack, path: str) -> None:
    answer = held(stack, path, [[]])
    assert answer.status_code == 409 and answer.headers["x-should-retry"] == "false"
    check_shape(DIALECTS[path], answer, path)
    assert answer.json()["error"]["code"] == "weight_version_superseded"


@PATHS
def test_a_stream_without_a_token_ends_with_the_error(stack: Stack, path: str) -> None:
    answer = held(stack, path, [[]], stream=True)
    assert answer.status_code == 200 and "weight_version_superseded" in answer.text


def test_a_stream_ends_with_what_it_has(stack: Stack) -> None:
    frames = events(held(stack, "/generate", [TEXT], stream=True).text)
    assert frames[-1]["output_ids"] == TEXT and frames[-1]["meta_info"]["finish_reason"]["status_code"] == 409


@pytest.mark.parametrize("tokens", [[TEXT, [], [71]], [[], TEXT, []]])
@pytest.mark.parametrize("stream", [False, True])
def test_samples_of_one_request_end_together(stack: Stack, tokens: list[list[int]], stream: bool) -> None:
    """The tokens of some samples are not lost because others had not begun."""
    fields = {"input_ids": [[70], [80], [90]], "stream": stream, "return_logprob": True}
    answer = held(stack, "/generate", tokens, **fields)
    assert answer.status_code == 200, answer.text
    results = {frame["index"]: frame for frame in events(answer.text)} if stream else dict(enumerate(answer.json()))
    assert [results[i]["output_ids"] for i in range(3)] == tokens
    for i, ids in enumerate(tokens):
        meta = results[i]["meta_info"]
        assert meta["finish_reason"]["status_code"] == 409 and meta["output_token_logprobs_length"] == len(ids)


def test_the_start_version_is_that_of_the_first_token(stack: Stack) -> None:
    stack.scheduler.hold = True
    with ThreadPoolExecutor(1) as pool:
        asked = {"min_weight_version": V1, "sampling_params": {"max_new_tokens": 3}}
        answer = pool.submit(post, stack, "/generate", **asked)
        (req,) = stack.scheduler.wait_for(TokenizedGenerateReq)
        running = stack.scheduler.running.pop(req.rid)
        stack.scheduler.emit(running, TEXT, None)
        stack.scheduler.version = V3
        stack.scheduler.emit(running, [72], FinishReason(type="length", length=3))
        meta = answer.result(20).json()["meta_info"]
    assert (meta["weight_version_start"], meta["weight_version"]) == (V2, V3)


# -- answers that come again -----------------------------------------------------------------------------------


def test_a_refused_request_is_judged_again(stack: Stack) -> None:
    key = {"Idempotency-Key": "k1"}
    assert post(stack, "/generate", key, min_weight_version=V3).status_code == 409
    serve(stack, V3)
    assert post(stack, "/generate", key, min_weight_version=V3).status_code == 200
    serve(stack, V2)  # as if another server had the key
    again = post(stack, "/generate", key, min_weight_version=V3)
    assert again.status_code == 200, "the answer is kept"
    assert again.headers["X-Verl-Weight-Version"] == V2 and again.json()["meta_info"]["weight_version"] == V3


def test_another_demand_is_another_request(stack: Stack) -> None:
    key = {"Idempotency-Key": "k2"}
    assert post(stack, "/generate", key | {MIN: V1}).status_code == 200
    other = post(stack, "/generate", key | {MIN: V2})
    assert other.status_code == 409 and other.headers["X-Verl-Error"] == "IdempotencyConflictError"


# -- sessions --------------------------------------------------------------------------------------------------


def create(stack: Stack, **fields: Any) -> dict[str, str]:
    """Create a session, and return the headers of its requests."""
    answer = stack.post("/sessions", fields, headers=OWNER)
    assert answer.status_code == 201, answer.text
    return {"Authorization": f"Bearer {answer.json()['key']}"}


@pytest.mark.parametrize("path", RECORDED)
def test_a_session_has_a_default(stack: Stack, path: str) -> None:
    key = create(stack, exact_weight_version=V2)
    for fields, headers, stated in (
        ({}, {}, V2),
        ({}, {MIN: V1}, f">={V1}"),
        ({"min_weight_version": V0}, {EXACT: V2}, f">={V0}"),
    ):
        answer = post(stack, path, key | headers, **fields)
        assert answer.status_code == 200 and demand(stack) == stated, answer.text
    serve(stack, V3)
    answer = post(stack, path, key)
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "weight_version_superseded"
    assert post(stack, path, key, min_weight_version=V1).status_code == 200


def test_a_refused_turn_changes_nothing(stack: Stack) -> None:
    headers = OWNER | {"X-Session-ID": "unchanged"}
    create(stack, id="unchanged", limits={"max_turns": 1}, min_weight_version=V3)
    assert post(stack, "/generate", headers).status_code == 409
    assert stack.get("/sessions/unchanged", headers=OWNER).json()["turns"] == 0
    serve(stack, V3)
    assert post(stack, "/generate", headers).status_code == 200


def test_a_turn_that_ends_at_a_border_is_recorded_as_aborted(stack: Stack) -> None:
    create(stack, id="cut", exact_weight_version=V2)
    stack.scheduler.hold = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, stack, "/generate", {"X-Session-ID": "cut"})
        end_at_border(stack, [TEXT])
        assert answer.result(20).status_code == 200
    (turn,) = stack.get("/sessions/cut", headers=OWNER).json()["tree"]
    assert turn["aborted"] and turn["output_tokens"] == 2 and turn["spans"] == [[V2, 0]]


def test_a_stored_turn_is_answered_whatever_is_served(stack: Stack) -> None:
    key = create(stack, exact_weight_version=V2) | {"Idempotency-Key": "turn"}
    first = post(stack, "/generate", key)
    serve(stack, V3)
    assert post(stack, "/generate", key).json()["output_ids"] == first.json()["output_ids"]


def test_sglangs_sessions_have_a_default(stack: Stack) -> None:
    opened = stack.post("/open_session", {"capacity_of_str_len": 100, "exact_weight_version": V2}, headers=OWNER)
    fields = {"session_params": {"id": opened.json()}}
    assert post(stack, "/generate", **fields).status_code == 200 and demand(stack) == V2
    wrong = stack.post("/open_session", {"min_weight_version": "13"}, headers=OWNER)
    assert wrong.status_code == 400 and "free labels have no order" in wrong.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_weight_version": V1, "exact_weight_version": V1}, "cannot both be set"),
        ({"min_weight_version": "13"}, "free labels have no order"),
    ],
)
def test_a_session_with_a_wrong_default_is_refused(stack: Stack, fields: dict[str, Any], message: str) -> None:
    answer = stack.post("/sessions", fields, headers=OWNER)
    assert answer.status_code == 400 and message in answer.text


def test_the_default_of_a_session_survives_a_restart(make_stack: MakeStack, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"api_key": "owner", "session_store": str(tmp_path / "store")}
    first = Server(make_stack(**settings))
    first.open()
    key = create(first.stack, id="s", exact_weight_version=V2)
    first.close()
    again = Server(make_stack(**settings))
    again.open()
    serve(again.stack, V1)
    assert post(again.stack, "/generate", key).headers["X-Verl-Error"] == "VersionBehindError"
    serve(again.stack, V2)
    assert post(again.stack, "/generate", key).status_code == 200 and demand(again.stack) == V2
    again.close()


def test_records_without_a_demand_are_read() -> None:
    old = payload(SessionRecord("s", b"h", 1.0))
    assert b"weight_demand" not in old and decoded(old).weight_demand == ""


# -- /weight_version -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/weight_version", "/get_weight_version"])
def test_what_a_router_polls(make_stack: MakeStack, path: str) -> None:
    stack = make_stack()
    found = stack.get(path).json()
    assert found.keys() == {"weight_version", "since", "instance_id", "weights_confirmed", "accepts"}
    assert (found["weight_version"], found["weights_confirmed"], found["accepts"]) == ("default", False, True)
    assert found["instance_id"] == stack.manager.instance_id
    since = found["since"]
    stack.scheduler.control = lambda req: None  # as in a long update: it answers nobody
    serve(stack, V1)
    later = stack.get(path, bound=2).json()
    assert later["weight_version"] == V1 and later["since"] >= since == found["since"]
    assert json.dumps(stack.get(path, bound=2).json()) == json.dumps(later), "the time is that of the activation"
    stack.manager.ready = False
    assert stack.get(path).json()["accepts"] is False


@pytest.mark.parametrize("refusal", [ServerUnavailableError("it starts"), ServerStoppingError("it stops")])
def test_a_server_that_starts_or_stops_answers_503(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, refusal: ServerUnavailableError
) -> None:
    monkeypatch.setattr(stack.manager, "_refusal", refusal)
    answer = stack.get("/weight_version", headers=OWNER)
    assert answer.status_code == 503 and answer.headers["X-Verl-Error"] == type(refusal).__name__
