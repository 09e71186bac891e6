"""Several index arrays are sent to the device in one transfer."""

from __future__ import annotations

import numpy as np
import torch

from verl_server.kernels.device_arrays import PackedInts, upload

CPU = torch.device("cpu")


def test_arrays_arrive_apart_and_aligned() -> None:
    arrays = [np.arange(5), np.arange(0), np.array([-1, 2**31 - 1]), np.arange(4, dtype=np.int32)]
    got = upload(arrays, CPU)
    for array, tensor in zip(arrays, got, strict=True):
        assert tensor.dtype == torch.int32 and tensor.tolist() == array.tolist()
        assert tensor.storage_offset() % 4 == 0


def test_packed_arrays_stay_where_they_are() -> None:
    packed = PackedInts([3, 6, 1], CPU)
    addresses = [view.data_ptr() for view in packed.views]
    packed.write([np.array([1, 2, 3]), np.array([4, 5]), np.array([6])])
    packed.write([np.array([7]), np.array([8, 9, 10]), np.array([11])])
    assert [view.data_ptr() for view in packed.views] == addresses
    assert packed.views[0][0] == 7 and packed.views[1][:3].tolist() == [8, 9, 10] and packed.views[2].tolist() == [11]
