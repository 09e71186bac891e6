"""verl's rollout settings as settings of this server.

`VerlServerReplica` calls these functions with verl's `RolloutConfig` and `HFModelConfig` (dataclasses or OmegaConf
nodes). Every field of `RolloutConfig` is in one of four groups: fields that this module translates, fields that verl
reads itself (`READ_BY_VERL`), fields without effect (`WITHOUT_EFFECT`), and fields that are refused by name
(`REFUSED`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_server import lora
from verl_server.engine.placement import seed_of_engine
from verl_server.errors import BadRequestError
from verl_server.sampling_params import LogprobsMode

logger = logging.getLogger(__name__)

Mode = Literal["hybrid", "colocated", "standalone"]
"""Values of verl's `RolloutMode`: the trainer's processes and the server share GPUs and weights (hybrid), share GPUs
only (colocated), or share nothing (standalone)."""

TRANSLATED = frozenset(
    (
        "cudagraph_capture_sizes",
        "dtype",
        "enable_prefix_caching",
        "enforce_eager",
        "engine_kwargs",
        "free_cache_engine",
        "full_determinism",
        "gpu_memory_utilization",
        "ignore_eos",
        "load_format",
        "logprobs_mode",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "profiler",
        "prompt_length",
        "repetition_penalty",
        "response_length",
        "seed",
        "standalone_gpu_memory_utilization",
        "tensor_model_parallel_size",
    )
)
"""Fields of `RolloutConfig` that this module, the replica or the server actor reads."""

READ_BY_VERL = frozenset(
    (
        "agent",
        "calculate_log_probs",
        "checkpoint_engine",
        "checkpoint_manager_class",
        "custom",
        "disable_log_stats",
        "do_sample",
        "layered_summon",
        "log_prob_max_token_len_per_gpu",
        "log_prob_micro_batch_size",
        "log_prob_micro_batch_size_per_gpu",
        "log_prob_use_dynamic_bsz",
        "mode",
        "multi_turn",
        "n",
        "n_gpus_per_node",
        "name",
        "nnodes",
        "prometheus",
        "router_config_path",
        "temperature",
        "top_k",
        "top_p",
        "trace",
        "val_kwargs",
    )
)
"""Fields of `RolloutConfig` that verl's trainer, agent loop or workers read. The server has nothing to do with them."""

WITHOUT_EFFECT = {
    "enable_chunked_prefill": "long prompts are always processed in chunks, which do not change results",
    "enable_sleep_mode": "memory can always be released",
    "layer_name_map": "verl's Megatron weight converters for vLLM read it",
    "limit_images": "only token ids are served",
    "moe_load_balance_metrics_interval": "the served models have no experts",
    "multi_stage_wake_up": "weights and KV cache are always resumed separately",
    "over_sample_rate": "no part of verl reads it",
    "scheduling_policy": "verl sends no priorities to this server",
    "server": "verl's SGLang adapter reads it",
    "sglang_engine_mode": "no part of verl reads it",
    "skip_tokenizer_init": "the server keeps its tokenizer, for OpenAI clients",
}
"""Field of `RolloutConfig` without effect -> the reason."""

_ONE_REPLICA = "a replica is one tensor-parallel server. Leave it at 1: verl starts one replica for each group of GPUs"
_DTYPE_ONLY = "the weights are served in rollout.dtype"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "data_parallel_size": ((1,), _ONE_REPLICA),
    "pipeline_model_parallel_size": ((1,), "use tensor_model_parallel_size"),
    "expert_parallel_size": ((1, None), "the served models have no experts"),
    "moe_tensor_parallel_size": ((1, None), "the served models have no experts"),
    "quantization": ((None,), _DTYPE_ONLY),
    "quantization_config_file": ((None,), _DTYPE_ONLY),
    "qat.enable": ((None, False), _DTYPE_ONLY),
    "mtp.enable_rollout": ((None, False), "speculative decoding is not implemented"),
    "disaggregation.enabled": ((None, False), "prefill and decode run in one server"),
    "enable_rollout_routing_replay": ((None, False), "the served models have no experts"),
}
"""Field of `RolloutConfig` -> (values that are accepted, what to do instead)."""

_REFUSED_OVERRIDES = frozenset(
    (
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "vocab_size",
    )
)
"""Keys of `model.override_config` that change what the model computes. The server reads config.json instead."""

_LOGPROBS_MODES: dict[str | None, LogprobsMode] = {
    None: "default",
    "processed_logprobs": "default",
    "raw_logprobs": "raw",
}
_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_LOAD_FORMATS = ("auto", "safetensors", "dummy")
_CHOSEN_BY_REPLICA = {
    "gpu_uuids": "the replica's workers have these GPUs",
    "host": "the server listens at its node's address",
    "model_path": "set actor_rollout_ref.model.path",
    "nnodes": "a replica runs on one node",
    "node_rank": "a replica runs on one node",
    "port": "the server uses a free port",
    "random_seed": "set actor_rollout_ref.rollout.seed, from which each replica derives its own",
    "tp_size": "set actor_rollout_ref.rollout.tensor_model_parallel_size",
}
"""Setting of `ServerArgs` that engine_kwargs.verl_server may not have -> the reason."""


@dataclass(frozen=True)
class ServingOptions:
    """Settings of the server actor that the server itself does not have."""

    mode: Mode = "standalone"
    """How the replica shares GPUs with the trainer."""
    free_cache_engine: bool = True
    """False: the memory of the server is never released."""
    prompt_length: int | None = None
    """Most prompt tokens of a first turn; with `response_length` it bounds the tokens of a request without a limit."""
    response_length: int | None = None
    """Most output tokens of a request without a limit."""
    ignore_eos: bool = False
    """Default of the sampling parameter `ignore_eos`."""
    repetition_penalty: float = 1.0
    """Default of the sampling parameter `repetition_penalty`."""
    logprobs_mode: LogprobsMode = "default"
    """Distribution of the log-probabilities of output tokens; see `SamplingParams.logprobs_mode`."""
    deterministic_seed: int | None = None
    """With `full_determinism`: the seed from which each request derives its own, with its id and prompt length."""
    gpu_memory_utilization: float | None = None
    """Share of a GPU's whole memory for weights and KV cache together, as in vLLM. The actor converts it into
    `mem_fraction_static`, a share of the memory that is free when the server starts. So the size of the KV cache does
    not depend on how much the trainer has allocated by then. A `mem_fraction_static` in `engine_kwargs.verl_server`
    replaces it. None: the server's default."""
    use_shm: bool = False
    """Copy the model folder to shared memory before the server reads the folder."""


def check_supported(config: Any, model_config: Any) -> None:
    """Raise BadRequestError, with the name of the setting and what to do instead, for a setting that is refused."""
    for name, (accepted, remedy) in REFUSED.items():
        if (value := _get(config, name)) not in accepted:
            raise BadRequestError(f"rollout.{name}={value!r} is not supported by rollout.name=verl_server: {remedy}.")
    mode = _get(config, "logprobs_mode")
    if mode not in _LOGPROBS_MODES:
        raise BadRequestError(
            f"rollout.logprobs_mode={mode!r} is not supported by rollout.name=verl_server: use 'processed_logprobs' "
            "(what the actor computes) or 'raw_logprobs'."
        )
    load_format = _get(config, "load_format")
    if load_format not in _LOAD_FORMATS:
        raise BadRequestError(
            f"rollout.load_format={load_format!r} is not supported by rollout.name=verl_server: use 'dummy' if the "
            "trainer pushes the weights before the first rollout, else 'auto'."
        )
    rank = _get(model_config, "lora_rank") or _get(model_config, "lora.rank") or 0
    if rank > 0 and not _get(model_config, "lora.merge"):
        raise BadRequestError(
            f"{lora.MERGE_IN_VERL}. model.lora_rank={rank} without it is not supported by rollout.name=verl_server, "
            "because adapters are not served."
        )
    if _get(model_config, "mtp.enable_rollout"):
        raise BadRequestError(
            "model.mtp.enable_rollout=True is not supported by rollout.name=verl_server: speculative decoding is not "
            "implemented."
        )
    overrides = _plain(_get(model_config, "override_config") or {})
    changed = sorted(_REFUSED_OVERRIDES & (overrides.get("model_config") or overrides).keys())
    if changed:
        raise BadRequestError(
            f"model.override_config sets {', '.join(changed)}, which the server would not see, because it reads "
            "config.json of the model folder: change them there."
        )


def serving_options(config: Any, model_config: Any, mode: Mode) -> ServingOptions:
    """Return the options of the server actor."""
    memory = _get(config, "gpu_memory_utilization")
    if mode == "standalone" and _get(config, "standalone_gpu_memory_utilization") is not None:
        memory = _get(config, "standalone_gpu_memory_utilization")
    if not 0.0 < memory <= 1.0:
        raise BadRequestError(f"rollout.gpu_memory_utilization must be in (0, 1], not {memory}.")
    return ServingOptions(
        mode=mode,
        free_cache_engine=bool(_get(config, "free_cache_engine")),
        prompt_length=_get(config, "prompt_length"),
        response_length=_get(config, "response_length"),
        ignore_eos=bool(_get(config, "ignore_eos")),
        repetition_penalty=float(_get(config, "repetition_penalty")),
        logprobs_mode=_LOGPROBS_MODES[_get(config, "logprobs_mode")],
        deterministic_seed=int(_get(config, "seed")) if _get(config, "full_determinism") else None,
        gpu_memory_utilization=float(memory),
        use_shm=bool(_get(model_config, "use_shm")),
    )


def server_settings(
    config: Any, model_config: Any, mode: Mode, replica_rank: int, gpu_uuids: tuple[str, ...], *, trained: bool = True
) -> dict[str, Any]:
    """Return the keywords of `ServerArgs` for the server of one replica. The actor adds the address.

    `gpu_uuids` has one UUID for each tensor-parallel rank, or is empty on the CPU. `trained` is False for a reward
    model or a teacher. Such a server draws its seed at random, because a seed by rank would equal the seed of a replica
    of the trained model. Raise BadRequestError for a setting in `engine_kwargs.verl_server` that the replica chooses.
    """
    check_supported(config, model_config)
    tp_size, seed = int(_get(config, "tensor_model_parallel_size")), _get(config, "seed")
    sizes = _plain(_get(config, "cudagraph_capture_sizes"))
    dtype = str(_get(config, "dtype"))
    settings = {
        "model_path": _get(model_config, "path"),
        "tokenizer_path": _get(model_config, "tokenizer_path"),
        "trust_remote_code": bool(_get(model_config, "trust_remote_code")),
        "load_format": _get(config, "load_format"),
        "dtype": _DTYPES.get(dtype, dtype),
        "context_length": _get(config, "max_model_len"),
        "device": "cuda" if gpu_uuids else "cpu",
        "gpu_uuids": gpu_uuids,
        "tp_size": tp_size,
        "max_running_requests": int(_get(config, "max_num_seqs")),
        "chunked_prefill_size": int(_get(config, "max_num_batched_tokens")),
        "disable_radix_cache": not _get(config, "enable_prefix_caching"),
        "disable_cuda_graph": bool(_get(config, "enforce_eager")),
        "cuda_graph_max_bs": max(sizes) if sizes else None,
        "enable_weights_cpu_backup": mode == "colocated",
        "random_seed": seed_of_engine(int(seed), replica_rank * tp_size) if trained and seed is not None else None,
    }
    given: dict[str, Any] = _plain(_get(config, "engine_kwargs.verl_server") or {})
    for name, reason in _CHOSEN_BY_REPLICA.items():
        if name in given:
            raise BadRequestError(f"rollout.engine_kwargs.verl_server.{name} cannot be set: {reason}.")
    if isinstance(templates := given.get("allowed_chat_templates"), list):
        given["allowed_chat_templates"] = tuple(templates)
    return {name: value for name, value in settings.items() if value is not None} | given


def log_without_effect(config: Any) -> None:
    """Log the settings of other engines in `engine_kwargs` and a priority policy, which have no effect."""
    others = [name for name, given in _plain(_get(config, "engine_kwargs") or {}).items() if given]
    for name in others:
        if name != "verl_server":
            logger.warning("rollout.engine_kwargs.%s has no effect with rollout.name=verl_server.", name)
    if _get(config, "scheduling_policy") not in (None, "fcfs"):
        logger.warning("rollout.scheduling_policy has no effect: %s.", WITHOUT_EFFECT["scheduling_policy"])


def _get(config: Any, path: str) -> Any:
    """Return the value at a dotted path of dataclasses and mappings; None if a part of the path is missing."""
    for name in path.split("."):
        if config is None:
            return None
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return config


def _plain(value: Any) -> Any:
    """Convert OmegaConf nodes into lists and dicts."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "ListConfig":
        return [_plain(entry) for entry in value]
    return value
