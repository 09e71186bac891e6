"""`SglangDriver`: an `EngineDriver` that runs SGLang's schedulers token in, token out.

This process takes the place of SGLang's tokenizer: it sends SGLang's own messages to the scheduler of rank 0, and
receives the messages of `HeldScheduler`. One socket brings outputs and replies, so a reply comes after the outputs of
all earlier steps. SGLang's processes are children of this process, and end with it.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl_server.backends.process.driver import EngineInfo, Step
from verl_server.backends.process.installed import check_installed
from verl_server.backends.process.step_queue import StepQueue
from verl_server.backends.sglang.outputs import MESSAGES, Outputs, Reply, RunningRequest, step_of
from verl_server.backends.sglang.sampling import UNSUPPORTED, refusal, tokenized_request
from verl_server.backends.sglang.settings import engine_settings, set_environment
from verl_server.errors import BadRequestError, ContextLengthError, ControlTimeoutError, ServerDiedError
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)
TESTED = {"sglang": "0.5.16"}
"""Distribution -> the version with which tests and benchmarks were run."""
_END_SECONDS = 30.0
"""Most seconds until SGLang's processes have ended after SIGKILL."""


class SglangDriver:
    def __init__(self, server_args: ServerArgs, ring: Callable[[], None]) -> None:
        """Start SGLang, and wait until it is ready. `ring` is called on another thread when `take` has something new.

        Call it in the main thread.
        """
        name = check_installed("sglang", "SGLang", TESTED, server_args.allow_untested_engine)
        settings = engine_settings(server_args)
        set_environment(server_args, settings["device"])
        from verl_server.backends.sglang.launch import launch

        self._has_tokenizer = not server_args.skip_tokenizer_init
        self._steps = StepQueue("SGLang", ring)
        self._ids = itertools.count()
        self._inner: dict[str, str] = {}
        """This project's request id -> SGLang's id. SGLang aborts all ids with a prefix, so they have equal lengths."""
        self._running: dict[str, RunningRequest] = {}
        """Running requests by SGLang's id."""
        self._lock = threading.Lock()
        """Held for changes of `_inner` and `_running`, and while an output is converted."""
        self._calls: dict[str, Future[bytes]] = {}
        self._launched = launch(settings)
        for run in (self._receive, self._watch):
            threading.Thread(target=run, name=f"sglang{run.__name__}", daemon=True).start()
        self.info = _info(name, self._launched.info)
        self._request("verl_start", server_args.to_json(), server_args.startup_timeout)

    def refusal(self, req: TokenizedGenerateReq) -> BadRequestError | None:
        prompt, new = len(req.input_ids), max(req.sampling.max_new_tokens or 0, 1)
        if prompt + new > self.info.context_length:
            return ContextLengthError.of(prompt, new, self.info.context_length)
        unsupported = refusal(req, self._has_tokenizer)
        return None if unsupported is None else BadRequestError(unsupported)

    def submit(self, req: TokenizedGenerateReq, seed: int, cache_key: str) -> None:
        inner = f"{next(self._ids):016x}"
        with self._lock:
            self._inner[req.rid], self._running[inner] = inner, RunningRequest(req)
        self._send(tokenized_request(req, inner, seed, cache_key))

    def abort(self, rids: list[str]) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        with self._lock:
            inner = [self._inner.pop(rid) for rid in rids if rid in self._inner]
            for id in inner:
                del self._running[id]
        for id in inner:
            self._send(AbortReq(rid=id))

    def take(self) -> list[Step]:
        return self._steps.take()

    def hold(self, timeout: float) -> None:
        self._request("hold", "", timeout)

    def resume(self) -> None:
        self._send_call("", "resume", "")

    def retract(self, timeout: float) -> None:
        self._request("retract", "", timeout)

    def call(self, method: str, argument: bytes, timeout: float) -> list[bytes]:
        return [self._request(method, argument.decode("latin-1"), timeout)]

    def close(self) -> None:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(os.getpid(), include_parent=False, wait_timeout=_END_SECONDS)

    # -- messages ------------------------------------------------------------------------------------------------

    def _send(self, message: Any) -> None:
        import zmq
        from sglang.srt.managers.io_struct import sock_send

        try:
            sock_send(self._launched.to_scheduler, message, zmq.NOBLOCK)
        except zmq.Again:  # rank 0 has just died; a send that blocks would wait for another process that connects
            self._fail(ServerDiedError("no scheduler takes messages"))

    def _send_call(self, call: str, method: str, argument: str) -> None:
        from sglang.srt.managers.io_struct import RpcReqInput

        self._send(RpcReqInput(rid=call, method=method, parameters={"argument": argument}))

    def _request(self, method: str, argument: str, timeout: float) -> bytes:
        """Run a command of `HeldScheduler` on all ranks, and return rank 0's reply."""
        call, future = str(next(self._ids)), Future[bytes]()
        self._calls[call] = future
        try:
            self._steps.check()
            self._send_call(call, method, argument)
            return future.result(timeout)
        except TimeoutError:
            raise ControlTimeoutError(f"SGLang did not answer within {timeout:g} s.") from None
        finally:
            self._calls.pop(call, None)

    # -- on threads of their own ---------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Convert each output into a `Step`, and give replies to `_request`, until this process ends."""
        try:
            while True:
                data = self._launched.outputs.recv()
                match MESSAGES.decode(data):
                    case Outputs() as outputs:
                        if step := self._step(outputs):
                            self._steps.add(step)
                    case Reply() as reply:
                        self._resolve(reply)
        except Exception as error:
            self._fail(error)

    def _step(self, outputs: Outputs) -> Step:
        with self._lock:
            step = step_of(outputs, self._running)
            for new in step:
                if new.finish_reason is not None:
                    del self._running[self._inner.pop(new.rid)]
        return step

    def _resolve(self, reply: Reply) -> None:
        future = self._calls.get(reply.call)
        if future is None:
            logger.warning("SGLang answered call %s after its timeout.", reply.call)
        elif reply.error is None:
            future.set_result(reply.data)
        else:
            future.set_exception(RuntimeError(reply.error))

    def _watch(self) -> None:
        """Wait for the end of a scheduler process, without which no output and no reply would come."""
        processes = {process.sentinel: process for process in self._launched.processes}
        for ended in multiprocessing.connection.wait(list(processes)):
            process = processes[ended]  # type: ignore[index]
            process.join()
            cause = f"its scheduler process {process.pid} ended (exit code {process.exitcode}); its log has the cause"
            self._fail(ServerDiedError(cause))

    def _fail(self, error: Exception) -> None:
        self._steps.fail(error)
        for future in list(self._calls.values()):
            if not future.done():
                future.set_exception(ServerDiedError(f"SGLang died during a call: {error}"))


def _info(name: str, info: dict[str, Any]) -> EngineInfo:
    return EngineInfo(
        name=name,
        device=info["device"],
        dtype=info["dtype"],
        context_length=info["context_length"],
        vocab_size=info["vocab_size"],
        kv_cache_tokens=info["max_total_num_tokens"],
        page_size=info["page_size"],
        max_running_requests=info["max_running_requests"],
        prefill_chunk=info["prefill_chunk"],
        unsupported=(*UNSUPPORTED, "profiles"),
        releases_memory=info["releases_memory"],
    )
