"""`ServerArgs`: every setting of a server, in one frozen dataclass.

Built by the CLI (generated from this class: each docstring below is that flag's help), by `Engine(**kwargs)`
and by `VerlEngine`. Field names are SGLang's where SGLang has the field. A server process receives it as
JSON (`to_json` / `from_json`).
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from verl_server.errors import BadRequestError

_COUNTS_FROM_ZERO = (
    "max_top_logprobs",
    "max_token_ids_logprob",
    "max_logprobs_per_request",
    "max_stop_strings",
    "max_stop_length",
    "max_stop_token_ids",
    "max_logit_bias",
)
"""Limits for which 0 means that the server refuses the feature."""


@dataclass(frozen=True)
class ServerArgs:
    """Settings of one rollout server."""

    model_path: str
    """Local folder or hub id of the policy (Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 dense)."""

    # -- model ---------------------------------------------------------------------------------------------
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; default: the model's."""
    skip_tokenizer_init: bool = False
    """Serve token ids only: no tokenizer is loaded, `text` and chat are refused."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Where weights come from: `auto`/`safetensors` reads the folder, `dummy` draws random weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute dtype; `auto` takes the checkpoint's on CUDA and float32 on CPU."""
    context_length: int | None = None
    """Longest prompt + completion in tokens; default: the model's `max_position_embeddings`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Allow tokenizer code from the model folder to run."""
    served_model_name: str | None = None
    """Name in `/v1/models`; default: `model_path`."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's."""
    allowed_chat_templates: tuple[str, ...] = ()
    """Paths of Jinja chat templates that a request may send in `chat_template_kwargs.chat_template`. A template is a
    program: one that is not byte for byte in this list (or the served model's own) is refused."""
    weight_version: str = "default"
    """Version label of the weights loaded at start."""

    # -- runtime -------------------------------------------------------------------------------------------
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; `auto` takes CUDA when there is one."""
    tp_size: int = 1
    """Tensor-parallel processes."""
    base_gpu_id: int = 0
    """First CUDA ordinal (as this process sees devices); rank i takes `base_gpu_id + i`."""
    gpu_uuids: tuple[str, ...] = ()
    """CUDA device UUIDs, one for each rank of this node; wins over `base_gpu_id`."""
    mem_fraction_static: float = 0.85
    """Share of the GPU memory that is free before the weights are loaded, for weights and KV cache together. The rest
    stays free for activations, at least what the largest step may take."""
    kv_cache_gib: float = 2.0
    """Size of the KV cache on CPU in GiB, an upper bound (CUDA uses `mem_fraction_static`)."""
    max_total_tokens: int | None = None
    """KV cache capacity in tokens; default: computed from the memory settings."""
    max_running_requests: int = 256
    """Most requests in one batch."""
    max_queued_requests: int | None = None
    """Most requests waiting; beyond it `/generate` answers 503. Default: no bound."""
    chunked_prefill_size: int | None = None
    """Most prompt tokens in one step; longer prompts are prefilled in chunks. Default: 8192 on CUDA, 2048 on CPU."""
    page_size: int = 16
    """Tokens in a KV page, the grain of prefix sharing."""
    disable_radix_cache: bool = False
    """Turn the prefix cache off."""
    attention_backend: Literal["auto", "triton", "cpp", "torch"] = "auto"
    """Paged attention; `auto` takes the Triton kernels on CUDA, the C++ ones on the CPU, plain PyTorch where Triton or
    a C++ compiler is missing."""
    disable_cascade_attention: bool = False
    """Let every request read all of its keys by itself, those of a prompt that several requests share too."""
    fused_kernels: bool = True
    """Run norms, rotary embedding, activation, sampling and products of few rows as kernels of our own: Triton on CUDA,
    C++ on the CPU; off: plain PyTorch."""
    cpu_kernel_choice: str = "auto"
    """Kernels of products and attention on the CPU (float32): `auto` takes the fastest for each shape, as the first
    start on this machine measured them; `cpp` takes the compiled ones, `torch` the libraries'. The path of a .json file
    takes what is written there; if there is no such file, it is measured and written."""
    disable_cuda_graph: bool = False
    """Launch every operator of a step by itself instead of replaying CUDA graphs."""
    cuda_graph_max_bs: int = 256
    """Largest batch of a step that only decodes which is captured as a CUDA graph."""
    disable_overlap_schedule: bool = False
    """Wait for each step on CUDA before the next one is planned."""
    disable_custom_all_reduce: bool = False
    """Sum over tensor-parallel GPUs with NCCL only, not out of each other's memory."""
    random_seed: int | None = None
    """Seed from which requests without a `sampling_seed` draw theirs; default: a random one at each start. Servers with
    the same seed sample the same, so give one only to repeat a run."""
    cpu_threads: int | None = None
    """Intra-op threads of each rank on CPU; default: cores of this process / `tp_size`."""
    check_invariants: bool = False
    """Check the scheduler's page accounting after every step (tests; it always runs when idle)."""

    # -- processes -----------------------------------------------------------------------------------------
    nnodes: int = 1
    """Hosts that share one tensor-parallel engine."""
    node_rank: int = 0
    """Which of them this is."""
    dist_init_addr: str | None = None
    """`host:port` at which the ranks meet; needed with `nnodes > 1`, default: a free local port."""
    startup_timeout: float = 600.0
    """Seconds until the server must be ready."""
    control_timeout: float = 300.0
    """Seconds that a control call (weights, memory, cache) may wait for its turn, and that the scheduler may be
    silent while calls wait for it, in a step or an update, before it counts as hung and is killed."""
    paused_request_timeout: float | None = None
    """Seconds that a request waits while generation is paused (`pause_generation`); then it is answered with 503.
    Default: it waits until generation continues, as in SGLang."""
    weight_update_lease: float = 60.0
    """Seconds of silence after which an open weight-update transaction (begin ... end) is given up."""
    weight_receive_bytes: int = 2 * 2**30
    """Memory for tensors that come over a process group: what fits is received while generation goes on, beyond
    that generation waits and tensors are received and copied in windows of half this size."""
    enable_weights_cpu_backup: bool = False
    """Keep released weights in host memory and restore them on resume, instead of waiting for an update."""
    fused_weight_copy: bool = True
    """Copy CUDA weights with one fused Triton kernel; off: torch's multi-tensor copy."""
    allow_hub_updates: bool = False
    """Let `update_weights_from_disk` take hub ids, whose files are downloaded; off: folders of its host only."""
    sync_timeout: float = 60.0
    """Seconds that one tensor-parallel rank waits for another before the server gives up and exits."""

    # -- limits of one request -----------------------------------------------------------------------------
    text_workers: int = 2
    """Most processes that render chat templates and tokenize short texts, and as many again for long ones. They start
    when they are needed."""
    text_timeout: float = 30.0
    """Seconds after which a process that renders or tokenizes for one request is killed (the request is answered 400),
    and that a request waits for such a process (then 503)."""
    max_text_length: int | None = None
    """Most characters in the texts of a request, or token ids in one to `/detokenize`. Default: 8 for each token of the
    context, at least 4194304."""
    max_samples_per_request: int = 16384
    """Most samples of a request: prompts times `n`."""
    max_prompt_tokens_per_request: int = 2**25
    """Most prompt tokens of a request, counted once for each sample."""
    max_top_logprobs: int = 256
    """Largest `top_logprobs_num`, `top_logprobs` or `logprobs`: candidates at one position."""
    max_token_ids_logprob: int = 1024
    """Most ids in `token_ids_logprob`."""
    max_logprobs_per_request: int = 2**20
    """Most log-probabilities of candidates in a reply: candidates at one position times positions, over all samples."""
    max_stop_strings: int = 32
    """Most `stop` strings."""
    max_stop_length: int = 1024
    """Most characters of one `stop` string."""
    max_stop_token_ids: int = 1024
    """Most `stop_token_ids`."""
    max_logit_bias: int = 1024
    """Most entries in `logit_bias`."""

    # -- HTTP ----------------------------------------------------------------------------------------------
    host: str = "127.0.0.1"
    """Bind address. A non-loopback address needs `api_key` or `allow_unauthenticated`."""
    port: int = 30000
    """TCP port; 0 picks a free one."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients send as `Authorization: Bearer KEY`. On a command line every user of the host can read it: set
    VERL_SERVER_API_KEY in the environment, or `api_key_file`, instead."""
    api_key_file: str | None = None
    """File that holds `api_key`."""
    admin_api_key: str | None = field(default=None, repr=False)
    """Key of the control routes (weights, memory, pause, flush, abort_all); it opens all others, too. On a command line
    every user of the host can read it: set VERL_SERVER_ADMIN_API_KEY, or `admin_api_key_file`, instead."""
    admin_api_key_file: str | None = None
    """File that holds `admin_api_key`."""
    allow_unauthenticated: bool = False
    """Permit a non-loopback bind without a key."""
    max_request_bytes: int = 64 * 2**20
    """Largest request body; beyond it 413."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    log_level_http: Literal["debug", "info", "warning", "error"] | None = None
    """Log level of the HTTP access log; default: warning."""
    enable_metrics: bool = True
    """Serve Prometheus metrics at `/metrics`."""

    def __post_init__(self) -> None:
        """Refuse settings that cannot work, naming the field and the remedy."""
        for path in ("model_path", "tokenizer_path", "chat_template", "api_key_file", "admin_api_key_file"):
            if isinstance(value := getattr(self, path), Path):
                object.__setattr__(self, path, str(value))
        for name, kind in get_type_hints(type(self)).items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise BadRequestError(f"ServerArgs.{name}: {error}.") from None
        for name in ("api_key", "admin_api_key"):
            self._read_key(name)
        sizes = ("tp_size", "nnodes", "max_running_requests", "page_size", "cuda_graph_max_bs", "weight_receive_bytes")
        for name in (*sizes, "text_workers", "max_samples_per_request", "max_prompt_tokens_per_request"):
            if getattr(self, name) < 1:
                raise BadRequestError(f"ServerArgs.{name} must be at least 1, not {getattr(self, name)}.")
        optional = ("context_length", "max_total_tokens", "max_queued_requests", "chunked_prefill_size", "cpu_threads")
        for name in (*optional, "max_text_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequestError(f"ServerArgs.{name} must be at least 1 or unset, not {value}.")
        for name in _COUNTS_FROM_ZERO:
            if getattr(self, name) < 0:
                raise BadRequestError(f"ServerArgs.{name} must be at least 0, not {getattr(self, name)}.")
        times = ("startup_timeout", "control_timeout", "sync_timeout", "text_timeout", "weight_update_lease")
        for name in (*times, "kv_cache_gib"):
            if not 0 < getattr(self, name) < math.inf:
                raise BadRequestError(f"ServerArgs.{name} must be positive and finite, not {getattr(self, name)}.")
        bound = self.paused_request_timeout
        if bound is not None and not 0 < bound < math.inf:
            raise BadRequestError(f"ServerArgs.paused_request_timeout must be positive and finite, not {bound}.")
        if not 0.0 < self.mem_fraction_static <= 1.0:
            raise BadRequestError(f"ServerArgs.mem_fraction_static must be in (0, 1], not {self.mem_fraction_static}.")
        if self.cpu_kernel_choice not in ("auto", "cpp", "torch") and not self.cpu_kernel_choice.endswith(".json"):
            raise BadRequestError(
                "ServerArgs.cpu_kernel_choice must be 'auto', 'cpp', 'torch' or the path of a .json file, "
                f"not {self.cpu_kernel_choice!r}."
            )
        if not 0 <= self.port <= 65535:
            raise BadRequestError(f"ServerArgs.port must be in 0..65535, not {self.port}.")
        if self.tp_size % self.nnodes:
            raise BadRequestError(f"tp_size={self.tp_size} does not divide over nnodes={self.nnodes}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise BadRequestError(f"node_rank={self.node_rank} is outside 0..{self.nnodes - 1}.")
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise BadRequestError(f"nnodes={self.nnodes} needs dist_init_addr='host:port' of node 0.")
        if self.gpu_uuids and len(self.gpu_uuids) != self.ranks_per_node:
            raise BadRequestError(
                f"gpu_uuids names {len(self.gpu_uuids)} devices, but a node has {self.ranks_per_node} ranks."
            )
        if not (self.is_loopback or self.api_key or self.allow_unauthenticated):
            raise BadRequestError(
                f"Refusing to bind {self.host} without a key: anyone who reaches it could replace the weights. "
                "Set api_key (or admin_api_key and api_key), or allow_unauthenticated=True if the network is trusted."
            )

    def _read_key(self, name: str) -> None:
        """Take a key from its file, once, so that the file may be gone afterwards; check what came from wherever."""
        key, file = getattr(self, name), getattr(self, f"{name}_file")
        if file is not None:
            try:
                content = Path(file).expanduser().read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise BadRequestError(f"ServerArgs.{name}_file={file!r} cannot be read: {reason}.") from None
            if key is not None and key != content:
                raise BadRequestError(f"ServerArgs.{name} and {name}_file name two different keys: give one of them.")
            key = content
            object.__setattr__(self, name, key)
            object.__setattr__(self, f"{name}_file", None)
        if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
            raise BadRequestError(f"ServerArgs.{name} must be ASCII characters without spaces, and at least one.")

    def prefill_chunk(self, device_type: str) -> int:
        """Most prompt tokens in one step on "cpu" or "cuda"."""
        return self.chunked_prefill_size or (8192 if device_type == "cuda" else 2048)

    @property
    def ranks_per_node(self) -> int:
        return self.tp_size // self.nnodes

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def url(self) -> str:
        """Base URL at which a client on this host reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    def replace(self, **changes: Any) -> ServerArgs:
        return dataclasses.replace(self, **changes)

    def public_dict(self) -> dict[str, Any]:
        """All fields but the keys, for `/server_info` and logs."""
        fields = dataclasses.asdict(self)
        fields["api_key"] = None
        fields["admin_api_key"] = None
        return fields

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerArgs:
        fields = json.loads(text)
        for name in ("gpu_uuids", "allowed_chat_templates"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Build from keyword arguments, naming unknown ones instead of Python's bare TypeError."""
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise BadRequestError(f"Unknown server argument(s) {unknown}; known: {', '.join(known)}.")
        if "model_path" not in kwargs:
            raise BadRequestError("ServerArgs needs model_path (a local folder or a hub id).")
        return cls(**kwargs)
