"""Fields and places of vLLM's answers on completions and chats, and those of SGLang beside them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.dialects.openai.conftest import MESSAGES, Caller
from verl_server.sampling_params import TOP_K_ALL


def test_the_default_call_of_trl(call: Caller) -> None:
    """`top_k=0` is off, and `logprobs=0` returns the sampled token, as the only entry of each position."""
    answer = call.complete(
        prompt=["ab", "c"], n=2, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0,
        logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True,
    )  # fmt: skip
    ids = call.text.encode("Hello!")
    assert call.sent().sampling.top_k == TOP_K_ALL and call.sent().sampling.max_new_tokens == 50
    assert [c["prompt_token_ids"] for c in answer["choices"][::2]] == [call.text.encode("ab"), call.text.encode("c")]
    for choice in answer["choices"]:
        logprobs = choice["logprobs"]
        assert choice["token_ids"] == ids
        assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
        named = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        assert all(top == {token: value} for token, value, top in named)


def test_the_default_chat_of_trl(call: Caller) -> None:
    answer = call.chat(
        top_k=0, max_tokens=50, logprobs=True, top_logprobs=0, return_token_ids=True, return_tokens_as_token_ids=True
    )
    ids, (choice,) = call.text.encode("Hello!"), answer["choices"]
    assert (
        answer["prompt_token_ids"] == choice["prompt_token_ids"] == call.sent().input_ids
    )  # vLLM's and SGLang's place
    assert choice["token_ids"] == choice["response_token_ids"] == ids
    content = choice["logprobs"]["content"]
    assert [c["token"] for c in content] == [f"token_id:{i}" for i in ids]
    assert [bytes(c["bytes"]) for c in content] == [b"H", b"e", b"l", b"l", b"o", b"!"]
    assert all(c["top_logprobs"] == [] for c in content)


def test_prompt_ids_of_streams_are_sent_once(call: Caller) -> None:
    call.cuts("Hello!", chunk=1)
    ids = call.text.encode("Hello!")
    frames = call.stream("/v1/completions", prompt="ab", max_tokens=50, return_token_ids=True)
    choices = [frame["choices"][0] for frame in frames]
    assert [i for c in choices for i in c.get("token_ids", [])] == ids
    assert [c.get("prompt_token_ids") for c in choices] == [call.text.encode("ab"), *[None] * (len(choices) - 1)]
    frames = call.stream("/v1/chat/completions", messages=MESSAGES, return_token_ids=True)
    assert [f.get("prompt_token_ids") for f in frames] == [call.sent().input_ids, *[None] * (len(frames) - 1)]
    assert [i for f in frames for i in f["choices"][0].get("token_ids", [])] == ids


def test_prompt_logprobs(call: Caller) -> None:
    (choice,) = call.complete(prompt="abc", prompt_logprobs=1)["choices"]
    first, *others = choice["prompt_logprobs"]
    _, b, c = call.text.encode("abc")
    assert first is None and choice["logprobs"] is None
    assert others[0] == {str(b): {"logprob": pytest.approx(-b / 8), "rank": 1, "decoded_token": "b"}}
    assert list(others[1]) == [str(c)]
    assert (call.sent().logprob_start_len, call.sent().top_logprobs_num) == (0, 1)
    answer = call.chat(prompt_logprobs=0, logprobs=True, top_logprobs=2)
    assert len(answer["prompt_logprobs"]) == len(call.sent().input_ids) and call.sent().top_logprobs_num == 2
    assert "stream" in call.refusal("/v1/completions", prompt="a", prompt_logprobs=1, stream=True)["message"]


def test_chosen_candidates(call: Caller) -> None:
    choice = call.chat(logprobs=True, logprob_token_ids=[7, 9])["choices"][0]
    tops = choice["logprobs"]["content"][0]["top_logprobs"]
    assert [t["token"] for t in tops] == [call.text.decoder(False)([i]) for i in (7, 9)]
    assert "logprobs" in call.refusal("/v1/completions", prompt="a", logprob_token_ids=[1])["message"]


@pytest.mark.parametrize(
    ("field", "value", "name", "wanted"),
    [
        ("include_stop_str_in_output", True, "no_stop_trim", True),
        ("allowed_token_ids", [5, 6], "allowed_token_ids", [5, 6]),
        ("bad_words", ["no"], "bad_words", ["no"]),
        ("min_tokens", 3, "min_new_tokens", 3),
        ("min_tokens", 3, "stop_after_min_new_tokens", True),
        ("min_tokens", 0, "stop_after_min_new_tokens", False),
        ("seed", 11, "sampling_seed", 11),
        ("stop_regex", "a+", "stop_regex", ["a+"]),
        ("logit_bias", {"7": 1.5}, "logit_bias", {"7": 1.5}),
        ("stop_token_ids", [9], "stop_token_ids", [9]),
        ("stream_interval", 4, "stream_interval", 4),
        ("logprobs_mode", "raw", "logprobs_mode", "raw"),
        ("spaces_between_special_tokens", False, "spaces_between_special_tokens", False),
    ],
)
def test_sampling_fields(call: Caller, field: str, value: Any, name: str, wanted: Any) -> None:
    for answer in (call.complete, call.chat):
        answer(**{field: value})
        assert getattr(call.sent().sampling, name) == wanted


def test_namespaces_and_priority(call: Caller) -> None:
    call.complete(cache_salt="v1", priority=7)
    salted = call.sent()
    call.chat(extra_key="v1", priority=-7)
    keyed = call.sent()
    assert salted.namespace and keyed.namespace and salted.namespace != keyed.namespace
    assert (salted.priority, keyed.priority) == (7, -7)


def test_prompts_are_truncated(call: Caller) -> None:
    call.complete(prompt="abcdef", truncate_prompt_tokens=2)
    assert call.sent().input_ids == call.text.encode("ef")
    call.complete(prompt="a" * 400, truncate_prompt_tokens=-1, max_tokens=6)
    assert len(call.sent().input_ids) == 250
    call.chat(truncate_prompt_tokens=3)
    assert call.text.decoder(False)(call.sent().input_ids) == "nt\n"
    assert "truncation_side" in call.refusal("/v1/completions", prompt="a", truncation_side="right")["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_ids_outside_the_vocabulary(call: Caller, path: str) -> None:
    """Stop ids that no output can have are accepted, as in SGLang; what would be an index into logits is refused."""
    body: dict[str, Any] = {"prompt": "a", "messages": MESSAGES, "max_tokens": 3}
    call.post(path, **body, stop_token_ids=[320, 9])
    assert call.sent().sampling.stop_token_ids == [9]
    for fields in (
        {"logit_bias": {"320": 1}},
        {"allowed_token_ids": [320]},
        {"logprob_token_ids": [320], "logprobs": 1},
    ):
        assert "token id 320" in call.refusal(path, **body, **fields)["message"], fields


def test_meta_info_and_sglext(call: Caller) -> None:
    answer = call.chat(
        return_meta_info=True, return_cached_tokens_details=True, logprobs=True,
        return_input_ids_in_sglext=True, return_output_ids_in_sglext=True,
    )  # fmt: skip
    meta = answer["choices"][0]["meta_info"]
    assert meta["completion_tokens"] == 6 and len(meta["output_token_logprobs"]) == 6
    assert answer["sglext"] == {
        "input_ids": call.sent().input_ids,
        "output_ids": [call.text.encode("Hello!")],
        "cached_tokens_details": {"device": 0, "host": 0},
    }
    assert answer["metadata"] == {"weight_version": "default", "weight_version_start": "default"}
    assert answer["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 6}]
    assert call.complete(return_meta_info=True)["choices"][0]["meta_info"]["prompt_tokens"] == 2


def test_sampling_masks_are_in_the_meta_info(call: Caller) -> None:
    call.chat(return_sampling_mask=True, return_meta_info=True, top_k=2)
    assert call.sent().sampling_mask_num == 4
    assert (
        "return_meta_info"
        in call.refusal("/v1/chat/completions", messages=MESSAGES, return_sampling_mask=True)["message"]
    )


def test_stop_reason_is_null_for_eos(call: Caller) -> None:
    eos = call.text.eos_token_ids[0]
    call.stack.scheduler.script = lambda req: [40, eos]
    (choice,) = call.complete()["choices"]
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", eos, None)
    (choice,) = call.complete(stop_token_ids=[40])["choices"]
    assert (choice["matched_stop"], choice["stop_reason"]) == (40, 40)


def test_echo_without_an_output(call: Caller) -> None:
    call.cuts("")
    (choice,) = call.complete(prompt="abc", max_tokens=0, echo=True, logprobs=1)["choices"]
    assert choice["text"] == "abc" and call.sent().sampling.max_new_tokens == 0
    assert choice["logprobs"]["tokens"] == list("abc") and choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


def test_adapters_are_refused_and_other_names_accepted(call: Caller) -> None:
    assert call.complete(model="whatever")["choices"]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "a"}),
    ):
        response = call.stack.post(path, body | {"model": "base:adapter"})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert "adapters are not served" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": "a", "max_tokens": "x"}, "max_tokens"),
        ("/v1/completions", {"prompt": "a", "suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ("/v1/chat/completions", {"messages": MESSAGES, "response_format": {"type": "x"}}, "response_format"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ("/v1/responses", {"input": "a", "previous_response_id": "x"}, "previous_response_id"),
    ],
)
def test_errors_name_the_field(call: Caller, path: str, body: dict[str, Any], param: str) -> None:
    assert call.refusal(path, **body)["param"] == param
