"""Control requests that concern the weights and memory of a server.

They are messages like those of `io_struct`: the TokenizerManager sends them to the scheduler, and the `WeightUpdater`
of every tensor-parallel rank carries them out. Each is also the JSON body of the HTTP route that `route` names.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from verl_server.weight_sync.handles import LocalSerializedTensor, PickledHandles, Shape, WeightsDescription
from verl_server.weight_version import MAX_LABEL_LENGTH

VersionLabel = Annotated[str, msgspec.Meta(max_length=MAX_LABEL_LENGTH)]
"""Label of a weight version, kept as it is: NUMBER@INCARNATION (`weight_version`), or another text, without order."""
TransactionId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
UpdateMode = Literal["wait", "in_place", "retract", "abort"]
"""Treatment of running requests in an update; see `UpdateWeightsFromTensorReq.mode`."""


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
    """Label of the new version; by default the server makes one. In a transaction, its end sets the label."""
    transaction_id: TransactionId | None = None
    """The transaction (`BeginWeightUpdateReq`) that this call belongs to."""
    strict_dtype: bool = False
    """Refuse to convert floating dtypes during the copy."""
    partial: bool | None = None
    """False: refuse (400) an update in which a parameter is missing. True: parameters that are missing keep their
    values, and the answer names them in `not_covered`. Null: False for `description` and `registration` without a
    `transaction_id`, True otherwise."""
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
    full: bool | None = None
    """True: refuse the end of the transaction while a parameter is missing. False: parameters that are missing keep
    their values, and the answer to the end names them in `not_covered`. Null: True for a transaction with an id, False
    for one without an id, as SGLang's and vLLM's clients open it."""
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
    """Label of the new version; by default the server makes one."""
    flush_cache: bool = True
    """No effect; see `UpdateWeightsFromTensorReq`."""
    discard: bool = False
    """Abandon the transaction: the old weights are served if nothing was written, else the weights are torn."""
    partial: bool = False
    """End the transaction although parameters are missing: they keep their values. Not possible after a write failed,
    because then the values are unknown."""


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
    """Label of the new version; by default the server makes one."""
    transaction_id: TransactionId | None = None
    """The transaction (`BeginWeightUpdateReq`) that this update belongs to."""
    selector: str = "all"
    """Must be "all" or "target"; there is no draft model. The name is SGLang's."""
    strict_dtype: bool = False
    """Refuse to convert floating dtypes during the copy."""
    partial: bool = True
    """False: refuse (400) an update in which a parameter is missing. True: parameters that are missing keep their
    values, and the answer names them in `not_covered`."""
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
    """Label of the new version; by default the server makes one."""
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
    new_version: Annotated[VersionLabel, msgspec.Meta(min_length=1)]
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
