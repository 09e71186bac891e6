"""Run a module of checks under torchrun, and read what its ranks say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def torchrun(nproc: int, module: str, *arguments: str | Path, results: Path, timeout: float = 280) -> None:
    """A launch that hangs is killed with all its ranks: the checks that are missing then say where."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    command += ["-m", module, *map(str, arguments), str(results)]
    with (results / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_results(folder: Path, rank: int) -> dict[str, str]:
    """The error of each check that a rank has finished, "" for none."""
    file = folder / f"{rank}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["check"]: line["error"] for line in lines}


def expect_passed(folder: Path, nproc: int, check: str) -> None:
    log = (folder / "log").read_text()[-3000:]
    for rank in range(nproc):
        results = read_results(folder, rank)
        assert check in results, f"rank {rank} never finished {check!r}; last: {list(results)[-1:]}\n{log}"
        assert not results[check], f"rank {rank}: {results[check]}"
