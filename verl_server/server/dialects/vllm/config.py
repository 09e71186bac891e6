"""`vllm_config`: what `/server_info?config_format=json` returns to vLLM's clients, under vLLM's names.

Clients read the world size, the dtype, the definition of log-probabilities, and whether weights can be transferred.
Only settings are included that this server has.
"""

from __future__ import annotations

from typing import Any

from verl_server.messages.results import SchedulerInfo
from verl_server.server_args import ServerArgs


def vllm_config(server_args: ServerArgs, scheduler_info: SchedulerInfo, model_path: str) -> dict[str, Any]:
    """Return the settings of this server. Parts that it does not have, such as LoRA, are None."""
    size, engine = server_args.tp_size, server_args.engine_args
    return {
        "model_config": {
            "model": model_path,
            "served_model_name": server_args.served_model_name or model_path,
            "tokenizer": server_args.tokenizer_path or server_args.model_path,
            "dtype": f"torch.{scheduler_info.get('dtype')}",
            "max_model_len": scheduler_info.get("context_length"),
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": server_args.max_top_logprobs,
            "seed": server_args.random_seed,
            "quantization": engine.get("quantization"),
            "enable_sleep_mode": scheduler_info.get("releases_memory", False),
            "skip_tokenizer_init": server_args.skip_tokenizer_init,
            "runner_type": "generate",
        },
        "parallel_config": {
            "world_size": size,
            "world_size_across_dp": size,
            "tensor_parallel_size": size,
            "pipeline_parallel_size": engine.get("pipeline_parallel_size", 1),
            "data_parallel_size": 1,
            "data_parallel_rank": 0,
            "enable_expert_parallel": engine.get("enable_expert_parallel", False),
        },
        "scheduler_config": {
            "max_num_seqs": scheduler_info.get("max_running_requests"),
            "max_num_batched_tokens": scheduler_info.get("chunked_prefill_size"),
            "max_model_len": scheduler_info.get("context_length"),
            "policy": "priority",
            "enable_chunked_prefill": True,
        },
        "cache_config": {
            "block_size": scheduler_info.get("page_size"),
            "enable_prefix_caching": not server_args.disable_radix_cache,
            "gpu_memory_utilization": server_args.mem_fraction_static,
        },
        "device_config": {"device": scheduler_info.get("device")},
        "load_config": {"load_format": server_args.load_format},
        "weight_transfer_config": {"backend": "nccl"},
        "lora_config": None,
        "speculative_config": None,
        "kv_transfer_config": None,
        "quant_config": None,
    }
