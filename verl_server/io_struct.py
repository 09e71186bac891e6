"""Every message that crosses a process boundary inside a server.

`TokenizerManager` -> `Scheduler` (`MessageSocket`, msgpack): `TokenizedGenerateReq`, `AbortReq`, `FinishReq`, the
control requests and `WithdrawReq`. `Scheduler` -> `TokenizerManager`: `BatchTokenIDOut`, once a step, as a struct of
arrays, and one `ControlReply` for each control request, matched by `id`.

Control requests double as the JSON bodies of their HTTP routes; `id` is then set by the TokenizerManager. `route` is
the path: `server.dialects.sglang.admin_routes` mounts it, `engine.http` sends to it.
Unknown JSON keys are ignored there, as SGLang's routes do.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from verl_server.sampling_params import SamplingParams
from verl_server.weight_sync.handles import LocalSerializedTensor, WeightsDescription

VersionLabel = Annotated[str, msgspec.Meta(max_length=256)]
"""It travels with every token, and one of digits only is counted on from."""
TransactionId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
UpdateMode = Literal["wait", "in_place", "retract", "abort"]

INSTANCE_HEADER = "X-Verl-Instance"
"""On every HTTP response: the id of the run of the server that answers."""
EXPECTED_INSTANCE_HEADER = "X-Verl-Expected-Instance"
"""On a request: the only run that may carry it out; another one answers 412 and does nothing (`server.instance`)."""

# -- generation ---------------------------------------------------------------------------------------------


class TokenizedGenerateReq(msgspec.Struct, tag=True, kw_only=True):
    """One sample to generate (`n` and batches are expanded before this)."""

    rid: str
    input_ids: list[int]
    """Prompt, 1 <= length < context length (checked by the TokenizerManager and again by the scheduler)."""
    sampling: SamplingParams
    """Verified; `max_new_tokens` is resolved to an int that fits the context."""
    stop_ids: list[int] = []
    """EOS ids plus `stop_token_ids`; empty with `ignore_eos`."""
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position whose log-probability is wanted; -1 for none."""
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None


class AbortReq(msgspec.Struct, tag=True, kw_only=True):
    """Stop one request (exact `rid`) or all; each gets its terminal `BatchTokenIDOut` with type "abort"."""

    route: ClassVar[str] = "/abort_request"
    rid: str = ""
    abort_all: bool = False


class AcceptRestartReq(msgspec.Struct, tag=True, kw_only=True):
    """The owner of the weights accepts those that the server serves, though nobody pushed them since its start.

    Handled by the TokenizerManager: the scheduler does not know of it.
    """

    route: ClassVar[str] = "/accept_restart"


class FinishReq(msgspec.Struct, tag=True, kw_only=True):
    """The TokenizerManager has its final answer already (a stop string matched): free the request silently."""

    rid: str


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """SGLang's `finish_reason` object."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    """stop: token id or stop string."""
    length: int | None = None
    """length: completion tokens."""
    message: str | None = None
    """abort: why."""
    status_code: int | None = None
    """abort: None for the user's own abort (answered 200 with partial output), else the HTTP status."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Candidates of one position: parallel lists, most likely first (or in the order asked)."""

    logprobs: list[float]
    token_ids: list[int]


class PromptLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of prompt[start:], from raw logits. Entry 0 of each list is null, as SGLang does:

    the i-th value is log p(prompt[start+i] | prompt[:start+i]) and is left out for the first one listed.
    """

    token_ids: list[int]
    logprobs: list[float | None]
    top: list[TokenLogprobs | None] | None = None
    requested: list[TokenLogprobs | None] | None = None


class BatchTokenIDOut(msgspec.Struct, tag=True, kw_only=True):
    """New tokens of one step, entry i belonging to request `rids[i]`.

    All tokens of one message were computed in one launch, so they share one `weight_version`. A request's
    last message carries its `finish_reasons` entry; after it the scheduler knows the rid no more.
    """

    rids: list[str]
    output_ids: list[list[int]]
    """Tokens new since the request's previous message; may be empty (abort, prefill only)."""
    output_logprobs: list[list[float]]
    """Same shape as output_ids where `return_logprob`, else []."""
    finish_reasons: list[FinishReason | None]
    weight_version: str
    cached_tokens: list[int]
    """Prompt tokens taken from the prefix cache."""
    num_retractions: list[int]
    top_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Entry index -> candidates for each new token; only requests that asked."""
    token_ids_logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Sent once, with the first message of a request that asked."""


# -- control ------------------------------------------------------------------------------------------------


class WithdrawReq(msgspec.Struct, tag=True, kw_only=True):
    """The caller of a control request gave up. Unless it has begun, it is answered with 499 and never carried out;
    one that ends or closes something (`ENDING_REQS`) is carried out all the same. Has no answer of its own."""

    id: int
    """Of the request that nobody waits for any more."""


class FlushCacheReq(msgspec.Struct, tag=True, kw_only=True):
    """Empty the prefix cache. Refused (success=False) while requests run or wait, as SGLang does."""

    route: ClassVar[str] = "/flush_cache"
    id: int = 0
    timeout: float = 0.0
    """Seconds to wait for the scheduler to become idle first."""


class PauseGenerationReq(msgspec.Struct, tag=True, kw_only=True):
    """Stop stepping. `abort` ends all requests with partial output, `retract` frees their KV and re-queues
    them, `in_place` freezes them with their KV. New requests queue until `ContinueGenerationReq`."""

    route: ClassVar[str] = "/pause_generation"
    id: int = 0
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationReq(msgspec.Struct, tag=True, kw_only=True):
    route: ClassVar[str] = "/continue_generation"
    id: int = 0
    torch_empty_cache: bool = True


class UpdateWeightsFromTensorReq(msgspec.Struct, tag=True, kw_only=True):
    """Copy tensors that other processes own into the served weights, in place, all or nothing.

    The source is exactly one of `named_tensors`, `description`, `registration` and `serialized_named_tensors`.
    """

    route: ClassVar[str] = "/update_weights_from_tensor"
    id: int = 0
    named_tensors: list[tuple[str, LocalSerializedTensor]] | None = None
    """Hugging Face names; server rank i reads `values[i]`. Opened for this update only."""
    description: WeightsDescription | None = None
    """Whole or sharded tensors of any number of owners; with `keep` they stay registered under its id."""
    registration: str | None = None
    """Id of a description that is registered already: nothing is opened, checked or planned again.
    404 if the server does not know it (any more): send the description."""
    serialized_named_tensors: list[str] | None = None
    """SGLang's payloads, one base64 pickle for each tensor-parallel rank. They are parsed, never unpickled."""
    keep: bool = False
    """Keep `description` open for later pushes. Its owner then holds the memory until it was unregistered."""
    forget: list[str] = []
    """Registrations to close before this update; unknown ids are ignored."""
    load_format: str | None = None
    flush_cache: bool = True
    """SGLang's; without effect: KV pages of an older version never serve a new request, whatever is asked for."""
    abort_all_requests: bool = False
    """Shorthand for mode="abort"."""
    mode: UpdateMode = "wait"
    """What happens to running requests: finish first under the old weights (new ones queue), keep their KV,
    recompute it under the new weights, or return partial output. Ignored while paused or in a transaction."""
    weight_version: VersionLabel | None = None
    """Label of the new version; default: the next integer. Inside a transaction it is settled at the end."""
    transaction_id: TransactionId | None = None
    """The transaction (`BeginWeightUpdateReq`) that this call belongs to."""
    strict_dtype: bool = False
    """Refuse to convert floating dtypes during the copy."""
    partial: bool = True
    """False: the update must cover every parameter."""
    allow_nonfinite: bool = False
    """Serve the weights although NaN or infinity was copied. Otherwise the update fails (400) and they are torn."""
    checksums: dict[str, str] | None = None
    """`tensor_checksum` of whole source tensors by name; one that does not match refuses the update (400)."""


class RegisterWeightsReq(msgspec.Struct, tag=True, kw_only=True):
    """Open and plan `description` now, so that pushes by its id only copy. Changes no weights."""

    route: ClassVar[str] = "/register_weights"
    id: int = 0
    description: WeightsDescription
    forget: list[str] = []
    strict_dtype: bool = False


class UnregisterWeightsReq(msgspec.Struct, tag=True, kw_only=True):
    """Close registrations. When it is answered, no process of the server maps their memory any more."""

    route: ClassVar[str] = "/unregister_weights"
    id: int = 0
    registrations: list[str] | None = None
    """None: all. Unknown ids are ignored."""


class BeginWeightUpdateReq(msgspec.Struct, tag=True, kw_only=True):
    """Open a transaction: several update calls become one version. One at a time; a second is refused (409, or 400 if
    neither has an id).

    From its reply to its end no step is taken (requests wait). Its calls renew the lease.
    """

    route: ClassVar[str] = "/begin_weight_update"
    id: int = 0
    transaction_id: TransactionId | None = None
    """Calls of this transaction carry it, all others are refused (409). None: SGLang's transactions, whose calls carry
    no id: calls without an id belong to it."""
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    """Silence after which the transaction is over: old weights if nothing was written, else torn.
    Default: `ServerArgs.weight_update_lease`."""
    full: bool = False
    """The transaction claims to bring every parameter: its end is refused while one is missing."""
    mode: UpdateMode = "wait"
    selector: str = "all"


class EndWeightUpdateReq(msgspec.Struct, tag=True, kw_only=True):
    """Close the transaction: its writes become one new version, under which generation goes on.

    `discard` gives it up instead: old weights if nothing was written, else torn.
    """

    route: ClassVar[str] = "/end_weight_update"
    id: int = 0
    transaction_id: TransactionId | None = None
    weight_version: VersionLabel | None = None
    flush_cache: bool = True
    """Without effect, see `UpdateWeightsFromTensorReq`."""
    discard: bool = False


class InitWeightsUpdateGroupReq(msgspec.Struct, tag=True, kw_only=True):
    """Join a process group with trainers of other hosts: the trainer is rank 0, server ranks follow."""

    route: ClassVar[str] = "/init_weights_update_group"
    id: int = 0
    master_address: str
    master_port: int
    rank_offset: int
    """Rank in the group = rank_offset + tensor-parallel rank."""
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyWeightsUpdateGroupReq(msgspec.Struct, tag=True, kw_only=True):
    route: ClassVar[str] = "/destroy_weights_update_group"
    id: int = 0
    group_name: str = "weight_update_group"


class UpdateWeightsFromDistributedReq(msgspec.Struct, tag=True, kw_only=True):
    """Receive tensors that rank 0 of a process group broadcasts, in the order of `names`."""

    route: ClassVar[str] = "/update_weights_from_distributed"
    id: int = 0
    names: list[str]
    dtypes: list[str]
    """torch's names, with or without "torch."."""
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    """None: one broadcast a tensor. "flattened_bucket": one broadcast of all, concatenated as bytes."""
    flush_cache: bool = True
    """Without effect, see `UpdateWeightsFromTensorReq`."""
    abort_all_requests: bool = False
    mode: UpdateMode = "wait"
    weight_version: VersionLabel | None = None
    transaction_id: TransactionId | None = None
    selector: str = "all"
    strict_dtype: bool = False
    partial: bool = True
    allow_nonfinite: bool = False


class UpdateWeightsFromDiskReq(msgspec.Struct, tag=True, kw_only=True):
    """Load a folder of safetensors over the served weights."""

    route: ClassVar[str] = "/update_weights_from_disk"
    id: int = 0
    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    """Without effect, see `UpdateWeightsFromTensorReq`."""
    abort_all_requests: bool = False
    mode: UpdateMode = "wait"
    weight_version: VersionLabel | None = None
    transaction_id: TransactionId | None = None
    keep_pause: bool = False
    """Leave generation paused after a successful update, until `ContinueGenerationReq`. False: as it was before."""
    allow_nonfinite: bool = False


class UpdateWeightVersionReq(msgspec.Struct, tag=True, kw_only=True):
    """Relabel the served weights without changing them."""

    route: ClassVar[str] = "/update_weight_version"
    id: int = 0
    new_version: VersionLabel
    abort_all_requests: bool = True


class GetWeightsByNameReq(msgspec.Struct, tag=True, kw_only=True):
    """First `truncate_size` rows of a parameter under its Hugging Face name, as float32 nested lists."""

    route: ClassVar[str] = "/get_weights_by_name"
    id: int = 0
    name: str
    truncate_size: int = 100


class WeightsCheckerReq(msgspec.Struct, tag=True, kw_only=True):
    """`checksum`: a digest per parameter and rank; `snapshot`/`compare`: remember weights, compare later;
    `reset_tensors`: overwrite with noise (marks the weights torn until a full update)."""

    route: ClassVar[str] = "/weights_checker"
    id: int = 0
    action: str = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: str = "all"


class ReleaseMemoryOccupationReq(msgspec.Struct, tag=True, kw_only=True):
    """Give memory back. Refused while requests run. Tags: "kv_cache", "weights", "cuda_graph"; None is all."""

    route: ClassVar[str] = "/release_memory_occupation"
    id: int = 0
    tags: list[str] | None = None


class ResumeMemoryOccupationReq(msgspec.Struct, tag=True, kw_only=True):
    """Take memory again. Resumed weights are *not loaded*: generation answers 503 until a full update, unless
    `enable_weights_cpu_backup` kept their contents."""

    route: ClassVar[str] = "/resume_memory_occupation"
    id: int = 0
    tags: list[str] | None = None


class GetInternalStateReq(msgspec.Struct, tag=True, kw_only=True):
    """Load and memory figures of the scheduler, for `/server_info`, `/v1/loads` and `/metrics`."""

    route: ClassVar[str] = "/server_info"
    """Whose answer holds the figures as `internal_states[0]`."""
    id: int = 0


UpdateReq = UpdateWeightsFromTensorReq | UpdateWeightsFromDiskReq | UpdateWeightsFromDistributedReq
"""Requests that bring new weights."""

StagedReq = UpdateReq | RegisterWeightsReq | InitWeightsUpdateGroupReq
"""Requests that open, check or wait for something before they are carried out; that happens off the loop."""

WeightReq = (
    StagedReq
    | UnregisterWeightsReq
    | BeginWeightUpdateReq
    | EndWeightUpdateReq
    | DestroyWeightsUpdateGroupReq
    | UpdateWeightVersionReq
    | GetWeightsByNameReq
    | WeightsCheckerReq
    | ReleaseMemoryOccupationReq
    | ResumeMemoryOccupationReq
)
"""Requests that every tensor-parallel rank carries out, in the same order: `WeightUpdater`'s."""

ENDING_REQS = (EndWeightUpdateReq, UnregisterWeightsReq, DestroyWeightsUpdateGroupReq)
"""Requests that are right to carry out for a caller who is gone: they read none of his memory, and without them a
transaction would hold generation until its lease ends, or memory would stay mapped."""

ControlReq = FlushCacheReq | PauseGenerationReq | ContinueGenerationReq | GetInternalStateReq | WeightReq


class ControlReply(msgspec.Struct, tag=True, kw_only=True):
    """Answer to the control request with the same `id`."""

    id: int
    success: bool
    message: str = ""
    status_code: int = 200
    """HTTP status when not `success`."""
    payload: Any = None
    """JSON-like data of requests that ask for some."""


SchedulerInput = TokenizedGenerateReq | AbortReq | FinishReq | WithdrawReq | ControlReq
SchedulerOutput = BatchTokenIDOut | ControlReply
