"""vLLM's pickled IPC handles: what they become, and what is refused, without unpickling anything."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import pytest
import torch

from tests.weight_sync.sglang.test_payloads import cuda_args
from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import PickledHandles
from verl_server.weight_sync.vllm.ipc_handles import parse_ipc_handles

GPU = "0d5f6a2c-1111-2222-3333-444455556666"


def given(handles: Any, **changes: Any) -> PickledHandles:
    encoded = base64.b64encode(pickle.dumps(handles)).decode()
    fields: dict[str, Any] = {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 3]], "handles": encoded}
    return PickledHandles(**(fields | changes))


@pytest.mark.parametrize("uuid", [GPU, f"GPU-{GPU}"])
def test_a_handle_for_each_tensor(uuid: str) -> None:
    ((name, handle),) = parse_ipc_handles(given([{uuid: tuple(cuda_args())}]), GPU)
    assert name == "w"
    assert (handle.dtype, handle.shape, handle.stride, handle.storage_offset) == ("bfloat16", [2, 3], [3, 1], 5)
    assert handle.allocation.device_uuid == GPU and handle.allocation.kind == "cuda"
    assert handle.allocation.ref_counter_handle == b"/torch_17_1_2"


def test_tensors_of_a_packed_buffer() -> None:
    args = cuda_args(shape=torch.Size([20]), stride=(1,), offset=0, dtype=torch.uint8)
    payload = given({GPU: tuple(args)}, names=["a", "b"], dtypes=["bfloat16", "float32"], shapes=[[2, 2], [3]])
    payload.sizes = [8, 12]
    (_, first), (_, second) = parse_ipc_handles(payload, GPU)
    assert first.allocation is second.allocation
    assert (first.shape, first.storage_offset) == ([2, 2], 0)
    assert (second.dtype, second.stride, second.storage_offset) == ("float32", [1], 2)


def test_a_handle_for_another_gpu_is_refused_by_name() -> None:
    with pytest.raises(BadRequestError, match=f"no IPC handle for this server's GPU {GPU}, only for beef"):
        parse_ipc_handles(given([{"GPU-beef": tuple(cuda_args())}]), GPU)


@pytest.mark.parametrize(
    ("handles", "changes", "message"),
    [
        ([{GPU: tuple(cuda_args())}], {"shapes": [[3, 2]]}, "not bfloat16 .3, 2. as announced"),
        ([{GPU: tuple(cuda_args())}], {"dtypes": ["quaternion"]}, "'quaternion' is not a dtype"),
        ([{GPU: tuple(cuda_args())}], {"names": ["w", "v"]}, "same length"),
        ([], {}, "list of 1 IPC handles"),
        ([{GPU: (1, 2)}], {}, "15 arguments"),
        ([{GPU: tuple(cuda_args(stride="x"))}], {}, "refused"),
        ([7], {}, "not a dict"),
        ({GPU: tuple(cuda_args())}, {"sizes": [12]}, "not one dimension of uint8"),
        ([{GPU: os.system}], {}, "posix.system is not allowed"),
    ],
)
def test_what_is_no_handle_is_refused(handles: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        parse_ipc_handles(given(handles, **changes), GPU)


@pytest.mark.parametrize("sizes", [[8], [8, 13], [8, -12]])
def test_sizes_that_do_not_fit_the_buffer_are_refused(sizes: list[int]) -> None:
    args = cuda_args(shape=torch.Size([20]), stride=(1,), offset=0, dtype=torch.uint8)
    payload = given({GPU: tuple(args)}, names=["a", "b"], dtypes=["bfloat16", "float32"], shapes=[[2, 2], [3]])
    payload.sizes = sizes
    with pytest.raises(BadRequestError):
        parse_ipc_handles(payload, GPU)
