"""A scheduler in a thread that speaks the protocol of the message socket and computes nothing.

A script of tokens defines the output of each request, and tests decide when the tokens are sent. By default, token k
after a prompt is `prompt[-1] + 1 + k` (modulo the vocabulary size), and all tokens are sent at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.readiness import wait_readable
from verl_server.messages import io_struct as io
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs, unpack_ids

VOCAB = 320
INFO: dict[str, Any] = {
    "max_total_num_tokens": 4096,
    "max_req_input_len": 255,
    "context_length": 256,
    "page_size": 16,
    "max_running_requests": 64,
    "chunked_prefill_size": 2048,
    "vocab_size": VOCAB,
    "num_parameters": 20,
    "device": "cpu",
    "dtype": "float32",
    "weight_version": "default",
    "pid": 0,
    "tp_rank": 0,
    "device_uuid": "",
    "releases_memory": True,
}
Control = Callable[[Any], io.ControlReply | None]


@dataclass
class Running:
    req: io.TokenizedGenerateReq
    script: list[int]
    sent: int = 0


@dataclass
class FakeScheduler:
    end: socket.socket
    script: Callable[[io.TokenizedGenerateReq], list[int]] | None = None
    """Output tokens of a request. It ends with "length" after the last one, or with "stop" at one of its stop ids."""
    chunk: int | None = None
    """Number of tokens in one message; None sends all tokens in one."""
    hold: bool = False
    """If set, tokens are sent only after `release`."""
    version: str = "default"
    control: Control | None = None
    tokenizers: list[io.GrammarTokenizer] = field(default_factory=list)
    """The first message of a server that compiles grammars."""
    received: list[Any] = field(default_factory=list)
    """Messages of the server besides the first one."""
    running: dict[str, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- methods that tests call ----------------------------------------------------------------------------

    def wait_for(self, kind: type[Any], count: int = 1, timeout: float = 10.0) -> list[Any]:
        """Wait until `count` messages of this kind have arrived, and return all messages of the kind."""

        def found() -> list[Any]:
            return [m for m in self.received if isinstance(m, kind)]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= count, timeout), (
                f"{len(found())} of {count} {kind.__name__} within {timeout} s; got {self.received}"
            )
            return found()

    def release(self) -> None:
        self.hold = False

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)

    # -- the scheduler's thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._messages = MessageSocket(self.end)
        decoder = msgspec.msgpack.Decoder(io.SchedulerInput)
        while not self._stopping.is_set():
            with self._sending:
                self._messages.flush()
            ready = wait_readable(self._messages, 0 if self.running and not self.hold else 0.002)
            for data in self._messages.receive() if ready else []:
                message = decoder.decode(data)
                if isinstance(message, io.TokenizedGenerateReq) and message.packed_ids:
                    message.input_ids, message.packed_ids = unpack_ids(message.packed_ids), b""
                if isinstance(message, io.GrammarTokenizer):  # sent at the start, and no part of any request
                    self.tokenizers.append(message)
                    continue
                with self._changed:  # whoever has the answer finds its message, and `wait_for` finds handled ones only
                    self.received.append(message)
                    self._handle(message)
                    self._changed.notify_all()
            if not ready and not self.hold:
                for running in list(self.running.values()):
                    self._step(running)
        self._messages.close()

    def send(self, message: io.SchedulerOutput) -> None:
        with self._sending:  # tests call `emit` on their own threads
            self._messages.send(msgspec.msgpack.encode(message))

    def _handle(self, message: Any) -> None:
        if isinstance(message, io.TokenizedGenerateReq):
            first = message.input_ids[-1] + 1
            count = message.sampling.max_new_tokens or 0
            script = self.script(message) if self.script else [(first + k) % VOCAB for k in range(count)]
            self.running[message.rid] = Running(message, script)
        elif isinstance(message, io.FinishReq):
            self.running.pop(message.rid, None)
        elif isinstance(message, io.GrammarTokenizer | io.FinishSessionReq):
            pass  # the fake has no grammars and no prefix cache
        elif isinstance(message, io.AbortReq):
            for rid in list(self.running) if message.abort_all else [message.rid]:
                if rid in self.running:
                    self.emit(self.running.pop(rid), [], io.FinishReason(type="abort", message="Aborted"))
        else:
            reply = self.control(message) if self.control else io.ControlReply(id=message.id, success=True)
            if reply is not None:
                self.send(reply)

    def _step(self, running: Running) -> None:
        left = running.script[running.sent :]
        tokens = left[: self.chunk] if self.chunk else left
        stop = next((k for k, t in enumerate(tokens) if t in running.req.stop_ids), None)
        reason = None
        if stop is not None:
            tokens = tokens[: stop + 1]
            reason = io.FinishReason(type="stop", matched=tokens[-1])
        elif len(tokens) == len(left):
            reason = io.FinishReason(type="length", length=len(running.script))
        if reason is not None:
            self.running.pop(running.req.rid, None)
        self.emit(running, tokens, reason)

    def emit(self, running: Running, tokens: list[int], reason: io.FinishReason | None) -> None:
        req = running.req
        out = io.BatchTokenIDOut(
            rids=[req.rid],
            output_ids=[tokens],
            output_logprobs=[[-t / 100 for t in tokens] if req.return_logprob else []],
            finish_reasons=[reason],
            weight_version=self.version,
            cached_tokens=[0],
            num_retractions=[0],
        )
        if req.top_logprobs_num:
            ids = list(range(req.top_logprobs_num))
            out.top_logprobs[0] = [TokenLogprobs.of([-1.0 - i for i in ids], ids) for _ in tokens]
        if req.token_ids_logprob is not None:
            wanted = req.token_ids_logprob
            out.token_ids_logprobs[0] = [TokenLogprobs.of([-2.0] * len(wanted), wanted) for _ in tokens]
        if req.sampling_mask_num:
            out.sampling_masks[0] = [TokenLogprobs.of([-0.5, -1.0], [t, t + 1]) for t in tokens]
        if running.sent == 0 and req.logprob_start_len >= 0:
            ids = req.input_ids[req.logprob_start_len :]
            values = [-i / 8 for i in ids[1:]]
            out.prompt_logprobs[0] = PromptLogprobs.of(ids, values, ranks=range(1, len(ids)))
        running.sent += len(tokens)
        self.send(out)
