"""The wire format of weights: descriptions of memory, never the bytes of weights.

`sender` creates the descriptions in a trainer process. They are sent over HTTP as JSON, and over the message socket as
msgpack. `receiver` opens the memory in each scheduler process. No description can run code, and none is pickled.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Range of every number on the wire; `open_memory` and `sources` check what the numbers mean."""
_MOST_DIMENSIONS = msgspec.Meta(max_length=16)
"""The most dimensions of a tensor. Without this bound, the product of a very long shape would take minutes to compute.
"""
Counts = Annotated[list[Count], _MOST_DIMENSIONS]
"""One number for each dimension of a tensor."""
Shape = Annotated[list[int], _MOST_DIMENSIONS]
"""Shape of a tensor as other frameworks send the shape. The code that uses the numbers checks them."""


class Allocation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One region of shareable memory, described once by its owner.

    `shm`: file descriptor `fd` of process `pid` (opened through /proc/PID/fd/FD, same host and user).
    `cuda`: a CUDA IPC handle of a caching-allocator segment on the GPU with UUID `device_uuid`.
    `shm_name`: a file in /dev/shm, as torch's `file_system` sharing strategy names it (old wire formats only).
    """

    id: str
    """Name of the region, unique over owners and time. The receiver caches the opened region under this name."""
    kind: Literal["shm", "cuda", "shm_name"]
    """Kind of the memory, which decides which of the other fields are used."""
    nbytes: Count
    """Size of the shared storage in bytes."""
    pid: Count = 0
    """Owner process."""
    fd: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)] = -1
    name: str = ""
    """shm_name: the file's name in /dev/shm, without a slash."""
    inode: Count = 0
    """st_ino of the memfd: pids and descriptors are reused, and have other meanings in other namespaces."""
    device_uuid: str = ""
    """cuda: UUID of the GPU that holds the segment."""
    handle: bytes = b""
    """cudaIpcMemHandle as torch exports it."""
    storage_offset_bytes: Count = 0
    """Start of the storage inside the exported segment."""
    ref_counter_handle: bytes = b""
    """cuda, from SGLang's pickles only: name of the shared-memory file with torch's reference count of the storage."""
    ref_counter_offset: Count = 0
    event_handle: bytes = b""
    """cuda, from SGLang's pickles only: IPC handle of the CUDA event that follows the last write of the owner."""
    event_sync_required: bool = False
    """cuda, from SGLang's pickles only: true if the reader must wait for that event."""


class Shard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A box of a full tensor, and the place of its elements in one owner's memory.

    The box starts at `offset` in the full tensor and has `shape`. Its elements are a strided view into
    `allocations[allocation]` of the description.
    """

    allocation: Count
    """Index into the description's `allocations`."""
    shape: Counts
    offset: Counts
    """Start of the box in the full tensor. A whole tensor has only zeros here, and its full `shape`."""
    stride: Counts
    """Strides in elements."""
    storage_offset: Count = 0
    """Elements from the start of the allocation's storage to the first element."""


class DescribedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One named tensor, whole or in shards that several processes own.

    Distinct boxes are disjoint and together cover the tensor. Equal boxes are copies (replicas of a data-parallel
    trainer), in the order of the trainer's ranks. Each reader reads the nearest copy.
    """

    name: str
    """Name of the parameter, as in the Hugging Face checkpoint."""
    dtype: str
    """torch's name of the dtype without the prefix, e.g. "bfloat16". All shards have this dtype."""
    shape: Counts
    """Shape of the full tensor."""
    shards: list[Shard]
    """All shards of the tensor, of all owners."""


class PickledHandles(msgspec.Struct, kw_only=True):
    """Whole tensors in CUDA memory, as vLLM's IPC transfer describes them. The pickle is parsed as data."""

    names: list[str]
    """Hugging Face names of the tensors."""
    dtypes: list[str]
    """Names of the tensors' torch dtypes."""
    shapes: list[Shape]
    """Shapes of the tensors."""
    handles: str
    """Base64 pickle: for each tensor, or for the buffer, a dict from the UUID of a GPU to what torch's `reduce_tensor`
    returned there."""
    sizes: list[int] | None = None
    """Bytes of each tensor in the buffer that holds them one after the other; null if each has a handle of its own."""


class WeightsDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the memory in which a set of tensors can be read. It is registered once and pushed many times.

    `id` names exactly this memory: if a tensor moves, its set gets a new description with a new id.
    """

    id: str
    """Registration id, with which later pushes name this description."""
    allocations: list[Allocation]
    """Memory regions that the shards refer to by index."""
    tensors: list[DescribedTensor]
    """Tensors that the description covers."""


class TensorHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A strided view into an `Allocation`."""

    allocation: Allocation
    """Memory that holds the tensor."""
    dtype: str
    """torch's name without the prefix, e.g. "bfloat16"."""
    shape: Counts
    stride: Counts
    """Strides in elements."""
    storage_offset: Count = 0
    """Elements from the start of the allocation's storage to the first element."""


class LocalSerializedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One named tensor as each trainer rank holds it: server rank i reads `values[i]`.

    A single value is read by every server rank. (SGLang's class of the same name held pickles.)
    """

    values: list[TensorHandle]
    """One handle for each trainer rank, or a single handle for all server ranks."""

    def get(self, rank: int) -> TensorHandle:
        return self.values[rank if len(self.values) > 1 else 0]
