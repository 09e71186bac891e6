"""Each field of each dialect's body is implemented, refused or without effect, and behaves as the table says.

The test reads the table of operations and sends every field. Answers come from a fake scheduler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import msgspec
import pytest

from tests.server.conftest import Stack
from verl_server.sampling_params import UNSUPPORTED_PARAMS, SamplingParams
from verl_server.server.app import operations
from verl_server.server.auth import AccessRules
from verl_server.server.dialects.vllm.sampling import (
    SAMPLING_REFUSED,
    SAMPLING_WITHOUT_EFFECT,
    VllmSamplingParams,
)
from verl_server.server.http.operation import Operation
from verl_server.server_args import ServerArgs

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/abort_requests": {"request_ids": ["a"]},
    "/generate": {"input_ids": [70, 71], "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"model": "", "messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "", "messages": MESSAGES},
    "/inference/v1/generate": {"token_ids": [70, 71], "sampling_params": {"max_tokens": 2}},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [70, 71]},
    "/update_weights_from_tensor": {"registration": "a"},
    "/update_weights": {"weight_dir": "a"},
}
"""Path -> a body that is answered 200. Other bodies have their required fields only."""
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
STRUCTURAL_TAG = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
        "triggers": ["<f>"],
    }
)
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{{ tools }}{{ documents }}{{ enable_thinking }}{{ reasoning_effort }}{{ add_generation_prompt }}"
)
"""A chat template that reads every variable that a request may set."""
VALUES: dict[str, Any] = {
    "model": "",
    "text": "hi",
    "prompt": "hi",
    "messages": MESSAGES,
    "tokens": [70, 71],
    "input_ids": [70, 71],
    "token_ids": [70, 71],
    "sampling_params": {},
    "logit_bias": {"70": 1.0},
    "stop_regex": "z+",
    "response_format": {"type": "text"},
    "regex": "a+",
    "ebnf": 'root ::= "a"',
    "json_schema": '{"type": "object"}',
    "structured_outputs": {"regex": "a+"},
    "guided_json": '{"type": "object"}',
    "guided_regex": "a+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "modalities": ["text"],
    "tools": CHAT_TOOLS,
    "tool_choice": "none",
    "documents": [{"title": "a", "text": "b"}],
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": False},
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "stop_token_ids": [9],
    "allowed_token_ids": [70, 71],
    "token_ids_logprob": [70],
    "logprob_token_ids": [70],
    "include": ["message.output_text.logprobs"],
    "truncation": "disabled",
    "truncation_side": "left",
    "store": False,
    "best_of": 1,
    "selector": "all",
    "load_format": "flattened_bucket",
    "backend": "nccl",
    "master_port": 29500,
    "world_size": 2,
    "rank_offset": 1,
    "tags": ["kv_cache"],
    "action": "checksum",
    "shapes": [[1]],
    "dtypes": ["float32"],
    "system": "Be brief.",
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "text_config": {},
    "continue_final_message": False,
    "method": "check_health",
    "args": [],
    "structural_tag": STRUCTURAL_TAG,
    "exact_weight_version": "default",
}
"""Field -> a sensible value. Others have a value of their type."""
MASK = {"return_sampling_mask": True, "sampling_params": {"max_new_tokens": 2, "top_k": 4}}
CHAT_MASK = {"return_sampling_mask": True, "return_meta_info": True, "top_k": 4}
SPECIAL: dict[tuple[str, str], dict[str, Any]] = {
    ("/generate", "text"): {"text": "hi", "input_ids": None},
    ("/generate", "cache_salt"): {"cache_salt": "a"},
    ("/generate", "columnar"): {"columnar": True},
    ("/generate", "return_sampling_mask"): MASK,
    ("/generate", "sampling_logprobs_mode"): MASK | {"sampling_logprobs_mode": "support"},
    ("/v1/chat/completions", "return_sampling_mask"): CHAT_MASK,
    ("/v1/chat/completions", "sampling_logprobs_mode"): CHAT_MASK | {"sampling_logprobs_mode": "support"},
    ("/v1/chat/completions", "input_ids"): {"input_ids": [70, 71], "messages": None},
    ("/v1/chat/completions", "top_logprobs"): {"top_logprobs": 1, "logprobs": True},
    ("/v1/chat/completions", "logprob_token_ids"): {"logprob_token_ids": [70], "logprobs": True},
    ("/v1/responses", "tools"): {"tools": [{"type": "function"} | FUNCTION]},
    ("/v1/responses", "text"): {"text": {"format": {"type": "text"}}},
    ("/v1/responses", "reasoning"): {"reasoning": {"effort": "low"}},
    ("/v1/messages", "tools"): {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ("/v1/messages", "tool_choice"): {
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"},
    },
    ("/v1/messages/count_tokens", "tools"): {"tools": [{"name": "f", "input_schema": {"type": "object"}}]},
    ("/v1/messages/count_tokens", "tool_choice"): {
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    ("/v1/completions", "logprob_token_ids"): {"logprob_token_ids": [70], "logprobs": 1},
    ("/tokenize", "messages"): {"messages": MESSAGES, "prompt": None},
}
"""(path, field) -> the change of the body, where the field needs others. None removes a field."""
_CHAT_MASK = {"return_sampling_mask": True, "return_meta_info": True, "top_k": 4, "logprobs": True}
SPECIAL[("/v1/chat/completions", "return_sampling_mask")] = _CHAT_MASK
SPECIAL[("/v1/chat/completions", "sampling_logprobs_mode")] = _CHAT_MASK | {"sampling_logprobs_mode": "support"}
for _path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
    SPECIAL[(_path, "stream_options")] = {"stream": True, "stream_options": {"include_usage": True}}
for _field in ("add_generation_prompt", "continue_final_message", "tools", "documents", "chat_template_kwargs"):
    SPECIAL[("/tokenize", _field)] = {"prompt": None, "messages": MESSAGES, _field: VALUES.get(_field, True)}
SPECIAL[("/tokenize", "reasoning_effort")] = {"prompt": None, "messages": MESSAGES, "reasoning_effort": "low"}
VLLM_VALUES: dict[str, Any] = {"output_kind": 2}
"""Values of vLLM's sampling parameters, where the type does not say one."""
ELSEWHERE = {
    "chat_template": "tests/chat: only templates that the operator listed are accepted",
    "previous_response_id": "tests/server/sessions: it names a response of a session",
    "prompt_lengths": "tests/server/test_packed_prompt.py: it needs a header",
    "min_weight_version": "tests/server/test_version_contract.py: the server must serve a version with a number",
    "session_params": "tests/server/sessions: it names a session",
    "update_info": "tests/server/dialects/vllm: the transfer must be initialized before",
}
"""Implemented fields whose values depend on other calls or settings -> the tests that send them."""


def table() -> list[Operation]:
    args = ServerArgs(model_path="m")
    found = operations(MagicMock(), args, AccessRules(args), MagicMock())
    # tests/server/sessions sends the fields of session routes: they need an owner's key, and refuse unknown fields.
    known = [each for each in found if each.body or each.refused or each.without_effect]
    return [operation for operation in known if operation.access != "owner"]


OPERATIONS = {operation.path: operation for operation in table()}


def sensible(kind: msgspec.inspect.Type) -> Any:
    """Return a value of a type."""
    match kind:
        case msgspec.inspect.UnionType():
            return sensible(next(t for t in kind.types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return max(1, kind.ge or 1)
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.StrType():
            return "a"
        case msgspec.inspect.LiteralType():
            return kind.values[-1]
        case msgspec.inspect.ListType():
            return [sensible(kind.item_type)]
        case msgspec.inspect.TupleType():
            return [sensible(item) for item in kind.item_types]
        case msgspec.inspect.DictType():
            return {}
        case msgspec.inspect.StructType():
            return {f.encode_name: sensible(f.type) for f in kind.fields if f.required}
        case _:
            return None


def field_types(body: type[msgspec.Struct]) -> dict[str, msgspec.inspect.Type]:
    info = msgspec.inspect.type_info(body)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.encode_name: field.type for field in info.fields}


def base_body(operation: Operation) -> dict[str, Any]:
    if operation.path in BODIES:
        return BODIES[operation.path]
    if operation.body is None:
        return {}
    kinds = field_types(operation.body)
    required = [field.name for field in msgspec.structs.fields(operation.body) if field.required]
    return {name: VALUES.get(name, sensible(kinds[name])) for name in required}


def send(stack: Stack, operation: Operation, changes: dict[str, Any]) -> httpx.Response:
    body = {name: value for name, value in (base_body(operation) | changes).items() if value is not None}
    return stack.request(operation.methods[-1], operation.path, json=body)


def has_documented_type(response: httpx.Response, operation: Operation) -> bool:
    """Return whether the content type is one that `/openapi.json` names. Without one, the answer must be empty."""
    if not operation.media_types:
        return not response.content and "content-type" not in response.headers
    return response.headers.get("content-type", "").partition(";")[0] in operation.media_types


@pytest.fixture(scope="module")
def fields_stack(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    stack = Stack(text_folder, chat_template=str(template), text_timeout=60.0, grammar_timeout=60.0)
    grammar = {"input_ids": [70], "sampling_params": {"max_new_tokens": 2, "regex": "a+"}}
    stack.request("POST", "/generate", bound=120, json=grammar)  # the first grammar starts a process
    yield stack
    stack.close()


@pytest.mark.parametrize("path", OPERATIONS)
def test_a_field_has_one_place(path: str) -> None:
    operation = OPERATIONS[path]
    places = [set(operation.fields), set(operation.refused), set(operation.without_effect)]
    for i, place in enumerate(places):
        for other in places[i + 1 :]:
            assert not place & other


@pytest.mark.parametrize("path", OPERATIONS)
def test_implemented_fields_are_accepted(path: str, fields_stack: Stack) -> None:
    operation = OPERATIONS[path]
    kinds = {} if operation.body is None else field_types(operation.body)
    wrong = {}
    for name in operation.fields:
        if name in ELSEWHERE:
            continue
        changes = SPECIAL.get((path, name), {name: VALUES.get(name, sensible(kinds[name]))})
        response = send(fields_stack, operation, changes)
        if response.status_code != 200:
            wrong[name] = f"{changes}: {response.status_code} {response.text}"
        elif not has_documented_type(response, operation):
            wrong[name] = f"{changes}: {response.headers} is none of {operation.media_types}"
    assert not wrong, "\n".join(f"{name}: {answer}" for name, answer in wrong.items())


@pytest.mark.parametrize("path", OPERATIONS)
def test_null_and_fields_without_effect_are_accepted(path: str, fields_stack: Stack) -> None:
    operation = OPERATIONS[path]
    base = base_body(operation)
    optional = [name for name in (*operation.fields, *operation.refused) if name not in base]
    body = base | dict.fromkeys(optional) | dict.fromkeys(operation.without_effect, "anything")
    response = fields_stack.request(operation.methods[-1], path, json=body)
    assert response.status_code == 200, response.text
    assert has_documented_type(response, operation)


@pytest.mark.parametrize("path", [path for path, operation in OPERATIONS.items() if operation.refused])
def test_refused_fields_are_named(path: str, fields_stack: Stack) -> None:
    operation = OPERATIONS[path]
    wrong = {}
    for name in operation.refused:
        response = send(fields_stack, operation, {name: "anything"})
        if response.status_code != 400 or name not in response.text:
            wrong[name] = f"{response.status_code} {response.text}"
    assert not wrong, "\n".join(f"{name}: {answer}" for name, answer in wrong.items())


@pytest.mark.parametrize("path", [path for path, operation in OPERATIONS.items() if operation.body])
def test_a_misspelled_field_is_refused_with_the_field(path: str, fields_stack: Stack) -> None:
    """A slip in any field of any operation changes nothing and names the field. So does a slip inside an object."""
    operation = OPERATIONS[path]
    known = [*operation.fields, *operation.refused, *operation.without_effect]
    known += ["stream_options.include_usage"] if "stream_options" in operation.fields else []
    known += [f"{place}.{max(names, key=len)}" for place, names in operation.inside.items()]
    elsewhere = {name for each in OPERATIONS.values() for name in (*each.fields, *each.refused, *each.without_effect)}
    wrong = {}
    for name in known:
        outer, _, own = name.rpartition(".")
        slip = own[:-3] + own[-2:]  # one letter is missing
        if len(slip) < 3 or slip in elsewhere:
            continue
        changes = {outer: {**base_body(operation).get(outer, {}), slip: 1}} if outer else {slip: 1}
        response = send(fields_stack, operation, changes)
        if response.status_code != 400 or f"`{outer + '.' if outer else ''}{slip}`" not in response.text:
            wrong[name] = f"{response.status_code} {response.text}"
        elif "Did you mean" not in response.text:
            wrong[name] = response.text
    assert not wrong, "\n".join(f"{name}: {answer}" for name, answer in wrong.items())


@pytest.mark.parametrize("path", [path for path, operation in OPERATIONS.items() if operation.body])
def test_an_unknown_field_is_accepted_and_named(path: str, fields_stack: Stack) -> None:
    response = send(fields_stack, OPERATIONS[path], {"of_a_newer_client": 1})
    assert response.status_code == 200, response.text
    assert response.headers["x-verl-unknown-fields"] == "of_a_newer_client"
    line = f'field="of_a_newer_client",model_name="{Path(fields_stack.args.model_path).name}",route="{path}"'
    assert f"verl_server:ignored_request_fields_total{{{line}}}" in fields_stack.get("/metrics").text


def test_sampling_parameters(fields_stack: Stack) -> None:
    kinds = field_types(SamplingParams)
    for name, kind in kinds.items():
        value = VALUES.get(name, sensible(kind))
        for given in (value, None):
            result = fields_stack.post(
                "/generate", {"input_ids": [70], "sampling_params": {"max_new_tokens": 2, name: given}}
            )
            assert result.status_code == 200, f"{name}={given!r}: {result.text}"
    for name in UNSUPPORTED_PARAMS:
        refusal = fields_stack.post("/generate", {"input_ids": [70], "sampling_params": {name: "anything"}})
        assert refusal.status_code == 400 and f"sampling_params.{name}" in refusal.text
    unknown = fields_stack.post("/generate", {"input_ids": [70], "sampling_params": {"no_such_field": 1}})
    assert unknown.status_code == 400 and "no_such_field" in unknown.text


def test_sampling_parameters_of_vllm(fields_stack: Stack) -> None:
    def send_sampling(name: str, value: Any) -> httpx.Response:
        body = {"token_ids": [70], "sampling_params": {"max_tokens": 2, name: value}}
        return fields_stack.post("/inference/v1/generate", body)

    for name, kind in field_types(VllmSamplingParams).items():
        for value in (VLLM_VALUES.get(name, VALUES.get(name, sensible(kind))), None):
            answer = send_sampling(name, value)
            assert answer.status_code == 200, f"{name}={value!r}: {answer.text}"
    for name in SAMPLING_REFUSED:
        answer = send_sampling(name, "anything")
        assert answer.status_code == 400 and name in answer.text
    for name in SAMPLING_WITHOUT_EFFECT:
        assert send_sampling(name, "anything").status_code == 200
