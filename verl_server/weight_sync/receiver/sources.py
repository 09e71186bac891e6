"""`Source`: one named tensor of an update, with the places of its parts.

The `WeightReceiver` creates sources from a description with shards, from handles, or from tensors in this process.
`plan` converts sources into copies. This module checks the geometry before any memory is opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.handles import Allocation, DescribedTensor, Shard, TensorHandle
from verl_server.weight_sync.receiver.boxes import Box, box_at, check_tiling, common_box, index_in
from verl_server.weight_sync.receiver.open_memory import FLOATING, HeldMemory, check_view

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED = 1 << 24
"""Number of elements that are compared at one time. On a GPU the result takes one byte for each element."""
_SPOKEN_DIMENSIONS = 16
"""The most dimensions of a tensor. An error does not print a longer shape."""

Choose = Callable[[Sequence[Allocation]], int]
"""A function that chooses one of several copies of a box. It returns the index of the copy to read."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the full tensor, and the memory from which this rank reads the box."""

    box: Box
    data: Tensor | TensorHandle

    @property
    def device_uuid(self) -> str:
        """UUID of the GPU that holds another process's data. Empty for host memory and for tensors of this process."""
        return self.data.allocation.device_uuid if isinstance(self.data, TensorHandle) else ""


@dataclass(frozen=True, slots=True)
class Source:
    """A full tensor, in disjoint parts that cover the tensor."""

    name: str
    """The trainer's name for the tensor."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[Part]
    memory: HeldMemory

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, part: Part) -> Tensor:
        """Return the part's elements. Open the memory of the part if it is not open."""
        return part.data if isinstance(part.data, Tensor) else self.memory.view(self.name, part.data)

    def whole(self) -> Tensor:
        """Return the full tensor. A tensor with several parts is concatenated in new memory."""
        whole = box_at([0] * len(self.shape), self.shape)
        if [part.box for part in self.parts] == [whole]:
            return self.read(self.parts[0])
        views = [(part.box, self.read(part)) for part in self.parts]
        full = torch.empty(self.shape, dtype=self.dtype, device=views[0][1].device if views else None)
        for box, view in views:
            full[index_in(box, whole)].copy_(view)
        return full

    def is_same_memory(self, other: Source) -> bool:
        """Return True if two sources read the same memory under two names, so that they are always equal."""
        return (
            (self.dtype, self.shape) == (other.dtype, other.shape)
            and len(self.parts) == len(other.parts)
            and all(_is_same(a, b) for a, b in zip(self.parts, other.parts, strict=True))
        )

    def has_same_values(self, other: Source) -> bool:
        """Return True if all elements of the two sources are equal now, bit for bit."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        bits = _BITS[self.dtype.itemsize]
        for mine in self.parts:
            for theirs in other.parts:
                common = common_box(mine.box, theirs.box)
                if common is None:
                    continue
                a = self.read(mine)[index_in(common, mine.box)].view(bits)
                b = other.read(theirs)[index_in(common, theirs.box)].view(bits)
                rows = max(1, _COMPARED * len(a) // a.numel())
                for x, y in zip(torch.split(a, rows), torch.split(b, rows), strict=True):
                    if not torch.equal(x, y.to(x.device)):
                        return False
        return True


def tensor_source(name: str, tensor: Tensor, memory: HeldMemory) -> Source:
    """Return the source of a full tensor that this process can read."""
    tensor = tensor.detach()
    return Source(name, tensor.dtype, tuple(tensor.shape), [_whole(tensor.shape, tensor)], memory)


def handle_source(name: str, handle: TensorHandle, memory: HeldMemory) -> Source:
    """Return the source of a full tensor in another process's memory."""
    try:
        dtype = check_view(handle)
    except WeightUpdateError as error:
        raise WeightUpdateError(f"'{name}': {error}") from None
    return Source(name, dtype, tuple(handle.shape), [_whole(handle.shape, handle)], memory)


def described_source(
    source: DescribedTensor, allocations: list[Allocation], memory: HeldMemory, choose: Choose
) -> Source:
    """Return the source of a described tensor. For equal boxes, only the copy that `choose` selects is opened.

    Raise WeightUpdateError, with the tensor's name, if a shard exceeds its memory or the tensor, or if the shards do
    not tile the tensor.
    """
    try:
        dtype = FLOATING.get(source.dtype)
        if dtype is None:
            raise WeightUpdateError(
                f"dtype {source.dtype[:40]} is not among {', '.join(FLOATING)}; weights are floating point."
            )
        if len(source.shape) > _SPOKEN_DIMENSIONS or min(source.shape, default=0) < 0:
            raise WeightUpdateError("its shape is none of a tensor's.")
        copies: dict[Box, list[TensorHandle]] = {}
        for shard in source.shards:
            box, handle = _checked(shard, source, allocations)
            if all(start < stop for start, stop in box):
                copies.setdefault(box, []).append(handle)
        check_tiling(source.shape, list(copies))
    except WeightUpdateError as error:
        raise WeightUpdateError(f"'{source.name}': {error}") from None
    parts = [Part(box, these[choose([h.allocation for h in these])]) for box, these in copies.items()]
    return Source(source.name, dtype, tuple(source.shape), parts, memory)


def _checked(shard: Shard, source: DescribedTensor, allocations: list[Allocation]) -> tuple[Box, TensorHandle]:
    if not 0 <= shard.allocation < len(allocations):
        raise WeightUpdateError(
            f"a shard names allocation {shard.allocation}, but the description has {len(allocations)}."
        )
    dimensions = len(source.shape)
    if len(shard.shape) != dimensions or len(shard.offset) != dimensions or len(shard.stride) != dimensions:
        raise WeightUpdateError(f"a shard's shape, offset and stride do not have {dimensions} dimensions each.")
    box = box_at(shard.offset, shard.shape)
    if not all(0 <= start <= stop <= size for (start, stop), size in zip(box, source.shape, strict=True)):
        raise WeightUpdateError(
            f"a shard of shape {shard.shape} at offset {shard.offset} does not lie inside {source.shape}."
        )
    handle = TensorHandle(
        allocation=allocations[shard.allocation],
        dtype=source.dtype,
        shape=shard.shape,
        stride=shard.stride,
        storage_offset=shard.storage_offset,
    )
    check_view(handle)
    return box, handle


def _whole(shape: Sequence[int], data: Tensor | TensorHandle) -> Part:
    return Part(box_at([0] * len(shape), shape), data)


def _is_same(a: Part, b: Part) -> bool:
    if a.box != b.box:
        return False
    if isinstance(a.data, Tensor) and isinstance(b.data, Tensor):
        return a.data.data_ptr() == b.data.data_ptr() and a.data.stride() == b.data.stride()
    return isinstance(a.data, TensorHandle) and isinstance(b.data, TensorHandle) and a.data == b.data
