"""`WorkerExtension`: the weight channel inside each worker process of vLLM.

vLLM adds it to its worker class (`worker_extension_cls`), and runs its methods on all workers between two steps
(`collective_rpc`). Arguments and results are bytes, which vLLM passes on as they are.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from verl_server.backends.process.served_model import ServedModel
from verl_server.backends.process.worker_commands import WorkerCommands
from verl_server.backends.process.worker_logging import log_in_worker
from verl_server.backends.vllm.live_model import VllmModel
from verl_server.backends.vllm.sleep import SleepingMemory
from verl_server.ipc.tp_group import TpGroup
from verl_server.server_args import ServerArgs


class WorkerExtension:
    model_runner: Any
    """The model runner of vLLM's worker."""
    _verl_commands: WorkerCommands

    def verl_start(self, server_args: bytes) -> bytes:
        """Prepare for weight commands. Called once, after the model is loaded."""
        args = ServerArgs.from_json(server_args.decode())
        log_in_worker(args.log_level, "vllm-worker")
        _quiet_vllm()
        tp = _tp_group(args)
        sleeps = self.model_runner.model_config.enable_sleep_mode
        memory = SleepingMemory(self, args.enable_weights_cpu_backup) if sleeps else None
        with torch.no_grad():
            model = ServedModel(VllmModel(self.model_runner), tp, args, memory)
        self._verl_commands = WorkerCommands(model, tp, args)
        return b""

    @torch.no_grad()
    def verl_command(self, command: bytes) -> bytes:
        """Carry out a command of `backends.process.commands`, and return its reply."""
        return self._verl_commands.handle(command)


def _quiet_vllm() -> None:
    """Drop vLLM's warnings about tensors that a reload omits."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def _tp_group(server_args: ServerArgs) -> TpGroup:
    """Return the connections between the tensor-parallel workers, on groups of their own."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return TpGroup.beside(
        group.rank_in_group,
        group.world_size,
        startup_timeout=server_args.startup_timeout,
        control_timeout=server_args.control_timeout,
    )
