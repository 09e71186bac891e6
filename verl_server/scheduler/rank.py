"""One tensor-parallel rank in its scheduler process, from start to end. Called by `scheduler.process`.

Builds this rank's `ModelRunner` and `WeightUpdater` and reports that it is ready. Then rank 0 runs the `Scheduler` with
its end of the message socket to the `TokenizerManager`, and every other rank follows rank 0. A rank ends on SIGTERM
(rank 0 between two steps), when the parent process ends (`child_main` watches it), or with a traceback.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from verl_server.errors import ServerUnavailableError
from verl_server.ipc.start_times import StartTimes
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.results import SchedulerInfo
from verl_server.scheduler.garbage import Garbage
from verl_server.scheduler.scheduler import Scheduler
from verl_server.scheduler.sockets import SchedulerSockets
from verl_server.server_args import ServerArgs
from verl_server.worker.cuda_context import find_uuid
from verl_server.worker.device import device_of, device_uuid, is_out_of_memory
from verl_server.worker.gpu_holders import holders_sentence
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.tp_worker import TpWorker
from verl_server.worker.weights.stager import Stager
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater

logger = logging.getLogger(__name__)

_STAGER_GRACE = 2.0
"""Seconds that the end of the process waits for staging to end."""
_QUIET = 0.05
"""Seconds without a message before idle time is used to warm up or to collect garbage. Messages that closely follow a
push come first."""


class SchedulerLoop:
    """Drives a `Scheduler`: reads messages without waiting while there is work, and blocks while there is none."""

    def __init__(self, scheduler: Scheduler, sockets: SchedulerSockets, garbage: Garbage) -> None:
        self._scheduler = scheduler
        self._sockets = sockets
        self._garbage = garbage
        self._is_quiet = False
        """True if no message has arrived for `_QUIET` seconds."""
        self.stopping = False

    def stop(self) -> None:
        """End `run` after the current step. Safe in a signal handler."""
        self.stopping = True
        self._sockets.ring()

    def run(self) -> None:
        """Run turns of the scheduler until `stop` is called."""
        scheduler, sockets = self._scheduler, self._sockets
        while not self.stopping:
            warms_up = not scheduler.has_work() and scheduler.can_warm_up
            collects = not scheduler.has_work() and self._garbage.is_due
            if warms_up or collects:
                sockets.wait(0.0 if self._is_quiet else _QUIET)
            elif not scheduler.has_work():
                sockets.wait(scheduler.control.wait_seconds())
            messages = sockets.receive()
            for message in messages:
                scheduler.handle(message)
            self._is_quiet = not messages and not scheduler.has_work()
            if self._is_quiet:
                if collects:
                    self._garbage.collect()
                elif warms_up:
                    self._is_quiet = scheduler.worker.warm_up()  # a rank that cannot now may be able to later
            scheduler.advance()
        scheduler.settle()


def run_rank(
    server_args: ServerArgs, argument: dict[str, Any], ready: Callable[[dict[str, Any]], None], start: StartTimes
) -> None:
    """Run one rank from start to end. `argument` and `ready` are those of `process.run_scheduler`."""
    start.mark("imports")
    rank: int = argument["tp_rank"]
    _set_up_process(server_args, rank)
    device = device_of(server_args, rank)
    tp = TpGroup.create(
        rank,
        server_args.tp_size,
        argument["init_addr"],
        device,
        server_args.sync_timeout,
        startup_timeout=server_args.startup_timeout,
        control_timeout=server_args.control_timeout,
        peer_memory=not server_args.disable_custom_all_reduce,
    )
    runner = _build_runner(server_args, tp, device, start)
    sources = WeightSources(runner, tp, server_args.replace(weight_receive_bytes=runner.weight_receive_bytes))
    stager = Stager(sources, tp, take_timeout=server_args.sync_timeout)
    worker = TpWorker(runner, WeightUpdater(runner, tp, sources, server_args), stager, tp)
    gc.freeze()  # the model and the imports live as long as the process, so no collection needs to visit them
    gc.enable()
    start.mark("ready")
    info = dict(scheduler_info(server_args, worker, runner, rank, start))
    logger.info("Ready: %s", start)
    if rank > 0:
        if server_args.nnodes == 1:  # rank 0 receives the signal too, and stops this rank after its step
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stager.on_finished = lambda: _end_if_lost(stager)
        ready(info)
        worker.follow()
        stager.close(_STAGER_GRACE)
        return
    # If a grandchild inherited the socket, the parent would not notice the end of this process.
    os.set_inheritable(argument["socket"], False)
    sockets = SchedulerSockets(socket.socket(fileno=argument["socket"]))
    stager.on_finished = sockets.ring
    scheduler = Scheduler(server_args, worker, sockets.send)
    scheduler.grammars.on_compiled = sockets.ring
    garbage = Garbage()
    garbage.defer()
    loop = SchedulerLoop(scheduler, sockets, garbage)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    sockets.wake_on_signals()
    ready(info)
    try:
        loop.run()
        worker.stop()
    except Exception as error:
        if not loop.stopping:
            raise
        logger.info("Another rank had already ended: %s", error)
    finally:
        scheduler.grammars.close()
        stager.close(_STAGER_GRACE)
        signal.set_wakeup_fd(-1)  # another file may get the number of the closed socket
        sockets.close()
    logger.info("The scheduler stopped.")


def _build_runner(server_args: ServerArgs, tp: TpGroup, device: torch.device, start: StartTimes) -> ModelRunner:
    """Return the runner. Raise ServerUnavailableError if the device runs out of memory meanwhile.

    `ModelRunner` refuses settings that do not fit what was free at its start. This error is about memory that it cannot
    see beforehand: that of the CUDA context, or what other processes take while the weights are loaded.
    """
    try:
        return ModelRunner(server_args, tp, device, start)
    except Exception as error:
        if device.type != "cuda" or not is_out_of_memory(error):
            raise
        first, *_ = str(error).splitlines()  # the driver's errors go on with advice for programmers
        sentences = (
            f"{device} ran out of memory while the engine was built: {first}",
            holders_sentence(find_uuid(device.index or 0)),
            "Free memory on the device (in a trainer: offload, then torch.cuda.empty_cache()) and start again, or use "
            "a smaller model or a larger tp_size.",
        )
        raise ServerUnavailableError(" ".join(filter(None, sentences))) from error


def _end_if_lost(stager: Stager) -> None:
    """End the process of a follower whose stager is lost, because rank 0 would wait for the stager's vote.

    The follower's loop cannot end the process, because it waits for the next command of rank 0.
    """
    if stager.is_lost:
        os._exit(1)


def scheduler_info(
    server_args: ServerArgs, worker: TpWorker, runner: ModelRunner, rank: int, start: StartTimes
) -> SchedulerInfo:
    """Return the limits and properties of this rank that the parent process reads when the rank is ready."""
    capacity = runner.num_pages * runner.page_size
    return {
        "max_total_num_tokens": capacity,
        "max_req_input_len": min(runner.context_length - 1, capacity),
        "context_length": runner.context_length,
        "page_size": runner.page_size,
        "max_running_requests": runner.max_rows,
        "chunked_prefill_size": server_args.prefill_chunk(runner.device.type),
        "vocab_size": runner.vocab_size,
        "num_parameters": len(runner.weight_map.parameters),
        "device": str(runner.device),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "weight_version": worker.weights.version,
        "pid": os.getpid(),
        "tp_rank": rank,
        "device_uuid": device_uuid(runner.device),
        "unsupported": [],
        "logprobs_after_filters": False,
        "releases_memory": True,
        "attention_backend": runner.kernels.attention,
        "fused_kernels": runner.kernels.fused,
        "disable_cuda_graph": not runner.has_graphs,
        "disable_overlap_schedule": not runner.overlaps,
        "disable_pdl": not runner.kernels.pdl,
        "start": start.moments,
    }


def _set_up_process(server_args: ServerArgs, rank: int) -> None:
    """Set the process name, the log prefix and the interpreter's thread switch interval."""
    prefix = "scheduler" if server_args.tp_size == 1 else f"scheduler tp{rank}"
    logging.basicConfig(
        level=server_args.log_level.upper(), format=f"[%(asctime)s {prefix}] %(levelname)s %(message)s", force=True
    )
    with contextlib.suppress(OSError):  # the name that `ps` and `top` show; Linux keeps 15 characters
        Path("/proc/self/comm").write_text(f"verl-sched-tp{rank}"[:15])
    # A step releases the GIL at each of its hundreds of operators. With Python's default of 5 ms, a stager that opens
    # memory and plans copies would delay the step by 5 ms each time.
    sys.setswitchinterval(2e-4)
