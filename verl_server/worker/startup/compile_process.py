"""The process that compiles kernels ahead: the entry of `ChildProcess("compile-ahead", ...)`.

`compile_all` records the kernels of the engine (`compile_jobs`), and forks processes that compile them into Triton's
cache. No process uses the GPU, so none takes memory while the engine measures how much is free. Forks are safe here,
because this process has neither a CUDA context nor threads that hold locks. A forked process need not import torch
again. `verl-server warm-up` calls `compile_all` too.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_server.ipc.child_process import child_main
from verl_server.kernels import compilation
from verl_server.server_args import ServerArgs
from verl_server.worker.startup.compile_ahead import CompileRequest, num_processes
from verl_server.worker.startup.compile_jobs import Job, record_jobs

logger = logging.getLogger(__name__)

_LOG_SECONDS = 5.0
"""Seconds between two lines of the log."""
_NICENESS = 10
"""Niceness of these processes: the engine's own processes take precedence if there are few cores."""
_PR_SET_PDEATHSIG = 1

_jobs: list[Job] = []
"""The kernels to compile, which the forked processes inherit."""


@dataclass(frozen=True)
class Compiled:
    """The result of `compile_all`."""

    compiled: list[str]
    """Names of the kernels that were compiled, once for each specialization."""
    cached: int
    """Number of kernels that were in the cache already."""
    failed: dict[str, str]
    """Name -> error of the kernels that cannot be compiled."""
    seconds: float


def compile_all(request: CompileRequest) -> Compiled:
    """Compile every kernel that the cache lacks. Write the stamp if none failed."""
    start = time.monotonic()
    server_args = ServerArgs.from_json(request.server_args)
    _jobs[:] = record_jobs(server_args, request.gpu)
    if not _jobs:
        return Compiled([], 0, {}, time.monotonic() - start)
    _set_launcher_tools()
    processes = min(len(_jobs), num_processes(server_args))
    logger.info(
        "Compiling up to %d kernels for this GPU in %d processes. The cache is %s.",
        *(len(_jobs), processes, compilation.cache_folder()),
    )
    compiled, cached, failed, logged = [], 0, {}, start
    context, parent = multiprocessing.get_context("fork"), os.getpid()
    with ProcessPoolExecutor(processes, context, initializer=_enter_fork, initargs=(parent,)) as pool:
        futures = {pool.submit(_compile, i): job.name for i, job in enumerate(_jobs)}
        for future in as_completed(futures):
            try:
                compiled += [futures[future]] * (count := future.result())
                cached += not count
            except Exception as error:
                failed[futures[future]] = f"{type(error).__name__}: {error}"
            if time.monotonic() - logged > _LOG_SECONDS:
                logged = time.monotonic()
                logger.info("Compiled %d of %d kernels.", len(compiled) + cached + len(failed), len(_jobs))
    if not failed:
        Path(request.stamp).write_text("\n".join(sorted(job.name for job in _jobs)) + "\n")
    return Compiled(compiled, cached, failed, time.monotonic() - start)


def _enter_fork(parent: int) -> None:
    """Prepare a forked process: it ends with its parent, and counts the kernels that it compiles."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    compilation.share()


def _compile(index: int) -> int:
    """Compile a job into the cache. Return 1, or 0 if the cache had the kernel."""
    job, before = _jobs[index], compilation.num_compiled()
    kernel = job.kernel.preload(job.specialization)
    _compile_launcher(kernel)
    return compilation.num_compiled() - before


def _set_launcher_tools() -> None:
    """Prepare `_compile_launcher`, if this machine has the library of the driver."""
    from triton.runtime.driver import driver

    try:
        from triton.backends.nvidia.driver import CudaUtils

        driver.active.utils = CudaUtils()
    except Exception as error:  # no libcuda, as where images are built: a first launch takes tenths of a second longer
        logger.debug("Launchers of kernels are not compiled ahead: %r", error)


def _compile_launcher(kernel: Any) -> None:
    """Compile the C function that launches a kernel. Triton before 3.7 has one for each signature."""
    from triton.runtime.driver import driver

    if hasattr(driver.active, "utils"):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def run_compile_process(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Compile, and log the outcome. `child_main` calls this function."""
    ready({})
    request = msgspec.convert(argument, CompileRequest)
    level = ServerArgs.from_json(request.server_args).log_level.upper()
    logging.basicConfig(level=level, format="[%(asctime)s compile-ahead] %(levelname)s %(message)s", force=True)
    os.nice(_NICENESS)
    try:
        done = compile_all(request)
    except Exception as error:
        logger.warning("Kernels are not compiled ahead, so first steps wait for them: %r", error)
        return
    for name, reason in done.failed.items():
        logger.warning("The kernel %s was not compiled ahead, so the first step with it waits: %s", name, reason)
    logger.info("Compiled %d kernels in %.1f s; %d were there.", len(done.compiled), done.seconds, done.cached)


if __name__ == "__main__":
    child_main(run_compile_process)
