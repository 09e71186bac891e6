"""The methods that `/collective_rpc` may call: a closed table of the names that RL clients use.

vLLM calls a method of its workers, by any name. Here, each name of the table is a control request or a call of the
weight transfer; any other name is refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import GetInternalStateReq
from verl_server.messages.weight_requests import UpdateWeightsFromDiskReq
from verl_server.server.dialects.vllm.sleep import Sleep
from verl_server.server.dialects.vllm.weight_transfer import CarryOut, WeightTransfer
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs


class CollectiveRpcReq(msgspec.Struct, kw_only=True):
    """Body of `POST /collective_rpc`."""

    method: str
    """Name of the method."""
    args: list[Any] = []
    """Positional arguments of the method."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the method."""
    timeout: float | None = None
    """No effect: each method has the bound of its control request."""


class Methods:
    """The methods, for one call. Each returns what every rank returns."""

    def __init__(
        self,
        manager: TokenizerManager,
        server_args: ServerArgs,
        transfer: WeightTransfer,
        sleep: Sleep,
        carry_out: CarryOut,
    ) -> None:
        self._manager, self._args = manager, server_args
        self._transfer, self._sleep, self._carry_out = transfer, sleep, carry_out

    async def check_health(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Wait for an answer of the scheduler."""
        _arguments(args, kwargs)
        await self._carry_out(GetInternalStateReq())

    async def device_uuid(self, args: list[Any], kwargs: dict[str, Any]) -> str:
        """Return the UUID of the GPU."""
        _arguments(args, kwargs)
        if self._args.tp_size > 1:
            raise BadRequestError("The UUIDs of the GPUs of several ranks are not known here; use /server_info.")
        uuid = self._manager.scheduler_info.get("device_uuid")
        return f"GPU-{uuid}" if uuid else "CPU"

    async def reload_weights(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Load the weights of the server's start, or of a folder on the server's host."""
        given = _arguments(args, kwargs, weights_path=self._args.model_path)
        await self._carry_out(UpdateWeightsFromDiskReq(model_path=_path(given["weights_path"]), mode="in_place"))

    async def update_weights_from_path(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See prime-rl's `/update_weights`."""
        path = _arguments(args, kwargs, weight_path=None)["weight_path"]
        await self._transfer.update_from_path(self._carry_out, None if path is None else _path(path))

    async def init_weight_update_group(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Join the NCCL group of a trainer that calls vLLM's example extension for RL."""
        given = _arguments(args, kwargs, master_address=None, master_port=None, rank_offset=1, world_size=None)
        if given["master_address"] is None:
            raise BadRequestError("init_weight_update_group needs master_address, master_port and world_size.")
        await self._transfer.init(self._carry_out, given)

    async def update_weight(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Receive one tensor that the trainer broadcasts."""
        given = _arguments(args, kwargs, name=None, dtype_name=None, shape=None)
        one = {"names": [given["name"]], "dtype_names": [given["dtype_name"]], "shapes": [given["shape"]]}
        await self._transfer.update(self._carry_out, one | {"packed": False})

    async def init_weight_transfer_engine(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `/init_weight_transfer_engine`."""
        await self._transfer.init(self._carry_out, _arguments(args, kwargs, init_info=None)["init_info"])

    async def start_weight_update(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `/start_weight_update`."""
        _arguments(args, kwargs, is_checkpoint_format=True)
        await self._transfer.start(self._carry_out)

    async def update_weights(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `/update_weights`."""
        await self._transfer.update(self._carry_out, _arguments(args, kwargs, update_info=None)["update_info"])

    async def finish_weight_update(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `/finish_weight_update`."""
        given = _arguments(args, kwargs, weight_version=None)["weight_version"]
        await self._transfer.finish(self._carry_out, None if given is None else str(given))

    async def wake_up(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """See `/wake_up`."""
        tags = _arguments(args, kwargs, tags=None)["tags"]
        await self._sleep.wake_up(self._carry_out, None if tags is None else [str(tag) for tag in tags])


def _path(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise BadRequestError(f"The path of the weights must be text, not {given!r:.100}.")
    return given


def _arguments(args: list[Any], kwargs: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return the arguments by name. Raise BadRequestError for more than `defaults` names, or for another name."""
    names = list(defaults)
    if len(args) > len(names) or (unknown := set(kwargs) - set(names[len(args) :])):
        wrong = f"{len(args)} arguments" if len(args) > len(names) else f"the arguments {sorted(unknown)}"
        raise BadRequestError(f"The method takes {', '.join(names) or 'no arguments'}, not {wrong}.")
    return defaults | dict(zip(names, args, strict=False)) | kwargs


METHODS: dict[str, Callable[..., Awaitable[Any]]] = {
    "check_health": Methods.check_health,
    "report_device_id": Methods.device_uuid,
    "skyrl_get_gpu_uuid": Methods.device_uuid,
    "reload_weights": Methods.reload_weights,
    "update_weights_from_path": Methods.update_weights_from_path,
    "init_weight_update_group": Methods.init_weight_update_group,
    "update_weight": Methods.update_weight,
    "init_weight_transfer_engine": Methods.init_weight_transfer_engine,
    "start_weight_update": Methods.start_weight_update,
    "skyrl_start_weight_update": Methods.start_weight_update,
    "update_weights": Methods.update_weights,
    "finish_weight_update": Methods.finish_weight_update,
    "skyrl_finish_weight_update": Methods.finish_weight_update,
    "wake_up": Methods.wake_up,
}
"""Every name that `/collective_rpc` accepts."""
