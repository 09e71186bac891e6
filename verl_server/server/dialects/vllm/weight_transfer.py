"""vLLM's four calls of a weight update, carried out as a transaction: init, start, update, finish.

`control_routes` calls them for HTTP routes and for `/collective_rpc`. A trainer on other GPUs describes its NCCL group
in `init_info`, and broadcasts after each update was announced. A trainer on the server's GPUs sends an `init_info`
without an address, and IPC handles in each update. prime-rl's trainers use two calls: `/init_broadcaster`, and one
`/update_weights` for each update, whose tensors they describe in their broadcasts.
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
)
from verl_server.web.json_convert import convert_json
from verl_server.weight_sync.handles import PickledHandles, Shape

CarryOut = Callable[[ControlReq], Awaitable[ControlReply]]
"""Sends a control request to the scheduler. Returns a successful reply, or raises its error."""
S = TypeVar("S", bound=msgspec.Struct)

GROUP_NAME = "vllm_weight_transfer"
"""Name of the process group of the trainer of vLLM or prime-rl, of which a server has one."""
_BUFFER_BYTES = 1 << 30
"""vLLM's default for the size of a packed broadcast."""


class InitInfo(msgspec.Struct, kw_only=True):
    """vLLM's `init_info`. Without an address, updates bring IPC handles."""

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
    """Keeps the arguments of the trainer's first call, because later calls depend on them."""

    def __init__(self) -> None:
        self._init = InitInfo()
        self.has_broadcaster = False
        """True if the group is that of prime-rl's trainer, which describes the tensors in its broadcasts."""

    async def init(self, carry_out: CarryOut, raw: Any) -> None:
        """Join the trainer's NCCL group, in place of an earlier one. Without an address, only note the settings.

        A broadcaster is left in both cases.
        """
        info = _converted("init_info", raw, InitInfo)
        if info.nccl_unique_id_b64 is not None:
            raise BadRequestError(
                "init_info.nccl_unique_id_b64 is not supported: send master_address and master_port of the trainer's "
                "store."
            )
        if info.master_address is None:
            if self.has_broadcaster:
                await self.shutdown(carry_out)
        else:
            if info.master_port is None or info.world_size is None:
                raise BadRequestError("init_info with master_address needs master_port and world_size too.")
            await self.shutdown(carry_out)
            await carry_out(
                InitWeightsUpdateGroupReq(
                    master_address=info.master_address,
                    master_port=info.master_port,
                    rank_offset=info.rank_offset,
                    world_size=info.world_size,
                    group_name=GROUP_NAME,
                    rendezvous="unique_id",
                )
            )
        self._init = info

    async def init_broadcaster(self, carry_out: CarryOut, req: InitBroadcasterReq) -> None:
        """Join the NCCL group of prime-rl's trainer, in place of an earlier group."""
        await self.shutdown(carry_out)
        await carry_out(
            InitWeightsUpdateGroupReq(
                master_address=req.host,
                master_port=req.port,
                rank_offset=req.rank_offset + 1,
                world_size=req.inference_world_size + 1,
                group_name=GROUP_NAME,
                rendezvous="unique_id",
            )
        )
        self.has_broadcaster = True

    async def shutdown(self, carry_out: CarryOut) -> None:
        """Leave the trainer's group, if there is one."""
        try:
            await carry_out(DestroyWeightsUpdateGroupReq(group_name=GROUP_NAME))
        except VerlServerError as error:
            if error.status_code != 400:  # 400: there is no group
                raise
        self._init, self.has_broadcaster = InitInfo(), False

    async def start(self, carry_out: CarryOut) -> None:
        """Open a transaction. Running requests finish first, unless generation is paused."""
        await carry_out(BeginWeightUpdateReq())

    async def finish(self, carry_out: CarryOut, weight_version: str | None) -> dict[str, Any]:
        """Close the transaction: what was written becomes one new version. Return what the answer says of it."""
        return _coverage(await carry_out(EndWeightUpdateReq(weight_version=weight_version)))

    async def update_from_path(self, carry_out: CarryOut, path: str | None) -> None:
        """Carry out prime-rl's update: receive what the trainer broadcasts, or load the folder `path` without a group.

        With a group, the folder holds only the files by which the trainer and its orchestrator wait for each other.
        """
        if self.has_broadcaster:
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
            return
        if not path:
            raise BadRequestError("The path of the weights is missing. Without /init_broadcaster, a folder is loaded.")
        await carry_out(UpdateWeightsFromDiskReq(model_path=path, mode="in_place"))

    async def update(self, carry_out: CarryOut, raw: Any) -> dict[str, Any]:
        """Write tensors into the weights. Outside a transaction, the update is a version of its own.

        Return what the answer says of this version.
        """
        info = _converted("update_info", raw, UpdateInfo)
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
            return _coverage(await carry_out(UpdateWeightsFromTensorReq(ipc_handles=handles)))
        if self._init.master_address is None:
            raise BadRequestError(
                "Weight transfer is not initialized: call /init_weight_transfer_engine with the trainer's address, or "
                "send ipc_handles_pickled."
            )
        packed = info.packed if info.packed is not None else bool(self._init.packed)
        reply = await carry_out(
            UpdateWeightsFromDistributedReq(
                names=info.names,
                dtypes=info.dtype_names,
                shapes=info.shapes,
                group_name=GROUP_NAME,
                load_format="packed" if packed else None,
                packed_buffer_size_bytes=info.packed_buffer_size_bytes or self._init.packed_buffer_size_bytes,
            )
        )
        return _coverage(reply)


def _coverage(reply: ControlReply) -> dict[str, Any]:
    """{"not_covered"} of a reply with a new version: vLLM's trainers may push a part of the parameters."""
    payload = reply.payload if isinstance(reply.payload, dict) else {}
    return {"not_covered": payload["not_covered"]} if "not_covered" in payload else {}


def _converted(name: str, raw: Any, kind: type[S]) -> S:
    if not isinstance(raw, dict):
        raise BadRequestError(f"The body needs `{name}`, which must be an object, not {type(raw).__name__}.")
    try:
        return convert_json(raw, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{name}: " + str(error).replace("`$.", "`")) from None
