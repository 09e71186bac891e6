"""`Req`, the state of one request in the scheduler, and `ScheduleBatch`, the requests of one step.

Used by the `BatchPlanner`, the `StepPipeline` and the `Scheduler`. Three lengths describe the progress of a request:

    token_ids    |<------ cached_len ------>|<- extend_len ->|            |
                 KV is in the pool           this step        later steps  may still be sampled
                                                              ^ device_len ends the step

A decode (one token), a chunk of a prefill, and the rest of a prompt after a prefix-cache hit are all the same: extend
the KV from `cached_len` to `device_len`.

These lengths advance when a step is planned, not when it is computed, so that the next step can be planned while the
device computes. The newest token of a request may then exist on the device only. `num_pending` counts such tokens: they
are part of the request, but are not yet in `token_ids` and `output_ids`. `sound_len` advances when a step is collected,
and only the KV below `sound_len` may be shared. The `BatchPlanner` advances the lengths. The `Scheduler` appends tokens
and ends requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs, pack_ids
from verl_server.sampling.spec import ForwardOutput, SampleSpec
from verl_server.scheduler.cache.page_node import PageNode
from verl_server.scheduler.request_grammar import RequestGrammar
from verl_server.worker.forward_batch import ForwardBatch

Place = tuple[int, bool, bool, bool, int, bool, int]
"""(-priority, not started, not overdue, continues no cached history, -length of the cached prefix in pages, first turn,
number of the arrival)"""


@dataclass(slots=True, eq=False)
class PromptLogprobState:
    """Log-probabilities of prompt[start:], collected chunk by chunk. A retraction drops them to be computed again.

    The lists of bytes have the packed values of each chunk.
    """

    start: int
    top_num: int
    requested_ids: list[int] | None
    logprobs: list[bytes] = field(default_factory=list)
    ranks: list[bytes] = field(default_factory=list)
    top: list[TokenLogprobs | None] = field(default_factory=list)
    requested: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def per_token(self) -> int:
        """Number of log-probabilities that are reported for each token of the prompt."""
        return 1 + self.top_num + len(self.requested_ids or ())

    def num_reported(self, cached_len: int, chunk: int) -> int:
        """Return how many log-probabilities the `chunk` tokens after the first `cached_len` ones report."""
        return max(0, cached_len + chunk - max(cached_len, self.start)) * self.per_token

    def clear(self) -> None:
        self.logprobs, self.ranks, self.top, self.requested = [], [], [], []

    def add(self, part: PromptLogprobs) -> None:
        self.logprobs.append(part.packed_logprobs)
        self.ranks.append(part.packed_ranks)
        self.top.extend(part.top or ())
        self.requested.extend(part.requested or ())

    def result(self, prompt_ids: list[int]) -> PromptLogprobs:
        """Return the log-probabilities of prompt[start:].

        The first entry is None, because nothing predicts the first token.
        """
        return PromptLogprobs(
            packed_ids=pack_ids(prompt_ids[self.start :]),
            packed_logprobs=b"".join(self.logprobs),
            packed_ranks=b"".join(self.ranks),
            top=[None, *self.top] if self.top_num else None,
            requested=[None, *self.requested] if self.requested_ids is not None else None,
        )


class Req:
    """One request from its arrival to its terminal message.

    A waiting request has no row, no pages and `cached_len == 0`. The `pages` of a running request hold the KV of its
    first `device_len` tokens; the first `num_shared` pages belong to the prefix cache (the request holds them through
    `node`), the others to this request alone. A request that ended has `row < 0` again, and results of steps in flight
    for it are dropped.
    """

    __slots__ = (
        "arrival",
        "cached_len",
        "cached_tokens",
        "compute_len",
        "device_len",
        "grammar",
        "last_turn",
        "match",
        "max_new_tokens",
        "namespace",
        "node",
        "num_pending",
        "num_retractions",
        "output_ids",
        "overdue",
        "page_updates",
        "pages",
        "place",
        "prefilling",
        "priority",
        "private",
        "prompt_ids",
        "prompt_logprobs",
        "restarted",
        "rid",
        "row",
        "session_id",
        "session_over",
        "sound_len",
        "spec",
        "started",
        "step_bytes",
        "stop_ids",
        "token_ids",
        "turn",
        "wants_candidates",
        "weight_demand",
    )

    def __init__(self, message: TokenizedGenerateReq, arrival: int, max_new_tokens: int, seed: int) -> None:
        self.rid = message.rid
        self.arrival = arrival
        """Number in the order of arrival. The oldest request is retracted last."""
        self.priority = message.priority
        self.place: Place = (-message.priority, False, False, False, 0, False, arrival)
        """Sort key of waiting requests. `WaitingQueue` sets it."""
        self.overdue = False
        """True if the request has waited so long that it precedes the other requests of its priority."""
        self.match: PageNode | None = None
        """The last node of the prefix that was cached at the last check of the `WaitingQueue`."""
        self.session_id = message.session_id
        self.session_over = False
        """True if the session ended while the request waited or ran, so that no later request continues this request.
        """
        self.turn = 0
        """Number of the turns that the request continues, as far as it is known."""
        self.weight_demand = message.weight_demand
        """Demand on the weight version that samples every token, "" for any version."""
        self.namespace = message.namespace
        """Namespace of the prefix cache."""
        self.prompt_ids = message.input_ids
        self.output_ids: list[int] = []
        self.token_ids = list(message.input_ids)
        """Prompt and output tokens that the host knows."""
        self.max_new_tokens = max_new_tokens
        self.compute_len = len(message.input_ids) + max(max_new_tokens - 1, 0)
        """Largest number of tokens whose KV may be computed: all but the last sampled token."""
        self.stop_ids = frozenset(message.stop_ids)
        self.spec = SampleSpec(
            params=message.sampling,
            seed=seed,
            prompt_ids=self.prompt_ids,
            output_ids=self.output_ids,
            stop_ids=message.stop_ids,
            return_logprob=message.return_logprob,
            top_logprobs_num=message.top_logprobs_num if message.return_logprob else 0,
            token_ids_logprob=message.token_ids_logprob if message.return_logprob else None,
            sampling_mask_num=message.sampling_mask_num,
            bad_words_ids=message.bad_words_ids,
            has_grammar=bool(message.grammar),
        )
        self.wants_candidates = (
            self.spec.top_logprobs_num > 0 or self.spec.token_ids_logprob is not None or self.spec.sampling_mask_num > 0
        )
        self.prompt_logprobs: PromptLogprobState | None = None
        """Log-probabilities of the prompt. None if they were not requested, and after they were sent."""
        if message.return_logprob and message.logprob_start_len >= 0:
            start = min(message.logprob_start_len, len(self.prompt_ids) - 1)
            self.prompt_logprobs = PromptLogprobState(start, self.spec.top_logprobs_num, self.spec.token_ids_logprob)

        self.grammar: RequestGrammar | None = None
        """The grammar of the output. `Grammars` sets it."""

        self.row = -1
        self.pages: list[int] = []
        self.node: PageNode | None = None
        self.cached_len = 0
        self.device_len = 0
        self.sound_len = 0
        """Number of leading tokens whose KV comes from collected steps or from the prefix cache."""
        self.num_pending = 0
        """Number of tokens of the request that steps in flight, and the step that is planned ahead, sample: at most 2.
        """
        self.page_updates: list[tuple[int, list[int]]] = []
        """(first column, pages) entries that the next step writes into the page table."""
        self.prefilling = False
        """True until the last chunk of the prefill was collected."""
        self.private = False
        """True if the KV mixes weight versions. It is never shared through the prefix cache then."""
        self.restarted = False
        """True from an update that dropped the KV until the KV is computed again. The next update waits for this."""
        self.started = False
        """True if the request was ever admitted. A weight update with mode "wait" waits for such requests."""
        self.cached_tokens = 0
        """Number of prompt tokens that the prefix cache held at the first admission."""
        self.num_retractions = 0
        self.step_bytes = 0
        """Bytes of device memory that sampling takes for this request beyond a plain draw. The `Scheduler` sets it."""
        self.last_turn = 0
        """Number of the last step with this request, among the steps that `StepLimits` counted while active."""

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def num_shared(self) -> int:
        return 0 if self.node is None else self.node.depth

    def reuse_limit(self) -> int:
        """Return the largest number of leading tokens that may come from the prefix cache.

        At least the last token must be computed, and every token from `logprob_start_len` on as long as the request
        needs log-probabilities of the prompt.
        """
        limit = len(self.token_ids) - 1
        return limit if self.prompt_logprobs is None else min(limit, self.prompt_logprobs.start)

    def append(self, token: int) -> FinishReason | None:
        """Append a sampled token. Return the reason if the request ends with it, None if it continues.

        `RequestGrammar.end` says if its grammar ends it.
        """
        self.num_pending -= 1
        self.output_ids.append(token)
        self.token_ids.append(token)
        if token in self.stop_ids:
            return FinishReason(type="stop", matched=token)
        if len(self.output_ids) >= self.max_new_tokens:
            return FinishReason(type="length", length=len(self.output_ids))
        return None


@dataclass(slots=True)
class ScheduleBatch:
    """The requests of one step, the message to the model runners, and the sampling settings for rank 0."""

    reqs: list[Req]
    forward: ForwardBatch
    specs: list[SampleSpec]
    sampled: list[Req]
    """The `reqs` for which a token is sampled, parallel to `specs` and `forward.sample`."""
    prefills: list[Req]
    """The `reqs` whose prefill this step continues or ends."""
    left_out: set[Req] = field(default_factory=set)
    """Requests of `sampled` whose token is dropped, because it was sampled without a valid mask."""

    @classmethod
    def build(cls, reqs: list[Req]) -> ScheduleBatch:
        """Return the step that the planned lengths describe, and advance the lengths.

        The step must be launched before another one is built, or `undo` must reverse it.
        The page updates of `reqs` move into the step. A pending token is -1 in `input_ids`.
        """
        forward = ForwardBatch(
            rows=[req.row for req in reqs],
            cached_lens=[req.cached_len for req in reqs],
            extend_lens=[req.device_len - req.cached_len for req in reqs],
            input_ids=[],
            page_updates=[],
            sample=[],
        )
        batch = cls(reqs, forward, [], [], [])
        input_ids, sample, sampled = forward.input_ids, forward.sample, batch.sampled
        for entry, req in enumerate(reqs):
            cached_len, device_len, tokens = req.cached_len, req.device_len, req.token_ids
            if cached_len == len(tokens):
                input_ids.append(-1)
            else:
                input_ids += tokens[cached_len:device_len]
            if req.page_updates:
                forward.page_updates += [(req.row, column, pages) for column, pages in req.page_updates]
                req.page_updates = []
            if req.prefilling:
                batch.prefills.append(req)
                if req.prompt_logprobs is not None:
                    _request_prompt_logprobs(forward, entry, req, req.prompt_logprobs)
            if device_len >= len(tokens) and req.max_new_tokens:
                sample.append(entry)
                sampled.append(req)
                req.num_pending += 1
            req.cached_len = device_len
        batch.specs = [req.spec for req in sampled]
        return batch

    def undo(self) -> None:
        """Reverse `build` for the requests that still run. The step was not launched, or its launch failed.

        The requests keep their pages. The step may have written KV beyond `cached_len` only, and a later step writes
        this KV again.
        """
        by_row = {req.row: req for req in self.reqs if req.row >= 0}
        for req, extend_len in zip(self.reqs, self.forward.extend_lens, strict=True):
            if req.row >= 0:
                req.cached_len -= extend_len - (req in self.left_out)
        for req in self.sampled:
            if req.row >= 0 and req not in self.left_out:
                req.num_pending -= 1
        for row, column, pages in reversed(self.forward.page_updates):
            if row in by_row:
                by_row[row].page_updates.insert(0, (column, pages))

    def leave_out(self, reqs: list[Req]) -> None:
        """Drop the sampled tokens of `reqs`, which still run. A later step computes their newest token again.

        Call it after the forward pass of this step was launched, before its results are collected. If the next step
        was built already, call `repeat` of the next step, too.
        """
        for req in reqs:
            req.num_pending -= 1
            req.cached_len -= 1
        self.left_out.update(reqs)

    def repeat(self, reqs: list[Req]) -> bool:
        """Compute the newest token of `reqs` again, which the step before left out. This step only decodes.

        Return False, and change nothing, if one of `reqs` is not in this step.
        """
        entries = {req: entry for entry, req in enumerate(self.reqs)} if reqs else {}
        if any(req not in entries for req in reqs):
            return False
        for req in reqs:
            self.forward.cached_lens[entries[req]] -= 1
            self.forward.input_ids[entries[req]] = req.token_ids[-1]
        return True

    def reads_outputs(self) -> bool:
        """Return True if the next step needs the values of this step's tokens before it can be launched."""
        return any([spec.reads_outputs for spec in self.specs])

    @property
    def has_grammars(self) -> bool:
        """True if the step samples a token that a grammar constrains."""
        return any([req.grammar is not None for req in self.sampled])


def _request_prompt_logprobs(forward: ForwardBatch, entry: int, req: Req, state: PromptLogprobState) -> None:
    """Add to `forward` the prompt positions of the request whose log-probabilities this step can compute."""
    first = max(req.cached_len, state.start)
    if first < min(req.device_len, len(req.prompt_ids) - 1):
        forward.prompt_logprobs.append((entry, first - req.cached_len, state.top_num, state.requested_ids))
        more = req.device_len < len(req.prompt_ids)
        forward.prompt_next_ids.append(req.prompt_ids[req.device_len] if more else -1)


class BatchOutput:
    """Collects the entries of one step into a `BatchTokenIDOut` for the `TokenizerManager`."""

    def __init__(self) -> None:
        self._out = self._empty()

    @staticmethod
    def _empty() -> BatchTokenIDOut:
        return BatchTokenIDOut(
            rids=[],
            output_ids=[],
            output_logprobs=[],
            finish_reasons=[],
            weight_version="",
            cached_tokens=[],
            num_retractions=[],
        )

    def add(self, req: Req, finish_reason: FinishReason | None, tokens: list[int], logprobs: list[float]) -> int:
        """Append one entry and return its index."""
        out = self._out
        out.rids.append(req.rid)
        out.output_ids.append(tokens)
        out.output_logprobs.append(logprobs if req.spec.return_logprob else [])
        out.finish_reasons.append(finish_reason)
        out.cached_tokens.append(req.cached_tokens)
        out.num_retractions.append(req.num_retractions)
        return len(out.rids) - 1

    def end(self, index: int, finish_reason: FinishReason) -> None:
        """Set the finish reason of entry `index`."""
        self._out.finish_reasons[index] = finish_reason

    def add_refusal(self, rid: str, finish_reason: FinishReason) -> None:
        """Append a terminal entry for a request that never became a `Req`."""
        out = self._out
        out.rids.append(rid)
        out.output_ids.append([])
        out.output_logprobs.append([])
        out.finish_reasons.append(finish_reason)
        out.cached_tokens.append(0)
        out.num_retractions.append(0)

    def add_candidates(self, index: int, req: Req, output: ForwardOutput, sampled: int) -> None:
        """Set the top-k and the requested log-probabilities of the one new token of entry `index`."""
        top, requested = output.top_logprobs, output.token_ids_logprobs
        if req.spec.top_logprobs_num and (found := top[sampled]) is not None:
            self._out.top_logprobs[index] = [found]
        if req.spec.token_ids_logprob is not None and (found := requested[sampled]) is not None:
            self._out.token_ids_logprobs[index] = [found]
        if req.spec.sampling_mask_num:
            self._out.sampling_masks[index] = [output.sampling_masks[sampled]]

    def add_policy(self, index: int, output: ForwardOutput, sampled: int) -> None:
        """Set the report on edited logits for the one new token of entry `index`."""
        self._out.policy_logprobs[index] = [output.policy_logprobs[sampled]]
        if (choice := output.has_choice.get(sampled)) is not None:
            self._out.has_choice[index] = [choice]

    def add_prompt_logprobs(self, index: int, req: Req) -> None:
        """Set the prompt's log-probabilities in entry `index`, if they were requested and not sent yet."""
        if req.prompt_logprobs is not None:
            self._out.prompt_logprobs[index] = req.prompt_logprobs.result(req.prompt_ids)
            req.prompt_logprobs = None

    def take(self, weight_version: str) -> BatchTokenIDOut | None:
        """Return the message and start an empty one. Return None if there are no entries."""
        if not self._out.rids:
            return None
        out, self._out = self._out, self._empty()
        out.weight_version = weight_version
        return out
