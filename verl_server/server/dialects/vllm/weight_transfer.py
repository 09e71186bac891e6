"""vLLM's four calls of a weight update, carried out as a transaction: init, start, update, finish.

`control_routes` serves each as a route, and as a method of `/collective_rpc`. A trainer on other GPUs describes its
NCCL group in `init_info`, and broadcasts after each update was announced. A trainer on the server's GPUs sends an
`init_info` without an address, and IPC handles in each update. prime-rl's trainers use two calls: `/init_broadcaster`,
and one `/update_weights` for each update, whose tensors they describe in their broadcasts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    VersionLabel,
)
from verl_server.web.json_convert import read_struct
from verl_server.weight_sync.handles import PickledHandles, Shape
from verl_server.weight_version import label_of

CarryOut = Callable[[ControlReq], Awaitable[ControlReply]]
"""Sends a control request to the scheduler. Returns a successful reply, or raises its error."""
S = TypeVar("S", bound=msgspec.Struct)

GROUP_NAME = "vllm_weight_transfer"
"""Name of the process group of vLLM's or prime-rl's trainer. A server has at most one such group."""
_BUFFER_BYTES = 1 << 30
"""vLLM's default for the size of a packed broadcast."""


class InitInfo(msgspec.Struct, kw_only=True):
    """vLLM's `init_info`. If it has no address, the updates contain IPC handles."""

    master_address: str | None = None
    master_port: int | None = None
    rank_offset: int = 1
    world_size: int | None = None
    nccl_unique_id_b64: str | None = None
    packed: bool | None = None
    packed_buffer_size_bytes: int = _BUFFER_BYTES


class UpdateInfo(msgspec.Struct, kw_only=True):
    """vLLM's `update_info`. With IPC handles, the tensors are read; otherwise they are received through NCCL."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[Shape]
    packed: bool | None = None
    packed_buffer_size_bytes: int | None = None
    ipc_handles_pickled: str | None = None
    ipc_handles: Any = None
    tensor_sizes: list[int] | None = None


TRANSFER_FIELDS = {"init_info": InitInfo.__struct_fields__, "update_info": UpdateInfo.__struct_fields__}
"""Object in a body -> the fields that it may have."""


class InitWeightTransferReq(msgspec.Struct, kw_only=True):
    """Body of `POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any]
    """NCCL: `master_address`, `master_port`, `rank_offset`, `world_size`, `packed`, `packed_buffer_size_bytes`. IPC: an
    empty object."""


class VllmUpdateWeightsReq(msgspec.Struct, kw_only=True):
    """Body of `POST /update_weights`: vLLM's `update_info`, or prime-rl's `weight_dir`."""

    update_info: dict[str, Any] | None = None
    """`names`, `dtype_names` and `shapes` of the tensors that the trainer broadcasts; or, with `ipc_handles_pickled`
    (and `tensor_sizes` for one buffer), of tensors in its memory."""
    weight_dir: str | None = None
    """Folder of safetensors files on the server's host. Not read after `/init_broadcaster`."""


class FinishWeightUpdateReq(msgspec.Struct, kw_only=True):
    """Body of `POST /finish_weight_update`."""

    weight_version: VersionLabel | None = None
    """Label of the new version; by default the server makes one."""


class InitBroadcasterReq(msgspec.Struct, kw_only=True):
    """Body of `POST /init_broadcaster`."""

    host: str
    """Host of the trainer's store."""
    port: int
    """Port of the trainer's store."""
    rank_offset: int
    """Number of inference ranks of the servers before this one. The trainer is rank 0 of the group, so this server's
    ranks begin at `rank_offset` + 1."""
    inference_world_size: int
    """Number of inference ranks of all servers together."""


class WeightTransfer:
    """The calls, whose docstrings describe the routes.

    The object keeps the arguments of the trainer's first call, because later calls depend on them.
    """

    def __init__(self) -> None:
        self._init = InitInfo()
        self._has_broadcaster = False
        """True if the group belongs to prime-rl's trainer, which describes the tensors in its broadcasts."""

    async def init(self, carry_out: CarryOut, init_info: Any = None) -> dict[str, Any]:
        """Return {"message"} when the trainer and all ranks of the server have joined the group."""
        info = _converted("init_info", init_info, InitInfo)
        if info.nccl_unique_id_b64 is not None:
            raise BadRequestError(
                "init_info.nccl_unique_id_b64 is not supported: send master_address and master_port of the trainer's "
                "store."
            )
        if info.master_address is None:  # no group, but a broadcaster is left
            if self._has_broadcaster:
                await self.shutdown(carry_out)
        elif info.master_port is None or info.world_size is None:
            raise BadRequestError("init_info with master_address needs master_port and world_size too.")
        else:
            await self._join(carry_out, info.master_address, info.master_port, info.rank_offset, info.world_size)
        self._init = info
        return {"message": "Weight transfer initialized"}

    async def init_group(
        self,
        carry_out: CarryOut,
        master_address: Any = None,
        master_port: Any = None,
        rank_offset: Any = 1,
        world_size: Any = None,
    ) -> None:
        """Join the NCCL group of a trainer that calls vLLM's example extension for RL."""
        if master_address is None:
            raise BadRequestError("init_weight_update_group needs master_address, master_port and world_size.")
        group = {"master_address": master_address, "master_port": master_port}
        await self.init(carry_out, group | {"rank_offset": rank_offset, "world_size": world_size})

    async def init_broadcaster(
        self, carry_out: CarryOut, host: str, port: int, rank_offset: int, inference_world_size: int
    ) -> dict[str, Any]:
        """Return {"status": "ok"} when the trainer and all inference ranks have joined the group.

        Every later `/update_weights` receives one broadcast of all weights from the trainer, until
        `/shutdown_weight_transfer_engine`.
        """
        await self._join(carry_out, host, port, rank_offset + 1, inference_world_size + 1)
        self._has_broadcaster = True
        return {"status": "ok"}

    async def shutdown(self, carry_out: CarryOut) -> dict[str, Any]:
        """Return {"message"}."""
        try:
            await carry_out(DestroyWeightsUpdateGroupReq(group_name=GROUP_NAME))
        except VerlServerError as error:
            if error.status_code != 400:  # 400: there is no group
                raise
        self._init, self._has_broadcaster = InitInfo(), False
        return {"message": "Weight transfer shut down"}

    async def _join(self, carry_out: CarryOut, address: str, port: int, rank_offset: int, world_size: int) -> None:
        """Join a group. Leave an earlier group first."""
        await self.shutdown(carry_out)
        await carry_out(
            InitWeightsUpdateGroupReq(
                master_address=address,
                master_port=port,
                rank_offset=rank_offset,
                world_size=world_size,
                group_name=GROUP_NAME,
                rendezvous="unique_id",
            )
        )

    async def start(self, carry_out: CarryOut, is_checkpoint_format: Any = True) -> dict[str, Any]:
        """Begin a weight update, after the running requests have finished. Return {"message"}.

        If generation is paused, the update begins at once. The server runs no step until `/finish_weight_update`. The
        transaction ends if the server receives no call of the transaction for `weight_update_lease` seconds.
        """
        await carry_out(BeginWeightUpdateReq())
        return {"message": "Weight update started"}

    async def start_draft(self, carry_out: CarryOut) -> dict[str, Any]:
        """Return 400, because there is no draft model."""
        raise BadRequestError("There is no draft model. Use /start_weight_update.")

    async def finish(self, carry_out: CarryOut, weight_version: Any = None) -> dict[str, Any]:
        """Return {"message", "not_covered"}.

        The tensors that were written since `/start_weight_update` are one new version.

        `not_covered` has the number and the first names of the parameters that were not written.
        """
        reply = await carry_out(EndWeightUpdateReq(weight_version=label_of(weight_version)))
        return {"message": "Weight update finished"} | _coverage(reply)

    async def update(
        self, carry_out: CarryOut, update_info: dict[str, Any] | None, weight_dir: str | None
    ) -> dict[str, Any]:
        """Return {"message"} for `update_info`, {"status": "ok"} for `weight_dir`. After `/init_broadcaster`, the
        weights are received from the trainer, and `weight_dir` is not read. With `update_info` outside
        `/start_weight_update` there is "not_covered", too; see `/finish_weight_update`."""
        of_prime_rl = weight_dir is not None or self._has_broadcaster
        if (update_info is not None) == of_prime_rl:
            raise BadRequestError("The body needs either `update_info` (vLLM) or `weight_dir` (prime-rl).")
        if of_prime_rl:
            await self._update_all(carry_out, weight_dir)
            return {"status": "ok"}
        return await self.update_tensors(carry_out, update_info)

    async def update_from_path(self, carry_out: CarryOut, weight_path: Any = None) -> None:
        """Carry out prime-rl's update, as `/update_weights` does with `weight_dir`."""
        await self._update_all(carry_out, None if weight_path is None else path_text(weight_path))

    async def _update_all(self, carry_out: CarryOut, path: str | None) -> None:
        """Receive what the trainer broadcasts, or load the folder `path` without a group.

        With a group, the folder has no weights, but only files with which the trainer and its orchestrator synchronize.
        """
        if self._has_broadcaster:
            await carry_out(
                UpdateWeightsFromDistributedReq(
                    names=[],
                    dtypes=[],
                    shapes=[],
                    group_name=GROUP_NAME,
                    load_format="state_dicts",
                    mode="in_place",
                    partial=False,
                )
            )
        elif not path:
            raise BadRequestError("The path of the weights is missing. Without /init_broadcaster, a folder is loaded.")
        else:
            await carry_out(UpdateWeightsFromDiskReq(model_path=path, mode="in_place"))

    async def update_tensors(self, carry_out: CarryOut, update_info: Any = None) -> dict[str, Any]:
        """Write the tensors of `update_info` (see `UpdateInfo`) into the weights. Return {"message", "not_covered"}.

        Outside a transaction, the update is one new version. "not_covered" is returned in this case only. Raise
        BadRequestError for a wrong `update_info`, or if the weight transfer is not initialized.
        """
        info = _converted("update_info", update_info, UpdateInfo)
        req: UpdateWeightsFromTensorReq | UpdateWeightsFromDistributedReq
        if info.ipc_handles is not None:
            raise BadRequestError("update_info.ipc_handles is not JSON: send ipc_handles_pickled.")
        if info.ipc_handles_pickled is not None:
            handles = PickledHandles(
                names=info.names,
                dtypes=info.dtype_names,
                shapes=info.shapes,
                handles=info.ipc_handles_pickled,
                sizes=info.tensor_sizes,
            )
            req = UpdateWeightsFromTensorReq(ipc_handles=handles)
        elif self._init.master_address is None:
            raise BadRequestError(
                "Weight transfer is not initialized: call /init_weight_transfer_engine with the trainer's address, or "
                "send ipc_handles_pickled."
            )
        else:
            packed = info.packed if info.packed is not None else bool(self._init.packed)
            req = UpdateWeightsFromDistributedReq(
                names=info.names,
                dtypes=info.dtype_names,
                shapes=info.shapes,
                group_name=GROUP_NAME,
                load_format="packed" if packed else None,
                packed_buffer_size_bytes=info.packed_buffer_size_bytes or self._init.packed_buffer_size_bytes,
            )
        return {"message": "Weights updated"} | _coverage(await carry_out(req))

    async def update_one(
        self, carry_out: CarryOut, name: Any = None, dtype_name: Any = None, shape: Any = None
    ) -> None:
        """Receive one tensor that the trainer broadcasts."""
        one = {"names": [name], "dtype_names": [dtype_name], "shapes": [shape]}
        await self.update_tensors(carry_out, one | {"packed": False})


def path_text(given: Any) -> str:
    """Return the caller's path of weights. Raise BadRequestError if the value is no path."""
    if not isinstance(given, str) or not given:
        raise BadRequestError(f"The path of the weights must be text, not {given!r:.100}.")
    return given


def _coverage(reply: ControlReply) -> dict[str, Any]:
    """Return {"not_covered"} if the reply has it, else {}. vLLM's trainers may push only a part of the parameters."""
    payload = reply.payload if isinstance(reply.payload, dict) else {}
    return {"not_covered": payload["not_covered"]} if "not_covered" in payload else {}


def _converted(name: str, raw: Any, kind: type[S]) -> S:
    if not isinstance(raw, dict):
        raise BadRequestError(f"The body needs `{name}`, which must be an object, not {type(raw).__name__}.")
    return read_struct(raw, kind, f"{name}: ")
