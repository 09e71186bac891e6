"""A scheduler process: the entry of `ChildProcess("scheduler-tpN", "verl_server.scheduler.process")`.

This module does not import torch. So a thread creates the CUDA context while `scheduler.rank` imports torch; each takes
seconds. The same thread starts the process that compiles kernels. `scheduler.rank` continues the start.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

from verl_server.ipc.child_process import child_main
from verl_server.ipc.start_times import StartTimes
from verl_server.server_args import ServerArgs
from verl_server.worker.cuda_context import create_context
from verl_server.worker.startup.compile_ahead import compile_ahead


def run_scheduler(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Run one rank from start to end. `child_main` calls this function."""
    start = StartTimes()
    gc.disable()  # until `run_rank` is ready: imports and construction create no garbage
    server_args = ServerArgs.from_json(argument["server_args"])
    arguments = (server_args, argument["tp_rank"])
    threading.Thread(target=_prepare_device, args=arguments, name="cuda-context", daemon=True).start()
    from verl_server.scheduler.rank import run_rank

    run_rank(server_args, argument, ready, start)


def _prepare_device(server_args: ServerArgs, tp_rank: int) -> None:
    """Create the CUDA context. On the first rank of a host, also start to compile kernels that the cache lacks."""
    gpu = create_context(server_args, tp_rank)
    if gpu is not None and tp_rank % server_args.ranks_per_node == 0:
        compile_ahead(server_args, gpu)


if __name__ == "__main__":
    child_main(run_scheduler)
