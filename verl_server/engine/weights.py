"""`EngineWeights`: the methods of `EngineBase` that update, read, release and version weights.

Method and argument names are SGLang's. Trainers call these methods; `VerlEngine` also calls the `send_...` methods. An
update that the server refuses raises WeightUpdateError and does not change the served weights.
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
from verl_server.lora import NoAdapters
from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
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
from verl_server.weight_version import AnyVersion, label_of

if TYPE_CHECKING:
    import torch

    from verl_server.engine.push import Push, WeightPusher
    from verl_server.weight_sync.handles import LocalSerializedTensor
    from verl_server.weight_sync.trainer.sender import Mapping, Origin
    from verl_server.weight_sync.trainer.shards import TensorShard

_UNKNOWN_REGISTRATION, _CONFLICT = 404, 409
U = TypeVar("U", UpdateWeightsFromTensorReq, UpdateWeightsFromDiskReq, UpdateWeightsFromDistributedReq)


class EngineWeights(NoAdapters, abc.ABC):
    """Weight methods of an engine. Methods may be called from any thread; pushes of several threads run in turn."""

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
        weight_version: AnyVersion | None = None,
        mapping: Mapping | None = None,
        **options: Unpack[PushOptions],
    ) -> tuple[bool, str]:
        """Copy tensors, named as in Hugging Face checkpoints, into the served weights. Return (True, message).

        The request describes the memory of the tensors, and the server reads this memory. Do not write to the tensors
        before the call returns. From the second push of the same tensors on, the server keeps the memory open, and this
        process keeps references to it. So call `unregister_weights` before you free or offload CUDA memory.
        `mapping(name, tensor)` returns the tensors or `TensorShard`s, under the server's names, for one of
        `named_tensors`. Every parameter must be among the tensors, unless `partial=True`, a transaction is open, or the
        tensors are `LocalSerializedTensor`s.
        """
        return self._push_named(named_tensors, mapping, push_request(load_format, flush_cache, weight_version, options))

    def _push_named(
        self, named_tensors: Iterable[tuple[str, Any]], mapping: Mapping | None, req: UpdateWeightsFromTensorReq
    ) -> tuple[bool, str]:
        result: tuple[bool, str] = self._weight_pusher().update(
            named_tensors, mapping, lambda push: self.send_update(push, req)
        )
        return result

    def register_weights(self, weights: Origin, mapping: Mapping | None = None, *, strict_dtype: bool = False) -> None:
        """Make the server open this memory and plan the copies now, so that `push_weights` only copies.

        `weights` is one of the following. The engine keeps a reference to it until `unregister_weights`.

        - A module. Each push reads its current parameters. An FSDP2 module is resharded first.
        - A function. Each push calls it for (name, tensor) pairs.
        - (name, tensor) pairs. Each push copies these tensors, even if the model has other tensors by then.
        """
        self._weight_pusher().register(weights, mapping, lambda push: self.send_registration(push, strict_dtype))

    def push_weights(
        self,
        version: AnyVersion | None = None,
        *,
        flush_cache: bool = True,
        **options: Unpack[PushOptions],
    ) -> tuple[bool, str]:
        """Copy the current values of the registered weights into the served weights.

        Storage that has moved since the registration is registered again. `version` is the label of the new weights;
        by default the server makes one. The weights must contain every parameter, unless `partial=True`.
        """
        req = push_request(None, flush_cache, version, options)
        result: tuple[bool, str] = self._weight_pusher().push(lambda push: self.send_update(push, req))
        return result

    def unregister_weights(self) -> None:
        """Make the server close the memory of this process. After this call the memory may be freed or offloaded."""
        if self._pusher is not None:
            self._pusher.unregister(self.send_unregistration)

    # -- from disk or a process group ----------------------------------------------------------------------------

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        weight_version: AnyVersion | None = None,
        **options: Unpack[UpdateOptions],
    ) -> tuple[bool, str]:
        """Load a folder of safetensors files into the served weights. `model_path` is a path on the server's host."""
        check_names(options, UpdateOptions, "update_weights_from_disk")
        req = UpdateWeightsFromDiskReq(
            model_path=str(model_path),
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=label_of(weight_version),
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
        """Make the server join a process group as ranks `rank_offset`, `rank_offset + 1`, ...; the trainer is rank 0.

        The call blocks until all ranks have joined, so the trainer joins in another thread.
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
        """Make the server leave a process group that it joined in `init_weights_update_group`."""
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
        weight_version: AnyVersion | None = None,
        **options: Unpack[TensorUpdateOptions],
    ) -> tuple[bool, str]:
        """Make the server receive tensors that rank 0 of the group broadcasts in the order of `names`.

        `dtypes` are torch dtypes or their names. The call blocks until the weights are served, so rank 0 broadcasts in
        another thread. Parameters may be missing, unless `partial=False`. The returned message names the missing
        parameters.
        """
        check_names(options, TensorUpdateOptions, "update_weights_from_distributed")
        req = UpdateWeightsFromDistributedReq(
            names=list(names),
            dtypes=[str(dtype).removeprefix("torch.") for dtype in dtypes],
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            load_format=load_format,
            flush_cache=flush_cache,
            weight_version=label_of(weight_version),
            **options,
        )
        return self._update(self._in_transaction(req))

    # -- several calls, one version ------------------------------------------------------------------------------

    def begin_weight_update(
        self,
        transaction_id: str | None = None,
        *,
        lease_seconds: float | None = None,
        full: bool | None = None,
        mode: UpdateMode = "wait",
    ) -> str:
        """Open a transaction and return its id: `transaction_id`, by default a random one.

        `mode` is the treatment of running requests; see `BeginWeightUpdateReq`.

        All update calls of this engine belong to the transaction until `end_weight_update`. The server runs no
        generation step during the transaction. `end_weight_update` raises an error while a parameter is missing, unless
        `full` is False. After `lease_seconds` (default: `ServerArgs.weight_update_lease`) without a call, the server
        abandons the transaction. The next call then raises UpdateConflictError.
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
        weight_version: AnyVersion | None = None,
        flush_cache: bool = True,
        discard: bool = False,
        partial: bool = False,
    ) -> tuple[bool, str]:
        """Close the transaction: serve its updates as one new version or, with `discard`, abandon the transaction.

        If parameters are missing, the call raises WeightUpdateError and the transaction stays open: push the missing
        parameters and call this method again, or discard the transaction. With `partial`, missing parameters keep their
        values, and the message names them.
        """
        req = EndWeightUpdateReq(
            transaction_id=transaction_id or self._transaction,
            weight_version=label_of(weight_version),
            flush_cache=flush_cache,
            discard=discard,
            partial=partial,
        )
        closed, self._transaction = self._transaction, None
        try:
            return self._update(req)
        except VerlServerError as error:
            if error.status_code == 400:  # parameters are missing: only then is the transaction still open
                self._transaction = closed
            raise

    # -- versions, inspection, memory ----------------------------------------------------------------------------

    def update_weight_version(self, new_version: AnyVersion, abort_all_requests: bool = True) -> tuple[bool, str]:
        """Change the version label of the served weights."""
        label = label_of(new_version)
        if not label:
            raise BadRequestError("update_weight_version needs a label: it does not change the weights.")
        return self._update(UpdateWeightVersionReq(new_version=label, abort_all_requests=abort_all_requests))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Return the first `truncate_size` rows of a parameter as nested lists of float32 values."""
        rows: list[Any] = self._ask(GetWeightsByNameReq(name=name, truncate_size=truncate_size))
        return rows

    def weights_checker(self, action: str = "checksum", skip_tensor_list: list[str] | None = None) -> dict[str, Any]:
        """Run a check of the served weights. "checksum" returns a digest for each rank and parameter.

        Parameters whose name contains one of `skip_tensor_list` are left out.
        """
        payload = self._ask(WeightsCheckerReq(action=action, skip_tensor_list=skip_tensor_list))
        return payload if isinstance(payload, dict) else {}

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Release memory of the server. Raise an error while requests run.

        `tags` may have "kv_cache", "weights" and "cuda_graph". None means all of them.
        """
        self._ask(ReleaseMemoryOccupationReq(tags=tags))
        if self._pusher is not None:
            self._pusher.released(tags)

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Allocate released memory again. Resumed weights have no contents: push weights before you generate.

        `tags` are those of `release_memory_occupation`.
        """
        self._ask(ResumeMemoryOccupationReq(tags=tags))

    # -- requests of a push; `VerlEngine` also calls them --------------------------------------------------------

    def send_update(self, push: Push, req: UpdateWeightsFromTensorReq) -> tuple[bool, str]:
        """Send `req` with the source of `push`: the registration's id if the server knows the id, else the description.

        Return (True, message). Raise WeightUpdateError if the server refuses the update.
        """
        req = self._in_transaction(req)
        if push.describe is None:
            return self._update(msgspec.structs.replace(req, named_tensors=push.handles))
        req = msgspec.structs.replace(req, forget=push.forget)
        if push.by_id:
            by_id = msgspec.structs.replace(req, registration=push.id)
            reply = self._control(by_id)
            if reply.success or reply.status_code != _UNKNOWN_REGISTRATION:
                return self._updated(by_id, reply)
        return self._update(msgspec.structs.replace(req, description=push.describe(), keep=push.keep))

    def send_registration(self, push: Push, strict_dtype: bool) -> None:
        """Send the description of `push` for registration. Raise BadRequestError if the memory cannot be registered."""
        if push.describe is None:
            raise BadRequestError(
                "register_weights accepts tensors only; a handle (LocalSerializedTensor) is for a single update."
            )
        if not push.keep:
            raise BadRequestError(
                "This CUDA memory cannot be registered, because the driver does not report its allocations. Use "
                "update_weights_from_tensor."
            )
        req = RegisterWeightsReq(description=push.describe(), forget=push.forget, strict_dtype=strict_dtype)
        self._update(req)

    def send_unregistration(self, registrations: list[str]) -> None:
        self._ask(UnregisterWeightsReq(registrations=registrations))

    # -- shared --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _control(self, req: ControlReq) -> ControlReply:
        """Send a control request and return the reply. A refusal by the scheduler is a reply with `success=False`.

        The wait has a bound. Raise an error if the engine is dead, unreachable or silent.
        """

    def _in_transaction(self, req: U) -> U:
        """Return `req` with the id of this engine's open transaction, unless `req` already names a transaction."""
        return msgspec.structs.replace(req, transaction_id=req.transaction_id or self._transaction)

    def _weight_pusher(self) -> WeightPusher:
        """Return the pusher. The first push creates it, so that a client that only generates does not import torch."""
        from verl_server.engine.push import OneRank, WeightPusher

        with self._pusher_lock:
            if self._pusher is None:
                self._pusher = WeightPusher(OneRank())
            return self._pusher

    def _end_pushes(self) -> list[str]:
        """Release all memory that was pushed. Return the ids of the registrations that the server may still hold."""
        return self._pusher.end() if self._pusher is not None else []

    def _ask(self, req: ControlReq, refused: type[VerlServerError] = BadRequestError) -> Any:
        """Send a control request and return the reply's payload. Raise an error of type `refused` for a refusal."""
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
                " This engine has left the transaction: until the next begin_weight_update, each update call makes a "
                "version of its own."
            )
        raise error_for_status(reply.status_code, message, WeightUpdateError)

    def _forget_transaction(self, transaction_id: str | None) -> bool:
        """Forget this engine's transaction if it has this id. Return True if it had."""
        if transaction_id is None or transaction_id != self._transaction:
            return False
        self._transaction = None
        return True


def push_request(
    load_format: str | None, flush_cache: bool, version: AnyVersion | None, options: PushOptions
) -> UpdateWeightsFromTensorReq:
    """Return an update request without a source (`send_update` adds it). Raise BadRequestError for unknown options."""
    check_names(options, PushOptions, "an update")
    return UpdateWeightsFromTensorReq(
        load_format=load_format, flush_cache=flush_cache, weight_version=label_of(version), **options
    )
