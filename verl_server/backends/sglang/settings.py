"""The settings that `SglangDriver` passes to SGLang: arguments of its `ServerArgs`, and environment variables.

Settings on which verl-server's guarantees depend are set here, and `engine_args` may not set them.
"""

from __future__ import annotations

import os
from typing import Any

from verl_server.backends.process.checkpoint_dtype import checkpoint_dtype
from verl_server.backends.process.engine_args import check_engine_args
from verl_server.errors import BadRequestError
from verl_server.files.model_folder import resolve_model_folder
from verl_server.server_args import ServerArgs

GRAMMARS = "verl_server"
"""Name of the grammar backend that `launch` registers."""
REFUSED = {
    "pp_size": "a hold does not know SGLang's loop of pipeline stages",
    "dp_size": "weights are voted on by the tensor-parallel ranks of one replica; start several servers",
    "enable_dp_attention": "weights are voted on by the tensor-parallel ranks of one replica",
    "speculative_algorithm": "updates would not reach the draft model",
    "disaggregation_mode": "a hold does not know SGLang's queues between prefill and decode",
    "dllm_algorithm": "a hold does not know SGLang's loop of diffusion models",
    "allow_auto_truncate": "it cuts prompts in silence",
    "custom_sigquit_handler": "the driver notices the end of each process itself",
    "nnodes": "the driver starts the processes of one host",
    "enable_eplb": "it moves experts, so that pushed weights would go to the wrong ones",
    "tokenizer_worker_num": "this server has its own tokenizer workers",
    "detokenizer_worker_num": "this server has its own text workers",
}
"""Argument of SGLang's `ServerArgs` that may not be set -> the reason."""


def engine_settings(server_args: ServerArgs) -> dict[str, Any]:
    """Return the arguments of SGLang's `ServerArgs`. Raise BadRequestError for `engine_args` that are set here."""
    device = _device(server_args)
    folder = resolve_model_folder(server_args.model_path, server_args.revision)
    dtype = checkpoint_dtype(folder) if server_args.dtype == "auto" else server_args.dtype
    if device == "cuda" and dtype == "float32":
        raise BadRequestError("SGLang's kernels for GPUs cannot compute in float32: set dtype='bfloat16' or 'float16'.")
    ours: dict[str, Any] = {
        "model_path": str(folder),
        "tokenizer_path": server_args.tokenizer_path,
        "skip_tokenizer_init": server_args.skip_tokenizer_init,  # grammars and min_new_tokens need the tokenizer
        "grammar_backend": "none" if server_args.skip_tokenizer_init else GRAMMARS,
        "device": device,
        "dtype": dtype,
        "load_format": server_args.load_format,
        "context_length": server_args.context_length,
        "tp_size": server_args.tp_size,
        "base_gpu_id": 0 if server_args.gpu_uuids else server_args.base_gpu_id,
        "max_running_requests": server_args.max_running_requests,
        "chunked_prefill_size": server_args.chunked_prefill_size,
        "disable_radix_cache": server_args.disable_radix_cache,
        "mem_fraction_static": server_args.mem_fraction_static,
        "trust_remote_code": server_args.trust_remote_code,
        "log_level": server_args.log_level,
        "sampling_backend": "pytorch",  # the only one that reads seeds
        "enable_priority_scheduling": True,
        "disable_priority_preemption": True,
        "default_priority_value": 0,
        "sleep_on_idle": True,  # a loop that spins would keep threads that stage weights from running
        "enable_memory_saver": device == "cuda",  # release and resume of memory
    }
    check_engine_args(server_args.engine_args, ours, REFUSED)
    defaults = _CPU_DEFAULTS | _kv_cache_tokens(server_args) if device == "cpu" else {}
    return ours | defaults | server_args.engine_args


_CPU_DEFAULTS = {"attention_backend": "torch_native", "disable_cuda_graph": True}


def _device(server_args: ServerArgs) -> str:
    if server_args.device != "auto":
        return server_args.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _kv_cache_tokens(server_args: ServerArgs) -> dict[str, int]:
    """Return SGLang's setting for the size of a KV cache on the CPU, which it would size by the host's memory."""
    from transformers import AutoConfig

    folder = resolve_model_folder(server_args.model_path, server_args.revision)
    config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=server_args.trust_remote_code).get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    numbers = 2 * config.num_hidden_layers * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return {"max_total_tokens": int(server_args.kv_cache_gib * 2**30 / (4 * numbers))}


def set_environment(server_args: ServerArgs, device: str) -> None:
    """Set the environment variables that SGLang reads. Called in the process that starts it, before it is imported."""
    if device == "cpu":
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    if server_args.gpu_uuids:
        names = [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in server_args.gpu_uuids]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
