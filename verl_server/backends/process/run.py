"""The process that drives another project's engine. Each engine's `main` module calls `run_backend` with its driver.

It starts the engine through its `EngineDriver`, reports that it is ready, and runs the `Backend` with its end of the
message socket to the `TokenizerManager`. It ends on SIGTERM, when the parent process ends (`child_main` watches it), or
with the error of the engine.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from verl_server.backends.process.backend import Backend
from verl_server.backends.process.driver import EngineDriver
from verl_server.backends.process.memory_hint import log_memory_hint
from verl_server.errors import BadRequestError
from verl_server.scheduler.sockets import SchedulerSockets
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)

StartDriver = Callable[[ServerArgs, Callable[[], None]], EngineDriver]
"""A function that starts an engine.

Its second argument wakes the loop: the driver calls it when `take` has new steps.
"""


def run_backend(start_driver: StartDriver, argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    """Run the engine from start to end. `argument` and `ready` are those of `child_main`."""
    server_args = ServerArgs.from_json(argument["server_args"])
    logging.basicConfig(
        level=server_args.log_level.upper(), format="[%(asctime)s backend] %(levelname)s %(message)s", force=True
    )
    # The engine's processes must not inherit the socket: the parent would not notice the end of this process.
    os.set_inheritable(argument["socket"], False)
    sockets = SchedulerSockets(socket.socket(fileno=argument["socket"]))
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True
        sockets.ring()

    try:
        driver = start_driver(server_args, sockets.ring)
    except BadRequestError:  # settings that were refused before the engine started
        raise
    except Exception:
        log_memory_hint(server_args)
        raise
    try:
        signal.signal(signal.SIGTERM, stop)
        sockets.wake_on_signals()
        backend = Backend(server_args, driver, sockets.send)
        ready(_scheduler_info(backend, driver))
        while not stopping:
            sockets.wait(backend.wait_seconds())
            for message in sockets.receive():
                backend.handle(message)
            backend.advance()
    finally:
        driver.close()
        signal.set_wakeup_fd(-1)  # another file may get the number of the closed socket
        sockets.close()
    logger.info("The engine stopped.")


def _scheduler_info(backend: Backend, driver: EngineDriver) -> dict[str, Any]:
    """Return the limits and properties that the parent process reads, as `scheduler.rank.scheduler_info` does."""
    info = driver.info
    return {
        "engine_version": info.name,
        "max_total_num_tokens": info.kv_cache_tokens,
        "max_req_input_len": min(info.context_length - 1, info.kv_cache_tokens),
        "context_length": info.context_length,
        "page_size": info.page_size,
        "max_running_requests": info.max_running_requests,
        "chunked_prefill_size": info.prefill_chunk,
        "vocab_size": info.vocab_size,
        "unsupported": list(info.unsupported),
        "logprobs_after_filters": info.logprobs_after_filters,
        "releases_memory": info.releases_memory,
        "num_parameters": backend.worker.num_parameters,
        "device": info.device,
        "dtype": info.dtype,
        "weight_version": backend.worker.version,
        "pid": os.getpid(),
        "tp_rank": 0,
    }
