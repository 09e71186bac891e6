"""Through the router, a server gets the bytes that the client sent, and the client gets the bytes of the server.

A recorder between router and server keeps what the server got and answered. So ids and times are compared, too.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests import fork_server
from tests.compat.serve_tiny import model_folder
from tests.fleet.recorder import Headers, Message, Recorder
from tests.waiting import eventually
from verl_server.fleet.operations import server_operations
from verl_server.messages.io_struct import PROMPT_HEADER
from verl_server.messages.packed import pack_ids

KEY = "key-of-the-servers"
NAME = b"x-test-name"
"""Header that names a request. Like every header that nobody knows, it reaches the server."""
OWN_REQUEST = {b"host", b"content-length", b"x-verl-expected-instance"}
"""Headers of a request that the router writes itself."""
OWN_ANSWER = {b"x-verl-instance", b"x-verl-fleet", b"x-verl-server"}
"""Headers of an answer that the router writes itself (docs/router.md)."""
OF_CONNECTION = {b"connection", b"keep-alive", b"transfer-encoding"}


@dataclass(frozen=True)
class Case:
    name: str
    path: str
    body: Any = None
    """Object that is sent as JSON, or the bytes themselves. None: no body."""
    status: int = 200
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


HELLO = [{"role": "user", "content": "Hello"}]
SAMPLED = {"max_new_tokens": 6, "sampling_seed": 3, "ignore_eos": True}
DRAWN: dict[str, Any] = {"max_tokens": 6, "seed": 3, "ignore_eos": True}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 80}
PACKED = pack_ids(list(range(70, 110)))
MSGPACK = {"Accept": "application/msgpack"}
STREAM = {"stream": True}
GENERATE = {"input_ids": [70, 71, 72], "sampling_params": SAMPLED}
CHAT = {"model": "m", "messages": HELLO} | DRAWN
COMPLETION = {"model": "m", "prompt": "Hello"} | DRAWN
RESPONSE = {"model": "m", "input": "Hello", "max_output_tokens": 6, "seed": 3}
MESSAGE = {"model": "m", "messages": HELLO, "max_tokens": 6}
TOKENS = {"token_ids": [70, 71], "sampling_params": DRAWN}
CASES = [
    Case("generate", "/generate", GENERATE),
    Case("put", "/generate", GENERATE, method="PUT"),
    Case("stream", "/generate", GENERATE | STREAM),
    Case("text", "/generate", {"text": "Hällo 🙂", "sampling_params": SAMPLED}),
    Case("n", "/generate", {"input_ids": [70], "sampling_params": SAMPLED | {"n": 3}}),
    Case("batch", "/generate", {"input_ids": [[70], [71, 72]], "sampling_params": SAMPLED, "return_logprob": True}),
    Case("batch in a stream", "/generate", {"input_ids": [[70], [71]], "sampling_params": SAMPLED} | STREAM),
    Case("columns", "/generate", GENERATE | {"columnar": True, "return_logprob": True}),
    Case("msgpack", "/generate", GENERATE | {"columnar": True, "return_logprob": True}, headers=MSGPACK),
    Case("columns in a stream", "/generate", GENERATE | {"columnar": True} | STREAM, headers=MSGPACK),
    Case(
        "packed prompt",
        "/generate",
        PACKED + json.dumps({"sampling_params": SAMPLED, "return_prompt_token_ids": True}).encode(),
        headers={PROMPT_HEADER: str(len(PACKED))} | MSGPACK,
    ),
    Case(
        "long answer",
        "/generate",
        {"input_ids": [70] * 3000, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 8}
        | {"sampling_params": SAMPLED},
    ),
    Case("completion", "/v1/completions", COMPLETION | {"logprobs": 2, "echo": True}),
    Case("completions", "/v1/completions", COMPLETION | {"prompt": ["a", "b"], "n": 2}),
    Case("completion in a stream", "/v1/completions", COMPLETION | STREAM),
    Case("chat", "/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
    Case("chat in a stream", "/v1/chat/completions", CHAT | STREAM | {"stream_options": {"include_usage": True}}),
    Case("tools", "/v1/chat/completions", CHAT | TOOLS),
    Case("tools in a stream", "/v1/chat/completions", CHAT | TOOLS | STREAM),
    Case("spaces", "/v1/chat/completions", b" \n" + json.dumps(CHAT, indent=3).encode() + b"\n"),
    Case("response", "/v1/responses", RESPONSE),
    Case("response in a stream", "/v1/responses", RESPONSE | STREAM),
    Case("message", "/v1/messages", MESSAGE),
    Case("message in a stream", "/v1/messages", MESSAGE | STREAM),
    Case("vllm", "/inference/v1/generate", TOKENS),
    Case("vllm in a stream", "/inference/v1/generate", TOKENS | STREAM),
    Case("demand", "/generate", GENERATE | {"min_weight_version": "default"}, status=400),
    Case("exact", "/generate", GENERATE | {"exact_weight_version": "default"}),
    Case("other version", "/v1/chat/completions", CHAT | {"exact_weight_version": "other"}, status=409),
    Case("idempotent", "/v1/chat/completions", CHAT, headers={"Idempotency-Key": "a b"}),
    Case("idempotent again", "/v1/chat/completions", CHAT, headers={"Idempotency-Key": "a b"}),
    Case("conversation", "/generate", GENERATE | {"session_id": "s"}, headers={"X-SMG-Routing-Key": "k"}),
    Case("bad JSON", "/v1/chat/completions", b'{"model": ', status=400),
    Case("bad field", "/v1/messages", MESSAGE | {"max_tokens": -1}, status=400),
    Case("bad value", "/v1/completions", COMPLETION | {"temperature": "hot"}, status=400),
    Case("bad ids", "/inference/v1/generate", TOKENS | {"token_ids": [10**6]}, status=400),
    Case("misspelled", "/generate", {"input_id": [70]}, status=400),
    Case("no body", "/generate", status=400),
    Case("no such model", "/v1/models/none", method="GET", status=404),
    Case(
        "no such model of Anthropic", "/v1/models/a%2Fb", method="GET", status=404, headers={"anthropic-version": "1"}
    ),
    Case("no such path", "/v1/chat/completion", CHAT, status=404),
    Case("no such path of Anthropic", "/nowhere", {}, status=404, headers={"Anthropic-Version": "2023-06-01"}),
    Case("no such method", "/v1/messages", method="GET", status=405),
    Case("control character", "/v1%0a", method="GET", status=400),
    Case("wrong key", "/generate", GENERATE, status=401, headers={"Authorization": "Bearer wrong"}),
    Case("models", "/v1/models", method="GET"),
    Case("models of Anthropic", "/v1/models?limit=5&after_id=%20", method="GET", headers={"anthropic-version": "1"}),
    Case("tokens", "/v1/tokenize", {"prompt": "Hello " * 20_000}),
    Case("text of tokens", "/detokenize", {"tokens": [70, 71]}),
    Case("count", "/v1/messages/count_tokens", {"model": "m", "messages": HELLO}),
    Case("information", "/get_model_info", method="GET"),
    Case("description", "/openapi.json", method="GET"),
    Case("page", "/docs", method="GET"),
]


class Wire:
    """A router in front of a recorder in front of a server."""

    def __init__(self, router: str, recorder: Recorder, model: str) -> None:
        self.model = model
        """Folder of the server's model."""
        self._port = int(router.rpartition(":")[2])
        self._recorder = recorder

    def send(self, case: Case) -> tuple[Message, Message, Message, Message]:
        """Return (what the client sent, what the server got, what the server answered, what the client got)."""
        content = case.body if isinstance(case.body, bytes | None) else json.dumps(case.body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "X-Empty": "", "X-Odd": "a, b;q=0  \xe4"} | case.headers
        headers[NAME.decode()] = case.name
        if content is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        sent = Message(f"{case.method} {case.path}".encode(), _encoded(headers.items()), content or b"")
        got = self._answer(case.method, case.path, headers, content)
        return sent, *self._recorder.exchange(sent.line, NAME, case.name.encode()), got

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Message:
        """Return the answer to a request, wherever it comes from."""
        content = b"" if body is None else json.dumps(body).encode()
        kept = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | (headers or {})
        return self._answer(method, path, kept | {"Content-Length": str(len(content))}, content)

    def _answer(self, method: str, path: str, headers: dict[str, str], content: bytes | None) -> Message:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.putrequest(method, path, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name, value.encode("latin-1"))
            connection.endheaders(content)
            response = connection.getresponse()
            return Message(str(response.status).encode(), _encoded(response.getheaders()), response.read())
        finally:
            connection.close()


def _encoded(headers: Any) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wire]:
    folder = tmp_path_factory.mktemp("bytes")
    settings: dict[str, Any] = {"model_path": str(model_folder(folder)), "kv_cache_gib": 0.1, "cpu_threads": 1}
    settings |= {"text_workers": 1, "api_key": KEY, "session_store": str(folder / "sessions")}
    (folder / "key").write_text(KEY)
    with ExitStack() as stack:
        server = _start(stack, "tests.compat.serve_tiny", str(folder), json.dumps(settings), stdout=subprocess.PIPE)
        assert server.stdout is not None
        recorder = stack.enter_context(Recorder(json.loads(server.stdout.readline())["url"]).running())
        options = ["--server", recorder.url, "--port", "0", "--server-api-key-file", str(folder / "key")]
        options += ["--hold-seconds", "0.5"]
        router = _start(stack, "verl_server", "router", *options, stderr=subprocess.PIPE)
        assert router.stderr is not None
        wire = Wire(router.stderr.readline().decode().removeprefix("Ready: ").strip(), recorder, settings["model_path"])
        assert eventually(lambda: wire.ask("GET", "/ready").line == b"200")
        yield wire


def _start(stack: ExitStack, *command: str, **pipes: Any) -> subprocess.Popen[bytes]:
    process = fork_server.run_module(*command, **pipes)
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    return process


def check(sent: Message, taken: Message, answered: Message, got: Message) -> None:
    """Compare what went into the router with what came out of it, in both directions."""
    assert (taken.line, taken.body) == (sent.line, sent.body)
    kept = [(name.lower(), value.strip()) for name, value in sent.headers if name.lower() not in OWN_REQUEST]
    assert [(name, value) for name, value in taken.headers if name.lower() not in OWN_REQUEST] == kept
    assert (got.line, got.body) == (answered.line, answered.body)
    returned = [each for each in got.headers if each[0].lower() not in OWN_ANSWER | OF_CONNECTION]
    assert returned == [each for each in answered.headers if each[0].lower() not in OWN_ANSWER | OF_CONNECTION]
    assert got.header(b"x-verl-instance") == got.header(b"x-verl-fleet") == b"fleet"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_pass(wire: Wire, case: Case) -> None:
    sent, taken, answered, got = wire.send(case)
    assert got.line == str(case.status).encode(), got.body
    check(sent, taken, answered, got)


def test_sessions_pass(wire: Wire) -> None:
    """A session is created, played by its key in a header and in the path, exported and deleted."""
    made = wire.send(Case("create", "/sessions", {"id": "a"}))
    check(*made)
    key = json.loads(made[3].body)["key"]
    turns = [
        Case("turn", "/v1/chat/completions", CHAT, headers={"Authorization": f"Bearer {key}"}),
        Case("streamed turn", f"/s/{key}/v1/chat/completions", CHAT | STREAM),
        Case("reward", "/sessions/a/reward", {"reward": 1.0}),
        Case("trajectory", "/sessions/a/trajectory", method="GET"),
        Case("delete", "/sessions/a", method="DELETE"),
        Case("gone", "/sessions/a", method="GET"),
    ]
    for case in turns:
        sent, taken, answered, got = wire.send(case)
        assert int(got.line) == (404 if case.name == "gone" else 200), got.body
        check(sent, taken, answered, got)


def test_what_does_not_depend_on_weights_passes_while_they_are_released(wire: Wire) -> None:
    wire.ask("POST", "/release_memory_occupation")
    assert eventually(lambda: wire.ask("GET", "/ready").line == b"503")
    try:
        for case in (
            Case("models meanwhile", "/v1/models", method="GET"),
            Case("tokens meanwhile", "/tokenize", {"prompt": "Hello"}),
            Case("no such path meanwhile", "/nowhere", {}, status=404),
        ):
            sent, taken, answered, got = wire.send(case)
            assert got.line == str(case.status).encode(), got.body
            check(sent, taken, answered, got)
        refused = wire.ask("POST", "/generate", GENERATE)
        assert refused.line == b"503" and refused.header(b"retry-after") == b"1"
    finally:
        wire.ask("POST", "/resume_memory_occupation")
        wire.ask("POST", "/update_weights_from_disk", {"model_path": wire.model, "weight_version": "again"})
    assert eventually(lambda: wire.ask("GET", "/ready").line == b"200")


@pytest.mark.parametrize(
    ("path", "headers", "body"),
    [
        ("/v1/chat/completions", {}, {"object": "error", "code": 412}),
        ("/v1/messages", {}, {"type": "error"}),
        ("/v1/models", {"anthropic-version": "1"}, {"type": "error"}),
        ("/v1/models", {}, {"object": "error", "code": 412}),
        ("/nowhere", {"anthropic-version": "1"}, {"type": "error"}),
        ("/generate", {}, {"object": "error", "code": 412}),
        ("/update_weights_from_tensor", {}, {"object": "error", "success": False}),
    ],
)
def test_own_errors_have_the_shape_of_the_path(
    wire: Wire, path: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    answer = wire.ask(method, path, {}, headers | {"X-Verl-Expected-Instance": "another"})
    assert answer.line == b"412" and body.items() <= json.loads(answer.body).items(), answer.body
    assert answer.header(b"x-verl-error") == b"ServerRestartedError"


def test_every_generating_operation_has_a_case() -> None:
    generating = {path for operation in server_operations() if operation.generates for path in operation.paths}
    assert generating <= {case.path for case in CASES}
    assert {case.path for case in CASES if isinstance(case.body, dict) and case.body.get("stream")} == generating
