"""Types of what an engine returns: the answers of `/generate`, `/server_info` and `/model_info`.

SGLang's shapes. They are for readers and type checkers: `server.request_state` and `server.dialects.sglang.routes`
build the objects, `engine` returns them as they came.
"""

# Annotations are evaluated here: of postponed ones a TypedDict cannot tell at run time which keys are required.

from typing import Any, Literal, NotRequired, TypedDict

LogprobTriple = list[Any]
"""[log-probability (float, or None where there is none), token id (int), text of the token (str) or None]."""


class FinishReason(TypedDict):
    """Why a sample ended."""

    type: Literal["stop", "length", "abort"]
    matched: NotRequired[int | str | None]
    """stop: the token id or the stop string."""
    length: NotRequired[int | None]
    """length: the number of output tokens."""
    message: NotRequired[str]
    """abort: the cause."""
    status_code: NotRequired[int | None]
    """abort: None for an abort that a caller asked for."""
    err_type: NotRequired[str | None]
    """abort: always None; SGLang's clients read it."""


class VersionSpan(TypedDict):
    """Output tokens [start, end) were sampled under weight version `version`."""

    version: str
    start: int
    end: int


class MetaInfo(TypedDict):
    """What is known about one sample besides its tokens."""

    id: str
    finish_reason: FinishReason | None
    """None in the frames of a stream before the last one."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that were taken from the prefix cache."""
    cached_tokens_details: dict[str, int]
    reasoning_tokens: int
    weight_version: str
    """The version of the newest output token."""
    weight_versions: NotRequired[list[VersionSpan]]
    """All versions, in the order of the tokens; present when the sample has ended."""
    num_retractions: int
    dp_rank: int
    e2e_latency: float
    """Seconds since the request was accepted."""
    response_sent_to_client_ts: float
    """Unix time in seconds."""
    input_token_logprobs: NotRequired[list[LogprobTriple]]
    """With `return_logprob`: the prompt from `logprob_start_len` on."""
    output_token_logprobs: NotRequired[list[LogprobTriple]]
    """With `return_logprob`: one for each output token."""
    output_token_logprobs_length: NotRequired[int]
    input_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    """With `top_logprobs_num`: candidates for each position, the most likely first."""
    output_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    input_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    """With `token_ids_logprob`: the requested ids at each position."""
    output_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]


class GenerateResult(TypedDict):
    """One sample. In a stream each frame is cumulative."""

    text: NotRequired[str]
    """Missing if the server has no tokenizer (`skip_tokenizer_init`)."""
    output_ids: list[int]
    meta_info: MetaInfo
    prompt_token_ids: NotRequired[list[int]]
    """With `return_prompt_token_ids`."""
    index: NotRequired[int]
    """In a stream of several samples: which sample this frame belongs to."""


class SchedulerInfo(TypedDict):
    """What rank 0's scheduler reports once, when it is ready."""

    max_total_num_tokens: int
    """Capacity of the KV cache in tokens."""
    max_req_input_len: int
    context_length: int
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    vocab_size: int
    num_parameters: int
    """Parameters by name, as a full weight update brings them (not their elements)."""
    device: str
    dtype: str
    weight_version: str
    pid: int
    tp_rank: int
    device_uuid: str
    start: dict[str, float]
    """When each phase of the start ended, in seconds of `time.monotonic`."""


class InternalState(TypedDict, total=False):
    """Load and memory figures of the scheduler at this moment; empty if it was too busy to answer."""

    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    cache_hit_rate: float
    num_cached_pages: int
    gen_throughput: float
    num_retractions: int
    num_requests: int
    num_aborted_requests: int
    num_steps: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    weight_version: str
    weights_state: Literal["serving", "torn", "not_loaded", "asleep"]
    refusal: str | None
    """Why generation is refused now; None if it is not."""
    paused: bool
    draining: bool
    transaction: str | None
    memory: dict[str, Any]


class ServerInfo(TypedDict, total=False):
    """`/server_info`: what is named here, every setting of `ServerArgs` but the keys, and all of `SchedulerInfo`."""

    model_path: str
    tp_size: int
    random_seed: int
    """The seed that is in use: the given one, or the one that was drawn at the start."""
    scheduler_info: SchedulerInfo
    internal_states: list[InternalState]
    weight_version: str
    instance_id: str
    """Random id of this run of the server; another one after a restart."""
    weights_confirmed: bool
    """Since the start, an update brought every parameter, or the owner called `accept_restart`."""
    startup_time: float
    """Unix time in seconds."""
    version: str
    frontend: str


class ModelInfo(TypedDict):
    """`/model_info`."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    load_format: str
    reasoning_parser: None
    tool_call_parser: None
    disaggregation_mode: str
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: str | None
    architectures: list[str] | None
