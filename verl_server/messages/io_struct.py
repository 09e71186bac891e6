"""The messages between the processes of a server.

The TokenizerManager sends the scheduler `GrammarTokenizer`, `TokenizedGenerateReq`, `AbortReq`, `FinishReq`,
`FinishSessionReq`, control requests and `WithdrawReq`. The scheduler sends one `BatchTokenIDOut` for each step, as a
struct of arrays, and one `ControlReply` with the same `id` for each control request. All messages are msgpack on a
`MessageSocket`.

`weight_requests` has the control requests that concern weights and memory, `packed` the log-probabilities.
A control request is also the JSON body of its HTTP route, without `id`, which the TokenizerManager sets. `route` is the
path of this route: `server.dialects.sglang.admin_routes` mounts the route, and `engine.http` sends requests to it. The
routes ignore unknown JSON keys, as SGLang's routes do.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from verl_server.errors import VerlServerError
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs
from verl_server.messages.weight_requests import WeightReq
from verl_server.sampling_params import SamplingParams

PauseMode = Literal["abort", "retract", "in_place", "wait"]
"""Treatment of running requests in a pause; see `PauseGenerationReq.mode`."""

INSTANCE_HEADER = "X-Verl-Instance"
"""Header of every HTTP response: id of the server run that answers."""
EXPECTED_INSTANCE_HEADER = "X-Verl-Expected-Instance"
"""Header of a request: id of the server run that may carry it out. Any other run answers 412 and does nothing."""

PROMPT_HEADER = "X-Verl-Prompt-Bytes"
"""Header of a `/generate` request: the body begins with this many bytes of token ids (little-endian int32), which are
the prompts. The JSON object comes after them. `server.packed_prompts` has the whole wire."""
PROMPT_JSON_BYTES = 128 * 1024
"""Most bytes of the JSON object in a request with `PROMPT_HEADER`."""

# -- generation ---------------------------------------------------------------------------------------------


class TokenizedGenerateReq(msgspec.Struct, tag=True, kw_only=True):
    """One sample to generate. The TokenizerManager has expanded `n` and batches."""

    rid: str
    """Request id of the sample."""
    input_ids: list[int] = []
    """Token ids of the prompt: at least one, and fewer than the context length. The scheduler checks this again."""
    packed_ids: bytes = b""
    """The prompt as an array of int32, which replaces `input_ids` in the message to the scheduler: it takes
    milliseconds to encode a list of 128k ids.

    `SchedulerSockets` unpacks the array.
    """
    sampling: SamplingParams
    """Verified settings. `max_new_tokens` is an int that fits the context."""
    stop_ids: list[int] = []
    """Ids of EOS tokens and `stop_token_ids`. Empty with `ignore_eos`."""
    return_logprob: bool = False
    """Return log-probabilities of the output tokens."""
    logprob_start_len: int = -1
    """First prompt position whose log-probability is returned; -1 for none."""
    top_logprobs_num: int = 0
    """Number of the most likely candidates that are returned for each position."""
    token_ids_logprob: list[int] | None = None
    """Token ids whose log-probabilities are returned for each position."""
    sampling_mask_num: int = 0
    """Most tokens in the set that each token was drawn from, which is returned; 0: not requested."""
    bad_words_ids: list[list[int]] = []
    """Token sequences of `sampling.bad_words`."""
    namespace: str = ""
    """Namespace of the prefix cache. Only requests of one namespace share pages."""
    priority: int = 0
    """Requests of a larger priority leave the waiting queue first."""
    grammar: str = ""
    """The grammar of the output, which a text worker has translated and checked; "" for none. `sampling` has none."""
    grammar_bytes: int = 0
    """Bytes that the compiled grammar takes, roughly."""
    session_id: str = ""
    """Session of which the request is a turn; "" if none is known. The prefix cache estimates from the earlier turns of
    the session for how long to keep its history."""
    weight_demand: str = ""
    """The weights that must sample every token: a demand as in `version_demand`, "" for any weights."""


class GrammarTokenizer(msgspec.Struct, tag=True, kw_only=True):
    """The tokenizer for which grammars are compiled. It is the first message, if the server compiles grammars."""

    tokenizer: bytes
    """A `tokenizers.Tokenizer` as JSON."""
    eos_token_ids: list[int]
    """Ids that end an output which satisfies its grammar."""


class AbortReq(msgspec.Struct, tag=True, kw_only=True):
    """Abort one request or all requests. Each of them ends with finish_reason.type "abort" and its partial output."""

    route: ClassVar[str] = "/abort_request"
    rid: str = ""
    """Exact id of the request."""
    abort_all: bool = False
    """Abort all requests."""


class AcceptRestartReq(msgspec.Struct, tag=True, kw_only=True):
    """Confirm the weights that a restarted server serves, although no engine has pushed them since the start.

    The TokenizerManager handles this request; the scheduler does not receive it.
    """

    route: ClassVar[str] = "/accept_restart"


class FinishReq(msgspec.Struct, tag=True, kw_only=True):
    """Free a request without an answer. The TokenizerManager has the final answer, because a stop string matched."""

    rid: str


class FinishSessionReq(msgspec.Struct, tag=True, kw_only=True):
    """No request continues the session any more. The pages of its history are evicted first. There is no answer."""

    session_id: str


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The reason why a sample ended; SGLang's `finish_reason` object."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """stop: the token id, the stop string or the pattern of the stop regex."""
    length: int | None = None
    """length: the number of output tokens."""
    message: str | None = None
    """abort: the cause."""
    status_code: int | None = None
    """abort: HTTP status of an error; None if the caller aborted the request (answered 200 with partial output)."""
    code: str | None = None
    """abort: `VerlServerError.code` of the error."""
    at_border: bool = False
    """abort: the weight version changed, and the request's demand excludes the new one. In spite of `status_code`, the
    output so far is a complete answer, unless it is empty."""

    @classmethod
    def refused(cls, error: VerlServerError, at_border: bool = False) -> FinishReason:
        """Return the end of a request that `error` refuses."""
        status_code, code = error.status_code, error.code
        return cls(type="abort", message=str(error), status_code=status_code, code=code, at_border=at_border)


class BatchTokenIDOut(msgspec.Struct, tag=True, kw_only=True):
    """New tokens of one step. Entry i of each list belongs to the request `rids[i]`.

    All tokens of a message were computed in one step, so they have the same `weight_version`. A request's last message
    has an entry in `finish_reasons`. After this message the scheduler does not know the request.
    """

    rids: list[str]
    output_ids: list[list[int]]
    """Tokens since the request's previous message. May be empty (abort, prefill only)."""
    output_logprobs: list[list[float]]
    """Log-probabilities of `output_ids`. Empty without `return_logprob`."""
    finish_reasons: list[FinishReason | None]
    weight_version: str
    cached_tokens: list[int]
    """Number of prompt tokens that were read from the prefix cache."""
    num_retractions: list[int]
    top_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Entry index -> candidates for each new token, for requests with `top_logprobs_num`."""
    token_ids_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Entry index -> log-probabilities of the requested ids for each new token, for requests with
    `token_ids_logprob`."""
    sampling_masks: dict[int, list[TokenLogprobs]] = {}
    """Entry index -> the tokens that each new token was drawn from, for requests with `sampling_mask_num`."""
    policy_logprobs: dict[int, list[float]] = {}
    """Entry index -> log-probabilities of the new tokens under the policy, without mask, penalty or bias. For requests
    with `return_logprob` whose `output_logprobs` are of another distribution, if the engine computes them."""
    has_choice: dict[int, list[bool]] = {}
    """Entry index -> for each new token, True if masks allowed another token.

    For requests with `return_logprob` and masks, if the engine counts this.
    """
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Entry index -> log-probabilities of the prompt. Sent once, with the first message of a request that needs
    them."""


# -- control ------------------------------------------------------------------------------------------------


class WithdrawReq(msgspec.Struct, tag=True, kw_only=True):
    """Withdraw a control request whose caller no longer waits.

    If the control request has not begun, it is answered with status 499 and is never carried out. `ENDING_REQS` are
    carried out anyway. A withdrawal has no answer of its own.
    """

    id: int
    """Id of the control request."""


class FlushCacheReq(msgspec.Struct, tag=True, kw_only=True):
    """Empty the prefix cache. Refused (success=False) while requests run or wait, as in SGLang."""

    route: ClassVar[str] = "/flush_cache"
    id: int = 0
    timeout: float = 0.0
    """Seconds to wait until no request runs or waits."""


class PauseGenerationReq(msgspec.Struct, tag=True, kw_only=True):
    """Stop generation until `ContinueGenerationReq`. New requests wait in the queue."""

    route: ClassVar[str] = "/pause_generation"
    id: int = 0
    mode: PauseMode = "abort"
    """Treatment of running requests. "abort": they end with partial output.

    "retract": they go back to the queue and lose their KV cache. "in_place": they wait and keep their KV cache. "wait":
    they finish before the pause begins and the reply is sent, for at most `control_timeout` seconds; no other request
    starts before the pause.
    """


class ContinueGenerationReq(msgspec.Struct, tag=True, kw_only=True):
    """Continue generation after `PauseGenerationReq`."""

    route: ClassVar[str] = "/continue_generation"
    id: int = 0
    torch_empty_cache: bool = True
    """No effect. SGLang's clients send it."""


class StartProfileReq(msgspec.Struct, tag=True, kw_only=True):
    """Record the steps of rank 0 with torch's profiler. Needs `ServerArgs.profile_folder`.

    The recording ends with `StopProfileReq`, and after 1000 steps or 60 seconds in any case. Generation waits while the
    trace is written.
    """

    route: ClassVar[str] = "/start_profile"
    id: int = 0
    output_dir: str | None = None
    """Folder of the trace: `profile_folder`, the default, or a folder in it."""
    num_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    """Number of steps after which the recording ends."""
    activities: list[Literal["CPU", "GPU"]] | None = None
    """The devices whose operators are recorded. Default: both, or the CPU only if the server runs on the CPU."""
    with_stack: bool = False
    """Record the Python stack of each operator."""
    record_shapes: bool = False
    """Record the shapes of the operators' inputs."""
    profile_prefix: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")] | None = None
    """Beginning of the file's name."""


class StopProfileReq(msgspec.Struct, tag=True, kw_only=True):
    """End the recording of `StartProfileReq`, and write the trace."""

    route: ClassVar[str] = "/stop_profile"
    id: int = 0


class GetInternalStateReq(msgspec.Struct, tag=True, kw_only=True):
    """Return the scheduler's load and memory figures, for `/server_info`, `/v1/loads` and `/metrics`."""

    route: ClassVar[str] = "/server_info"
    """The answer of this route holds the figures in `internal_states[0]`."""
    id: int = 0


ProfileReq = StartProfileReq | StopProfileReq
"""Requests that the `StepProfiler` of rank 0 carries out at once."""

QueuedReq = FlushCacheReq | PauseGenerationReq | ContinueGenerationReq | GetInternalStateReq | WeightReq
"""Requests that the scheduler's `ControlQueue` receives."""

ControlReq = QueuedReq | ProfileReq


class ControlReply(msgspec.Struct, tag=True, kw_only=True):
    """The answer to the control request with the same `id`."""

    id: int
    success: bool
    message: str = ""
    status_code: int = 200
    """HTTP status if `success` is false."""
    payload: Any = None
    """JSON-like result, for requests that have one."""
    weights_refusal: str | None = None
    """The reason why the weights cannot serve after this request. None if they can, and in a transaction, which holds
    requests instead of refusing them."""


SchedulerInput = (
    GrammarTokenizer | TokenizedGenerateReq | AbortReq | FinishReq | FinishSessionReq | WithdrawReq | ControlReq
)
SchedulerOutput = BatchTokenIDOut | ControlReply
