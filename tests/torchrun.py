"""Run a module of checks on the ranks of a torchrun (or on forks with its environment), and read the results."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tests import fork_server
from verl_server.ipc.sockets import free_port


def _ranks(nproc: int, module: str, arguments: list[str], log: TextIO) -> list[subprocess.Popen[Any]]:
    """Start the processes that torchrun would start, without torchrun's imports."""
    common = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    common |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": 0, "ROLE_NAME": "default", "OMP_NUM_THREADS": 1}
    places = [{"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank} for rank in range(nproc)]
    envs = [os.environ | {name: str(value) for name, value in (common | place).items()} for place in places]
    return [fork_server.run_module(module, *arguments, stdout=log, stderr=log, env=env) for env in envs]


def torchrun(nproc: int, module: str, *arguments: str | Path, results: Path, timeout: float = 280) -> None:
    """Run a module of checks, whose last argument is the folder for its results and its log.

    A launch that hangs is killed with all its ranks. `read_results` then shows which checks are missing.
    """
    run_ranks(nproc, module, [*map(str, arguments), str(results)], results / "log", timeout)


def run_ranks(nproc: int, module: str, arguments: list[str], log_file: Path, timeout: float) -> list[int | None]:
    """Run `python -m MODULE ARGUMENTS` on every rank; return the exit code of each process (None if killed)."""
    with log_file.open("w") as log:
        if fork_server.is_running():
            processes = _ranks(nproc, module, arguments, log)
        else:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
            command += ["-m", module, *arguments]
            processes = [subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)]
        deadline = time.monotonic() + timeout
        try:
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            codes = [process.returncode for process in processes]
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    return codes


def read_results(folder: Path, rank: int) -> dict[str, str]:
    """Return the error of each check that a rank has finished ("" if the check passed)."""
    file = folder / f"{rank}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["check"]: line["error"] for line in lines}


def expect_passed(folder: Path, nproc: int, check: str) -> None:
    log = (folder / "log").read_text()[-3000:]
    for rank in range(nproc):
        results = read_results(folder, rank)
        assert check in results, f"rank {rank} never finished {check!r}; last: {list(results)[-1:]}\n{log}"
        assert not results[check], f"rank {rank}: {results[check]}"
