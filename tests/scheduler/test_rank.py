"""A rank whose GPU runs out of memory while the engine is built says who holds the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl_server.errors import ServerUnavailableError
from verl_server.ipc.start_times import StartTimes
from verl_server.ipc.tp_group import TpGroup
from verl_server.scheduler import rank
from verl_server.server_args import ServerArgs

HELD = "Other processes hold 63.00 GiB of the GPU's 80.00 GiB (process 7)."


def build(monkeypatch: pytest.MonkeyPatch, error: Exception, device: str) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(rank, "ModelRunner", fail)
    monkeypatch.setattr(rank, "find_uuid", lambda ordinal: f"uuid-{ordinal}")
    monkeypatch.setattr(rank, "holders_sentence", lambda uuid: HELD if uuid == "uuid-1" else "")
    rank._build_runner(ServerArgs("model"), TpGroup(), torch.device(device), StartTimes())


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"
        ),  # of the context, if the GPU is full
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ],
)
def test_a_gpu_without_memory_is_an_error_that_users_read(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with pytest.raises(ServerUnavailableError) as raised:
        build(monkeypatch, error, "cuda:1")
    assert "TORCH_USE_CUDA_DSA" not in str(raised.value)
    for words in (
        "cuda:1 ran out of memory",
        str(error).splitlines()[0],
        HELD,
        "torch.cuda.empty_cache()",
        "larger tp_size",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize(
    ("error", "device"), [(RuntimeError("a bug"), "cuda:1"), (RuntimeError("CUDA error: out of memory"), "cpu")]
)
def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception, device: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        build(monkeypatch, error, device)
    assert raised.value is error
