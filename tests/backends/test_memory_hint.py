"""A failed start of another project's engine logs which settings decide its memory. No other engine is needed."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from verl_server.backends.process import memory_hint
from verl_server.backends.process.memory_hint import log_memory_hint
from verl_server.backends.process.run import run_backend
from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs
from verl_server.worker.gpu_holders import GpuHolders

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs of 80 GiB, the second of which has 16 GiB left."""
    holders = {
        "uuid-0": GpuHolders(79 * GIB, 80 * GIB, {}),
        "uuid-1": GpuHolders(16 * GIB, 80 * GIB, {2**30: 63 * GIB}),
    }
    monkeypatch.setattr(memory_hint, "find_uuid", lambda ordinal: f"uuid-{ordinal}")
    monkeypatch.setattr(memory_hint, "gpu_holders", holders.get)


@pytest.mark.usefixtures("gpu")
def test_vllm_needs_its_share_of_the_whole_gpu(caplog: pytest.LogCaptureFixture) -> None:
    log_memory_hint(ServerArgs("m", engine="vllm", tp_size=2))
    for words in (
        "mem_fraction_static=0.85 is vLLM's gpu_memory_utilization, a share of the whole GPU",
        "(now 0.20 is free)",
        "GPU uuid-1: 16.00 of 80.00 GiB are free. Other processes hold 64.00 GiB",
        f"process {2**30}: 63.00 GiB",
    ):
        assert words in caplog.text, words


@pytest.mark.usefixtures("gpu")
def test_sglang_uses_a_share_of_what_is_free_on_its_own_gpu(caplog: pytest.LogCaptureFixture) -> None:
    log_memory_hint(ServerArgs("m", engine="sglang", base_gpu_id=1))
    assert "share of what was free at the start" in caplog.text and "{'cuda_graph_max_bs_decode': ...}" in caplog.text
    assert "GPU uuid-1" in caplog.text and "GPU uuid-0" not in caplog.text


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_a_gpu_only_the_settings_are_named(caplog: pytest.LogCaptureFixture, engine: str) -> None:
    log_memory_hint(ServerArgs("m", engine=engine, device="cpu"))  # type: ignore[arg-type]
    assert "mem_fraction_static=0.85" in caplog.text and "GPU 0" not in caplog.text


@pytest.mark.parametrize(("error", "is_explained"), [(RuntimeError("no memory"), True), (BadRequestError("no"), False)])
def test_only_an_engine_that_failed_is_explained(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, is_explained: bool
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)

    def start(*_: Any) -> Any:
        raise error

    ours, theirs = socket.socketpair()
    with ours, pytest.raises(type(error)):
        argument = {"server_args": ServerArgs("m", engine="vllm", device="cpu").to_json(), "socket": theirs.detach()}
        run_backend(start, argument, lambda _: None)
    assert ("The engine did not start" in caplog.text) is is_explained
    os.close(argument["socket"]) if _is_open(argument["socket"]) else None


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
