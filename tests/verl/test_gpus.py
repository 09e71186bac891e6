"""Questions to nvidia-smi, which a script in the PATH answers here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_server.errors import BadRequestError
from verl_server.integrations.verl import gpus


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs a shell script as nvidia-smi."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return install


def test_the_uuid_of_a_gpu(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('[ "$1 $2" = "--id=5 --query-gpu=uuid,mig.mode.current" ] && echo "GPU-12ab, [N/A]"')
    assert gpus.uuid_of("5") == "GPU-12ab"


def test_a_part_of_a_gpu_is_refused(nvidia_smi: Callable[[str], None]) -> None:
    nvidia_smi('echo "GPU-12ab, Enabled"')
    for gpu_id in ("5", "MIG-12ab"):
        with pytest.raises(BadRequestError, match=f"GPU {gpu_id} is in MIG mode"):
            gpus.uuid_of(gpu_id)


def test_the_share_of_free_memory(nvidia_smi: Callable[[str], None], caplog: pytest.LogCaptureFixture) -> None:
    """The same bytes, whatever is free; all that is free if that is less."""
    nvidia_smi(
        'case "$1" in --id=GPU-a) echo "80000, 80000";; --id=GPU-b) echo "80000, 50000";; *) echo "80000, 30000"; esac'
    )
    assert gpus.share_of_free_memory(["GPU-a"], 0.5) == 0.5
    assert gpus.share_of_free_memory(["GPU-b"], 0.5) == 0.8
    assert gpus.share_of_free_memory(["GPU-a", "GPU-b"], 0.5) == 0.5
    assert not caplog.records
    assert gpus.share_of_free_memory(["GPU-c"], 0.5) == 1.0
    assert "40000 MiB of GPU GPU-c, but only 30000 MiB are free" in caplog.text


def test_nvidia_smi_fails(nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi("echo No devices were found; exit 6")
    with pytest.raises(BadRequestError, match="No devices were found"):
        gpus.uuid_of("5")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadRequestError, match="nvidia-smi"):
        gpus.uuid_of("5")
