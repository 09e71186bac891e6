"""`Backend`: replaces the `Scheduler` if another project's engine computes the tokens.

`run_backend` passes decoded messages to `handle` and calls `advance` for each turn. `Backend` owns the accepted
requests (`Admission`) and the weights' state (`EngineWorkers`), labels the tokens of each step with the weight version,
and sends one `BatchTokenIDOut` for each step. Every accepted request gets exactly one terminal entry. The
`ControlQueue` of the embedded engine handles pauses, transactions and weight updates: docs/scheduler-states.md has the
rules.

From `settle` until the end of the turn, or of the pause, the engine is held: it runs no step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from verl_server.backends.process.admission import Accepted, Admission
from verl_server.backends.process.driver import EngineDriver, NewTokens, Step
from verl_server.backends.process.engine_workers import EngineWorkers
from verl_server.messages.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    FinishReason,
    FinishReq,
    FinishSessionReq,
    GrammarTokenizer,
    SchedulerInput,
    SchedulerOutput,
    StartProfileReq,
    StopProfileReq,
    TokenizedGenerateReq,
    WithdrawReq,
)
from verl_server.scheduler.control.control_queue import ControlQueue
from verl_server.scheduler.stats import SchedulerStats
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)


class Backend:
    """The accepted requests of one engine, and the turn of the loop that advances them."""

    def __init__(
        self,
        server_args: ServerArgs,
        driver: EngineDriver,
        send: Callable[[SchedulerOutput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._args, self._driver = server_args, driver
        self.send, self.clock = send, clock
        self.planner = Admission(driver, server_args.random_seed, server_args.control_timeout)
        self.worker = EngineWorkers(driver, server_args.control_timeout, clock)
        self.control = ControlQueue(self, server_args.control_timeout, server_args.weight_update_lease)
        self._stats = SchedulerStats(clock)
        self._is_held = False
        """True while the engine is held, so that it runs no step."""

    @property
    def requests(self) -> Mapping[str, Accepted]:
        return self.planner.all()

    # -- the loop ------------------------------------------------------------------------------------------------

    def handle(self, message: SchedulerInput) -> None:
        """Process one message, or queue it."""
        match message:
            case TokenizedGenerateReq():
                self._receive_request(message)
            case AbortReq():
                rids = list(self.requests) if message.abort_all else [message.rid]
                self._abort([rid for rid in rids if rid in self.planner], "Aborted", None)
            case FinishReq():
                self.planner.remove([message.rid])
            case FinishSessionReq() | GrammarTokenizer():
                pass  # hints for the embedded engine's cache and grammars
            case WithdrawReq():
                self.control.withdraw(message.id)
            case StartProfileReq() | StopProfileReq():
                refusal = f"Profiles are not supported with engine='{self._args.engine}'."
                self.send(ControlReply(id=message.id, success=False, message=refusal, status_code=501))
            case _:
                self.control.receive(message)

    def advance(self) -> None:
        """Run one turn. Raise ServerDiedError if the engine has died."""
        self._take()
        self.control.run_ready()
        refusal = self.worker.refusal()
        if not self.control.holds_generation:
            if refusal is not None:
                self.abort_all(refusal, status_code=503)
            elif not self.control.draining:
                self.planner.start_all()
        if self._is_held and not self.control.holds_generation:
            self._driver.resume()
            self._is_held = False

    def wait_seconds(self) -> float | None:
        """Return the seconds that the loop may sleep if nothing arrives, None if there is no bound."""
        if self.control.is_ready() and (self.control.holds_generation or not self.planner.running):
            return 0.0  # no step will arrive that would end the wait
        waits = [self.control.wait_seconds(), self.worker.wait_seconds()]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    # -- what `ControlQueue` calls -------------------------------------------------------------------------------

    def has_runnable(self) -> bool:
        return len(self.planner) > 0 and not self.control.holds_generation

    def settle(self) -> None:
        """Hold the engine, and send the results of its completed steps."""
        if not self._is_held:
            self._driver.hold(self._args.control_timeout)
            self._is_held = True
        self._take()

    def emit(self) -> None:
        """Do nothing: each step is sent as soon as it arrives."""

    def abort_all(self, message: str, status_code: int | None = None) -> None:
        self._abort(list(self.requests), message, status_code)

    def demands(self) -> list[tuple[str, str]]:
        return [(rid, one.req.weight_demand) for rid, one in self.requests.items() if one.req.weight_demand]

    def end_request(self, rid: str, reason: FinishReason) -> None:
        self._end([rid], lambda accepted: reason)

    def internal_state(self) -> dict[str, Any]:
        """Return the figures on load and weights for `/server_info`, `/v1/loads` and `/metrics`."""
        planner, worker, stats = self.planner, self.worker, self._stats
        waiting_tokens = sum(len(accepted.req.input_ids) for accepted in planner.waiting.values())
        return {
            "engine_version": self._driver.info.name,
            "num_running_reqs": len(planner.running),
            "num_waiting_reqs": len(planner.waiting),
            "num_waiting_uncached_tokens": waiting_tokens,
            "max_total_num_tokens": self._driver.info.kv_cache_tokens,
            "gen_throughput": stats.gen_throughput(),
            "last_gen_throughput": stats.gen_throughput(),
            "effective_max_running_requests_per_dp": self._driver.info.max_running_requests,
            "num_retractions": planner.num_retractions,
            "num_requests": stats.num_requests,
            "num_aborted_requests": stats.num_aborted,
            "num_steps": stats.num_steps,
            "output_tokens_total": stats.num_output_tokens,
            "weight_version": worker.version,
            "weights_state": worker.state,
            "refusal": worker.refusal(),
            "released": worker.released,
            "paused": self.control.paused,
            "draining": self.control.draining,
            "transaction": self.control.transaction.name if self.control.transaction.is_open else None,
        }

    # -- requests ------------------------------------------------------------------------------------------------

    def _receive_request(self, req: TokenizedGenerateReq) -> None:
        if req.rid in self.planner:
            logger.error("Dropped a request, because another live request has the same rid %r.", req.rid)
            return
        refused = self._check_request(req)
        if refused is not None:
            self._stats.num_aborted += 1
            self._send([(NewTokens(req.rid, [], [], refused), 0)])
            return
        self._stats.num_requests += 1
        self.planner.add(req)

    def _check_request(self, req: TokenizedGenerateReq) -> FinishReason | None:
        """Return the reason why a request is refused, None if it is accepted."""
        refusal = self._driver.refusal(req)
        if refusal is not None:
            return FinishReason.refused(refusal)
        unready = self.worker.refusal()
        if unready is not None and not self.control.holds_generation:
            return FinishReason(type="abort", message=unready, status_code=503)
        if (superseded := self.control.border.refusal(req.weight_demand)) is not None:
            return superseded
        bound = self._args.max_queued_requests
        if bound is not None and len(self.planner.waiting) >= bound:
            return FinishReason(type="abort", message="The request queue is full.", status_code=503)
        return None

    def _abort(self, rids: list[str], message: str, status_code: int | None) -> None:
        """End requests with the output that they have so far."""

        def reason(accepted: Accepted) -> FinishReason:
            text = "Abort in waiting queue" if status_code is None and accepted.num_output == 0 else message
            return FinishReason(type="abort", message=text, status_code=status_code)

        if rids:
            self._take()  # tokens that were computed before the abort belong to the partial output
            self._end(rids, reason)

    def _end(self, rids: list[str], reason: Callable[[Accepted], FinishReason]) -> None:
        """Remove requests, and send the `reason` of each as its last entry."""
        ended = self.planner.remove(rids)
        self._stats.num_aborted += len(ended)
        self._send([(NewTokens(one.req.rid, [], [], reason(one)), one.num_retractions) for one in ended])

    def _take(self) -> None:
        """Send the results of the steps that have arrived, under the version of the weights that computed them."""
        for step in self._driver.take():
            self._pass_on(step)

    def _pass_on(self, step: Step) -> None:
        entries = []
        for new in step:
            accepted = self.planner.note(new)
            if accepted is not None:
                entries.append((new, accepted.num_retractions))
        self._stats.count_step(sum(len(new.output_ids) for new, _ in entries))
        self.control.step_taken()
        self._send(entries)

    def _send(self, entries: list[tuple[NewTokens, int]]) -> None:
        """Send (new tokens, number of retractions) of requests as one message."""
        if not entries:
            return
        self.send(
            BatchTokenIDOut(
                rids=[new.rid for new, _ in entries],
                output_ids=[new.output_ids for new, _ in entries],
                output_logprobs=[new.logprobs for new, _ in entries],
                finish_reasons=[new.finish_reason for new, _ in entries],
                weight_version=self.worker.version,
                cached_tokens=[new.cached_tokens for new, _ in entries],
                num_retractions=[count for _, count in entries],
                top_logprobs={
                    i: new.top_logprobs for i, (new, _) in enumerate(entries) if new.top_logprobs is not None
                },
                prompt_logprobs={
                    i: new.prompt_logprobs for i, (new, _) in enumerate(entries) if new.prompt_logprobs is not None
                },
            )
        )
