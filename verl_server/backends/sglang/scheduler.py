"""`HeldScheduler`: SGLang's scheduler, which can be held between two steps and carries out this project's commands.

It runs in each of SGLang's scheduler processes (`launch.run_scheduler`). Commands arrive as SGLang's `RpcReqInput`,
which rank 0 sends on to all ranks, so each rank carries out the same commands before the same step. Rank 0 replies on
the socket of the outputs, behind the outputs of all earlier steps.

SGLang's own pause `in_place` stops the loop at once: with overlapped scheduling, the results of the last step would be
processed after the pause, and its tokens would be labelled with the weights of a later version.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.io_struct import PauseGenerationReqInput, RpcReqInput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import NextBatchPlan, Scheduler

from verl_server.backends.process.engine_workers import WEIGHT_COMMAND
from verl_server.backends.process.served_model import ServedModel
from verl_server.backends.process.worker_commands import WorkerCommands
from verl_server.backends.process.worker_logging import log_in_worker
from verl_server.backends.sglang.live_model import SglangModel
from verl_server.backends.sglang.outputs import Reply
from verl_server.backends.sglang.sleep import SleepingMemory
from verl_server.backends.sglang.step_streamer import StepStreamer
from verl_server.ipc.tp_group import TpGroup
from verl_server.server_args import ServerArgs

_POLL_MS = 50
"""Most milliseconds between two looks for messages while the engine is held. A message ends the wait."""


class HeldScheduler(Scheduler):  # type: ignore[misc]
    _hold: str | None = None
    """Id of the call `hold` that waits for the running step, None if there is none."""
    _commands: WorkerCommands
    _streamer: StepStreamer
    ipc_channels: Any

    # -- commands ------------------------------------------------------------------------------------------------

    def handle_rpc_request(self, request: RpcReqInput) -> None:
        argument = (request.parameters or {}).get("argument", "")
        match request.method:
            case "hold":
                self._hold = request.rid
            case "resume":
                self._hold, self._engine_paused = None, False
            case "retract":
                self._reply(request.rid, self._retract)
            case "verl_start":
                self._reply(request.rid, lambda: self._start(argument))
            case command if command == WEIGHT_COMMAND:
                self._reply(request.rid, lambda: self._commands.handle(argument.encode("latin-1")))
            case other:
                raise AssertionError(other)

    def _reply(self, call: str, run: Callable[[], bytes | None]) -> None:
        """Run a command on this rank. Reply with its bytes, or with the message of its error."""
        try:
            with torch.no_grad():
                reply = Reply(call, run() or b"")
        except Exception as error:  # SGLang would end all processes
            logging.getLogger(__name__).exception("A command of verl-server failed.")
            reply = Reply(call, error=f"{type(error).__name__}: {error}")
        self._streamer.send(reply)

    def _start(self, server_args: str) -> None:
        args = ServerArgs.from_json(server_args)
        log_in_worker(args.log_level, "sglang")
        tp = TpGroup.beside(
            self.ps.tp_rank,
            self.ps.tp_size,
            startup_timeout=args.startup_timeout,
            control_timeout=args.control_timeout,
        )
        live = SglangModel(self.tp_worker.model_runner)
        memory = SleepingMemory(self, live) if self.server_args.enable_memory_saver else None
        self._commands = WorkerCommands(ServedModel(live, tp, args, memory), tp, args)

    # -- holding -------------------------------------------------------------------------------------------------

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        super().process_input_requests(recv_reqs)
        if self._hold is not None and not self._engine_paused and self.last_batch is None:
            self._engine_paused = True
            self._reply(self._hold, lambda: b"")
        if self._engine_paused and not recv_reqs and self.idle_sleeper is not None:
            # A loop that spins would keep the thread that stages weights from running.
            self.idle_sleeper.poller.poll(_POLL_MS)

    def get_next_batch_to_run(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> NextBatchPlan:
        """Plan nothing before a hold. SGLang's loop then processes the last step, whose requests are merged here."""
        plan = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        return plan if self._hold is None else NextBatchPlan(batch_to_run=None, running_batch=plan.running_batch)

    def get_new_batch_prefill(self, running_batch: ScheduleBatch) -> NextBatchPlan:
        if self._hold is None:
            return super().get_new_batch_prefill(running_batch)
        return NextBatchPlan(batch_to_run=None, running_batch=running_batch)

    def update_running_batch(self, batch: ScheduleBatch) -> ScheduleBatch | None:
        return super().update_running_batch(batch) if self._hold is None else batch

    def _retract(self) -> None:
        """Drop the KV of all running requests, which go back to the queue, and empty the prefix cache."""
        self.pause_generation(PauseGenerationReqInput(mode="retract"))
        self.drop_cache()

    def drop_cache(self) -> None:
        """Empty the prefix cache. Only while no request has KV. `flush_cache` refuses it if requests wait."""
        self.tree_cache.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()

    # -- start ---------------------------------------------------------------------------------------------------

    def init_ipc_channels(self, port_args: Any) -> None:
        super().init_ipc_channels(port_args)
        self._streamer = StepStreamer(self.ipc_channels.send_to_detokenizer.socket)
        self.ipc_channels = dataclasses.replace(self.ipc_channels, send_to_tokenizer=self._streamer)

    def init_output_streamer(self) -> None:
        self.output_streamer = self._streamer

    def get_init_info(self) -> dict[str, Any]:
        """Return what `SglangDriver` reports as `EngineInfo`."""
        runner = self.tp_worker.model_runner
        # SGLang takes prompts of `max_req_input_len` - 1 tokens, and cuts `max_new_tokens` in silence to what fits.
        longest = min(self.max_req_input_len - 1, self.max_total_num_tokens - 2 * self.page_size - 1)
        info: dict[str, Any] = super().get_init_info()
        return info | {
            "device": str(self.device),
            "dtype": str(runner.dtype).removeprefix("torch."),
            "context_length": longest,
            "vocab_size": self.model_config.vocab_size,
            "page_size": self.page_size,
            "max_running_requests": self.max_running_requests,
            "prefill_chunk": self.chunked_prefill_size or self.max_prefill_tokens,
            "releases_memory": self.server_args.enable_memory_saver,
        }
