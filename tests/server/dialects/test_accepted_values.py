"""Values of known fields that vLLM, SGLang or the SDKs accept, and that lose nothing here, for each dialect.

`ACCEPTED` was compared with the request models of vLLM 0.32 and with the types of the openai and anthropic packages.
`REFUSED` are values that they accept, and that lose something or may mean something else.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Stack
from verl_server.messages.io_struct import TokenizedGenerateReq

MESSAGES = [{"role": "user", "content": "hi"}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
BASE: dict[str, dict[str, Any]] = {
    "/generate": {"input_ids": [70, 71]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": [70, 71]},
}
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": None, "continuous_usage_stats": None}}
NULL_FUNCTION = {"name": "f", "description": None, "parameters": None, "strict": None}
NULL_SCHEMA = {"type": "object", "properties": None, "required": None}


def said(role: str, *parts: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [*MESSAGES, {"role": role, "content": [*parts] or None, **fields}, *MESSAGES]}


def items(*given: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "hi"}, *given]}


OPENAI: list[dict[str, Any]] = [
    *({"max_tokens": 4.0}, {"max_tokens": "4"}, {"temperature": "0.5"}, {"temperature": 1}, {"top_k": 3.0}),
    *({"seed": 2.0}, {"seed": -1}, {"seed": 2**40}, {"n": None}, {"stop": []}, {"stop": None}, {"logit_bias": {}}),
    *({"logit_bias": {"70": "1"}}, {"stop_token_ids": [5.0, "6"]}, {"stream": 0}, {"user": 5}, {"user": None}),
    *({"priority": 1.0}, {"min_tokens": 0.0}, {"ignore_eos": 0}, {"skip_special_tokens": "true"}, STREAM),
    *({"stream": True, "stream_options": {}}, {"stream": True, "stream_options": {"include_obfuscation": False}}),
    *({"response_format": None}, {"response_format": {"type": "text"}}, {"metadata": {}}, {"store": True}),
    *({"structured_outputs": None}, {"service_tier": "auto"}, {"bad_words": []}, {"prompt_logprobs": None}),
    {"structured_outputs": {"regex": "a+", "json": None, "disable_fallback": True, "disable_any_whitespace": False}},
]
CHATS: list[dict[str, Any]] = [
    *({"max_completion_tokens": 4.0}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": 1, "top_logprobs": 2.0}),
    *({"tools": []}, {"tools": None}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"tool_choice": None}),
    *({"parallel_tool_calls": True}, {"parallel_tool_calls": None}, {"tools": [{"function": NULL_FUNCTION}]}),
    {"tools": [{"type": None, "function": FUNCTION | {"parameters": NULL_SCHEMA}}]},
    {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"type": ["object", "null"]}}}]},
    {"tools": [{"type": "function", "function": NULL_FUNCTION}], "tool_choice": "required"},
    {"tools": [{"type": "function", "function": FUNCTION | {"parameters": NULL_SCHEMA}}], "tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": None}}},
    *(
        {"modalities": ["text"]},
        {"audio": None},
        {"verbosity": "medium"},
        {"verbosity": "low"},
        {"function_call": "none"},
    ),
    *({"functions": [], "function_call": "auto"}, {"prediction": {"type": "content", "content": "x"}}),
    *({"reasoning_effort": None}, {"chat_template_kwargs": {}}, {"documents": None}, {"web_search_options": None}),
    said("assistant", {"type": "refusal", "refusal": "no"}),
    said("assistant", {"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}),
    said("assistant", {"type": "output_text", "text": "a", "annotations": []}),
    said("assistant", refusal="no", tool_calls=None, function_call=None, audio=None),
    said("user", {"type": "input_text", "text": "a"}),
    said("user", "a", "b"),
]
ACCEPTED: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        *({"stream": 0}, {"stream": "false"}, {"return_logprob": 1}, {"top_logprobs_num": 2.0}, {"priority": 1.0}),
        *({"logprob_start_len": -1.0}, {"input_ids": [70.0, "71"]}, {"sampling_params": None}, {"rid": None}),
        *({"sampling_params": {"max_new_tokens": 4.0}}, {"sampling_params": {"max_new_tokens": None}}),
        *({"sampling_params": {"max_new_tokens": "4", "temperature": "0.5"}}, {"image_data": None}),
        *({"sampling_params": {"n": None, "top_k": -1.0, "stop": [], "logit_bias": {}}}, {"lora_path": []}),
        *({"sampling_params": {"sampling_seed": 2.0}}, {"sampling_params": {"json_schema": "", "beam_width": 1}}),
    ],
    "/v1/completions": [
        *OPENAI,
        *({"logprobs": 1.0}, {"logprobs": None}, {"echo": None}, {"best_of": 1.0}, {"best_of": None}, {"suffix": ""}),
        *({"prompt": [70.0, 71.0]}, {"prompt": ["a"]}, {"max_tokens": None}),
    ],
    "/v1/chat/completions": [*OPENAI, *CHATS],
    "/v1/responses": [
        *({"max_output_tokens": 4.0}, {"temperature": "0.5"}, {"truncation": "auto"}, {"truncation": "disabled"}),
        *(
            {"truncation": None},
            {"store": True},
            {"reasoning": {"effort": None, "summary": "auto", "generate_summary": None}},
        ),
        *({"reasoning": {}}, {"reasoning": None}, {"text": {"format": None, "verbosity": None}}, {"text": {}}),
        *({"text": {"format": {"type": "text"}, "verbosity": "medium"}}, {"include": []}, {"include": None}),
        *({"include": ["file_search_call.results", "web_search_call.action.sources"]}, {"max_tool_calls": 3}),
        *({"metadata": {}}, {"metadata": None}, {"store": False}, {"store": None}, {"service_tier": "auto"}),
        *({"parallel_tool_calls": None}, {"tools": []}, {"tool_choice": "auto"}, {"tool_choice": "none"}),
        *({"top_logprobs": 2.0}, {"background": False}, {"prompt": None}, {"conversation": None}, {"user": 5}),
        *({"stream": "false"}, {"stream_options": None}, {"previous_response_id": None}, {"instructions": None}),
        {"tools": [{"type": "function"} | NULL_FUNCTION]},
        items({"type": None, "role": "user", "content": "x"}),
        items({"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "id": None}),
        items({"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]}, *MESSAGES),
        items({"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}], "content": None}),
        items({"type": "function_call", "call_id": "c", "name": "f", "arguments": None, "status": None}),
    ],
    "/v1/messages": [
        *({"max_tokens": 4.0}, {"max_tokens": "4"}, {"temperature": None}, {"temperature": 1}, {"top_k": 3.0}),
        *({"top_k": -1}, {"stop_sequences": []}, {"stop_sequences": None}, {"system": []}, {"system": ""}),
        *({"tools": []}, {"tool_choice": {"type": "auto"}}, {"tool_choice": {"type": "none"}}, {"stream": 0}),
        *({"metadata": {"user_id": None}}, {"container": None}, {"mcp_servers": []}, {"service_tier": "auto"}),
        *({"thinking": {"type": "enabled", "budget_tokens": 1024.0, "display": None}}, {"thinking": None}),
        *({"output_config": {"format": None, "effort": None}}, {"output_config": {}}),
        {"tools": [{"name": "f", "type": None, "description": None, "input_schema": NULL_SCHEMA, "strict": None}]},
        {
            "tools": [{"name": "f", "input_schema": NULL_SCHEMA}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": None},
        },
        said("assistant", {"type": "text", "text": "a", "citations": None, "cache_control": None}),
        {
            "messages": [
                *MESSAGES,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": None}]},
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}],
                },
            ]
        },
    ],
    "/inference/v1/generate": [
        *({"sampling_params": None}, {"token_ids": [70.0]}, {"priority": 1.0}, {"priority": None}, {"stream": 0}),
        *({"sampling_params": {"max_tokens": 4.0}}, {"sampling_params": {"temperature": "0.5", "seed": None}}),
        *({"sampling_params": {"stop": [], "bad_words": [], "logit_bias": {}}}, {"model": None}, STREAM),
        *({"sampling_params": {"logprobs": 1.0, "top_k": -1.0}}, {"features": None}, {"kv_transfer_params": {}}),
        {"sampling_params": {"structured_outputs": {"regex": "a+", "json": None, "json_object": None}}},
        {"sampling_params": {"structured_outputs": {"json": True}}},
    ],
}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        *({"sampling_params": {"max_new_tokens": 4.5}}, {"sampling_params": {"n": True}}, {"stream": 2}),
        *({"sampling_params": {"beam_width": 2}}, {"sampling_params": {"max_new_tokens": "9" * 30}}),
    ],
    "/v1/completions": [{"max_tokens": 1.5}, {"n": True}, {"logprobs": True}, {"logprobs": False}, {"best_of": 2}],
    "/v1/chat/completions": [
        *({"max_tokens": "many"}, {"temperature": True}, {"seed": 2**63}, {"seed": "9" * 30}, {"verbosity": "least"}),
        *({"functions": [FUNCTION]}, {"function_call": {"name": "f"}}, {"top_logprobs": 5}, {"stop": 5}),
        *({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, {"tool_choice": "required"}),
        said("user", {"type": "image_url", "image_url": {"url": "x"}}),
        said("user", {"type": "text", "text": 5}),
        {"tools": [{"type": "function", "function": FUNCTION | {"parameters": {"type": "array"}}}]},
    ],
    "/v1/responses": [
        *({"truncation": "some"}, {"text": {"verbosity": "least"}}, {"include": ["all"]}),
        *({"metadata": {"a": 1}}, {"background": True}, {"max_output_tokens": 1.5}),
    ],
    "/v1/messages": [{"max_tokens": 1.5}, {"max_tokens": True}, {"max_tokens": None}, {"mcp_servers": [{}]}],
    "/inference/v1/generate": [{"sampling_params": {"max_tokens": 1.5}}, {"priority": True}, {"stream": 2}],
}


def sent(stack: Stack) -> TokenizedGenerateReq:
    return [each for each in stack.scheduler.received if isinstance(each, TokenizedGenerateReq)][-1]


def shown(value: Any) -> str:
    return str(value).replace("'", "")[:90]


@pytest.mark.parametrize(
    ("path", "change"), [(path, change) for path in ACCEPTED for change in ACCEPTED[path]], ids=shown
)
def test_values_that_lose_nothing_are_accepted(module_stack: Stack, path: str, change: dict[str, Any]) -> None:
    response = module_stack.post(path, BASE[path] | change)
    assert response.status_code == 200, response.text
    assert "error" not in response.text or path == "/v1/responses"


@pytest.mark.parametrize(
    ("path", "change"), [(path, change) for path in REFUSED for change in REFUSED[path]], ids=shown
)
def test_values_that_lose_something_are_refused(module_stack: Stack, path: str, change: dict[str, Any]) -> None:
    assert module_stack.post(path, BASE[path] | change).status_code == 400


@pytest.mark.parametrize(
    ("path", "change", "name", "wanted"),
    [
        ("/generate", {"sampling_params": {"max_new_tokens": "4", "temperature": "0.5"}}, "temperature", 0.5),
        ("/generate", {"sampling_params": {"max_new_tokens": 4.0}}, "max_new_tokens", 4),
        ("/v1/completions", {"max_tokens": 4.0}, "max_new_tokens", 4),
        ("/v1/chat/completions", {"max_completion_tokens": "4"}, "max_new_tokens", 4),
        ("/v1/responses", {"max_output_tokens": 4.0}, "max_new_tokens", 4),
        ("/v1/messages", {"max_tokens": 4.0}, "max_new_tokens", 4),
        ("/v1/messages", {"top_k": 3.0}, "top_k", 3),
        ("/inference/v1/generate", {"sampling_params": {"max_tokens": 4.0}}, "max_new_tokens", 4),
        ("/v1/chat/completions", {"stop_token_ids": [5.0, "6"]}, "stop_token_ids", [5, 6]),
    ],
)
def test_numbers_keep_their_value(
    module_stack: Stack, path: str, change: dict[str, Any], name: str, wanted: Any
) -> None:
    assert module_stack.post(path, BASE[path] | change).status_code == 200
    found = getattr(sent(module_stack).sampling, name)
    assert found == wanted and type(found) is type(wanted)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/chat/completions", said("assistant", {"type": "refusal", "refusal": "I won't"})),
        ("/v1/chat/completions", said("assistant", refusal="I won't")),
        ("/v1/chat/completions", said("assistant", "I ", {"type": "output_text", "text": "won't"})),
        ("/v1/responses", items({"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't"}]})),
    ],
)
def test_every_text_of_a_message_is_in_the_prompt(module_stack: Stack, path: str, change: dict[str, Any]) -> None:
    assert module_stack.post(path, BASE[path] | change).status_code == 200
    assert "assistant\nI won't" in module_stack.text.decoder(False)(sent(module_stack).input_ids)


def test_a_truncated_response_says_that_nothing_was_truncated(module_stack: Stack) -> None:
    answer = module_stack.post("/v1/responses", BASE["/v1/responses"] | {"truncation": "auto"}).json()
    assert answer["truncation"] == "disabled"
    long = module_stack.post("/v1/responses", {"input": "a" * 400, "truncation": "auto"})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded"), long.text
