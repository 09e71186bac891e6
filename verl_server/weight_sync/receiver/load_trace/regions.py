"""Regions of a tensor's storage, and copies between regions: (index of the source, view of the destination).

`record` creates a `LoadedCopy` for each copy of the loader. `proof` and the engines of `backends` convert a
`LoadedCopy` into a `Piece`. All functions are pure arithmetic on shapes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verl_server.models.loader import Index


@dataclass(frozen=True)
class Region:
    """Elements of a storage, by the arguments of `torch.as_strided`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: Tensor) -> Region:
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    def view(self, whole: Tensor) -> Tensor:
        """Return the region as a view of the storage of `whole`. `offset` counts from the first element of `whole`."""
        return whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)


@dataclass(frozen=True)
class LoadedCopy:
    """One copy of a model's loader: `destination.view(parameter).copy_(source[index])`."""

    source: str
    """Name of a tensor of the checkpoint."""
    index: Index
    """A box of the source, one slice a dimension, without steps."""
    destination: Region
    """The written region of the parameter, with the shape of the box."""


def as_copy(name: str, shape: tuple[int, ...], source: Region, destination: Region) -> LoadedCopy | None:
    """Describe a copy between two regions of equal shape. Return None if `source` is not a box of the tensor `name`.

    `shape` is the shape of this tensor, which is contiguous. The dimensions of a region may be the tensor's dimensions
    in another order (transposed), merged (flattened), or with additional dimensions of size 1.
    """
    assert source.shape == destination.shape
    strides = _contiguous(shape)
    lengths, to_strides = [1] * len(shape), [1] * len(shape)
    for size, stride, to_stride in zip(source.shape, source.stride, destination.stride, strict=True):
        # A dimension of the region may run through several dimensions of the source, the innermost first.
        while size > 1:
            found = [d for d, n in enumerate(shape) if strides[d] == stride and n > 1 and lengths[d] == 1]
            if not found:
                return None
            d = found[0]
            if size > shape[d] and size % shape[d]:
                return None
            lengths[d], to_strides[d] = min(size, shape[d]), to_stride
            size, stride, to_stride = size // lengths[d], stride * lengths[d], to_stride * lengths[d]
    index, rest = [], source.offset
    for n, length, stride in zip(shape, lengths, strides, strict=True):
        start, rest = divmod(rest, stride) if stride else (0, rest)
        if start + length > n:
            return None
        index.append(slice(start, start + length))
    return LoadedCopy(name, tuple(index), Region(tuple(lengths), tuple(to_strides), destination.offset))


def _contiguous(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for d in reversed(range(len(shape) - 1)):
        strides[d] = strides[d + 1] * shape[d + 1]
    return strides
