"""`ServerArgs` with SGLang's settings, translated into this server's.

A setting of SGLang is in exactly one of three places: among this server's own settings, whose names are SGLang's; in
`WITHOUT_EFFECT`; or in `REFUSED`. A setting in none of them raises TypeError, as any unknown argument does.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from typing import Any

from verl_server import lora
from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs as Settings

_KERNELS = "this server chooses its kernels by itself"
_ONE_MODEL = "one model is served, without a draft model"
_MEMORY = "memory can always be released and resumed"
_SCHEDULING = "the scheduler sets it by itself"
_LOGS = "the server has its own log and metrics"

WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "enable_memory_saver": (False, _MEMORY),
    "enable_draft_weights_cpu_backup": (False, _ONE_MODEL),
    "skip_server_warmup": (False, "the first request takes milliseconds, and the server is ready after it"),
    "warmups": (None, "the server warms up by itself"),
    "nccl_port": (None, "ranks of one host meet at a file"),
    "dist_timeout": (None, "sync_timeout bounds the wait of ranks"),
    "watchdog_timeout": (300, "control_timeout bounds a silent scheduler"),
    "soft_watchdog_timeout": (None, "control_timeout bounds a silent scheduler"),
    "sleep_on_idle": (False, "an idle server sleeps"),
    "numa_node": (None, "the caller places the process"),
    "mm_attention_backend": (None, _KERNELS),
    "prefill_attention_backend": (None, _KERNELS),
    "decode_attention_backend": (None, _KERNELS),
    "sampling_backend": (None, _KERNELS),
    "triton_attention_reduce_in_fp32": (False, _KERNELS),
    "triton_attention_num_kv_splits": (8, _KERNELS),
    "moe_runner_backend": ("auto", _KERNELS),
    "moe_a2a_backend": ("none", _KERNELS),
    "enable_torch_compile": (False, _KERNELS),
    "torch_compile_max_bs": (32, _KERNELS),
    "enable_nccl_nvls": (False, _KERNELS),
    "enable_symm_mem": (False, _KERNELS),
    "enable_mscclpp": (False, _KERNELS),
    "enable_p2p_check": (False, _KERNELS),
    "disable_flashinfer_autotune": (False, _KERNELS),
    "disable_cuda_graph_padding": (False, _KERNELS),
    "enable_profile_cuda_graph": (False, _KERNELS),
    "cuda_graph_bs": (None, _KERNELS),
    "cuda_graph_bs_decode": (None, _KERNELS),
    "cuda_graph_max_bs_decode": (None, _KERNELS),
    "cuda_graph_backend_decode": (None, _KERNELS),
    "cuda_graph_backend_prefill": (None, _KERNELS),
    "disable_prefill_cuda_graph": (False, _KERNELS),
    "max_prefill_tokens": (16384, _SCHEDULING),
    "schedule_conservativeness": (1.0, _SCHEDULING),
    "num_continuous_decode_steps": (1, _SCHEDULING),
    "scheduler_recv_interval": (1, _SCHEDULING),
    "enable_mixed_chunk": (False, _SCHEDULING),
    "load_balance_method": ("auto", "there is one data-parallel rank"),
    "radix_eviction_policy": ("lru", _SCHEDULING),
    "tokenizer_mode": ("auto", "the fast tokenizer is used where there is one"),
    "tokenizer_worker_num": (1, "text_workers sets the number"),
    "detokenizer_worker_num": (1, "text_workers sets the number"),
    "model_impl": ("auto", "the server has its own models"),
    "model_loader_extra_config": ("{}", "safetensors need none"),
    "download_dir": (None, "the cache of the hub is used"),
    "delete_ckpt_after_loading": (False, "files are left to their owner"),
    "weight_loader_disable_mmap": (False, "files are read by the server's own reader"),
    "enable_cache_report": (False, "cached tokens are always reported"),
    "stream_interval": (1, "sampling_params.stream_interval sets it for each request"),
    "sampling_defaults": ("model", "requests carry their sampling parameters"),
    "enable_return_indexer_topk": (False, "the models have no indexer"),
    "log_requests": (False, _LOGS),
    "log_requests_level": (2, _LOGS),
    "show_time_cost": (False, _LOGS),
    "crash_dump_folder": (None, _LOGS),
    "decode_log_interval": (40, _LOGS),
    "enable_metrics_for_all_schedulers": (False, _LOGS),
    "enable_trace": (False, _LOGS),
    "gc_warning_threshold_secs": (0.0, _LOGS),
    "fastapi_root_path": ("", "the server answers at every prefix that a proxy removes"),
    "enable_custom_logit_processor": (False, "requests that carry a processor are refused"),
}
"""Setting without effect -> (SGLang's default, the reason)."""

_NOT_SPLIT = "the server has one data-parallel, pipeline and expert rank; start several servers"
_NO_DRAFT = "speculative decoding is not implemented"
_NOT_DISAGGREGATED = "prefill and decode are not disaggregated"
_NOT_QUANTIZED = "weights are served in the dtype of `dtype`"
_TEXT_ONLY = "only text and token ids are served"
_TOKENS_ONLY = "the server returns tokens and log-probabilities only"

_LORA_DEFAULTS: dict[str, Any] = {
    "enable_lora": None,
    "enable_lora_overlap_loading": None,
    "experts_shared_outer_loras": None,
    "lora_backend": "csgmv",
    "lora_drain_wait_threshold": 0.0,
    "lora_eviction_policy": "lru",
    "lora_paths": None,
    "lora_strict_loading": False,
    "lora_target_modules": None,
    "lora_use_virtual_experts": False,
    "max_loaded_loras": None,
    "max_lora_chunk_size": 16,
    "max_lora_rank": None,
    "max_loras_per_batch": 8,
}
"""SGLang's settings of adapters -> their defaults."""

REFUSED: dict[str, tuple[Any, str]] = {
    "dp_size": (1, _NOT_SPLIT),
    "pp_size": (1, _NOT_SPLIT),
    "ep_size": (1, _NOT_SPLIT),
    "moe_dp_size": (1, _NOT_SPLIT),
    "attn_cp_size": (1, _NOT_SPLIT),
    "enable_dp_attention": (False, _NOT_SPLIT),
    "enable_dp_lm_head": (False, _NOT_SPLIT),
    "gpu_id_step": (1, "set gpu_uuids"),
    **{name: (default, lora.PUSH_MERGED) for name, default in _LORA_DEFAULTS.items()},
    "speculative_algorithm": (None, _NO_DRAFT),
    "speculative_draft_model_path": (None, _NO_DRAFT),
    "speculative_num_steps": (None, _NO_DRAFT),
    "speculative_eagle_topk": (None, _NO_DRAFT),
    "speculative_num_draft_tokens": (None, _NO_DRAFT),
    "disaggregation_mode": ("null", _NOT_DISAGGREGATED),
    "encoder_only": (False, _NOT_DISAGGREGATED),
    "quantization": (None, _NOT_QUANTIZED),
    "kv_cache_dtype": ("auto", "the KV cache has the dtype of the model"),
    "quantization_param_path": (None, _NOT_QUANTIZED),
    "modelopt_quant": (None, _NOT_QUANTIZED),
    "rl_quant_profile": (None, _NOT_QUANTIZED),
    "custom_weight_loader": (None, "no code is loaded by name"),
    "json_model_override_args": ("{}", "edit config.json in the model's folder"),
    "is_embedding": (False, "only generation is served"),
    "enable_multimodal": (None, _TEXT_ONLY),
    "enable_return_hidden_states": (False, _TOKENS_ONLY),
    "enable_return_routed_experts": (False, _TOKENS_ONLY),
    "cpu_offload_gb": (0, "the weights stay on the device"),
    "enable_hierarchical_cache": (False, "the prefix cache is on the device"),
    "enable_lmcache": (False, "the prefix cache is on the device"),
    "enable_deterministic_inference": (False, "requests with a sampling_seed repeat on one machine"),
    "rl_on_policy_target": (None, "requests with a sampling_seed repeat on one machine"),
    "preferred_sampling_params": (None, "send sampling_params with each request"),
    "allow_auto_truncate": (False, "send truncate_prompt_tokens, or shorter prompts"),
    "ssl_certfile": (None, "put a proxy in front of the server"),
    "ssl_keyfile": (None, "put a proxy in front of the server"),
    "grpc_mode": (False, "only HTTP is served"),
    "decrypted_config_file": (None, "edit config.json in the model's folder"),
    "checkpoint_engine_wait_weights_before_ready": (False, "start with load_format='dummy' and push weights"),
}
"""Refused setting -> (SGLang's default, the alternative)."""

_DTYPES = {"half": "float16", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_LOG_LEVELS = {"warn": "warning", "critical": "error", "fatal": "error", "trace": "debug", "notset": "debug"}
_SETTINGS = {field.name: field for field in dataclasses.fields(Settings)}


class TranslatedArgs:
    """Methods of `ServerArgs`. Its fields are this server's settings, `WITHOUT_EFFECT` and `REFUSED`."""

    def translated(self) -> Settings:
        """Return this server's settings. Raise BadRequestError that names a refused setting and what to do instead.

        None means the default, as in SGLang.
        """
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(typing.cast(Any, self))}
        for name, (default, remedy) in REFUSED.items():
            if given[name] not in (None, default, False, "", []):
                raise BadRequestError(f"ServerArgs.{name}={given[name]!r} is not supported: {remedy}.")
        own = {name: given[name] for name in _SETTINGS if given[name] is not None}
        if "dtype" in own:
            own["dtype"] = _DTYPES.get(own["dtype"], own["dtype"])
        for name in ("log_level", "log_level_http"):
            if name in own:
                own[name] = _LOG_LEVELS.get(own[name].lower(), own[name].lower())
        if own.get("attention_backend", "auto") not in ("auto", "triton", "cpp", "torch"):
            own["attention_backend"] = "auto"  # a kernel library of SGLang's
        if own.get("grammar_backend", "none") not in ("llguidance", "none"):
            del own["grammar_backend"]  # another library for the same grammars
        if own.get("schedule_policy", "lpm") not in ("lpm", "fcfs"):
            del own["schedule_policy"]  # another order of the queue does not change results
        if own.get("chunked_prefill_size", 1) < 1:
            del own["chunked_prefill_size"]  # -1 means one chunk; chunks do not change results
        return Settings(**own)

    def url(self, port: int | None = None) -> str:
        """Return the URL at which a client on this host reaches the server. Adapters call it before the start."""
        given: str = self.host  # type: ignore[attr-defined]
        host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(given, given)
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        return f"http://{host}:{port or self.port}"  # type: ignore[attr-defined]

    def resolve_once(self) -> None:
        """Raise BadRequestError for a refused setting. SGLang's adapter calls this before it starts the process."""
        self.translated()

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add a flag for each setting, as SGLang does."""
        hints = typing.get_type_hints(Settings)
        for field in dataclasses.fields(typing.cast(Any, cls)):
            flag = f"--{field.name.replace('_', '-')}"
            default = None if field.default is dataclasses.MISSING else field.default
            if isinstance(default, bool):
                parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
            elif isinstance(default, tuple):
                parser.add_argument(flag, nargs="*", default=default)
            else:
                kinds = {type(default), *typing.get_args(hints.get(field.name, str))}
                kind = next((kind for kind in (int, float) if kind in kinds), str)
                parser.add_argument(flag, type=kind, default=default)

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> Any:
        """Return the settings in the result of a parser with `add_cli_args`."""
        names = [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
        return cls(**{name: getattr(namespace, name) for name in names if hasattr(namespace, name)})


def _fields() -> list[tuple[str, Any, Any]]:
    """Return (name, type, default) of all settings. `model_path` is the first and has no default, as in SGLang."""
    own = [(name, Any, field) for name, field in _SETTINGS.items()]
    others = [
        (name, Any, default) for name, (default, _) in (WITHOUT_EFFECT | REFUSED).items() if name not in _SETTINGS
    ]
    return [
        *((name, kind, _with_default_of(field)) for name, kind, field in own),
        *((name, kind, dataclasses.field(default=default)) for name, kind, default in others),
    ]


def _with_default_of(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default=field.default)


ServerArgs: Any = dataclasses.make_dataclass("ServerArgs", _fields(), bases=(TranslatedArgs,))
"""SGLang's settings, as a dataclass: adapters read its fields."""
ServerArgs.__module__ = __name__  # a spawned process finds the class by this name
