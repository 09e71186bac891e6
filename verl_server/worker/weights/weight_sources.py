"""`WeightSources`: prepares updates of every kind until they can be written.

Each rank has one, which is thread-safe. The stager's threads call `prepare`. `prepare` opens the trainer's memory,
reads a checkpoint, joins a process group, or receives from a group. It checks everything against the model, and writes
no weight. The loop executes the `Prepared` that `prepare` returns, and looks up registrations. On rank 0 the loop also
calls `check` to refuse requests with wrong fields.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from verl_server.errors import BadRequestError, UnknownRegistrationError, VerlServerError
from verl_server.files.model_folder import local_folder, refuse_adapter, resolve_model_folder
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    RegisterWeightsReq,
    StagedReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    WeightReq,
)
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import TensorHandle
from verl_server.weight_sync.receiver.disk import Checkpoint
from verl_server.weight_sync.receiver.plan import UpdatePlan
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver
from verl_server.weight_sync.sglang.payloads import give_back, parse_payload
from verl_server.weight_sync.vllm.ipc_handles import parse_ipc_handles
from verl_server.worker.device import device_uuid
from verl_server.worker.weights.prepared import Done, Prepared
from verl_server.worker.weights.updated_model import UpdatedModel
from verl_server.worker.weights.weight_groups import WeightGroups, check_lists


class WeightSources:
    def __init__(self, model: UpdatedModel, tp: TpGroup, server_args: ServerArgs) -> None:
        self._rank, self._size, self._device = tp.rank, tp.size, model.device
        self._receiver = WeightReceiver(
            model.weight_map, tp.rank, tp.size, model.device, fused=server_args.fused_weight_copy
        )
        self.registrations = self._receiver.registrations
        self._allow_hub, self._own_path = server_args.allow_hub_updates, server_args.model_path
        self.groups = WeightGroups(self._receiver, model, tp, server_args)

    # -- the loop ------------------------------------------------------------------------------------------------

    def check(self, req: WeightReq) -> None:
        """Raise BadRequestError if the fields of `req` are wrong. Rank 0 calls this on arrival. Nothing is opened.

        Raise UnknownRegistrationError if `req` names a registration that this rank does not know.
        """
        match req:
            case UpdateWeightsFromTensorReq():
                _check_source(req, self._size)
                if req.registration is not None:
                    self.registered(req)
            case UpdateWeightsFromDiskReq():
                if req.load_format not in (None, "auto", "safetensors"):
                    raise BadRequestError(
                        f"load_format={req.load_format!r} is not supported. Use 'auto' or 'safetensors'."
                    )
            case UpdateWeightsFromDistributedReq():
                _check_selector(req.selector)
                check_lists(req)
            case BeginWeightUpdateReq():
                _check_selector(req.selector)

    # -- the stager ----------------------------------------------------------------------------------------------

    def adopt_thread(self) -> None:
        """Set this rank's device, a new stream and no autograd for the calling thread, which will call `prepare`.

        A new thread would otherwise use device 0, where it would create a second context, and would record gradients.
        """
        torch.set_grad_enabled(False)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]

    def prepare(self, req: StagedReq) -> Prepared:
        """Do everything for `req` on this rank except the write.

        After an error, everything that was opened is closed.
        """
        match req:
            case UpdateWeightsFromTensorReq():
                return self._tensors(req)
            case UpdateWeightsFromDiskReq():
                return self._checkpoint(req)
            case UpdateWeightsFromDistributedReq():
                return self.groups.receive(req)
            case RegisterWeightsReq():
                self._receiver.register(req.description, strict_dtype=req.strict_dtype)
                return Done(lambda: self.registrations.forget([req.description.id]))
            case InitWeightsUpdateGroupReq():
                return self.groups.join(req)

    def refused(self, req: StagedReq, error: VerlServerError) -> None:
        """Clean up after a rank could not prepare `req`.

        After a fault (status 500 or more), no rank may use the process group of `req` any more.
        """
        if isinstance(req, UpdateWeightsFromDistributedReq) and error.status_code >= 500:
            self.groups.lost(req.group_name)

    def abandoned(self, req: StagedReq) -> None:
        """Clean up after `req`, which will not be prepared.

        Close the process group of `req`, and release the references to memory that SGLang's sender counts for it.
        """
        if isinstance(req, UpdateWeightsFromDistributedReq):
            self.groups.lost(req.group_name)  # the next receive would read the broadcasts of this update
        elif isinstance(req, UpdateWeightsFromTensorReq) and (req.serialized_named_tensors or req.ipc_handles):
            with contextlib.suppress(VerlServerError):
                give_back(handle.allocation for _, handle in self._parsed(req))

    def _tensors(self, req: UpdateWeightsFromTensorReq) -> UpdatePlan:
        strict, partial, checksums = req.strict_dtype, _may_be_partial(req), req.checksums
        if req.registration is not None:
            plan = self.registered(req)
            plan.verify(checksums or {})
            return plan
        if req.description is not None:
            return self._receiver.stage(
                req.description, strict_dtype=strict, partial=partial, checksums=checksums, keep=req.keep
            )
        named = req.named_tensors if req.named_tensors is not None else self._parsed(req)
        return self._receiver.stage_named(named, strict_dtype=strict, partial=partial, checksums=checksums)

    def _parsed(self, req: UpdateWeightsFromTensorReq) -> list[tuple[str, TensorHandle]]:
        """Return (name, handle) for the tensors in vLLM's pickle, or in this rank's entry of SGLang's pickles."""
        if req.ipc_handles is not None:
            return parse_ipc_handles(req.ipc_handles, device_uuid(self._device))
        payloads = req.serialized_named_tensors or []
        return parse_payload(payloads[self._rank if len(payloads) > 1 else 0], req.load_format, rank=self._rank)

    def registered(self, req: UpdateWeightsFromTensorReq) -> UpdatePlan:
        """Return the plan of the registration that `req` names.

        Raise UnknownRegistrationError if there is none, WeightUpdateError if it does not fit the options of `req`.
        """
        plan = self.registrations.get(req.registration or "")
        if plan is None:
            raise UnknownRegistrationError(
                f"No weights are registered under '{req.registration}'. The server drops a registration when it "
                "releases its weights, or when the owner of the memory ends. Send their description."
            )
        plan.check(strict_dtype=req.strict_dtype, partial=_may_be_partial(req))
        return plan

    def _checkpoint(self, req: UpdateWeightsFromDiskReq) -> UpdatePlan:
        with Checkpoint(self._folder(req.model_path)) as checkpoint:
            checkpoint.read(self._receiver.compared(checkpoint.tensors))
            plan = self._receiver.plan(checkpoint.tensors, strict_dtype=False, partial=False)
            checkpoint.read(plan.views())  # the slices of this rank
        return plan

    def _folder(self, model_path: str) -> Path:
        """Return the folder of `model_path`. A hub id, except the server's own, needs `allow_hub_updates`.

        Raise BadRequestError for a hub id without that permission: a caller must not choose what the server downloads.
        """
        if self._allow_hub or model_path == self._own_path:
            return resolve_model_folder(model_path)
        folder = local_folder(model_path)
        if folder is None:
            raise BadRequestError(
                f"model_path={model_path!r} is not a folder on the server's host. (The server downloads hub ids only "
                "if it was started with allow_hub_updates=True.)"
            )
        refuse_adapter(folder, model_path)
        return folder


def needs_staging(req: StagedReq) -> bool:
    """Return True unless `req` is a push by id without checksums, whose plan exists."""
    return not (isinstance(req, UpdateWeightsFromTensorReq) and req.registration is not None and not req.checksums)


def _may_be_partial(req: UpdateWeightsFromTensorReq) -> bool:
    """Return True if parameters may be missing from an update: its caller permits it, or the update is always a part.

    Two kinds of updates are always parts: the calls of a transaction, whose end checks all calls together, and handles
    of single tensors, which SGLang's and vLLM's trainers send one after the other. A description, in contrast, is of
    all tensors of a trainer.
    """
    if req.partial is not None:
        return req.partial
    is_described = req.description is not None or req.registration is not None
    return req.transaction_id is not None or not is_described


def _check_source(req: UpdateWeightsFromTensorReq, size: int) -> None:
    names = ("named_tensors", "description", "registration", "ipc_handles", "serialized_named_tensors")
    given = [name for name in names if getattr(req, name) is not None]
    if len(given) != 1:
        raise BadRequestError(
            f"update_weights_from_tensor takes exactly one of {', '.join(names)}; "
            f"it got {' and '.join(given) or 'none of them'}."
        )
    payloads = req.serialized_named_tensors
    if payloads is None and req.load_format not in (None, "auto"):
        raise BadRequestError(
            f"load_format={req.load_format!r} is supported only with serialized_named_tensors. Leave it unset."
        )
    if payloads is not None and len(payloads) not in (1, size):
        raise BadRequestError(
            f"serialized_named_tensors has {len(payloads)} entries, but this server has {size} tensor-parallel rank(s)."
        )
    if req.keep and req.description is None:
        raise BadRequestError("keep=True registers a `description`, but this request has none.")


def _check_selector(selector: str) -> None:
    if selector not in ("all", "target"):
        raise BadRequestError(f"selector={selector!r} is not supported: there is no draft model. Leave it unset.")
