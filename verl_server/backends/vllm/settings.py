"""The settings that `VllmDriver` passes to vLLM: arguments of its engine, and environment variables.

Settings on which verl-server's guarantees depend are set here, and `engine_args` may not set them.
"""

from __future__ import annotations

import os
from typing import Any

from verl_server.backends.process.checkpoint_dtype import checkpoint_dtype
from verl_server.backends.process.engine_args import check_engine_args
from verl_server.backends.vllm.plugin import ENDS_WITH_PARENT
from verl_server.files.model_folder import resolve_model_folder
from verl_server.server_args import ServerArgs

REFUSED = {
    "worker_cls": "the weight channel extends vLLM's own worker",
    "scheduler_cls": "pauses and version borders rely on vLLM's own scheduler",
    "enable_eplb": "it moves experts, so that pushed weights would go to the wrong ones",
}
"""Argument of `AsyncEngineArgs` that may not be set -> the reason."""


def engine_settings(server_args: ServerArgs, on_gpu: bool = False) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`. Raise BadRequestError for `engine_args` that are set here."""
    folder = resolve_model_folder(server_args.model_path, server_args.revision)
    ours: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": server_args.tokenizer_path,
        "skip_tokenizer_init": server_args.skip_tokenizer_init,  # grammars and bad_words need the tokenizer
        "structured_outputs_config": {"backend": "guidance"},  # the library that translated the grammars
        "dtype": checkpoint_dtype(folder) if server_args.dtype == "auto" else server_args.dtype,
        "load_format": server_args.load_format,
        "max_model_len": server_args.context_length,
        "tensor_parallel_size": server_args.tp_size,
        "max_num_seqs": server_args.max_running_requests,
        "enable_prefix_caching": not server_args.disable_radix_cache,
        "gpu_memory_utilization": server_args.mem_fraction_static,
        "trust_remote_code": server_args.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "enable_sleep_mode": on_gpu,  # release and resume of memory
        "worker_extension_cls": "verl_server.backends.vllm.worker_extension.WorkerExtension",
    }
    if server_args.chunked_prefill_size is not None:
        ours["max_num_batched_tokens"] = server_args.chunked_prefill_size
    check_engine_args(server_args.engine_args, {*ours, "max_num_batched_tokens"}, REFUSED)
    return ours | server_args.engine_args


def set_environment(server_args: ServerArgs) -> None:
    """Set the environment variables that vLLM reads. Called in the process that starts it, before it is imported."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ[ENDS_WITH_PARENT] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", server_args.log_level.upper())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(server_args.kv_cache_gib))))
    if server_args.gpu_uuids:
        names = [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in server_args.gpu_uuids]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    elif server_args.base_gpu_id:
        last = server_args.base_gpu_id + server_args.tp_size
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(server_args.base_gpu_id, last)))
