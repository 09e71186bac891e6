"""The messages between the processes of a server.

The TokenizerManager sends the scheduler `GrammarTokenizer`, `TokenizedGenerateReq`, `AbortReq`, `FinishReq`,
`FinishSessionReq`, control requests and `WithdrawReq`. The scheduler sends one `BatchTokenIDOut` for each step, as a
struct of arrays, and one `ControlReply` with the same `id` for each control request. All messages are msgpack on a
`MessageSocket`.

A control request is also the JSON body of its HTTP route, without `id`, which the TokenizerManager sets. `route` is the
path of this route: `server.dialects.sglang.admin_routes` mounts the route, and `engine.http` sends requests to it. The
routes ignore unknown JSON keys, as SGLang's routes do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from verl_server.packing import ITEM, pack_array, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs
from verl_server.sampling_params import SamplingParams
from verl_server.weight_sync.handles import LocalSerializedTensor, PickledHandles, Shape, WeightsDescription

VersionLabel = Annotated[str, msgspec.Meta(max_length=256)]
"""Label of a weight version. If a label has digits only, the default label of the next version is the next integer."""
TransactionId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
UpdateMode = Literal["wait", "in_place", "retract", "abort"]
"""Treatment of running requests in an update; see `UpdateWeightsFromTensorReq.mode`."""
PauseMode = Literal["abort", "retract", "in_place", "wait"]
"""Treatment of running requests in a pause; see `PauseGenerationReq.mode`."""

INSTANCE_HEADER = "X-Verl-Instance"
"""Header of every HTTP response: id of the server run that answers."""
EXPECTED_INSTANCE_HEADER = "X-Verl-Expected-Instance"
"""Header of a request: id of the server run that may carry it out. Any other run answers 412 and does nothing."""

PROMPT_HEADER = "X-Verl-Prompt-Bytes"
"""Header of a `/generate` request: the body begins with this many bytes of token ids (little-endian int32), which are
the prompt. The JSON object comes after them."""

# -- generation ---------------------------------------------------------------------------------------------


class TokenizedGenerateReq(msgspec.Struct, tag=True, kw_only=True):
    """One sample to generate. The TokenizerManager has expanded `n` and batches."""

    rid: str
    """Request id of the sample."""
    input_ids: list[int] = []
    """Token ids of the prompt: at least one, and fewer than the context length. The scheduler checks this again."""
    packed_ids: bytes = b""
    """The same as an array of int32, in the place of `input_ids` on the way to the scheduler: a list of 128k ids takes
    milliseconds to encode. `SchedulerSockets` unpacks it."""
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


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Candidates of one position, packed: the most likely first, or in the order of the request's ids."""

    packed_logprobs: bytes
    packed_ids: bytes

    @classmethod
    def of(cls, logprobs: Sequence[float], token_ids: Sequence[int]) -> TokenLogprobs:
        """`logprobs` are exact in float32."""
        return cls(pack_logprobs(logprobs), pack_ids(token_ids))

    @classmethod
    def rows(
        cls, logprobs: npt.NDArray[np.generic], token_ids: npt.NDArray[np.generic], nums: Iterable[int] | None = None
    ) -> list[TokenLogprobs]:
        """Return the first `nums[i]` candidates of each row i of two arrays [n, count]; all of them by default."""
        n, count = token_ids.shape
        packed_logprobs, packed_ids, width = pack_array(logprobs), pack_array(token_ids), count * ITEM
        starts = range(0, n * width, width) if count else [0] * n
        sizes = [width] * n if nums is None else [min(num * ITEM, width) for num in nums]
        return [
            cls(packed_logprobs[start : start + size], packed_ids[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.packed_ids) // ITEM

    def first(self, num: int) -> TokenLogprobs:
        """Return the first `num` candidates, or all if there are fewer."""
        return TokenLogprobs(self.packed_logprobs[: num * ITEM], self.packed_ids[: num * ITEM])

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities as a new list."""
        return unpack_logprobs(self.packed_logprobs)

    @property
    def token_ids(self) -> list[int]:
        """The token ids as a new list."""
        return unpack_ids(self.packed_ids)


class PromptLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens prompt[start:], from raw logits.

    Entry i of each list is for log p(prompt[start+i] | prompt[:start+i]). Entry 0 is None, as in SGLang. The part of a
    chunk of the prompt has no such entry.
    """

    packed_ids: bytes
    """Ids of the tokens."""
    packed_logprobs: bytes
    """Log-probabilities of the tokens, but not of the first one if its entry is None."""
    packed_ranks: bytes
    """Packed like ids; parallel to `packed_logprobs`. `ranks` describes them."""
    top: list[TokenLogprobs | None] | None = None
    requested: list[TokenLogprobs | None] | None = None

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int],
        top: list[TokenLogprobs | None] | None = None,
        requested: list[TokenLogprobs | None] | None = None,
    ) -> PromptLogprobs:
        """`logprobs`, exact in float32, and `ranks` leave out the first token if its entry is None."""
        return cls(
            packed_ids=pack_ids(token_ids),
            packed_logprobs=pack_logprobs(logprobs),
            packed_ranks=pack_ids(ranks),
            top=top,
            requested=requested,
        )

    @property
    def num_missing(self) -> int:
        """Number of tokens without a log-probability: 1 if the first entry is None."""
        return (len(self.packed_ids) - len(self.packed_logprobs)) // ITEM

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens as a new list."""
        return unpack_ids(self.packed_ids)

    @property
    def logprobs(self) -> list[float | None]:
        """The log-probabilities as a new list, parallel to `token_ids`."""
        return [*[None] * self.num_missing, *unpack_logprobs(self.packed_logprobs)]

    @property
    def ranks(self) -> list[int | None]:
        """Place of each token among all tokens of the vocabulary, the most likely first, from 1. Equal tokens share it.

        A new list, parallel to `token_ids`.
        """
        return [*[None] * self.num_missing, *unpack_ids(self.packed_ranks)]


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
    """Treatment of running requests. "abort": they end with partial output. "retract": they go back to the queue and
    lose their KV cache. "in_place": they wait and keep their KV cache. "wait": they finish before the pause begins and
    the reply is sent, for at most `control_timeout` seconds; no other request is started meanwhile."""


class ContinueGenerationReq(msgspec.Struct, tag=True, kw_only=True):
    """Continue generation after `PauseGenerationReq`."""

    route: ClassVar[str] = "/continue_generation"
    id: int = 0
    torch_empty_cache: bool = True
    """No effect. SGLang's clients send it."""


class UpdateWeightsFromTensorReq(msgspec.Struct, tag=True, kw_only=True):
    """Copy tensors from the memory of other processes into the served weights, in place.

    A refused update changes nothing. The source is exactly one of `named_tensors`, `description`, `registration`,
    `ipc_handles` and `serialized_named_tensors`.
    """

    route: ClassVar[str] = "/update_weights_from_tensor"
    id: int = 0
    named_tensors: list[tuple[str, LocalSerializedTensor]] | None = None
    """Tensors with Hugging Face names. Server rank i reads `values[i]`. The memory is opened for this update only."""
    description: WeightsDescription | None = None
    """Memory of whole or sharded tensors, of any number of owners. With `keep` it stays registered under its id."""
    registration: str | None = None
    """Id of a registered description. The server uses the existing plan and opens nothing. If it has no such
    registration, it answers 404: send the description then."""
    ipc_handles: PickledHandles | None = None
    """vLLM's IPC handles of whole tensors, or of one buffer that holds them."""
    serialized_named_tensors: list[str] | None = None
    """SGLang's payloads: one base64 pickle for each tensor-parallel rank. They are parsed as data, never unpickled."""
    keep: bool = False
    """Keep the memory of `description` open for later pushes. The owner must not free it before it is unregistered."""
    forget: list[str] = []
    """Registrations to close before this update. Unknown ids are ignored."""
    load_format: str | None = None
    """Format of `serialized_named_tensors`, as in SGLang. Must be null or "auto" with the other sources."""
    flush_cache: bool = True
    """No effect; the name is SGLang's. A KV page of an older version is never used for a new request."""
    abort_all_requests: bool = False
    """Shorthand for mode="abort"."""
    mode: UpdateMode = "wait"
    """Treatment of running requests. "wait": they finish under the old weights, and new requests wait in the queue.
    "in_place": they keep their KV cache. "retract": they compute it again under the new weights. "abort": they return
    partial output. Ignored while generation is paused and in a transaction."""
    weight_version: VersionLabel | None = None
    """Label of the new version; default: the next integer. In a transaction, the end of the transaction sets it."""
    transaction_id: TransactionId | None = None
    """The transaction (`BeginWeightUpdateReq`) that this call belongs to."""
    strict_dtype: bool = False
    """Refuse to convert floating dtypes during the copy."""
    partial: bool = True
    """False: refuse an update in which a parameter is missing."""
    allow_nonfinite: bool = False
    """Serve weights that contain NaN or infinity. Otherwise such an update fails (400) and the weights are torn."""
    checksums: dict[str, str] | None = None
    """Tensor name -> `tensor_checksum` of the whole source tensor. The update is refused (400) if a checksum
    differs."""


class RegisterWeightsReq(msgspec.Struct, tag=True, kw_only=True):
    """Open the memory of `description` and plan the copies now, so that a push by id only copies. Changes no
    weights."""

    route: ClassVar[str] = "/register_weights"
    id: int = 0
    description: WeightsDescription
    """Memory of the tensors."""
    forget: list[str] = []
    """Registrations to close before this one. Unknown ids are ignored."""
    strict_dtype: bool = False
    """Refuse to convert floating dtypes during the copy."""


class UnregisterWeightsReq(msgspec.Struct, tag=True, kw_only=True):
    """Close registrations. After the reply, no process of the server maps their memory."""

    route: ClassVar[str] = "/unregister_weights"
    id: int = 0
    registrations: list[str] | None = None
    """Ids of the registrations; null closes all. Unknown ids are ignored."""


class BeginWeightUpdateReq(msgspec.Struct, tag=True, kw_only=True):
    """Open a transaction, which makes one version of several updates.

    Only one transaction may be open. A second one is refused (409, or 400 if neither has an id). No generation step
    runs from the reply to the end of the transaction. Each call of the transaction renews the lease.
    """

    route: ClassVar[str] = "/begin_weight_update"
    id: int = 0
    transaction_id: TransactionId | None = None
    """Id of the transaction. Updates without this id are refused (409). Null, as in SGLang: updates without an id
    belong to the transaction."""
    lease_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] | None = None
    """Seconds without a call after which the transaction is abandoned: the old weights are served if nothing was
    written, else the weights are torn. Default: `ServerArgs.weight_update_lease`."""
    full: bool = False
    """Refuse the end of the transaction while a parameter is missing."""
    mode: UpdateMode = "wait"
    """Treatment of running requests, as in an update."""
    selector: str = "all"
    """Must be "all" or "target"; there is no draft model. The name is SGLang's."""


class EndWeightUpdateReq(msgspec.Struct, tag=True, kw_only=True):
    """Close the transaction: its updates become one new version, and generation continues with it."""

    route: ClassVar[str] = "/end_weight_update"
    id: int = 0
    transaction_id: TransactionId | None = None
    """Id of the transaction; null for a transaction without an id."""
    weight_version: VersionLabel | None = None
    """Label of the new version; default: the next integer."""
    flush_cache: bool = True
    """No effect; see `UpdateWeightsFromTensorReq`."""
    discard: bool = False
    """Abandon the transaction: the old weights are served if nothing was written, else the weights are torn."""


class InitWeightsUpdateGroupReq(msgspec.Struct, tag=True, kw_only=True):
    """Join a process group with trainers on other hosts. The trainer is rank 0, and the server's ranks follow."""

    route: ClassVar[str] = "/init_weights_update_group"
    id: int = 0
    master_address: str
    """Host of rank 0."""
    master_port: int
    """Port of rank 0."""
    rank_offset: int
    """Rank in the group of the server's tensor-parallel rank 0. The other ranks follow in order."""
    world_size: int
    """Number of ranks in the group."""
    group_name: str = "weight_update_group"
    """Name of the group in later requests."""
    backend: str = "nccl"
    """torch.distributed backend of the group."""
    rendezvous: Literal["prefix_store", "unique_id"] = "prefix_store"
    """The protocol by which the ranks meet at the trainer's store. "prefix_store" is the one of torch's process groups,
    which SGLang's trainers use. With "unique_id" the trainer publishes NCCL's unique id, as vLLM's trainers do."""


class DestroyWeightsUpdateGroupReq(msgspec.Struct, tag=True, kw_only=True):
    """Leave a process group."""

    route: ClassVar[str] = "/destroy_weights_update_group"
    id: int = 0
    group_name: str = "weight_update_group"
    """Name of the group."""


class UpdateWeightsFromDistributedReq(msgspec.Struct, tag=True, kw_only=True):
    """Receive tensors that rank 0 of a process group broadcasts, in the order of `names`."""

    route: ClassVar[str] = "/update_weights_from_distributed"
    id: int = 0
    names: list[str]
    """Hugging Face names of the tensors."""
    dtypes: list[str]
    """Names of the tensors' torch dtypes, with or without the prefix "torch."."""
    shapes: list[Shape]
    """Shapes of the tensors."""
    group_name: str = "weight_update_group"
    """Name of the process group."""
    load_format: str | None = None
    """Null: one broadcast for each tensor. "flattened_bucket": one broadcast of all tensors, concatenated as bytes.
    "packed": broadcasts of several tensors, concatenated as bytes, as vLLM's trainers send them. "state_dicts": the
    trainer broadcasts names, dtypes and shapes itself, as prime-rl's trainers do, and the three lists are empty."""
    packed_buffer_size_bytes: int = 1 << 30
    """With "packed": a broadcast ends with the tensor that makes it larger than this."""
    flush_cache: bool = True
    """No effect; see `UpdateWeightsFromTensorReq`."""
    abort_all_requests: bool = False
    """Shorthand for mode="abort"."""
    mode: UpdateMode = "wait"
    """Treatment of running requests; see `UpdateWeightsFromTensorReq`."""
    weight_version: VersionLabel | None = None
    """Label of the new version; default: the next integer."""
    transaction_id: TransactionId | None = None
    """The transaction (`BeginWeightUpdateReq`) that this update belongs to."""
    selector: str = "all"
    """Must be "all" or "target"; there is no draft model. The name is SGLang's."""
    strict_dtype: bool = False
    """Refuse to convert floating dtypes during the copy."""
    partial: bool = True
    """False: refuse an update in which a parameter is missing."""
    allow_nonfinite: bool = False
    """Serve weights that contain NaN or infinity. Otherwise such an update fails (400) and the weights are torn."""


class UpdateWeightsFromDiskReq(msgspec.Struct, tag=True, kw_only=True):
    """Load a folder of safetensors files into the served weights."""

    route: ClassVar[str] = "/update_weights_from_disk"
    id: int = 0
    model_path: str
    """Path of the folder on the server's host or, with `ServerArgs.allow_hub_updates`, a hub id."""
    load_format: str | None = None
    """Null, "auto" or "safetensors"."""
    flush_cache: bool = True
    """No effect; see `UpdateWeightsFromTensorReq`."""
    abort_all_requests: bool = False
    """Shorthand for mode="abort"."""
    mode: UpdateMode = "wait"
    """Treatment of running requests; see `UpdateWeightsFromTensorReq`."""
    weight_version: VersionLabel | None = None
    """Label of the new version; default: the next integer."""
    transaction_id: TransactionId | None = None
    """The transaction (`BeginWeightUpdateReq`) that this update belongs to."""
    keep_pause: bool = False
    """After a successful update, pause generation until `ContinueGenerationReq`. False: leave the pause as it was."""
    allow_nonfinite: bool = False
    """Serve weights that contain NaN or infinity. Otherwise such an update fails (400) and the weights are torn."""


class UpdateWeightVersionReq(msgspec.Struct, tag=True, kw_only=True):
    """Change the version label of the served weights. The weights stay the same."""

    route: ClassVar[str] = "/update_weight_version"
    id: int = 0
    new_version: VersionLabel
    """The new label."""
    abort_all_requests: bool = True
    """Abort all requests before the change, unless a transaction is open."""


class GetWeightsByNameReq(msgspec.Struct, tag=True, kw_only=True):
    """Return the first rows of a parameter as nested lists of float32 values."""

    route: ClassVar[str] = "/get_weights_by_name"
    id: int = 0
    name: str
    """Hugging Face name of the parameter."""
    truncate_size: int = 100
    """Number of rows."""


class WeightsCheckerReq(msgspec.Struct, tag=True, kw_only=True):
    """Check the served weights."""

    route: ClassVar[str] = "/weights_checker"
    id: int = 0
    action: str = "checksum"
    """"checksum" returns a digest for each rank and parameter. "snapshot" stores the digests, and "compare" compares
    the weights with the snapshot. "reset_tensors" overwrites the weights with noise: they are torn until a full
    update."""
    allow_quant_error: bool = False
    """Must be false; weights are not quantized. The name is SGLang's."""
    skip_tensor_list: list[str] | None = None
    """Leave out each parameter whose name contains one of these strings."""
    selector: str = "all"
    """Must be "all" or "target"; there is no draft model. The name is SGLang's."""


class ReleaseMemoryOccupationReq(msgspec.Struct, tag=True, kw_only=True):
    """Release memory of the server. Refused while requests run."""

    route: ClassVar[str] = "/release_memory_occupation"
    id: int = 0
    tags: list[str] | None = None
    """Any of "kv_cache", "weights" and "cuda_graph"; null for all."""
    cpu_backup: bool | None = None
    """Keep the contents of the weights in host memory; null: if the server has `enable_weights_cpu_backup`."""


class ResumeMemoryOccupationReq(msgspec.Struct, tag=True, kw_only=True):
    """Allocate released memory again.

    Resumed weights have no contents, and generation answers 503 until a full update. With `enable_weights_cpu_backup`
    they have their old contents.
    """

    route: ClassVar[str] = "/resume_memory_occupation"
    id: int = 0
    tags: list[str] | None = None
    """Any of "kv_cache", "weights" and "cuda_graph"; null for all."""


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


UpdateReq = UpdateWeightsFromTensorReq | UpdateWeightsFromDiskReq | UpdateWeightsFromDistributedReq
"""Requests for new weights."""

StagedReq = UpdateReq | RegisterWeightsReq | InitWeightsUpdateGroupReq
"""Requests that need preparation, such as opening memory. The preparation runs in threads, outside the scheduler's
loop."""

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
"""Requests that the `WeightUpdater` of every tensor-parallel rank carries out, in the same order."""

ENDING_REQS = (EndWeightUpdateReq, UnregisterWeightsReq, DestroyWeightsUpdateGroupReq)
"""Requests that are carried out even if the caller no longer waits. They do not read the caller's memory. Without them,
a transaction would stop generation until its lease ends, or memory would stay mapped."""

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


SchedulerInput = (
    GrammarTokenizer | TokenizedGenerateReq | AbortReq | FinishReq | FinishSessionReq | WithdrawReq | ControlReq
)
SchedulerOutput = BatchTokenIDOut | ControlReply
