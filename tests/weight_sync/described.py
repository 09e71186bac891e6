"""A trainer's memory for tests of the receiver, with shards cut in any way and described by hand."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import uuid
import weakref
from collections.abc import Callable, Sequence

import torch

from verl_server.weight_sync.handles import Allocation, DescribedTensor, Shard, WeightsDescription

Boxes = list[tuple[list[int], list[int]]]
"""(offset, shape) of each shard."""
Layout = Callable[[Sequence[int]], Boxes]


opened: list[SharedMemory] = []
"""Shared memory of the current test's trainers. `conftest.py` clears the list after each test."""


class SharedMemory:
    """Shared memory of one rank. `put` copies tensors into it, one after the other."""

    def __init__(self, nbytes: int = 1 << 20, *, sealed: bool = True) -> None:
        id = uuid.uuid4().hex
        self.fd = os.memfd_create(f"verl-{id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._map = mmap.mmap(self.fd, nbytes)
        weakref.finalize(self, os.close, self.fd)
        opened.append(self)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._end = 0
        inode = os.fstat(self.fd).st_ino
        self.allocation = Allocation(id=id, kind="shm", nbytes=nbytes, pid=os.getpid(), fd=self.fd, inode=inode)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy `tensor` into this memory with the same strides, and return the copy."""
        extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        extent = extent if tensor.numel() else 0
        start = -(-self._end // 8) * 8
        self._end = start + extent * tensor.element_size()
        assert self._end <= self.allocation.nbytes, "the tensors need more than `nbytes`"
        place = self._bytes.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), start // tensor.element_size())
        return place.copy_(tensor)

    def shard(self, tensor: torch.Tensor, offset: Sequence[int], allocation: int = 0) -> Shard:
        """Describe where a tensor that `put` returned is stored."""
        start = tensor.data_ptr() - self._bytes.data_ptr() if tensor.numel() else 0
        return Shard(
            allocation=allocation,
            shape=list(tensor.shape),
            offset=list(offset),
            stride=list(tensor.stride()),
            storage_offset=start // tensor.element_size(),
        )


class Trainer:
    """Ranks whose shared memory holds full tensors in shards."""

    def __init__(self, ranks: int = 1, nbytes: int = 1 << 20) -> None:
        self.ranks = [SharedMemory(nbytes) for _ in range(ranks)]
        self.placed: dict[str, list[torch.Tensor]] = {}
        """Name -> views of the tensor's shards in the ranks' memory."""
        self._sources: list[DescribedTensor] = []

    def place(
        self, name: str, full: torch.Tensor, boxes: Boxes | None = None, dice: random.Random | None = None
    ) -> None:
        """Cut `full` into boxes (default: one) and put the i-th box on rank i % n. `dice` varies the strides."""
        shards, views = [], []
        for i, (offset, shape) in enumerate(boxes or [([0] * full.dim(), list(full.shape))]):
            index = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
            owner = i % len(self.ranks)
            view = self.ranks[owner].put(restrided(full[index], dice))
            shards.append(self.ranks[owner].shard(view, offset, owner))
            views.append(view)
        dtype = str(full.dtype).removeprefix("torch.")
        self._sources.append(DescribedTensor(name=name, dtype=dtype, shape=list(full.shape), shards=shards))
        self.placed[name] = views

    def description(self, id: str = "weights") -> WeightsDescription:
        return WeightsDescription(id=id, allocations=[r.allocation for r in self.ranks], tensors=list(self._sources))


def described(weights: dict[str, torch.Tensor], id: str = "weights") -> tuple[Trainer, WeightsDescription]:
    """Return a trainer that holds whole tensors, and the trainer's description."""
    trainer = Trainer()
    for name, tensor in weights.items():
        trainer.place(name, tensor)
    return trainer, trainer.description(id)


def restrided(tensor: torch.Tensor, dice: random.Random | None) -> torch.Tensor:
    """Return the same values, randomly contiguous, transposed, or with gaps between rows or elements."""
    kind = dice.choice(["plain", "transposed", "padded", "strided"]) if dice and tensor.numel() else "plain"
    if kind == "transposed":
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if kind == "padded":
        return torch.nn.functional.pad(tensor, (0, 3))[..., : tensor.shape[-1]]
    if kind == "strided":
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    return tensor.contiguous()


# -- layouts -------------------------------------------------------------------------------------------------


def split_over(dim: int, ranks: int) -> Layout:
    """Split like FSDP2 and DTensor's `Shard(dim)`: sizes of `torch.chunk`, empty shards at the end."""

    def layout(shape: Sequence[int]) -> Boxes:
        d = min(dim, len(shape) - 1)
        step, boxes = -(-shape[d] // ranks), []
        for rank in range(ranks):
            start = min(rank * step, shape[d])
            stop = min(start + step, shape[d])
            boxes.append(([start if i == d else 0 for i in range(len(shape))], list(shape)))
            boxes[-1][1][d] = stop - start
        return boxes

    return layout


def grid(rows: int, columns: int) -> Layout:
    """Split over two mesh dimensions: the rows into blocks, and each block over the columns."""

    def layout(shape: Sequence[int]) -> Boxes:
        boxes = []
        for offset, part in split_over(0, rows)(shape):
            for inner, size in split_over(len(shape) - 1, columns)(part) if len(shape) > 1 else [([0], part)]:
                boxes.append(([a + b for a, b in zip(offset, inner, strict=True)], size))
        return boxes

    return layout


def irregular(dice: random.Random) -> Layout:
    """Cut into boxes that no mesh produces: halved at random places in random dimensions, in random order."""

    def layout(shape: Sequence[int]) -> Boxes:
        boxes: Boxes = [([0] * len(shape), list(shape))]
        for _ in range(dice.randrange(6)):
            offset, size = boxes.pop(dice.randrange(len(boxes)))
            d = dice.randrange(len(shape))
            cut = dice.randint(0, size[d])
            first, second = list(size), list(size)
            first[d], second[d] = cut, size[d] - cut
            boxes += [(offset, first), ([o + cut * (i == d) for i, o in enumerate(offset)], second)]
        dice.shuffle(boxes)
        return boxes

    return layout


def replicated(layout: Layout, copies: int) -> Layout:
    return lambda shape: [box for box in layout(shape) for _ in range(copies)]
