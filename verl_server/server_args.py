"""`ServerArgs`: all settings of a server, in one frozen dataclass.

The engines and the command line build it. Each field is a flag of `verl-server serve`, and the field's docstring is the
help of the flag. Field names are SGLang's where SGLang has the setting. A server process receives the settings as JSON
(`to_json`, `from_json`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

import msgspec

from verl_server import lora
from verl_server.errors import BadRequestError
from verl_server.web.addresses import is_loopback
from verl_server.web.key_files import check_key, read_key_file
from verl_server.weight_version import MAX_LABEL_LENGTH

_COUNTS_FROM_ZERO = (
    "max_top_logprobs",
    "max_token_ids_logprob",
    "max_logprobs_per_request",
    "max_stop_strings",
    "max_stop_length",
    "max_stop_token_ids",
    "max_logit_bias",
    "max_allowed_token_ids",
    "max_bad_words",
    "max_bad_words_length",
    "max_grammar_length",
)
"""Limits that may be 0. With 0 the server refuses the feature."""


_PATHS = (
    "model_path",
    "tokenizer_path",
    "chat_template",
    "api_key_file",
    "admin_api_key_file",
    "profile_folder",
    "session_store",
)
"""Settings that may be given as a `Path`."""


_EMBEDDED_ONLY: dict[str, dict[str, str]] = {
    "max_total_tokens": {
        "vllm": ", or pass engine_args={'num_gpu_blocks_override': ...}",
        "sglang": ", or pass engine_args={'max_total_tokens': ...}",
    },
    "schedule_policy": {"sglang": ", or pass engine_args={'schedule_policy': ...}"},
    "schedule_max_age": {},
    "page_size": {
        "vllm": ", or pass engine_args={'block_size': ...}",
        "sglang": ", or pass engine_args={'page_size': ...}",
    },
    "attention_backend": {
        "vllm": ", or pass engine_args={'attention_backend': ...}",
        "sglang": ", or pass engine_args={'attention_backend': ...}",
    },
    "disable_cascade_attention": {},
    "fused_kernels": {},
    "disable_pdl": {},
    "cpu_kernel_choice": {},
    "disable_cuda_graph": {
        "vllm": ", or pass engine_args={'enforce_eager': True}",
        "sglang": ", or pass engine_args={'disable_cuda_graph': True}",
    },
    "cuda_graph_max_bs": {
        "vllm": ", or pass engine_args={'max_cudagraph_capture_size': ...}",
        "sglang": ", or pass engine_args={'cuda_graph_max_bs_decode': ...}",
    },
    "disable_overlap_schedule": {
        "vllm": ", or pass engine_args={'async_scheduling': False}",
        "sglang": ", or pass engine_args={'disable_overlap_schedule': True}",
    },
    "disable_custom_all_reduce": {
        "vllm": ", or pass engine_args={'disable_custom_all_reduce': True}",
        "sglang": ", or pass engine_args={'disable_custom_all_reduce': True}",
    },
    "cpu_threads": dict.fromkeys(("vllm", "sglang"), ", or set OMP_NUM_THREADS"),
    "check_invariants": {},
    "nnodes": {},
    "node_rank": {},
    "enable_weights_cpu_backup": {},
    "profile_folder": {},
}
"""Settings without effect on other engines -> the end of the remedy by engine, if there is one."""


def settings_of_engine(engine: str) -> set[str]:
    """Return the names of the settings that have an effect on an engine."""
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    return names if engine == "embedded" else names - _EMBEDDED_ONLY.keys()


@dataclass(frozen=True)
class ServerArgs:
    """Settings of one rollout server."""

    model_path: str
    """Local folder or hub id of the policy (Llama, Mistral, Qwen2, Qwen2.5 and Qwen3 dense)."""

    # -- model ---------------------------------------------------------------------------------------------
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; default: `model_path`."""
    tokenizer_pipeline: Literal["transformers", "file"] = "transformers"
    """Source of the normalizer, pre-tokenizer and decoder.

    `transformers` uses the parts of its tokenizer, which for some models (qwen2) differ from tokenizer.json; the log
    warns of a difference. `file` uses the parts of tokenizer.json.
    """
    skip_tokenizer_init: bool = False
    """Load no tokenizer. The server accepts and returns token ids only, and refuses `text` and chat."""
    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Source of the weights: `auto` and `safetensors` read the folder, `dummy` uses random weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the computation. `auto` is the checkpoint's dtype on CUDA and float32 on the CPU."""
    context_length: int | None = None
    """Most tokens in prompt and output together; default: the limit of the model's config."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Permit the tokenizer to run Python code from the model folder."""
    served_model_name: str | None = None
    """Name of the model in `/v1/models`; default: `model_path`."""
    chat_template: str | None = None
    """Path of a Jinja chat template that replaces the tokenizer's."""
    allowed_chat_templates: tuple[str, ...] = ()
    """Paths of Jinja chat templates that a request may send in `chat_template_kwargs.chat_template`. A template is a
    program. The server refuses any other template, except the model's own, byte for byte."""
    tool_call_parser: str | None = None
    """Format in which the model writes tool calls: `hermes`, `qwen3_coder`, `llama3_json`, `mistral`, `pythonic` or
    another name of one of them in SGLang or vLLM (`qwen25`, `qwen`, `qwen3_xml`, `llama3`), or `none`. Default: the
    format that the chat template describes."""
    reasoning_parser: str | None = None
    """Format in which the model writes its reasoning: `qwen3`, `deepseek-r1` (the output always begins with the
    reasoning), `mistral` or `none`. Default: the format that the chat template describes."""
    weight_version: str | None = None
    """Version label of the weights that are loaded at the start (None: "default"). It states which weights these are:
    sessions of `session_store` continue at once if their last turn has this label."""

    # -- engine --------------------------------------------------------------------------------------------
    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine that computes the tokens: this package's own one, or an installed vLLM (`verl-server[vllm]`) or SGLang
    (`verl-server[sglang]`)."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, by the names of vLLM's `AsyncEngineArgs` or SGLang's `ServerArgs`. Arguments
    that this server sets itself are refused."""
    allow_untested_engine: bool = False
    """Permit a version of the engine with which this release was not run."""

    # -- runtime -------------------------------------------------------------------------------------------
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto` is CUDA if a GPU is available, else the CPU."""
    tp_size: int = 1
    """Number of tensor-parallel processes."""
    base_gpu_id: int = 0
    """CUDA ordinal of rank 0, among the devices that this process sees. Rank i uses `base_gpu_id + i`."""
    gpu_uuids: tuple[str, ...] = ()
    """UUIDs of CUDA devices, one for each rank of this node. They replace `base_gpu_id`."""
    mem_fraction_static: float = 0.85
    """Share of the free GPU memory for weights and KV cache together. The free memory is measured before the weights
    are loaded. The rest is for activations, CUDA graphs, sampling and received weights. If it is too small for the
    largest step and all graphs, the KV cache gets less than this share. The log shows the parts as a table. With
    `engine="vllm"` it is a share of the whole GPU, and all of it must be free."""
    kv_cache_gib: float = 2.0
    """Most GiB for the KV cache on the CPU. (On CUDA, `mem_fraction_static` determines the size.)"""
    max_total_tokens: int | None = None
    """Capacity of the KV cache in tokens; default: computed from the memory settings."""
    max_running_requests: int = 256
    """Most requests in one batch."""
    max_queued_requests: int | None = None
    """Most requests in the queue. If the queue is full, a new request is answered 503. Default: no limit."""
    schedule_policy: Literal["lpm", "fcfs"] = "lpm"
    """Order of waiting requests of one priority. `lpm` (longest prefix match): the longest cached prefix comes first.

    If the KV cache cannot hold the histories of all episodes, running episodes end before new episodes begin, and the
    cache evicts pages that will probably not be used again soon. `fcfs` is first come, first served; the cache evicts
    the least recently used pages.
    """
    schedule_max_age: float = 60.0
    """Seconds after which a waiting request starts before all others of its priority, with `schedule_policy="lpm"`. If
    many requests wait for that long, one more of them may do so in each 64th part of the time (or a 256th of them, if
    that is more), the oldest first."""
    chunked_prefill_size: int | None = None
    """Most prompt tokens in one step. A longer prompt is processed in chunks. Default: 8192 on CUDA, 2048 on the
    CPU."""
    page_size: int = 16
    """Tokens in a page of the KV cache. Requests share whole pages of a common prefix."""
    disable_radix_cache: bool = False
    """Turn the prefix cache off."""
    attention_backend: Literal["auto", "triton", "cpp", "torch"] = "auto"
    """Kernels for paged attention. `auto` is Triton on CUDA and C++ on the CPU, or plain PyTorch if Triton or a C++
    compiler is missing."""
    disable_cascade_attention: bool = False
    """Disable cascade attention: each request reads its own copy of a shared prefix's keys."""
    fused_kernels: bool = True
    """Use this package's own kernels (Triton on CUDA, C++ on the CPU) for norms, rotary embedding, activation, sampling
    and products of few rows. Off: plain PyTorch."""
    cpu_kernel_choice: str = "auto"
    """Kernels for products and attention on the CPU (float32). `auto` uses the fastest kernel for each shape, as
    measured at the first start on this machine. `cpp` uses the compiled kernels, `torch` the libraries of PyTorch. With
    the path of a .json file, the server uses the choice in the file; if there is no such file, the server measures and
    writes it."""
    disable_cuda_graph: bool = False
    """Launch each operator of a step, instead of replaying CUDA graphs."""
    cuda_graph_max_bs: int | None = None
    """Largest decode batch that is captured as a CUDA graph. Default: `max_running_requests`, at most 1024."""
    disable_pdl: bool = False
    """On Hopper, begin each kernel of a step after the one before it has ended, without programmatic dependent
    launch."""
    disable_overlap_schedule: bool = False
    """On CUDA, wait for the end of each step before the next step is planned."""
    grammar_backend: Literal["llguidance", "none"] = "llguidance"
    """Library for constrained decoding (`json_schema`, `regex`, `ebnf`, `structural_tag`). `none` refuses these
    parameters, and saves a second at the start with a large vocabulary."""
    disable_custom_all_reduce: bool = False
    """Sum over tensor-parallel GPUs with NCCL only, without reading the other GPUs' memory directly."""
    random_seed: int | None = None
    """Seed of the seeds of requests without `sampling_seed`; default: a random value at each start. Servers with the
    same seed draw the same samples, so set it only to repeat a run."""
    cpu_threads: int | None = None
    """Intra-op threads of each rank on the CPU; default: cores of this process / `tp_size`."""
    check_invariants: bool = False
    """Check the scheduler's page accounting after every step, for tests. An idle scheduler always checks it."""

    # -- processes -----------------------------------------------------------------------------------------
    nnodes: int = 1
    """Number of hosts that share one tensor-parallel engine."""
    node_rank: int = 0
    """Index of this host among the `nnodes` hosts."""
    dist_init_addr: str | None = None
    """`host:port` at which the ranks meet. Required with `nnodes > 1`; default: a free local port."""
    startup_timeout: float = 600.0
    """Most seconds until the server is ready."""
    control_timeout: float = 300.0
    """Most seconds that a control call (weights, memory, cache) waits for its turn. Also the most seconds that the
    scheduler may be silent while calls wait; after that it counts as hung and is killed."""
    stream_frame_gap: float = 2e-4
    """Least time in seconds between two frames of one stream, for each request in progress, and at most 0.05 s. Tokens
    of that time share a frame, so that many fast streams do not fill the event loop. The first frame and the last one
    are never delayed. 0: a frame for each step."""
    paused_request_timeout: float | None = None
    """Most seconds that a request waits while generation is paused (`pause_generation`). After that it is answered 503.
    Default: the request waits until generation continues, as in SGLang."""
    weight_update_lease: float = 60.0
    """Seconds without a call after which an open weight-update transaction is abandoned."""
    weight_receive_bytes: int = 2 * 2**30
    """Memory for tensors from a process group, in bytes. Tensors that fit are received while generation continues. For
    larger updates generation waits, and tensors are received and copied in windows of half this size. On a GPU this
    memory is smaller if the other parts leave less, but at least 256 MiB. The log warns if it is smaller."""
    enable_weights_cpu_backup: bool = False
    """Keep the contents of released weights in host memory, and restore them on resume. Off: they need an update."""
    fused_weight_copy: bool = True
    """Copy CUDA weights with one fused Triton kernel. Off: torch's multi-tensor copy."""
    allow_hub_updates: bool = False
    """Accept hub ids in `update_weights_from_disk`, and download their files. Off: only folders on the server's
    host."""
    sync_timeout: float = 60.0
    """Most seconds that a tensor-parallel rank waits for another one. After that the server exits."""

    # -- limits of one request -----------------------------------------------------------------------------
    text_workers: int = 2
    """Most processes that render chat templates and tokenize short texts. The same number of processes is for long
    texts. A process starts when it is needed."""
    text_timeout: float = 30.0
    """Most seconds that a process may render or tokenize for one request. After that the process is killed and the
    request is answered 400. Also the most seconds that a request waits for such a process; after that it is answered
    503."""
    grammar_timeout: float = 10.0
    """Most seconds that a process may check a new grammar (`json_schema`, `regex`, `ebnf`, `structural_tag`). After
    that the process is killed and the request is answered 400. Also the most seconds that a new grammar waits for such
    a process, of which there are at most `text_workers`."""
    max_grammar_length: int = 262144
    """Most characters of a grammar."""
    max_text_length: int | None = None
    """Most characters in the texts of a request, or token ids in a request to `/detokenize`. Default: 8 for each token
    of the context, at least 4194304."""
    max_samples_per_request: int = 16384
    """Most samples of a request: the number of prompts times `n`."""
    max_prompt_tokens_per_request: int = 2**25
    """Most prompt tokens of a request. The prompt counts once for each sample."""
    max_top_logprobs: int = 256
    """Largest `top_logprobs_num`, `top_logprobs` or `logprobs`: the number of candidates at one position."""
    max_token_ids_logprob: int = 1024
    """Most ids in `token_ids_logprob`."""
    max_logprobs_per_request: int = 2**20
    """Most log-probabilities of candidates in a reply: candidates at one position times positions, summed over all
    samples."""
    max_stop_strings: int = 32
    """Most `stop` strings."""
    max_stop_length: int = 1024
    """Most characters of one `stop` string."""
    max_stop_token_ids: int = 1024
    """Most `stop_token_ids`."""
    max_logit_bias: int = 1024
    """Most entries in `logit_bias`."""
    max_allowed_token_ids: int = 16384
    """Most entries in `allowed_token_ids`."""
    max_bad_words: int = 256
    """Most `bad_words`."""
    max_bad_words_length: int = 4096
    """Most characters in all `bad_words` of a request together."""

    # -- HTTP ----------------------------------------------------------------------------------------------
    host: str = "127.0.0.1"
    """Address of the listening socket. An address that is not loopback needs `api_key` or `allow_unauthenticated`."""
    port: int = 30000
    """TCP port; 0 uses a free port."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients send as `Authorization: Bearer KEY`. Every user of the host can read it on a command line:
    instead set VERL_SERVER_API_KEY in the environment, or `api_key_file`."""
    api_key_file: str | None = None
    """File that contains `api_key`."""
    admin_api_key: str | None = field(default=None, repr=False)
    """Key of the control routes (weights, memory, pause, flush, abort_all). It permits all other routes, too. Every
    user of the host can read it on a command line: instead set VERL_SERVER_ADMIN_API_KEY in the environment, or
    `admin_api_key_file`."""
    admin_api_key_file: str | None = None
    """File that contains `admin_api_key`."""
    allow_unauthenticated: bool = False
    """Permit an address that is not loopback without a key."""
    incremental_streaming_output: bool = False
    """Send only the new text, token ids and log-probabilities in each event of a stream of `/generate`, instead of
    everything so far."""
    profile_folder: str | None = None
    """Folder to which `/start_profile` may write traces of torch's profiler. It is created at the start. Unset: the
    route is refused."""
    max_request_bytes: int = 64 * 2**20
    """Most bytes in a request body. A larger request is answered 413."""
    unknown_fields: Literal["accept", "refuse"] = "accept"
    """A field of a request, or a query parameter, that the server does not know. accept: it is counted in /metrics and
    named in the header X-Verl-Unknown-Fields of the answer; a name that looks misspelled is answered 400. refuse: each
    unknown name is answered 400.
    """
    session_store: str | None = None
    """Folder of the session store, which is created at the start. A server that is started again with it continues its
    sessions. Unset: sessions are in memory only."""
    session_fsync: Literal["interval", "turn", "never"] = "interval"
    """When the session store is synced: `turn` before each turn's reply ends, which survives a power loss; `interval`
    every second, which survives the end of every process; `never`."""
    session_memory_bytes: int = 2 * 2**30
    """Memory of all sessions, in bytes. Beyond it, new sessions and turns are answered 503."""
    session_ttl: float = 3600.0
    """Seconds without a request after which an open session expires."""
    session_retention: float = 600.0
    """Seconds that a finished session is kept after its trajectory was read. A session that was never read is kept for
    a day."""
    replay_grace: float = 60.0
    """Seconds for which a generation continues after its client's connection broke, so that a retry can join it.

    For requests with an `Idempotency-Key`, and in sessions.
    """
    replay_ttl: float = 600.0
    """Seconds for which the answer to such a request is kept for a retry."""
    replay_bytes: int = 256 * 2**20
    """Approximate memory of all kept answers, in bytes. Beyond it, the oldest answers are dropped."""
    max_sessions: int = 65536
    """Most sessions at the same time."""
    max_session_turn_tokens: int | None = None
    """Most tokens of a turn of a session, with its whole prompt. Unset: the context length."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level of the server."""
    log_level_http: Literal["debug", "info", "warning", "error"] | None = None
    """Log level of the HTTP access log; default: warning."""
    enable_metrics: bool = True
    """Serve Prometheus metrics at `/metrics`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> ServerArgs:
        """Raise BadRequestError for a setting about adapters, which no field has."""
        _refuse_adapters(kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise BadRequestError for settings that cannot work. The message names the field and the remedy."""
        for path in _PATHS:
            if isinstance(value := getattr(self, path), Path):
                object.__setattr__(self, path, str(value))
        for name, kind in get_type_hints(type(self)).items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise BadRequestError(f"ServerArgs.{name}: {error}.") from None
        self._check_engine()
        for name in ("api_key", "admin_api_key"):
            self._read_key(name)
        sizes = ("tp_size", "nnodes", "max_running_requests", "page_size", "weight_receive_bytes")
        counts = ("max_samples_per_request", "max_prompt_tokens_per_request", "max_sessions", "session_memory_bytes")
        for name in (*sizes, "text_workers", *counts):
            if getattr(self, name) < 1:
                raise BadRequestError(f"ServerArgs.{name} must be at least 1, not {getattr(self, name)}.")
        optional = ("context_length", "max_total_tokens", "max_queued_requests", "chunked_prefill_size", "cpu_threads")
        for name in (*optional, "cuda_graph_max_bs", "max_text_length", "max_session_turn_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequestError(f"ServerArgs.{name} must be at least 1 or unset, not {value}.")
        for name in _COUNTS_FROM_ZERO:
            if getattr(self, name) < 0:
                raise BadRequestError(f"ServerArgs.{name} must be at least 0, not {getattr(self, name)}.")
        times = ("startup_timeout", "control_timeout", "sync_timeout", "text_timeout", "weight_update_lease")
        for name in (
            *times,
            "schedule_max_age",
            "kv_cache_gib",
            "session_ttl",
            "session_retention",
            "replay_grace",
            "replay_ttl",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise BadRequestError(f"ServerArgs.{name} must be positive and finite, not {getattr(self, name)}.")
        if not 0 <= self.stream_frame_gap < math.inf:
            raise BadRequestError(f"ServerArgs.stream_frame_gap must be at least 0, not {self.stream_frame_gap}.")
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
        if self.weight_version is not None and not 1 <= len(self.weight_version) <= MAX_LABEL_LENGTH:
            raise BadRequestError(
                f"ServerArgs.weight_version must have 1 to {MAX_LABEL_LENGTH} characters, or be unset."
            )
        if not 0 <= self.port <= 65535:
            raise BadRequestError(f"ServerArgs.port must be in 0..65535, not {self.port}.")
        if self.tp_size % self.nnodes:
            raise BadRequestError(f"tp_size={self.tp_size} must be a multiple of nnodes={self.nnodes}.")
        if not 0 <= self.node_rank < self.nnodes:
            raise BadRequestError(f"node_rank={self.node_rank} must be in 0..{self.nnodes - 1}.")
        if self.nnodes > 1 and self.dist_init_addr is None:
            raise BadRequestError(f"nnodes={self.nnodes} needs dist_init_addr='host:port' of node 0.")
        if self.gpu_uuids and len(self.gpu_uuids) != self.ranks_per_node:
            raise BadRequestError(
                f"gpu_uuids names {len(self.gpu_uuids)} devices, but a node has {self.ranks_per_node} ranks."
            )
        if not (self.is_loopback or self.api_key or self.allow_unauthenticated):
            raise BadRequestError(
                f"Refusing to bind {self.host} without a key: anyone who can connect could replace the weights. "
                "Set api_key (or admin_api_key and api_key), or allow_unauthenticated=True if you trust the network."
            )

    def _check_engine(self) -> None:
        """Raise BadRequestError for settings that the chosen engine does not have."""
        if self.engine == "embedded":
            if self.engine_args or self.allow_untested_engine:
                raise BadRequestError(
                    "engine_args and allow_untested_engine are for another engine: engine='vllm' or engine='sglang'."
                )
            return
        for name, remedies in _EMBEDDED_ONLY.items():
            if getattr(self, name) != _default_of(name):
                raise BadRequestError(
                    f"ServerArgs.{name} is a setting of the embedded engine, and engine={self.engine!r} has none. "
                    f"Remove it{remedies.get(self.engine, '')}."
                )

    def _read_key(self, name: str) -> None:
        """Replace a key file by the key in the file, so that the file may be deleted afterwards. Check the key."""
        key, file = getattr(self, name), getattr(self, f"{name}_file")
        if file is not None:
            content = read_key_file(file, f"ServerArgs.{name}_file")
            if key is not None and key != content:
                raise BadRequestError(f"ServerArgs.{name} and {name}_file are two different keys: set only one.")
            key = content
            object.__setattr__(self, name, key)
            object.__setattr__(self, f"{name}_file", None)
        if key is not None:
            check_key(key, f"ServerArgs.{name}")

    def prefill_chunk(self, device_type: str) -> int:
        """Return the most prompt tokens in one step. `device_type` is "cpu" or "cuda"."""
        return self.chunked_prefill_size or (8192 if device_type == "cuda" else 2048)

    @property
    def ranks_per_node(self) -> int:
        """Number of tensor-parallel processes on each host."""
        return self.tp_size // self.nnodes

    @property
    def loaded_version(self) -> str:
        """Version label of the weights that are loaded at the start."""
        return "default" if self.weight_version is None else self.weight_version

    @property
    def is_loopback(self) -> bool:
        """True if only this host can connect to `host`."""
        return is_loopback(self.host)

    @property
    def url(self) -> str:
        """Base URL at which a client on this host reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"http://{host}:{self.port}"

    def replace(self, **changes: Any) -> ServerArgs:
        """Return a copy with changed fields."""
        return dataclasses.replace(self, **changes)

    def public_dict(self) -> dict[str, Any]:
        """Return all fields with the keys set to None, for `/server_info` and logs."""
        fields = dataclasses.asdict(self)
        fields["api_key"] = None
        fields["admin_api_key"] = None
        return fields

    def to_json(self) -> str:
        """Return all fields as JSON, with the keys."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerArgs:
        """Return the settings in the result of `to_json`."""
        fields = json.loads(text)
        for name in ("gpu_uuids", "allowed_chat_templates"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """Build from keyword arguments. Raise BadRequestError for an unknown name or a missing `model_path`."""
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [name for name in kwargs if name not in known]
        _refuse_adapters(unknown)
        if unknown:
            raise BadRequestError(f"Unknown server argument(s) {unknown}; known: {', '.join(known)}.")
        if "model_path" not in kwargs:
            raise BadRequestError("ServerArgs needs model_path (a local folder or a hub id).")
        return cls(**kwargs)


def _refuse_adapters(names: Iterable[str]) -> None:
    """Raise BadRequestError if one of the names of unknown settings is about adapters."""
    if (adapters := lora.first_named(names)) is not None:
        raise BadRequestError(lora.refusal(f"The server argument {adapters!r:.100}"))


def _default_of(name: str) -> object:
    """Return the default of a field of `ServerArgs`."""
    return ServerArgs.__dataclass_fields__[name].default
