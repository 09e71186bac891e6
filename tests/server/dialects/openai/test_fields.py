"""Every field of OpenAI's, SGLang's and vLLM's request bodies is implemented, refused, or without effect."""

from __future__ import annotations

import typing

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.server.dialects.openai.conftest import MESSAGES, Caller
from verl_server.server.dialects.openai.routes import OpenAIApi
from verl_server.server.http.operation import Operation
from verl_server.server.sessions.service import SessionService
from verl_server.server.sessions.session_turns import SessionTurns


def words(text: str) -> list[str]:
    return text.split()


SGLANG = words(
    """
    model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_spec_tokens_details return_token_ids top_k min_p min_tokens json_schema regex
    ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id
    session_params response_format custom_params custom_logit_processor watermark images_config mm_processor_kwargs
    data_parallel_rank rid extra_key cache_salt priority custom_labels bootstrap_host bootstrap_port bootstrap_room
    routed_dp_rank disagg_prefill_dp_rank
    """
)
SGLANG_CHAT = words(
    """
    messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls return_prompt_token_ids
    return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask sampling_logprobs_mode
    return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64 reasoning_effort thinking task
    continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch
    use_audio_in_video video_config input_ids
    """
)
VLLM = words(
    """
    use_beam_search watermarking length_penalty include_stop_str_in_output spaces_between_special_tokens
    truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
    structured_outputs request_id return_tokens_as_token_ids routed_experts_prompt_start return_token_offsets
    return_mm_kwargs kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
    thinking_token_budget
    guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern
    logits_processors add_special_tokens
    """
)
VLLM_CHAT = words(
    """
    include_reasoning echo add_generation_prompt documents chat_template media_io_kwargs return_prompt_text
    """
)
SGLANG_RESPONSES = words("chat_template_kwargs request_id session_id priority extra_key cache_salt stop top_k min_p")


@pytest.fixture
def routes(call: Caller) -> dict[str, Operation]:
    manager, args = call.stack.manager, call.stack.args
    turns = SessionTurns(manager, SessionService(manager, args).ledger)
    return {each.path: each for each in OpenAIApi(manager, turns).operations()}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v1/completions", completion_create_params.CompletionCreateParamsBase.__annotations__),
        ("/v1/completions", [*SGLANG, *VLLM, "prompt_embeds"]),
        ("/v1/chat/completions", chat_create_params.CompletionCreateParamsBase.__annotations__),
        ("/v1/chat/completions", [*(set(SGLANG) - {"prompt", "best_of", "suffix"}), *SGLANG_CHAT, *VLLM, *VLLM_CHAT]),
        ("/v1/responses", response_create_params.ResponseCreateParamsBase.__annotations__),
        ("/v1/responses", SGLANG_RESPONSES),
    ],
    ids=["OpenAI", "SGLang and vLLM", "OpenAI chat", "SGLang and vLLM chat", "OpenAI responses", "SGLang responses"],
)
def test_known_fields(routes: dict[str, Operation], path: str, names: typing.Iterable[str]) -> None:
    route = routes[path]
    places = [set(route.fields), set(route.refused), set(route.without_effect)]
    missing = [name for name in names if sum(name in place for place in places) == 0]
    assert not missing, f"{path} does not know {missing}"
    for i, place in enumerate(places):
        assert not any(place & other for other in places[i + 1 :]), "a field has two places"


BODIES = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 4},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "ab", "max_output_tokens": 4},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [70]},
}


@pytest.mark.parametrize("path", BODIES)
def test_refused_fields_are_named_and_the_others_accepted(
    call: Caller, routes: dict[str, Operation], path: str
) -> None:
    call.says("x")
    for name in routes[path].refused:
        error = call.refusal(path, **BODIES[path], **{name: "x"})
        assert f"`{name}`" in error["message"] and error["param"] == name
        call.post(path, **BODIES[path], **{name: None})
    for name in routes[path].without_effect:
        call.post(path, **BODIES[path], **{name: "x"})
