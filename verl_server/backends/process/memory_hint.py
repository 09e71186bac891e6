"""`log_memory_hint`: what a user needs to know about memory when another project's engine did not start.

`backends.process.run` calls it after a failed start. The reason of the failure is in the engine's own log, in the
engine's own names. The line of this module comes last, so that it is in the end of the log that the error shows.
"""

from __future__ import annotations

import logging

from verl_server.server_args import ServerArgs
from verl_server.worker.cuda_context import find_uuid
from verl_server.worker.gpu_holders import GpuHolders, gpu_holders

logger = logging.getLogger(__name__)

_SETTINGS = {
    "vllm": (
        "mem_fraction_static={fraction:g} is vLLM's gpu_memory_utilization, a share of the whole GPU, which must be "
        "free at the start{most}. context_length is vLLM's max_model_len: the KV cache must hold one such request. "
        "max_running_requests is its max_num_seqs, chunked_prefill_size its max_num_batched_tokens. On a CPU, "
        "kv_cache_gib is its VLLM_CPU_KVCACHE_SPACE."
    ),
    "sglang": (
        "mem_fraction_static={fraction:g} is the share of what was free at the start that SGLang uses for weights and "
        "KV cache. Raise it if there is no room for the KV cache, lower it if SGLang ran out of memory. "
        "chunked_prefill_size, max_running_requests and engine_args={{'cuda_graph_max_bs_decode': ...}} lower what it "
        "needs beside them."
    ),
}
"""Engine -> the meaning of the settings that decide how much memory it takes."""


def log_memory_hint(server_args: ServerArgs) -> None:
    """Log which settings decide the engine's memory, and who holds the memory of its GPUs now."""
    found = [(name, holders) for name in _gpus(server_args) if (holders := gpu_holders(name)) is not None]
    free = min((holders.free / holders.total for _, holders in found), default=None)
    most = "" if free is None else f" (now {free:.2f} is free)"
    text = _SETTINGS[server_args.engine].format(fraction=server_args.mem_fraction_static, most=most)
    gpus = "".join(f" GPU {name}: {_describe(holders)}" for name, holders in found)
    logger.error("The engine did not start. If the log above says that memory is short: %s%s", text, gpus)


def _describe(holders: GpuHolders) -> str:
    sentence = holders.sentence()
    return f"{holders.free / 2**30:.2f} of {holders.total / 2**30:.2f} GiB are free. {sentence}".rstrip()


def _gpus(server_args: ServerArgs) -> list[str]:
    """Return the UUIDs of the engine's GPUs, empty without a GPU."""
    if server_args.device == "cpu":
        return []
    if server_args.gpu_uuids:
        return list(server_args.gpu_uuids)
    first = 0 if server_args.engine == "vllm" else server_args.base_gpu_id  # vLLM's GPUs are the visible ones
    return [name for rank in range(server_args.tp_size) if (name := find_uuid(first + rank))]
