"""`EngineWeights`: the weights of an engine, as a trainer or a tool on its side sees them.

The half of `EngineBase` that changes, reads, releases and versions weights; SGLang's method and argument names. A
refused update raises WeightUpdateError and leaves the weights as they were.
"""

from __future__ import annotations

import abc
import threading
import uuid
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import msgspec

from verl_server.engine.options import PushOptions, TensorUpdateOptions, UpdateOptions, check_names
from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError, error_for_status
from verl_server.io_struct import (
    BeginWeightUpdateReq,
    ControlReply,
    ControlReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateMode,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)

if TYPE_CHECKING:
    import torch

    from verl_server.weight_sync.handles import LocalSerializedTensor
    from verl_server.weight_sync.trainer.pusher import Origin, Push, WeightPusher
    from verl_server.weight_sync.trainer.sender import Mapping
    from verl_server.weight_sync.trainer.shards import TensorShard

_UNKNOWN_REGISTRATION, _CONFLICT = 404, 409
U = TypeVar("U", UpdateWeightsFromTensorReq, UpdateWeightsFromDiskReq, UpdateWeightsFromDistributedReq)


class EngineWeights(abc.ABC):
    """Thread-safe: pushes of several threads come one after the other."""

    def __init__(self) -> None:
        self._pusher: WeightPusher | None = None
        self._pusher_lock = threading.Lock()
        self._transaction: str | None = None

    # -- from this process's memory ------------------------------------------------------------------------------

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorShard | LocalSerializedTensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str | None = None,
        mapping: Mapping | None = None,
        **options: Unpack[PushOptions],
    ) -> tuple[bool, str]:
        """Copy tensors (Hugging Face names) into the served weights; returns (True, message).

        Tensors of this process travel as descriptions of their memory, which must not be written before this
        returns. From the second push of the same tensors on, the server keeps their memory open, and this process
        holds it (CUDA memory that is to be freed or offloaded wants `unregister_weights` first).
        `mapping(name, tensor)` returns the tensors, or `TensorShard`s, that the server knows for each.
        """
        req = push_request(load_format, flush_cache, weight_version, options)
        result: tuple[bool, str] = self._weight_pusher().update(
            named_tensors, mapping, lambda push: self.send_update(push, req)
        )
        return result

    def register_weights(self, weights: Origin, mapping: Mapping | None = None, *, strict_dtype: bool = False) -> None:
        """Have the server open and plan this memory now, so that `push_weights` only copies.

        `weights` is a module, whose parameters are looked up at every push (FSDP2 modules are resharded first);
        a function that gives (name, tensor) pairs at every push; or pairs, which are pushed as *these* tensors,
        whatever the model refers to later. The engine refers to them until `unregister_weights`.
        """
        self._weight_pusher().register(weights, mapping, lambda push: self.send_registration(push, strict_dtype))

    def push_weights(
        self, version: str | int | None = None, *, flush_cache: bool = True, **options: Unpack[PushOptions]
    ) -> tuple[bool, str]:
        """Copy what was registered into the served weights, as it is now; storage that moved is registered again.

        `version` labels the new weights; default: the next integer.
        """
        req = push_request(None, flush_cache, version, options)
        result: tuple[bool, str] = self._weight_pusher().push(lambda push: self.send_update(push, req))
        return result

    def unregister_weights(self) -> None:
        """Have the server close the memory of this process. Afterwards it may be freed or offloaded."""
        if self._pusher is not None:
            self._pusher.unregister(self.send_unregistration)

    # -- from elsewhere ------------------------------------------------------------------------------------------

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        weight_version: str | None = None,
        **options: Unpack[UpdateOptions],
    ) -> tuple[bool, str]:
        """Load a folder of safetensors, as the server's host sees it, over the served weights."""
        check_names(options, UpdateOptions, "update_weights_from_disk")
        req = UpdateWeightsFromDiskReq(
            model_path=str(model_path),
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            **options,
        )
        return self._update(self._in_transaction(req))

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        """Have the server join a process group as ranks `rank_offset ...`; the trainer, rank 0, joins meanwhile.

        Blocks until all have joined: the trainer calls it from another thread than the one that joins.
        """
        req = InitWeightsUpdateGroupReq(
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
        return self._update(req)

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> tuple[bool, str]:
        return self._update(DestroyWeightsUpdateGroupReq(group_name=group_name))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: Sequence[torch.dtype | str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
        flush_cache: bool = True,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        **options: Unpack[TensorUpdateOptions],
    ) -> tuple[bool, str]:
        """Receive what rank 0 of the group broadcasts, in the order of `names`; `dtypes` are torch's, or their names.

        Blocks until the weights are served: rank 0 calls it from another thread than the one that broadcasts.
        """
        check_names(options, TensorUpdateOptions, "update_weights_from_distributed")
        req = UpdateWeightsFromDistributedReq(
            names=list(names),
            dtypes=[str(dtype).removeprefix("torch.") for dtype in dtypes],
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=weight_version,
            **options,
        )
        return self._update(self._in_transaction(req))

    # -- several calls, one version ------------------------------------------------------------------------------

    def begin_weight_update(
        self,
        transaction_id: str | None = None,
        *,
        lease_seconds: float | None = None,
        full: bool = False,
        mode: UpdateMode = "wait",
    ) -> str:
        """Open a transaction, which this engine's update calls belong to until `end_weight_update`; returns its id.

        The server takes no step meanwhile. `full`: its end is refused while a parameter is missing. After
        `lease_seconds` without a call the server gives the transaction up; the next call raises UpdateConflictError.
        """
        transaction_id = transaction_id or uuid.uuid4().hex
        req = BeginWeightUpdateReq(transaction_id=transaction_id, lease_seconds=lease_seconds, full=full, mode=mode)
        self._update(req)
        self._transaction = transaction_id
        return transaction_id

    def end_weight_update(
        self,
        transaction_id: str | None = None,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        discard: bool = False,
    ) -> tuple[bool, str]:
        """Serve what the transaction brought as one new version, or with `discard` give it up.

        An end that is refused because parameters are missing leaves the transaction open.
        """
        req = EndWeightUpdateReq(
            transaction_id=transaction_id or self._transaction,
            weight_version=weight_version,
            flush_cache=flush_cache,
            discard=discard,
        )
        ours, self._transaction = self._transaction, None
        try:
            return self._update(req)
        except VerlServerError as error:
            if error.status_code == 400:  # something is missing, it is still open; after anything else it is not ours
                self._transaction = ours
            raise

    # -- versions, inspection, memory ----------------------------------------------------------------------------

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> tuple[bool, str]:
        """Relabel the served weights."""
        return self._update(UpdateWeightVersionReq(new_version=new_version, abort_all_requests=abort_all_requests))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """First rows of a parameter as float32 nested lists."""
        rows: list[Any] = self._ask(GetWeightsByNameReq(name=name, truncate_size=truncate_size))
        return rows

    def weights_checker(self, action: str = "checksum") -> dict[str, Any]:
        """Digests of the served weights, per rank and parameter."""
        payload = self._ask(WeightsCheckerReq(action=action))
        return payload if isinstance(payload, dict) else {}

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Give memory back: "kv_cache", "weights", "cuda_graph", or None for all. Refused while requests run."""
        self._ask(ReleaseMemoryOccupationReq(tags=tags))
        if self._pusher is not None:
            self._pusher.released(tags)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take memory again. Resumed weights are not loaded: push them before generating."""
        self._ask(ResumeMemoryOccupationReq(tags=tags))

    # -- requests of a push, also for `VerlEngine` ---------------------------------------------------------------

    def send_update(self, push: Push, req: UpdateWeightsFromTensorReq) -> tuple[bool, str]:
        """Send `req` with the source of `push`: its id where the server knows it, else the description."""
        req, terms = self._in_transaction(req), push.terms
        if terms is None or push.describe is None:
            return self._update(msgspec.structs.replace(req, named_tensors=push.named_tensors))
        req = msgspec.structs.replace(req, forget=terms.forget)
        if terms.by_id:
            by_id = msgspec.structs.replace(req, registration=terms.id)
            reply = self._control(by_id)
            if reply.success or reply.status_code != _UNKNOWN_REGISTRATION:
                return self._updated(by_id, reply)
        return self._update(msgspec.structs.replace(req, description=push.describe(), keep=terms.keep))

    def send_registration(self, push: Push, strict_dtype: bool) -> None:
        if push.terms is None or push.describe is None:
            raise BadRequestError("register_weights takes tensors; handles (LocalSerializedTensor) are for one update.")
        if not push.terms.keep:
            raise BadRequestError(
                "This CUDA memory cannot be registered: the driver does not tell its allocations apart. Use "
                "update_weights_from_tensor."
            )
        req = RegisterWeightsReq(description=push.describe(), forget=push.terms.forget, strict_dtype=strict_dtype)
        self._update(req)

    def send_unregistration(self, registrations: list[str]) -> None:
        self._ask(UnregisterWeightsReq(registrations=registrations))

    # -- shared --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _control(self, req: ControlReq) -> ControlReply:
        """Bounded. Raises for a dead or unreachable engine; a refusal is `success=False`."""

    def _in_transaction(self, req: U) -> U:
        """`req` as a part of the transaction that this engine began, unless it names one."""
        return msgspec.structs.replace(req, transaction_id=req.transaction_id or self._transaction)

    def _weight_pusher(self) -> WeightPusher:
        """Made at the first push: a client that only generates needs no torch."""
        from verl_server.weight_sync.trainer.pusher import OneRank, WeightPusher

        with self._pusher_lock:
            if self._pusher is None:
                self._pusher = WeightPusher(OneRank())
            return self._pusher

    def _end_pushes(self) -> list[str]:
        """Hold no memory any more; returns the registrations that a server which lives on still has."""
        return self._pusher.end() if self._pusher is not None else []

    def _ask(self, req: ControlReq, refused: type[VerlServerError] = BadRequestError) -> Any:
        """The payload of a control call; a refusal raises."""
        reply = self._control(req)
        if not reply.success:
            raise error_for_status(reply.status_code, reply.message, refused)
        return reply.payload

    def _update(self, req: ControlReq) -> tuple[bool, str]:
        return self._updated(req, self._control(req))

    def _updated(self, req: ControlReq, reply: ControlReply) -> tuple[bool, str]:
        if reply.success:
            return True, reply.message
        message = reply.message
        if (
            reply.status_code == _CONFLICT
            and isinstance(req, UpdateReq)
            and self._forget_transaction(req.transaction_id)
        ):
            message += (
                " This engine has left the transaction: until begin_weight_update, each of its calls is an update of "
                "its own again."
            )
        raise error_for_status(reply.status_code, message, WeightUpdateError)

    def _forget_transaction(self, transaction_id: str | None) -> bool:
        """The server, which may have been started again, has no transaction under this id; whether it was ours."""
        if transaction_id is None or transaction_id != self._transaction:
            return False
        self._transaction = None
        return True


def push_request(
    load_format: str | None, flush_cache: bool, version: str | int | None, options: PushOptions
) -> UpdateWeightsFromTensorReq:
    """An update that lacks its source; raises BadRequestError for unknown options."""
    check_names(options, PushOptions, "an update")
    weight_version = None if version is None else str(version)
    return UpdateWeightsFromTensorReq(
        load_format=load_format, flush_cache=flush_cache, weight_version=weight_version, **options
    )
