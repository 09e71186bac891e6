"""`Backend`: stands in the `Scheduler`'s place if another project's engine computes the tokens.

`backends.process.main` passes decoded messages to `handle` and calls `advance` for each turn. `Backend` owns the
accepted requests: it checks them, hands them to the `EngineDriver`, labels the tokens of each step with the weight
version, and sends one `BatchTokenIDOut` for each step. Every accepted request gets exactly one terminal entry.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_server.backends.process.driver import EngineDriver, NewTokens, Step
from verl_server.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    FinishReason,
    FinishReq,
    FlushCacheReq,
    GetInternalStateReq,
    GrammarTokenizer,
    SchedulerInput,
    SchedulerOutput,
    TokenizedGenerateReq,
    WithdrawReq,
)
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A request without a terminal entry yet."""

    req: TokenizedGenerateReq
    num_output: int = 0


class Backend:
    """The accepted requests of one engine, and the turn of the loop that advances them."""

    def __init__(self, server_args: ServerArgs, driver: EngineDriver, send: Callable[[SchedulerOutput], None]) -> None:
        self._args, self._driver, self._send = server_args, driver, send
        self._requests: dict[str, _Running] = {}
        self._seeds = random.Random(server_args.random_seed)
        self._version = server_args.weight_version
        self._epoch = 0
        """Increases whenever no new request may use the KV pages that were computed before."""
        self._num_requests = self._num_aborted = self._num_steps = self._num_output_tokens = 0

    def handle(self, message: SchedulerInput) -> None:
        """Carry out one message."""
        match message:
            case TokenizedGenerateReq():
                self._receive_request(message)
            case AbortReq():
                self._abort(list(self._requests) if message.abort_all else [message.rid])
            case FinishReq():
                if self._requests.pop(message.rid, None) is not None:
                    self._driver.abort([message.rid])
            case GrammarTokenizer() | WithdrawReq():
                pass
            case GetInternalStateReq():
                self._send(ControlReply(id=message.id, success=True, payload=self.internal_state()))
            case FlushCacheReq():
                self._send(self._flush(message))
            case _:
                refusal = f"{type(message).__name__} is not supported with engine='{self._args.engine}'."
                self._send(ControlReply(id=message.id, success=False, message=refusal, status_code=501))

    def advance(self) -> None:
        """Send the results of the steps that have arrived. Raise ServerDiedError if the engine has died."""
        for step in self._driver.take():
            self._pass_on(step)

    # -- requests ------------------------------------------------------------------------------------------------

    def _receive_request(self, req: TokenizedGenerateReq) -> None:
        if req.rid in self._requests:
            logger.error("Dropped a request, because another live request has the same rid %r.", req.rid)
            return
        refusal = self._driver.refusal(req)
        if refusal is not None:
            self._num_aborted += 1
            reason = FinishReason(type="abort", message=refusal, status_code=400)
            self._emit([NewTokens(req.rid, [], [], reason)])
            return
        self._num_requests += 1
        self._requests[req.rid] = _Running(req)
        seed = req.sampling.sampling_seed
        self._driver.submit(req, self._seeds.getrandbits(63) if seed is None else seed, self._cache_key(req.namespace))

    def _cache_key(self, namespace: str) -> str:
        """Return the key of the requests that may share pages: admitted under the same weights, in one namespace.

        The number has no colon, so that no namespace can imitate another epoch's key.
        """
        return f"{self._epoch}:{namespace}"

    def _abort(self, rids: list[str]) -> None:
        self.advance()  # tokens that were computed before the abort belong to the partial output
        alive = [rid for rid in rids if rid in self._requests]
        self._driver.abort(alive)
        ended: Step = []
        for rid in alive:
            started = self._requests.pop(rid).num_output > 0
            message = "Aborted" if started else "Abort in waiting queue"
            ended.append(NewTokens(rid, [], [], FinishReason(type="abort", message=message)))
        self._num_aborted += len(ended)
        self._emit(ended)

    def _pass_on(self, step: Step) -> None:
        """Send the outputs of one step, without those of requests that ended meanwhile."""
        alive = [new for new in step if new.rid in self._requests]
        for new in alive:
            self._requests[new.rid].num_output += len(new.output_ids)
            self._num_output_tokens += len(new.output_ids)
            if new.finish_reason is not None:
                del self._requests[new.rid]
        self._num_steps += 1
        self._emit(alive)

    def _emit(self, entries: Step) -> None:
        if not entries:
            return
        self._send(
            BatchTokenIDOut(
                rids=[new.rid for new in entries],
                output_ids=[new.output_ids for new in entries],
                output_logprobs=[new.logprobs for new in entries],
                finish_reasons=[new.finish_reason for new in entries],
                weight_version=self._version,
                cached_tokens=[new.cached_tokens for new in entries],
                num_retractions=[0] * len(entries),
                top_logprobs={i: new.top_logprobs for i, new in enumerate(entries) if new.top_logprobs is not None},
                prompt_logprobs={
                    i: new.prompt_logprobs for i, new in enumerate(entries) if new.prompt_logprobs is not None
                },
            )
        )

    # -- control -------------------------------------------------------------------------------------------------

    def _flush(self, req: FlushCacheReq) -> ControlReply:
        """Empty the prefix cache for new requests: they get a new cache key, and old pages are evicted when needed."""
        if self._requests:
            message = f"The cache was not flushed: {len(self._requests)} requests run or wait."
            return ControlReply(id=req.id, success=False, message=message, status_code=400)
        self._epoch += 1
        return ControlReply(id=req.id, success=True, message="Cache flushed.")

    def internal_state(self) -> dict[str, Any]:
        """Return the figures on load and weights for `/server_info`, `/v1/loads` and `/metrics`."""
        return {
            "engine": self._driver.info.name,
            "num_running_reqs": len(self._requests),
            "num_waiting_reqs": 0,
            "max_total_num_tokens": self._driver.info.kv_cache_tokens,
            "num_requests": self._num_requests,
            "num_aborted_requests": self._num_aborted,
            "num_steps": self._num_steps,
            "output_tokens_total": self._num_output_tokens,
            "weight_version": self._version,
            "weights_state": "serving",
            "refusal": None,
            "released": [],
            "paused": False,
            "draining": False,
            "transaction": None,
        }
