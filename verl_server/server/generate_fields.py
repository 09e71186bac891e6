"""The fields of SGLang's `/generate` that `GenerateReqInput` does not have, each with the reason.

`generate_request` refuses or ignores them. SGLang's and OpenAI's dialects list them in their operations.
"""

from __future__ import annotations

from verl_server import lora

_NO_MULTIMODAL = "only text and token ids are served"
_NO_INTERNALS = "this server returns tokens and log-probabilities only"
_NO_ROUTING = "this server has one data-parallel rank, 0"
_NO_DISAGGREGATION = "prefill and decode are not disaggregated"
_NO_SCORING = "this server generates; use logprob_start_len to score a prompt"
UNSUPPORTED_FIELDS = {
    "input_embeds": "send input_ids or text",
    "positional_embed_overrides": "send input_ids or text",
    "image_data": _NO_MULTIMODAL,
    "video_data": _NO_MULTIMODAL,
    "audio_data": _NO_MULTIMODAL,
    "modalities": _NO_MULTIMODAL,
    "mm_hashes": _NO_MULTIMODAL,
    "mm_content_hashes": _NO_MULTIMODAL,
    "mm_processor_kwargs": _NO_MULTIMODAL,
    "use_audio_in_video": _NO_MULTIMODAL,
    "video_config": _NO_MULTIMODAL,
    "images_config": _NO_MULTIMODAL,
    "max_dynamic_patch": _NO_MULTIMODAL,
    "min_dynamic_patch": _NO_MULTIMODAL,
    "image_max_dynamic_patch": _NO_MULTIMODAL,
    "video_max_dynamic_patch": _NO_MULTIMODAL,
    "need_wait_for_mm_inputs": _NO_MULTIMODAL,
    "num_items_assigned": _NO_MULTIMODAL,
    "encoder_urls": _NO_MULTIMODAL,
    **lora.REQUEST_FIELDS,
    "custom_logit_processor": "use logit_bias, allowed_token_ids, bad_words or penalties",
    "watermark": "watermarks are not implemented",
    "return_hidden_states": _NO_INTERNALS,
    "return_routed_experts": _NO_INTERNALS,
    "routed_experts_start_len": _NO_INTERNALS,
    "return_indexer_topk": _NO_INTERNALS,
    "return_entropy": "use top_logprobs_num; SGLang returns no entropy either",
    "return_bytes": "only text and token ids are returned",
    "return_flat_raw_top_logprobs": "use top_logprobs_num, with columnar for arrays",
    "return_flat_raw_output_top_logprobs": "use top_logprobs_num, with columnar for arrays",
    "return_flat_raw_top_logprobs_b64": "use top_logprobs_num, with columnar for arrays",
    "max_thinking_tokens": "use max_new_tokens",
    "require_reasoning": "reasoning is not enforced; open it in the prompt",
    "routed_dp_rank": _NO_ROUTING,
    "data_parallel_rank": _NO_ROUTING,
    "kv_hints": "the prefix cache takes no hints",
    "bootstrap_host": _NO_DISAGGREGATION,
    "bootstrap_port": _NO_DISAGGREGATION,
    "bootstrap_room": _NO_DISAGGREGATION,
    "bootstrap_pair_key": _NO_DISAGGREGATION,
    "decode_tp_size": _NO_DISAGGREGATION,
    "multi_item_delimiter_indices": _NO_SCORING,
    "token_indices_to_pool": _NO_SCORING,
}
"""SGLang's request fields that are refused if they are set, each with the reason or the alternative. 0, false, null and
empty values count as not set."""

ACCEPTED_HINTS = {
    "routing_key": "a router in front of the server reads it",
    "kv_router_hint": "a router in front of the server reads it",
    "no_logs": "requests are not logged",
    "log_metrics": "metrics count every request",
    "custom_labels": "metrics have no labels of requests",
    "external_trace_header": "requests are not traced",
    "received_time": "the server measures its own times",
    "http_worker_ipc": "one process answers HTTP",
    "background": "the answer is sent when the request ends",
}
"""SGLang's request fields that are accepted and have no effect, each with the reason."""
