"""The device of a rank."""

from __future__ import annotations

import pytest
import torch

from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs
from verl_server.worker.device import device_of


def test_device_of_rank() -> None:
    args = ServerArgs(model_path="x", device="cpu", tp_size=2)
    assert device_of(args, 1) == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(BadRequestError, match="no CUDA device"):
            device_of(args.replace(device="cuda"), 0)
