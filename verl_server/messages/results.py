"""Types of an engine's results: the answers of `/generate`, `/server_info` and `/model_info`.

Their form is SGLang's. The types are for readers and type checkers; nothing validates objects against them.
`server.request_state` and `server.dialects.sglang.info_routes` build the objects, and `engine` returns them unchanged.
"""

# No `from __future__ import annotations`: with postponed annotations a TypedDict does not know its required keys.

from typing import Any, Literal, NotRequired, TypedDict

LogprobTriple = tuple[Any, int, str | None]
"""(log-probability: float, or None where there is none; token id; text of the token or None). In JSON an array."""


class FinishReason(TypedDict):
    """The reason why a sample ended."""

    type: Literal["stop", "length", "abort"]
    """"stop": end of sequence or a stop string. "length": token limit. "abort": abort or error."""
    matched: NotRequired[int | str | None]
    """stop: the token id, the stop string or the pattern of the stop regex."""
    length: NotRequired[int | None]
    """length: the number of output tokens."""
    message: NotRequired[str]
    """abort: the cause."""
    status_code: NotRequired[int | None]
    """abort: HTTP status of an error; None if the caller aborted the request."""
    err_type: NotRequired[str | None]
    """abort: always None. SGLang's clients read it."""


class VersionSpan(TypedDict):
    """Output tokens [start, end) were sampled under weight version `version`."""

    version: str
    """Version label of the weights: NUMBER@INCARNATION, or any other text, which has no order."""
    start: int
    """Index of the first output token."""
    end: int
    """Index after the last output token."""


class MetaInfo(TypedDict):
    """Information about one sample, besides its tokens."""

    id: str
    """Request id (`rid`) of the sample."""
    finish_reason: FinishReason | None
    """The reason why the sample ended. In a stream, None in every frame but the last."""
    prompt_tokens: int
    """Number of prompt tokens."""
    completion_tokens: int
    """Number of output tokens."""
    cached_tokens: int
    """Number of prompt tokens that were read from the prefix cache."""
    cached_tokens_details: dict[str, int]
    """`cached_tokens` by the place of the cache: "device", and "host", which is always 0."""
    reasoning_tokens: int
    """Always 0. SGLang's clients read it."""
    weight_version: str
    """Weight version of the newest output token: a label as in `VersionSpan`."""
    weight_version_start: NotRequired[str]
    """Weight version of the first output token; `weight_version` if there is no token. Servers of other projects do not
    report it."""
    weight_versions: NotRequired[list[VersionSpan]]
    """Weight versions of all output tokens, in their order. Present when the sample has ended."""
    num_retractions: int
    """Number of times that the sample lost its KV cache and computed it again."""
    dp_rank: int
    """Always 0. SGLang's clients read it."""
    e2e_latency: float
    """Seconds since the request was accepted."""
    response_sent_to_client_ts: float
    """Unix time of the reply, in seconds."""
    input_token_logprobs: NotRequired[list[LogprobTriple]]
    """With `return_logprob`: log-probabilities of the prompt tokens from `logprob_start_len` on."""
    output_token_logprobs: NotRequired[list[LogprobTriple]]
    """With `return_logprob`: log-probabilities of the output tokens."""
    output_token_logprobs_length: NotRequired[int]
    """Length of `output_token_logprobs`."""
    logprobs_mode: NotRequired[Literal["default", "raw", "sampling"]]
    """With `return_logprob`: `sampling_params.logprobs_mode`, the distribution of the log-probabilities of output
    tokens. Those of prompt tokens are always raw."""
    policy_logprobs: NotRequired[Literal["same", "given", "unknown"]]
    """With `return_logprob`: the field that has the policy's log-probabilities of the output tokens: the log-softmax of
    (the model's logits / temperature) without mask, penalty or bias. "same": in `output_token_logprobs`. "given": in
    `output_token_policy_logprobs`. "unknown": no field has them.

    A trainer's probability ratio needs these values.
    """
    output_token_policy_logprobs: NotRequired[list[float]]
    """With `policy_logprobs` "given": the policy's log-probability of each output token."""
    output_token_has_choice: NotRequired[list[int]]
    """With `return_logprob`, if a grammar, `allowed_token_ids`, `bad_words` or `min_new_tokens` forbids tokens and the
    engine counts: 1 for an output token if another token was allowed, too, and 0 if it was the only allowed token.

    A trainer omits the latter from its loss.
    """
    input_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    """With `top_logprobs_num`: candidates for each prompt position, the most likely first."""
    output_top_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    """With `top_logprobs_num`: candidates for each output token, the most likely first."""
    input_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    """With `token_ids_logprob`: log-probabilities of these ids at each prompt position."""
    output_token_ids_logprobs: NotRequired[list[list[LogprobTriple] | None]]
    """With `token_ids_logprob`: log-probabilities of these ids for each output token."""
    output_token_sampling_mask: NotRequired[list[list[int]]]
    """With `return_sampling_mask`: the ids that each output token was drawn from, the most likely first."""
    output_token_sampling_logprobs: NotRequired[list[float | list[float]]]
    """With `return_sampling_mask`: the log-probability of each output token, normalized over the ids of its mask. With
    `sampling_logprobs_mode` "support": a list with the log-probability of each id of the mask."""
    output_token_sampling_mask_length: NotRequired[int]
    """Length of `output_token_sampling_mask`."""


class GenerateResult(TypedDict):
    """One sample. In a stream, each frame contains the whole output so far.

    With the setting `incremental_streaming_output`, a frame holds the text, the token ids and the log-probabilities of
    output tokens that are new. Counts are cumulative. The first and the last frame have the fields about the prompt.
    Frames may have sent text that a later match of a stop regex cuts off.
    """

    text: NotRequired[str]
    """Output text. Missing if the server has no tokenizer (`skip_tokenizer_init`)."""
    output_ids: list[int]
    """Token ids of the output."""
    meta_info: MetaInfo
    """Information about the sample, besides its tokens."""
    prompt_token_ids: NotRequired[list[int]]
    """With `return_prompt_token_ids`: token ids of the prompt."""
    index: NotRequired[int]
    """In a stream of several samples: index of the sample that this frame belongs to."""


class SchedulerInfo(TypedDict):
    """Report of rank 0's scheduler when it is ready."""

    max_total_num_tokens: int
    """Capacity of the KV cache in tokens."""
    max_req_input_len: int
    """Most tokens in a prompt."""
    context_length: int
    """Most tokens in prompt and output together."""
    page_size: int
    """Tokens in a KV page."""
    max_running_requests: int
    """Most requests in one batch."""
    chunked_prefill_size: int
    """Most prompt tokens in one step."""
    vocab_size: int
    """Number of token ids."""
    num_parameters: int
    """Number of named parameters in a full weight update (not the number of their elements)."""
    device: str
    """Device of rank 0, for example "cuda:0" or "cpu"."""
    dtype: str
    """Dtype of the model, for example "bfloat16"."""
    weight_version: str
    """Version label of the weights at the start."""
    pid: int
    """Process id of rank 0's scheduler."""
    tp_rank: int
    """Tensor-parallel rank of the scheduler that reports: 0."""
    device_uuid: str
    """UUID of rank 0's GPU without the prefix "GPU-"; "" on the CPU."""
    start: dict[str, float]
    """Phase of the start -> time of its end, in seconds of `time.monotonic`."""
    unsupported: list[str]
    """Settings and calls that the engine refuses; [] for the embedded engine."""
    logprobs_after_filters: bool
    """True if log-probabilities of output tokens are those after top-k, top-p and min-p."""
    releases_memory: bool
    """True if `release_memory_occupation` frees memory."""
    attention_backend: NotRequired[str]
    """Kernels of attention that rank 0 uses; with the embedded engine, like the next four."""
    fused_kernels: NotRequired[bool]
    """True if rank 0 uses this package's own kernels."""
    disable_cuda_graph: NotRequired[bool]
    """True if no step is replayed from a CUDA graph, for example on the CPU."""
    disable_overlap_schedule: NotRequired[bool]
    """True if each step is waited for before the next one is planned, for example on the CPU."""
    disable_pdl: NotRequired[bool]
    """True if no kernel begins before the one before it has ended."""


class InternalState(TypedDict, total=False):
    """Current load and memory figures of the scheduler. Empty if the scheduler was too busy to answer."""

    num_running_reqs: int
    """Requests in the running batch."""
    num_waiting_reqs: int
    """Requests in the queue."""
    num_retracted_reqs: int
    """Requests in the queue that were started and lost their KV cache."""
    num_waiting_uncached_tokens: int
    """Tokens of the requests in the queue. Cached tokens are included: they are unknown before a request starts."""
    num_total_tokens: int
    """`num_used_tokens` + `num_waiting_uncached_tokens`."""
    num_used_tokens: int
    """Tokens of KV cache capacity that running requests occupy."""
    max_total_num_tokens: int
    """Capacity of the KV cache in tokens."""
    token_usage: float
    """`num_used_tokens` / `max_total_num_tokens`."""
    cache_hit_rate: float
    """Share of all prompt tokens since the start that were read from the prefix cache."""
    num_cached_pages: int
    """KV pages in the prefix cache that a new request may share."""
    gen_throughput: float
    """Output tokens per second, over about one second."""
    last_gen_throughput: float
    """`gen_throughput`, under SGLang's name."""
    effective_max_running_requests_per_dp: int
    """Most requests that run at once."""
    num_retractions: int
    """Number of times since the start that a request lost its KV cache and was queued again."""
    num_requests: int
    """Samples accepted since the start."""
    num_aborted_requests: int
    """Samples aborted since the start."""
    num_steps: int
    """Steps since the start."""
    prompt_tokens_total: int
    """Prompt tokens since the start."""
    cached_tokens_total: int
    """Prompt tokens since the start that were read from the prefix cache."""
    output_tokens_total: int
    """Output tokens since the start."""
    weight_version: str
    """Version label of the served weights."""
    weights_state: Literal["serving", "torn", "not_loaded", "asleep"]
    """State of the weights: served, torn by a failed update, without contents, or released."""
    refusal: str | None
    """The reason why generation is refused now; None if it is not refused."""
    released: list[str]
    """Tags of the memory that `release_memory_occupation` released."""
    paused: bool
    """True between `pause_generation` and `continue_generation`."""
    draining: bool
    """True while an update waits for running requests to finish."""
    transaction: str | None
    """Id of the open weight-update transaction."""
    memory_usage: dict[str, Any]
    """GiB of `weight` and `kvcache`, and `token_capacity`, under SGLang's names."""
    memory: dict[str, Any]
    """Memory figures of rank 0: bytes of weights and KV cache, capacity in tokens; on CUDA also bytes of the device,
    CUDA graphs and the seconds of their captures, steps with and without a graph, the bytes of each part of the GPU
    ("account"), kernels compiled, and allocations that had to free cached memory."""


class ServerInfo(TypedDict, total=False):
    """Answer of `/server_info`: these fields, all settings of `ServerArgs` except the keys, and all of
    `SchedulerInfo`. Where a setting leaves a choice, or cannot be met, the field says what the server does."""

    model_path: str
    """Folder or hub id of the served model."""
    tp_size: int
    """Number of tensor-parallel processes."""
    random_seed: int
    """The seed that the server uses: the setting, or the random seed of this start."""
    scheduler_info: SchedulerInfo
    """Report of rank 0's scheduler at its start."""
    internal_states: list[InternalState]
    """One entry: the scheduler's current figures."""
    weight_version: str
    """Version label of the served weights."""
    instance_id: str
    """Random id of this run of the server. A restart changes it."""
    weights_confirmed: bool
    """True if, since the start, an update contained every parameter or the owner called `accept_restart`."""
    busy_seconds: float
    """Seconds since the start in which at least one request was in the server."""
    tokenizer_path: str
    """Folder or hub id of the tokenizer."""
    dp_size: int
    """Always 1."""
    pp_size: int
    """1, or the pipeline-parallel size of another engine."""
    ep_size: int
    """1, or `tp_size` if another engine places experts on its ranks."""
    disaggregation_mode: str
    """Always "null"."""
    enable_memory_saver: bool
    """True if `release_memory_occupation` frees memory. The embedded engine needs no setting for it."""
    startup_time: float
    """Unix time of the start, in seconds."""
    version: str
    """Version of this package."""
    frontend: str
    """Always "python"."""


class ServedVersion(TypedDict):
    """Answer of `/weight_version`."""

    weight_version: str
    """Version label of the served weights."""
    since: float
    """Unix time at which this label was activated, in seconds; of the start for the loaded weights."""
    instance_id: str
    """Random id of this run of the server. A restart changes it."""
    weights_confirmed: bool
    """True if, since the start, an update contained every parameter or the owner called `accept_restart`."""
    accepts: bool
    """False before the first request of the start was answered, and while the weights cannot serve: torn, not loaded or
    released, as far as the last reply of the scheduler said."""


class ModelInfo(TypedDict):
    """Answer of `/model_info`. SGLang's clients read the fields that always have the same value."""

    model_path: str
    """Folder or hub id of the served model."""
    served_model_name: str
    """Name of the model in `/v1/models`."""
    tokenizer_path: str
    """Folder or hub id of the tokenizer."""
    is_generation: bool
    """Always True."""
    preferred_sampling_params: None
    """Always None."""
    weight_version: str
    """Version label of the served weights."""
    load_format: str
    """The setting `load_format`."""
    reasoning_parser: str | None
    """Format of the reasoning in outputs, by the setting or by the default chat template. None: none is recognized."""
    tool_call_parser: str | None
    """Format of the tool calls in outputs, like `reasoning_parser`."""
    disaggregation_mode: str
    """Always "null"."""
    has_image_understanding: bool
    """Always False."""
    has_audio_understanding: bool
    """Always False."""
    model_type: str | None
    """`model_type` in the model's config.json."""
    architectures: list[str] | None
    """`architectures` in the model's config.json."""
