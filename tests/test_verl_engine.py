"""`VerlEngine` on several ranks: `verl_engine_ranks.py` under torchrun, one launch for many checks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl_engine_ranks import SCENARIOS

pytestmark = pytest.mark.timeout(300)


def torchrun(nproc: int, scenario: str, model: Path, results: Path) -> None:
    """Run the checks; a launch that hangs is killed with all its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += ["-m", "tests.verl_engine_ranks", scenario, str(model), str(results)]
    with (results / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout=280)
        except subprocess.TimeoutExpired:
            pass  # the checks that are missing in the results say where it hung
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_results(folder: Path, rank: int) -> dict[str, str]:
    file = folder / f"{rank}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["check"]: line["error"] for line in lines}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    torchrun(2, "all", tiny_llama, folder)
    return folder


CHECKS = [f"{name}: {check}" for name, (_, checks) in SCENARIOS.items() for check in ("start", *checks)]


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(two_ranks: Path, check: str) -> None:
    for rank in range(2):
        results = read_results(two_ranks, rank)
        log = (two_ranks / "log").read_text()[-3000:]
        assert check in results, f"rank {rank} never finished {check!r}; last: {list(results)[-1:]}\n{log}"
        assert not results[check], f"rank {rank}: {results[check]}"


def test_two_replicas_of_two_ranks(tmp_path: Path, tiny_llama: Path) -> None:
    torchrun(4, "replicas", tiny_llama, tmp_path)
    for rank in range(4):
        results = read_results(tmp_path, rank)
        assert results == {"replicas": ""}, f"rank {rank}: {results}\n{(tmp_path / 'log').read_text()[-3000:]}"
