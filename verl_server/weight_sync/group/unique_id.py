"""Join an NCCL group by vLLM's recipe: the trainer puts NCCL's unique id into its store as a pickle.

`process_group` calls this for a group with `rendezvous="unique_id"`. The pickle is parsed as data. This process puts
the id into a store of its own, where torch's NCCL group finds it. So both recipes share streams, time limits and
aborts. After the join, vLLM's ranks all-reduce one number (`NcclMember.meet`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from verl_server.errors import BadRequestError
from verl_server.weight_sync.group.group_connection import nccl_group
from verl_server.weight_sync.pickle_reader import Function, Globals, read_pickle

_PUBLISHED_KEY = "broadcast_from/0/0"
"""Store key of the first object that rank 0 of vLLM's StatelessProcessGroup broadcasts."""
_TORCH_KEY = "0"
"""Store key under which torch's ProcessGroupNCCL looks up the unique id of its first communicator."""
_ID_BYTES = 128
_MOST_PICKLE_BYTES = 4096


def connect_by_unique_id(store: Store, rank: int, world_size: int, device: torch.device) -> dist.ProcessGroup:
    """Wait for the trainer's unique id in `store`, and return the NCCL group of that id.

    The ranks connect in the first collective. Raise RuntimeError if the id does not arrive in time,
    or is malformed.
    """
    try:
        unique_id = read_unique_id(store.get(_PUBLISHED_KEY))
    except BadRequestError as error:
        raise RuntimeError(str(error)) from None
    local = HashStore()
    local.set(_TORCH_KEY, unique_id)  # type: ignore[arg-type]  # the stub knows text only
    return nccl_group(local, rank, world_size, device)


def read_unique_id(data: bytes) -> bytes:
    """Return the 128 bytes of the `ncclUniqueId` that `data` pickles. Raise BadRequestError for anything else."""
    if len(data) > _MOST_PICKLE_BYTES:
        raise BadRequestError(f"The pickle of NCCL's unique id has {len(data)} bytes, more than {_MOST_PICKLE_BYTES}.")
    value = read_pickle(data, _GLOBALS)
    if not isinstance(value, bytes) or len(value) != _ID_BYTES:
        raise BadRequestError(f"The trainer's store does not hold NCCL's unique id of {_ID_BYTES} bytes.")
    return value


def _structure(cls: Any, state: Any) -> bytes:
    """Return the bytes of a pickled ncclUniqueId, without the call of `_ctypes._unpickle`."""
    if cls != "ncclUniqueId" or not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[1], bytes):
        raise ValueError("a structure that is not an ncclUniqueId")
    return state[1]


_GLOBALS: Globals = {
    ("_ctypes", "_unpickle"): Function(_structure),
    ("vllm.distributed.device_communicators.pynccl_wrapper", "ncclUniqueId"): "ncclUniqueId",
}
"""The globals that the pickle may contain."""
