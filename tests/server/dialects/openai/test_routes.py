"""OpenAI routes return what the openai client expects."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.test_http_routes import events


@pytest.fixture
def speaking(stack: Stack) -> Stack:
    """A stack that answers "Hello!" to every request."""
    stack.scheduler.script = lambda req: stack.text.encode("Hello!")
    return stack


def test_completion(speaking: Stack) -> None:
    body = {"model": "m", "prompt": "Say", "max_tokens": 6, "logprobs": 2, "return_token_ids": True}
    answer = speaking.post("/v1/completions", body).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("Hello!", "length", None)
    assert choice["token_ids"] == speaking.text.encode("Hello!")
    assert choice["logprobs"]["tokens"] == list("Hello!")
    assert choice["logprobs"]["text_offset"] == list(range(6))
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["logprobs"]["top_logprobs"]) == 6
    assert answer["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": None,
        "reasoning_tokens": 0,
    }  # fmt: skip
    assert answer["metadata"]["weight_version"] == "default"


@pytest.mark.parametrize("prompt", ["ab", ["ab"], None, [None]])
def test_prompt_forms(speaking: Stack, prompt: Any) -> None:
    ids = speaking.text.encode("ab")
    prompt = ids if prompt is None else [ids] if prompt == [None] else prompt
    answer = speaking.post("/v1/completions", {"prompt": prompt, "max_tokens": 6}).json()
    assert answer["choices"][0]["text"] == "Hello!" and answer["usage"]["prompt_tokens"] == 2


def test_n_and_batches_are_numbered(speaking: Stack) -> None:
    answer = speaking.post("/v1/completions", {"prompt": ["a", "bc"], "n": 2, "max_tokens": 6}).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 24


def test_echo_with_logprobs(speaking: Stack) -> None:
    choice = speaking.post("/v1/completions", {"prompt": "ab", "max_tokens": 6, "echo": True, "logprobs": 0}).json()[
        "choices"
    ][0]
    assert choice["text"] == "abHello!"
    assert choice["logprobs"]["tokens"] == list("abHello!") and choice["logprobs"]["token_logprobs"][0] is None


def test_streamed_completion_adds_up(speaking: Stack) -> None:
    speaking.scheduler.chunk = 1
    body = {"prompt": "a", "max_tokens": 6, "stream": True, "logprobs": 1, "stream_options": {"include_usage": True}}
    chunks = events(speaking.post("/v1/completions", body).text)
    choices = [c["choices"][0] for c in chunks if c["choices"]]
    assert "".join(c["text"] for c in choices) == "Hello!"
    assert sum(len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]) == 6
    assert [c["finish_reason"] for c in choices[-2:]] == [None, "length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 6


def test_streamed_stop_string_is_never_shown(stack: Stack) -> None:
    stack.scheduler.script = lambda req: stack.text.encode("Yes. END and more")
    stack.scheduler.chunk = 1
    body = {"prompt": "a", "max_tokens": 50, "stream": True, "stop": "END"}
    choices = [c["choices"][0] for c in events(stack.post("/v1/completions", body).text)]
    assert "".join(c["text"] for c in choices) == "Yes. "
    assert (choices[-1]["finish_reason"], choices[-1]["matched_stop"]) == ("stop", "END")


def test_chat(speaking: Stack) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    body = {"model": "m", "messages": messages, "max_tokens": 6, "logprobs": True, "top_logprobs": 1}
    answer = speaking.post("/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["id"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "Hello!"
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], len(first["top_logprobs"])) == ("H", [72], 1)
    (sent,) = [m for m in speaking.scheduler.received if hasattr(m, "input_ids")]
    assert speaking.text.decoder(False)(sent.input_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_streamed_chat(speaking: Stack) -> None:
    speaking.scheduler.chunk = 2
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "stream": True, "n": 2}
    choices = [c["choices"][0] for c in events(speaking.post("/v1/chat/completions", body).text)]
    for index in (0, 1):
        mine = [c for c in choices if c["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and "role" not in mine[-1]["delta"]
        assert "".join(c["delta"]["content"] for c in mine) == "Hello!"
        assert mine[-1]["finish_reason"] == "length"


def test_chat_takes_token_ids_and_runs_to_the_context(speaking: Stack) -> None:
    assert speaking.post("/v1/chat/completions", {"messages": [], "input_ids": [9, 8]}).status_code == 200
    (sent,) = [m for m in speaking.scheduler.received if hasattr(m, "input_ids")]
    assert (sent.input_ids, sent.sampling.max_new_tokens) == ([9, 8], 254)


def test_models(make_stack: MakeStack) -> None:
    stack = make_stack(served_model_name="org/policy")
    (card,) = stack.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("org/policy", 256)
    assert stack.get("/v1/models/org/policy").json()["id"] == "org/policy"
    missing = stack.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt cannot be empty"),
        ("/v1/completions", {"prompt": ["a", 1]}, "mixes"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, "max_tokens must be at least 1"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "`suffix` is not supported"),
        ("/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": "a", "n": True}, "n"),
        ("/v1/chat/completions", {"messages": []}, "messages cannot be empty"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages[0] needs a `role`"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text"),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": "x"}], "tools": [{}]}, "tools[0]"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "u", "content": "x"}], "response_format": {"type": "xml"}},
            "response_format.type",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "u", "content": "x"}], "top_logprobs": 2}, "logprobs=true"),
        ("/tokenize", {"prompt": "a", "messages": []}, "exactly one"),
        ("/detokenize", {"tokens": [9999]}, "9999"),
    ],
)
def test_bad_requests_are_shape_e(stack: Stack, path: str, body: dict[str, Any], says: str) -> None:
    response = stack.post(path, body)
    error = response.json()
    assert (response.status_code, error["object"], error["type"]) == (400, "error", "BadRequestError"), error
    assert says in error["message"] and error["error"]["message"] == error["message"]


def test_tokenize_and_detokenize(stack: Stack) -> None:
    one = stack.post("/tokenize", {"prompt": "hé"}).json()
    assert one == {"tokens": stack.text.encode("hé"), "count": 3, "max_model_len": 256}
    two = stack.post("/v1/tokenize", {"prompt": ["a", "bc"]}).json()
    assert two["count"] == [1, 2]
    chat = stack.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert chat["count"] == len(chat["tokens"]) > 3
    assert stack.post("/detokenize", {"tokens": one["tokens"]}).json() == {"text": "hé", "prompt": "hé"}
    assert stack.post("/v1/detokenize", {"tokens": two["tokens"]}).json()["text"] == ["a", "bc"]
    assert stack.post("/detokenize", {"tokens": []}).json()["text"] == ""
    assert stack.post("/detokenize", {"tokens": [2, 3]}).json()["text"] == ""
    assert stack.post("/detokenize", {"tokens": [2], "skip_special_tokens": False}).json()["text"] == "<eos>"


def test_text_routes_without_a_tokenizer(make_stack: MakeStack) -> None:
    stack = make_stack(skip_tokenizer_init=True)
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        response = stack.post(path, body)
        assert response.status_code == 400 and "skip_tokenizer_init" in response.json()["message"], path
