"""`ParameterProof`: proves that copies write the same bytes into a parameter as the model's own loader.

The caller loads codes (`codes.coded`) instead of weights through the model's own loader. Each element of a parameter
then identifies its origin. The proof copies the same codes into a scratch tensor, and compares every byte with the
parameter. So it detects a kernel that shuffles, pads, converts or scales its weights, even if the trace of the loader
does not show this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from verl_server.weight_sync.receiver.load_trace.regions import LoadedCopy

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ParameterProof:
    def __init__(self, parameter: Tensor, copies: Sequence[LoadedCopy]) -> None:
        """`parameter` is the live tensor, contiguous, which still has its weights."""
        self._parameter, self._copies = parameter, copies
        written = self._written()
        self._rest = None if bool(written.all()) else parameter[~written].clone()
        """Elements that no copy writes, such as padding. The loader must never change them."""
        self._overlaps = sum(_count(copy) for copy in copies) > int(written.sum())

    def holds(self, code: Callable[[str], Tensor]) -> bool:
        """Return True if the parameter has the same bits as the result of the copies, and no copies overlap.

        `code` maps the name of a checkpoint tensor to the codes that were loaded for this tensor.
        """
        if self._overlaps:  # the order of copies would matter
            return False
        expected = torch.empty_like(self._parameter)
        if self._rest is not None:
            expected[~self._written()] = self._rest
        for copy in self._copies:
            copy.destination.view(expected).copy_(code(copy.source)[copy.index])
        bits = _INTEGERS[expected.dtype.itemsize]
        return torch.equal(expected.view(bits), self._parameter.view(bits))

    def _written(self) -> Tensor:
        written = torch.zeros_like(self._parameter, dtype=torch.bool)
        for copy in self._copies:
            copy.destination.view(written).fill_(True)
        return written


def _count(copy: LoadedCopy) -> int:
    count = 1
    for part in copy.index:
        count *= part.stop - part.start
    return count
