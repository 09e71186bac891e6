"""`Req`, one request's life in the scheduler, and `ScheduleBatch`, the requests of one step.

Four lengths say where a request stands:

    token_ids    |<------ cached_len ------>|<- extend_len ->|            |<--- remain_len --->|
                 KV is in the pool           this step        later steps  may still be sampled
                                                              ^ device_len ends the step

Decode (extend 1), a chunk of a prefill, and what follows a prefix-cache hit are all "extend from cached_len to
device_len".

These lengths move when a step is launched, not when it is computed, so that the next one can be planned meanwhile.
The newest token of a request may then be known to the device only: `num_pending` counts such tokens, which count as
part of the request everywhere but in `token_ids` and `output_ids`. `sound_len` follows behind: it moves when a step is
collected, and only what lies below it may be shared. The `BatchPlanner` moves the lengths, the `Scheduler` appends
tokens and finishes requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_server.io_struct import (
    BatchTokenIDOut,
    FinishReason,
    PromptLogprobs,
    TokenizedGenerateReq,
    TokenLogprobs,
)
from verl_server.sampling.spec import ForwardOutput, SampleSpec
from verl_server.scheduler.radix_cache import PageNode
from verl_server.worker.forward_batch import ForwardBatch


@dataclass(slots=True, eq=False)
class PromptLogprobState:
    """Log-probabilities of prompt[start:], gathered chunk by chunk; dropped and redone after a retraction."""

    start: int
    top_num: int
    requested_ids: list[int] | None
    logprobs: list[float | None] = field(default_factory=list)
    top: list[TokenLogprobs | None] = field(default_factory=list)
    requested: list[TokenLogprobs | None] = field(default_factory=list)

    def clear(self) -> None:
        self.logprobs, self.top, self.requested = [], [], []

    def add(self, part: PromptLogprobs) -> None:
        self.logprobs.extend(part.logprobs)
        self.top.extend(part.top or ())
        self.requested.extend(part.requested or ())

    def result(self, prompt_ids: list[int]) -> PromptLogprobs:
        """The whole answer; nothing comes before prompt[start], so the lists open with null."""
        return PromptLogprobs(
            token_ids=prompt_ids[self.start :],
            logprobs=[None, *self.logprobs],
            top=[None, *self.top] if self.top_num else None,
            requested=[None, *self.requested] if self.requested_ids is not None else None,
        )


class Req:
    """One request from arrival to its terminal message.

    Waiting: no row, no pages, `cached_len == 0`. Running: `pages` backs the first `device_len` tokens; the first
    `num_shared` of them belong to the prefix cache (held through `node`), the others to this request alone. Over:
    `row < 0` again; what steps in flight still give for it is dropped.
    """

    __slots__ = (
        "arrival",
        "cached_len",
        "cached_tokens",
        "compute_len",
        "device_len",
        "last_turn",
        "max_new_tokens",
        "node",
        "num_pending",
        "num_retractions",
        "output_ids",
        "page_updates",
        "pages",
        "prefilling",
        "private",
        "prompt_ids",
        "prompt_logprobs",
        "restarted",
        "rid",
        "row",
        "sound_len",
        "spec",
        "started",
        "step_bytes",
        "stop_ids",
        "token_ids",
        "wants_candidates",
    )

    def __init__(self, message: TokenizedGenerateReq, arrival: int, max_new_tokens: int, seed: int) -> None:
        self.rid = message.rid
        self.arrival = arrival
        """Order of arrival: the oldest request is admitted first and retracted last."""
        self.prompt_ids = message.input_ids
        self.output_ids: list[int] = []
        self.token_ids = list(message.input_ids)
        """Prompt and output, as far as known here."""
        self.max_new_tokens = max_new_tokens
        self.compute_len = len(message.input_ids) + max(max_new_tokens - 1, 0)
        """Tokens whose KV may ever be computed: all but the last one sampled."""
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
        )
        self.wants_candidates = self.spec.top_logprobs_num > 0 or self.spec.token_ids_logprob is not None
        self.prompt_logprobs: PromptLogprobState | None = None
        """Set until they were sent."""
        if message.return_logprob and message.logprob_start_len >= 0:
            start = min(message.logprob_start_len, len(self.prompt_ids) - 1)
            self.prompt_logprobs = PromptLogprobState(start, self.spec.top_logprobs_num, self.spec.token_ids_logprob)

        self.row = -1
        self.pages: list[int] = []
        self.node: PageNode | None = None
        self.cached_len = 0
        self.device_len = 0
        self.sound_len = 0
        """Leading tokens whose KV was computed by steps that were collected, or came from the prefix cache."""
        self.num_pending = 0
        """Tokens that steps in flight sample: at most one between two turns, two while a step is being collected."""
        self.page_updates: list[tuple[int, list[int]]] = []
        """(first column, pages) to write into the page table with the next step."""
        self.prefilling = False
        """Until the last chunk of its prefill was collected."""
        self.private = False
        """KV mixes weight versions: never shared through the prefix cache."""
        self.restarted = False
        """An update threw its KV away: its prefill ends before the next update may do the same."""
        self.started = False
        """Was admitted once; a weight update that waits, waits for it."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache when first admitted."""
        self.num_retractions = 0
        self.step_bytes = 0
        """Device memory that sampling takes for this request beyond a plain draw; set by the scheduler."""
        self.last_turn = 0
        """The last step that it was part of, counted while `StepLimits` are active."""

    @property
    def extend_len(self) -> int:
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        return self.max_new_tokens - len(self.output_ids) - self.num_pending

    @property
    def num_shared(self) -> int:
        return 0 if self.node is None else self.node.depth

    def reuse_limit(self) -> int:
        """Most leading tokens that may come from the prefix cache: one at least is computed, and all from
        `logprob_start_len` on whose log-probabilities are still wanted."""
        limit = len(self.token_ids) - 1
        return limit if self.prompt_logprobs is None else min(limit, self.prompt_logprobs.start)

    def append(self, token: int) -> FinishReason | None:
        """Take a sampled token. Returns why the request is over with it, None if it goes on."""
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
    """The requests of one step, the message for the model runners, and rank 0's sampling settings."""

    reqs: list[Req]
    forward: ForwardBatch
    specs: list[SampleSpec]
    sampled: list[Req]
    """Those of `reqs` that get a token, parallel to `specs` and `forward.sample`."""
    prefills: list[Req]
    """Those of `reqs` whose prefill this step goes on with, or ends."""

    @classmethod
    def build(cls, reqs: list[Req]) -> ScheduleBatch:
        """Turn planned lengths into one `ForwardBatch`, and move them: it will be launched at once.

        Consumes the requests' page updates. A token that is still pending is -1 in `input_ids`.
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
                    _ask_prompt_logprobs(forward, entry, req, req.prompt_logprobs)
            if device_len >= len(tokens) and req.max_new_tokens:
                sample.append(entry)
                sampled.append(req)
                req.num_pending += 1
            req.cached_len = device_len
        batch.specs = [req.spec for req in sampled]
        return batch

    def undo(self) -> None:
        """The step could not be launched: its requests that still run are where they were before `build`.

        They keep their pages. What the step may have written lies beyond `cached_len`, and is written again.
        """
        by_row = {req.row: req for req in self.reqs if req.row >= 0}
        for req, extend_len in zip(self.reqs, self.forward.extend_lens, strict=True):
            if req.row >= 0:
                req.cached_len -= extend_len
        for req in self.sampled:
            if req.row >= 0:
                req.num_pending -= 1
        for row, column, pages in reversed(self.forward.page_updates):
            if row in by_row:
                by_row[row].page_updates.insert(0, (column, pages))

    def reads_outputs(self) -> bool:
        """Whether the step after this one cannot be launched before the values of these tokens are known."""
        return any([spec.reads_outputs for spec in self.specs])


def _ask_prompt_logprobs(forward: ForwardBatch, entry: int, req: Req, state: PromptLogprobState) -> None:
    first = max(req.cached_len, state.start)
    if first < min(req.device_len, len(req.prompt_ids) - 1):
        forward.prompt_logprobs.append((entry, first - req.cached_len, state.top_num, state.requested_ids))
        more = req.device_len < len(req.prompt_ids)
        forward.prompt_next_ids.append(req.prompt_ids[req.device_len] if more else -1)


class BatchOutput:
    """Collects what one step has to say to the TokenizerManager, as one `BatchTokenIDOut`."""

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
        """Append one entry; returns its index."""
        out = self._out
        out.rids.append(req.rid)
        out.output_ids.append(tokens)
        out.output_logprobs.append(logprobs if req.spec.return_logprob else [])
        out.finish_reasons.append(finish_reason)
        out.cached_tokens.append(req.cached_tokens)
        out.num_retractions.append(req.num_retractions)
        return len(out.rids) - 1

    def add_refusal(self, rid: str, finish_reason: FinishReason) -> None:
        """A terminal entry for a request that never became a `Req`."""
        out = self._out
        out.rids.append(rid)
        out.output_ids.append([])
        out.output_logprobs.append([])
        out.finish_reasons.append(finish_reason)
        out.cached_tokens.append(0)
        out.num_retractions.append(0)

    def add_candidates(self, index: int, req: Req, output: ForwardOutput, sampled: int) -> None:
        """Top and requested log-probabilities of the one new token of entry `index`."""
        top, requested = output.top_logprobs, output.token_ids_logprobs
        if req.spec.top_logprobs_num and (found := top[sampled]) is not None:
            self._out.top_logprobs[index] = [found]
        if req.spec.token_ids_logprob is not None and (found := requested[sampled]) is not None:
            self._out.token_ids_logprobs[index] = [found]

    def add_prompt_logprobs(self, index: int, req: Req) -> None:
        """The prompt's part, with the first message of a request that asked for it."""
        if req.prompt_logprobs is not None:
            self._out.prompt_logprobs[index] = req.prompt_logprobs.result(req.prompt_ids)
            req.prompt_logprobs = None

    def take(self, weight_version: str) -> BatchTokenIDOut | None:
        """The message, if there is anything to say; starts an empty one."""
        if not self._out.rids:
            return None
        out, self._out = self._out, self._empty()
        out.weight_version = weight_version
        return out
