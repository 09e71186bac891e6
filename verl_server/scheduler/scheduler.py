"""`Scheduler`: receives requests, admits them, runs steps, sends results. Each engine has one, in rank 0's process.

`scheduler.rank` passes decoded messages to `handle` and calls `advance` for each turn. Messages and control requests
take effect between two steps only. Then the `StepPipeline` launches the next step on every rank and collects the step
before it, whose results `process` turns into one `BatchTokenIDOut`. Every accepted request gets exactly one terminal
entry; docs/scheduler-states.md says which one in which state.

Between two turns a step may be in flight, so that the host does not know the newest tokens. Code that needs these
tokens calls `settle` first.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import (
    AbortReq,
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
from verl_server.sampling.spec import NOTHING_ALLOWED, ForwardOutput
from verl_server.scheduler.batch_planner import BatchPlanner
from verl_server.scheduler.control.control_queue import ControlQueue
from verl_server.scheduler.control.profiler import StepProfiler
from verl_server.scheduler.grammars import Grammars
from verl_server.scheduler.request_checks import check_request
from verl_server.scheduler.request_grammar import RequestGrammar
from verl_server.scheduler.schedule_batch import BatchOutput, Req, ScheduleBatch
from verl_server.scheduler.stats import SchedulerStats
from verl_server.scheduler.step_masks import Outcomes
from verl_server.scheduler.step_pipeline import MEMORY_REMEDY, StepPipeline
from verl_server.server_args import ServerArgs
from verl_server.worker.tp_worker import TpWorker

logger = logging.getLogger(__name__)

_NOTHING_ALLOWED = (
    "No token can be sampled: the grammar, allowed_token_ids, bad_words, logit_bias and min_new_tokens together forbid "
    "every token."
)
_MASK_TOO_LARGE = (
    "return_sampling_mask: a token was drawn from more than {most} tokens, because tokens of equal probability stay "
    "together. Use a smaller top_k."
)
_TOO_LARGE = (
    "Sampling for this request takes up to {needed} MiB in a step, but this server has {budget} MiB for it. "
    + MEMORY_REMEDY
)


class Scheduler:
    """The state of all live requests, and the turn of the loop that advances them."""

    def __init__(
        self,
        server_args: ServerArgs,
        worker: TpWorker,
        send: Callable[[SchedulerOutput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.server_args = server_args
        self.worker = worker
        self.send = send
        self.clock = clock
        runner = worker.runner
        self.planner = BatchPlanner(
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            max_rows=min(runner.max_rows, server_args.max_running_requests),
            chunked_prefill_size=server_args.prefill_chunk(runner.device.type),
            disable_radix_cache=server_args.disable_radix_cache,
            step_budget=runner.memory.step_budget,
            schedule_policy=server_args.schedule_policy,
            max_age=server_args.schedule_max_age,
            clock=clock,
        )
        self.requests: dict[str, Req] = {}
        """Accepted requests without a terminal entry yet, by rid."""
        self.grammars = Grammars(runner.vocab_size, runner.device, self.planner.rows.max_rows)
        self.control = ControlQueue(self, server_args.control_timeout, server_args.weight_update_lease)
        self.stats = SchedulerStats(clock)
        self.profiler = StepProfiler(server_args.profile_folder, worker.runner.device.type, clock)
        self._output = BatchOutput()
        self._arrivals = 0
        self._seeds = random.Random(server_args.random_seed)
        """Source of seeds for requests without a `sampling_seed`."""
        self.steps = StepPipeline(self.planner, worker, self.grammars, self)

    # -- the loop --------------------------------------------------------------------------------------------

    def handle(self, message: SchedulerInput) -> None:
        """Process one message, or queue it."""
        match message:
            case TokenizedGenerateReq():
                self._receive_request(message)
            case AbortReq():
                self._receive_abort(message)
            case FinishReq():
                if (req := self.requests.get(message.rid)) is not None:
                    self._remove(req)
            case FinishSessionReq():
                self.planner.finish_session(message.session_id)
            case GrammarTokenizer():
                self.grammars.load(message)
            case StartProfileReq() | StopProfileReq():
                self.send(self.profiler.handle(message))
            case WithdrawReq():
                self.control.withdraw(message.id)
            case _:
                self.control.receive(message)

    def advance(self) -> None:
        """Run one turn: the control requests that are ready, then one step; send the results."""
        self.control.run_ready()
        # A resume measures what other processes left.
        self.planner.admission.step_budget = self.worker.runner.memory.step_budget
        self._queue_compiled()
        self.emit()  # answer aborts before the next step, not after it
        if not self.has_runnable():
            self.steps.collect()
        elif (refusal := self.worker.weights.refusal()) is not None:
            self.settle()
            self.abort_all(refusal, status_code=503)
        else:
            self.profiler.step()
            self.steps.advance(only_started=self.control.draining)
            self.control.step_taken()
        self.emit()
        if self.server_args.check_invariants or not self.planner.running:
            self.check_invariants(deep=self.server_args.check_invariants)

    def has_runnable(self) -> bool:
        """Return True if the next turn may launch a step."""
        return len(self.requests) > len(self.grammars.waiting) and not self.control.holds_generation

    def has_work(self) -> bool:
        """Return True if the next turn has anything to do. If not, the loop may sleep until a message arrives."""
        idle = self.steps.is_empty and not self.has_runnable() and not self.grammars.has_compiled()
        return not idle or self.control.is_ready()

    @property
    def can_warm_up(self) -> bool:
        """True if the engine is idle and `Runner.warm_up` has something left to do."""
        return not self.requests and self.worker.runner.can_warm_up

    def settle(self) -> None:
        """Wait for the step in flight, if any, and send its results. Afterwards the host knows every token.

        Called before weights, memory or running requests change, and before the process ends.
        """
        self.steps.settle()

    def emit(self) -> None:
        """Send the entries that were collected since the last message, if any."""
        message = self._output.take(self.worker.weights.version)
        if message is not None:
            self.send(message)

    # -- requests in -----------------------------------------------------------------------------------------

    def _receive_request(self, message: TokenizedGenerateReq) -> None:
        if message.rid in self.requests:
            logger.error("Dropped a request, because another live request has the same rid %r.", message.rid)
            return
        runner, capacity = self.worker.runner, self.planner.max_tokens()
        try:
            check_request(message, runner.vocab_size, runner.context_length, capacity)
        except BadRequestError as error:
            self._refuse(message, FinishReason.refused(error))
            return
        refused = self._refusal_now(message)
        if refused is not None:
            self._refuse(message, refused)
            return
        max_new_tokens = message.sampling.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = min(runner.context_length, capacity + 1) - len(message.input_ids)
        seed = message.sampling.sampling_seed
        req = Req(message, self._arrivals + 1, max_new_tokens, self._seeds.getrandbits(63) if seed is None else seed)
        req.step_bytes, budget = runner.step_bytes(req.spec), runner.memory.step_budget
        if budget is not None and req.step_bytes > budget:
            self._refuse(message, _refused(400, _TOO_LARGE.format(needed=req.step_bytes >> 20, budget=budget >> 20)))
            return
        self._arrivals += 1
        self.stats.num_requests += 1
        self.requests[req.rid] = req
        if message.grammar:
            self.grammars.attach(req, message.grammar, message.grammar_bytes)
        if req.rid not in self.grammars.waiting:
            self._queue(req)

    def _queue_compiled(self) -> None:
        """Queue the requests whose grammar was compiled, in order of arrival."""
        for req in self.grammars.take_compiled():
            self._queue(req)

    def _queue(self, req: Req) -> None:
        """Put a request into the planner's queue, or end it if its grammar could not be compiled."""
        failure = None if req.grammar is None else req.grammar.compile_failure()
        self.planner.add(req)
        if failure is not None:
            self.end(req, failure)

    def _refuse(self, message: TokenizedGenerateReq, reason: FinishReason) -> None:
        self._output.add_refusal(message.rid, reason)
        self.stats.num_aborted += 1

    def _refusal_now(self, message: TokenizedGenerateReq) -> FinishReason | None:
        """Return the reason why the server refuses the request in its present state, None if it accepts it."""
        if message.grammar and self.grammars.refusal is not None:
            return _refused(400, self.grammars.refusal)
        refusal = self.worker.weights.refusal()
        if refusal is not None and not self.control.holds_generation:
            return _refused(503, refusal)
        if (superseded := self.control.border.refusal(message.weight_demand)) is not None:
            return superseded
        bound = self.server_args.max_queued_requests
        if bound is not None and len(self.planner.waiting) + len(self.grammars.waiting) >= bound:
            return _refused(503, "The request queue is full.")
        return None

    def _receive_abort(self, message: AbortReq) -> None:
        if message.abort_all:
            self.abort_all("Aborted")
        elif (req := self.requests.get(message.rid)) is not None:
            self.abort(req, "Aborted", None)

    # -- requests out ----------------------------------------------------------------------------------------

    def abort_all(self, message: str, status_code: int | None = None) -> None:
        """End every live request with the output that it has so far."""
        for req in list(self.requests.values()):
            self.abort(req, message, status_code)

    def demands(self) -> list[tuple[str, str]]:
        return [(req.rid, req.weight_demand) for req in self.requests.values() if req.weight_demand]

    def end_request(self, rid: str, reason: FinishReason) -> None:
        self.end(self.requests[rid], reason)

    def abort(self, req: Req, message: str, status_code: int | None, *, cache: bool = True) -> None:
        if status_code is None and not req.started:
            message = "Abort in waiting queue"
        self.end(req, FinishReason(type="abort", message=message, status_code=status_code), cache=cache)

    def end(self, req: Req, reason: FinishReason, *, cache: bool = True) -> None:
        """Answer a request with an abort, and free its resources."""
        self._remove(req, cache=cache)
        self.stats.num_aborted += 1
        self._output.add(req, reason, [], [])

    def _remove(self, req: Req, *, cache: bool = True) -> None:
        del self.requests[req.rid]
        self.grammars.release(req)
        if self.grammars.waiting.pop(req.rid, None) is None:
            self.planner.remove(req, cache=cache)

    # -- one step --------------------------------------------------------------------------------------------

    def process(self, batch: ScheduleBatch, output: ForwardOutput, prefilled: list[Req]) -> None:
        """Append the new tokens to their requests, end the finished requests, and collect the entries to send.

        The results of requests that ended since the launch are dropped.
        """
        for entry, part in output.prompt_logprobs.items():
            state = batch.reqs[entry].prompt_logprobs
            if state is not None:
                state.add(part)
        vocab_size, out = self.worker.runner.vocab_size, self._output
        outcomes = self._consume(batch, output) if batch.has_grammars else None
        entries: dict[RequestGrammar, tuple[Req, int]] = {}
        finished: list[tuple[Req, bool]] = []
        num_tokens = 0
        tokens = zip(batch.sampled, output.next_ids, output.logprobs, strict=True)
        for sampled, (req, token, logprob) in enumerate(tokens):
            if req.row < 0 or req in batch.left_out:
                continue
            if logprob == NOTHING_ALLOWED and (req.spec.masked or req.grammar is not None):
                out.add(req, _refused(400, _NOTHING_ALLOWED), [], [])
                finished.append((req, True))
                continue
            if not math.isfinite(logprob) or not 0 <= token < vocab_size:  # there was no distribution
                out.add(req, FinishReason(type="stop", matched="NaN happened"), [], [])
                finished.append((req, False))
                continue
            if req.spec.sampling_mask_num and not len(output.sampling_masks[sampled]):
                out.add(req, _refused(400, _MASK_TOO_LARGE.format(most=req.spec.sampling_mask_num)), [], [])
                finished.append((req, True))
                continue
            num_tokens += 1
            reason = req.append(token)
            index = out.add(req, reason, [token], [logprob])
            if req.grammar is not None:
                entries[req.grammar] = req, index
            if req.wants_candidates:
                out.add_candidates(index, req, output, sampled)
            if req.spec.adds_policy:
                out.add_policy(index, output, sampled)
            if req.prompt_logprobs is not None:
                out.add_prompt_logprobs(index, req)
            if reason is not None:
                finished.append((req, True))
        if outcomes is not None:
            for grammar, end in outcomes():
                if grammar in entries:  # else the request ended without its token
                    req, index = entries[grammar]
                    out.end(index, end)
                    if (req, True) not in finished:
                        finished.append((req, True))
        for req in prefilled:  # a request with max_new_tokens=0 ends as soon as its prompt is computed
            if req.max_new_tokens == 0 and not req.prefilling:
                index = out.add(req, FinishReason(type="length", length=0), [], [])
                out.add_prompt_logprobs(index, req)
                finished.append((req, True))
        for req, _ in finished:
            del self.requests[req.rid]
            self.grammars.release(req)
        self.planner.remove_finished(finished)
        self.stats.count_step(num_tokens)

    def _consume(self, batch: ScheduleBatch, output: ForwardOutput) -> Outcomes:
        """Advance the matchers of the requests that continue after their new token.

        Return a function that waits, and returns the requests that end. Meanwhile the tokens are processed.
        """
        assert self.grammars.masks is not None
        tokens = zip(batch.sampled, output.next_ids, output.logprobs, strict=True)
        return self.grammars.masks.consume(
            [
                (req.grammar, token)
                for req, token, logprob in tokens
                if req.grammar is not None and req.row >= 0 and req not in batch.left_out
                if math.isfinite(logprob) and token not in req.stop_ids
            ]
        )

    def internal_state(self) -> dict[str, Any]:
        """Return the figures on load, memory and weights for `/server_info`, `/v1/loads` and `/metrics`."""
        planner, weights, stats = self.planner, self.worker.weights, self.stats
        total, used = planner.max_tokens(), planner.num_used_tokens()
        prompt_tokens, cached_tokens = planner.num_prompt_tokens, planner.num_cached_tokens
        waiting_tokens = sum(len(req.token_ids) for req in planner.waiting)
        memory = self.worker.runner.memory.figures()
        return {
            "num_running_reqs": len(planner.running),
            "num_waiting_reqs": len(planner.waiting) + len(self.grammars.waiting),
            "num_retracted_reqs": planner.num_retracted,
            "num_used_tokens": used,
            "num_waiting_uncached_tokens": waiting_tokens,
            "num_total_tokens": used + waiting_tokens,
            "max_total_num_tokens": total,
            "token_usage": used / total,
            "cache_hit_rate": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
            "num_cached_pages": planner.cache.num_shareable,
            "gen_throughput": stats.gen_throughput(),
            "last_gen_throughput": stats.gen_throughput(),
            "effective_max_running_requests_per_dp": planner.rows.max_rows,
            "num_retractions": planner.num_retractions,
            "num_requests": stats.num_requests,
            "num_aborted_requests": stats.num_aborted,
            "num_steps": stats.num_steps,
            "prompt_tokens_total": prompt_tokens,
            "cached_tokens_total": cached_tokens,
            "output_tokens_total": stats.num_output_tokens,
            "weight_version": weights.version,
            "weights_state": weights.state,
            "refusal": weights.refusal(),
            "released": weights.released,
            "paused": self.control.paused,
            "draining": self.control.draining,
            "transaction": self.control.transaction.name if self.control.transaction.is_open else None,
            "memory": memory,
            "memory_usage": {
                "weight": round(memory["weight_bytes"] / 2**30, 3),
                "kvcache": round(memory["kv_cache_bytes"] / 2**30, 3),
                "token_capacity": total,
                "graph": {},
            },
        }

    def check_invariants(self, *, deep: bool) -> None:
        """Assert that every page is accounted for and every live request either waits or runs."""
        self.planner.check_invariants(deep)
        compiling = list(self.grammars.waiting.values())
        assert len(self.requests) == len(self.planner.waiting) + len(self.planner.running) + len(compiling)
        self.steps.check_invariants(deep)
        if deep:
            listed = sorted(req.rid for req in [*self.planner.waiting, *self.planner.running, *compiling])
            assert listed == sorted(self.requests), "a live request is neither waiting nor running"


def _refused(status_code: int, message: str) -> FinishReason:
    return FinishReason(type="abort", message=message, status_code=status_code)
