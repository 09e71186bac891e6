"""Updates whose broadcasts describe their tensors: prime-rl's trainers broadcast a description before the tensors.

`WeightGroup.receive_state_dicts` receives such an update and calls the functions here. An update is, in this order:

    int64                the number of state dicts (one for each layer, and one for the other parameters)
    for each state dict:
      int64              the number of bytes of the header
      bytes              the header: the pickle of {dtype: [(name, shape, number of elements), ...]}
      for each dtype:    the tensors of this dtype, flattened and concatenated

The header is parsed as data. Every number is checked against a limit before memory is allocated for it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from verl_server.errors import BadRequestError
from verl_server.weight_sync.group.windows import Bucket, Window
from verl_server.weight_sync.pickle_reader import Function, Globals, read_pickle, shown

NUMBER_BYTES = 8
"""Bytes of a number: an int64 in the byte order of the hosts, which is little-endian."""
MOST_STATE_DICTS = 10_000
MOST_HEADER_BYTES = 16 << 20
"""The most bytes of a header. The header of a state dict with 100,000 tensors is smaller."""
_MOST_DIMENSIONS = 16
_MOST_ELEMENTS = 2**48
_DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)


def read_number(data: bytes, what: str, most: int) -> int:
    """Return the little-endian int64 in `data`. Raise BadRequestError, which names `what`, unless it is 0 to `most`."""
    number = int.from_bytes(data, "little", signed=True)
    if not 0 <= number <= most:
        raise BadRequestError(
            f"The trainer announced {number:,} {what}, which must be 0 to {most:,}. Does it send its weights as "
            "prime-rl's trainers do?"
        )
    return number


def read_header(data: bytes) -> Window:
    """Return the layout of the state dict that `data` describes: one broadcast for each dtype.

    Raise BadRequestError for a header that describes no tensors, or that names anything besides dtypes and shapes.
    """
    groups = read_pickle(data, _GLOBALS)
    if not isinstance(groups, dict) or not set(groups) <= set(_DTYPES):
        raise BadRequestError("The header of a state dict is not a dict from dtypes to lists of tensors.")
    window = Window()
    for dtype, entries in groups.items():
        if not isinstance(entries, list) or not entries:
            raise BadRequestError(f"The header of a state dict has no list of tensors for {dtype}.")
        bucket: Bucket = [_entry(getattr(torch, dtype), entry) for entry in entries]
        window.add(bucket)
    return window


def _entry(dtype: torch.dtype, entry: Any) -> tuple[str, torch.dtype, list[int]]:
    if not isinstance(entry, tuple) or len(entry) != 3 or not isinstance(entry[0], str):
        raise BadRequestError("An entry in the header of a state dict is not (name, shape, number of elements).")
    name, shape, elements = entry
    if len(name) > 1000 or not name.isprintable():
        raise BadRequestError(f"'{shown(name)}' is not the name of a parameter.")
    if not isinstance(shape, tuple) or type(elements) is not int:
        raise BadRequestError(f"'{name}': the header of its state dict has no shape or number of elements.")
    if math.prod(shape) != elements or elements >= _MOST_ELEMENTS:
        raise BadRequestError(f"'{name}': {elements} elements do not fit the shape {list(shape)}.")
    return name, dtype, list(shape)


def _size(sizes: Any = ()) -> tuple[int, ...]:
    """Build a shape. Its length is bounded here, because a pickle may use one long tuple for each of its tensors."""
    if not isinstance(sizes, (tuple, list)) or len(sizes) > _MOST_DIMENSIONS:
        raise ValueError(f"a shape that is not a tuple of at most {_MOST_DIMENSIONS} integers")
    if not all(type(size) is int and 0 <= size < _MOST_ELEMENTS for size in sizes):
        raise ValueError("a shape with an entry that is not the size of a dimension")
    return tuple(sizes)


_GLOBALS: Globals = {("torch", "Size"): Function(_size), **{("torch", name): name for name in _DTYPES}}
"""The globals that a header may contain. A dtype is read as its name."""
