"""Known fields of OpenAI's routes that are not in the structs: refused, or without effect, each with the reason.

The lists follow the request bodies of the openai package 3.54, SGLang 0.5.23 and vLLM 0.26 to 0.32.
"""

from __future__ import annotations

from verl_server.server.generate_fields import ACCEPTED_HINTS, UNSUPPORTED_FIELDS

_NO_MEDIA = "only text is served"
_NO_SPECULATION = "speculative decoding is not implemented"
_NO_TRANSFER = "prefill and decode are not disaggregated"
_NO_BEAMS = "use n independent samples"

_ELSEWHERE = ("modalities", "return_flat_raw_top_logprobs_b64")
"""Fields that `/generate` refuses, but that the tables below treat differently."""

_REFUSED = {name: reason for name, reason in UNSUPPORTED_FIELDS.items() if name not in _ELSEWHERE} | {
    "structural_tag": "use response_format or structured_outputs",
    "session_params": "use a session key, which names the session of each request",
    "custom_params": "custom logit processors are not implemented",
    "logits_processors": "use logit_bias, penalties or stop_token_ids",
    "watermark": "watermarks are not implemented",
    "watermarking": "watermarks are not implemented",
    "use_beam_search": _NO_BEAMS,
    "thinking_token_budget": "use max_tokens",
    "repetition_detection": "use repetition_penalty or stop",
    "guided_whitespace_pattern": "write the white space into a regex or a grammar",
    "vllm_xargs": "the server has no extensions of vLLM",
    "kv_transfer_params": _NO_TRANSFER,
    "ec_transfer_params": _NO_TRANSFER,
    "disagg_prefill_dp_rank": _NO_TRANSFER,
    "routed_experts_prompt_start": "only dense models are served",
    "images_config": _NO_MEDIA,
    "video_config": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "max_dynamic_patch": _NO_MEDIA,
    "min_dynamic_patch": _NO_MEDIA,
    "use_audio_in_video": _NO_MEDIA,
    "moderation": "the server does not moderate",
    "return_spec_tokens_details": _NO_SPECULATION,
    "return_prompt_text": "use return_token_ids and /detokenize",
}
_WITHOUT_EFFECT = ACCEPTED_HINTS | {
    "user": "it names the caller to OpenAI",
    "safety_identifier": "it names the caller to OpenAI",
    "metadata": "nothing is stored",
    "service_tier": "there is one class of service",
    "length_penalty": "only beam search uses it, which is refused",
    "guided_decoding_backend": "there is one library of grammars",
    "prompt_cache_key": "the prefix cache finds every prefix by itself",
    "prompt_cache_options": "the prefix cache finds every prefix by itself",
    "prompt_cache_retention": "the prefix cache keeps a prefix for as long as it has room",
    "return_token_offsets": "only vLLM's /render routes return them",
    "return_mm_kwargs": "only vLLM's /render routes return them",
    "return_flat_raw_top_logprobs_b64": "it configures return_flat_raw_output_top_logprobs, which is refused",
}

COMPLETION_REFUSED = _REFUSED | {
    "suffix": "fill-in-the-middle is not implemented",
    "prompt_embeds": "send text or token ids",
    "modalities": _NO_MEDIA,
}
COMPLETION_WITHOUT_EFFECT = _WITHOUT_EFFECT | {"store": "nothing is stored"}

CHAT_REFUSED = _REFUSED | {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": _NO_MEDIA,
    "web_search_options": "the server has no tools",
    "thinking": "use reasoning_effort or chat_template_kwargs",
    "task": "use chat_template_kwargs",
    "echo": "use continue_final_message",
    "add_special_tokens": "the chat template adds the special tokens",
}
CHAT_WITHOUT_EFFECT = _WITHOUT_EFFECT | {"prediction": "it only makes OpenAI's service faster"}

HARMLESS = {"function_call": ("none", "auto")}
"""Refused field -> values that are accepted, because the server behaves in this way in any case."""
