"""`requests`: the attacks of `benchmarks.hostile_callers` that are one JSON body, sent repeatedly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

VOCABULARY = 8192
SLOW_TEMPLATE = "{% for i in range(30000) %}{% for j in range(30000) %}{% endfor %}{% endfor %}"
"""A template that the operator of this server has listed, and that takes minutes to render."""
LAST_MESSAGE_TEMPLATE = "{{ messages[-1]['content'] }}"
"""A second listed template."""
_ONE = {"max_new_tokens": 1}
_CANDIDATES: dict[str, Any] = {
    "input_ids": [5],
    "return_logprob": True,
    "top_logprobs_num": 256,
    "sampling_params": {"max_new_tokens": 400, "ignore_eos": True},
}
_MESSAGE = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Request:
    path: str
    body: Any
    in_session: bool = False
    """The caller has a session key. Each run has a new session."""


def requests() -> dict[str, Request]:
    """Name -> request that is sent repeatedly."""
    million = [i % VOCABULARY for i in range(1_000_000)]
    text = "The quick brown fox, it jumps. " * 100_000  # 3.1 MB
    nested = SLOW_TEMPLATE.replace("30000", "20000")
    return {
        "template_of_caller": Request(
            "/v1/chat/completions", {"messages": _MESSAGE, "chat_template_kwargs": {"chat_template": nested}}
        ),
        "slow_listed_template": Request(
            "/v1/chat/completions", {"messages": _MESSAGE, "chat_template_kwargs": {"chat_template": SLOW_TEMPLATE}}
        ),
        "chat_3mb": Request("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        "chat_of_one_letter_3mb": Request(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 3_000_000}]}
        ),
        "chat_90000_messages": Request("/v1/chat/completions", {"messages": _MESSAGE * 90_000}),
        "tokenize_3mb": Request("/tokenize", {"prompt": text}),
        "detokenize_1000000": Request("/detokenize", {"tokens": million}),
        "generate_3mb": Request("/generate", {"text": text}),
        "input_ids_1000000": Request("/generate", {"input_ids": million}),
        "token_ids_logprob_1000000": Request(
            "/generate", {"input_ids": [5], "return_logprob": True, "token_ids_logprob": million}
        ),
        "n_1000000": Request("/generate", {"input_ids": [5], "sampling_params": _ONE | {"n": 1_000_000}}),
        "batch_200000": Request("/generate", {"input_ids": [[5]] * 200_000, "sampling_params": _ONE}),
        "batch_16000_params": Request(
            "/generate", {"input_ids": [[5]] * 16_000, "sampling_params": [_ONE | {"n": 2}] * 16_000}
        ),
        "n_4096": Request("/generate", {"input_ids": [5], "sampling_params": _ONE | {"n": 4096}}),
        "rids_200000": Request("/generate", {"input_ids": [[5]] * 200_000, "rid": ["same"] * 200_000}),
        "stop_strings_200000": Request(
            "/generate", {"input_ids": [5], "sampling_params": {"stop": [f"s{i}" for i in range(200_000)]}}
        ),
        "stop_string_3mb": Request("/generate", {"input_ids": [5], "sampling_params": {"stop": "a" * 3_000_000}}),
        "stop_token_ids_1000000": Request(
            "/generate", {"input_ids": [5], "sampling_params": {"stop_token_ids": million}}
        ),
        "logit_bias_200000": Request(
            "/generate", {"input_ids": [5], "sampling_params": {"logit_bias": {str(i): 1.0 for i in range(200_000)}}}
        ),
        "top_logprobs_256": Request("/generate", _CANDIDATES),
        "top_logprobs_256_stream": Request("/generate", _CANDIDATES | {"stream": True}),
        "top_logprobs_256_chat": Request(
            "/v1/chat/completions",
            {"messages": _MESSAGE, "logprobs": True, "top_logprobs": 256, "max_tokens": 400, "ignore_eos": True},
        ),
        "prompt_logprobs_256": Request(
            "/generate",
            _CANDIDATES | {"input_ids": list(range(5, 105)) * 4, "logprob_start_len": 0, "sampling_params": _ONE},
        ),
        "session_4000_messages": _equal_messages(4000),
        "session_12000_messages": _equal_messages(12_000),
        "session_45mib": Request(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 11_796_000}]}, in_session=True
        ),
    }


def _equal_messages(count: int) -> Request:
    """A chat whose prompt has the last message only, so that its many messages fit into the model's context."""
    template = {"chat_template": LAST_MESSAGE_TEMPLATE}
    body = {"messages": _MESSAGE * count, "chat_template_kwargs": template, "max_tokens": 1}
    return Request("/v1/chat/completions", body, in_session=True)
