"""A model runner and a weight updater that compute with integers, and a harness around a `Scheduler`.

The fake runner has a KV cache of integers, one for each slot of a page. An entry is computed from the token, the
position, the weights and the entry before, and is written and read through a page table as in the real runner. The next
token is a hash of all entries that are read through the table, so that a stale, aliased or unwritten page changes the
output.

With `overlaps` the fake computes late, as a device does: in the order of launches, at the latest when a result is
requested. Where the batch marks a token as pending, the fake takes the token that it sampled itself.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from verl_server.errors import VerlServerError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    FinishReason,
    SchedulerOutput,
    TokenizedGenerateReq,
)
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    StagedReq,
    UpdateReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightReq,
)
from verl_server.sampling.spec import ForwardOutput, MakeMasks, SampleSpec, TokenMasks
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.scheduler import Scheduler
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import WeightsDescription
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.tp_worker import TpWorker
from verl_server.worker.weights.prepared import Prepared
from verl_server.worker.weights.stager import Staged

VOCAB = 1009
_MASK = (1 << 61) - 1
_GARBAGE = -7


def kv_entry(before: int, token: int, position: int, salt: int) -> int:
    return (before * 1_000_003 + token * 8191 + position * 131 + salt * 7_919 + 12345) & _MASK


def chain(tokens: Sequence[int], salt: int) -> list[int]:
    """Return the KV entries of `tokens`, all computed under one version of the weights."""
    out: list[int] = []
    for position, token in enumerate(tokens):
        out.append(kv_entry(out[-1] if out else 1, token, position, salt))
    return out


def next_token(kv: Sequence[int], salt: int) -> int:
    """Return a hash of all KV of a context and of the weights of this step. Ids 0 to 8 are never returned."""
    mixed = salt
    for value in kv:
        mixed = (mixed * 31 + value) & _MASK
    return 9 + (mixed ^ (mixed >> 29)) % (VOCAB - 9)


def logprob_of(token: int, position: int, salt: int) -> float:
    return -((token * 7 + position * 3 + salt) % 1000) / 128.0  # exact in float32, as log-probabilities are


def generate(prompt: Sequence[int], count: int, salt: int) -> list[int]:
    """Return the `count` tokens after `prompt`, if everything is computed under one version of the weights."""
    tokens, kv = list(prompt), chain(prompt, salt)
    for _ in range(count):
        token = next_token(kv, salt)
        kv.append(kv_entry(kv[-1], token, len(tokens), salt))
        tokens.append(token)
    return tokens[len(prompt) :]


def allowed_tokens(masks: TokenMasks, row: int) -> list[int]:
    """Return the tokens that the mask of a row of the step allows."""
    words = masks.words[masks.rows.index(row)].numpy()
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), count=VOCAB, bitorder="little")).tolist()


class FakeStep:
    """A launched step, which its runner computes later."""

    def __init__(self, runner: FakeModelRunner, batch: ForwardBatch, specs: list[SampleSpec]) -> None:
        self._runner, self._batch, self._specs = runner, batch, specs
        runner.uncollected += 1
        self._salt = runner.salt
        self._failure, runner.fail_later_with = runner.fail_later_with, None
        self._output: ForwardOutput | None = None
        self.masks: TokenMasks | None = None

    def compute(self) -> None:
        assert self._runner.salt == self._salt, "the weights changed during a step in flight"
        self._runner.masks = self.masks
        self._output = self._runner.compute(self._batch, self._specs)

    def result(self) -> ForwardOutput:
        self._runner.compute_until(self)
        self._runner.uncollected -= 1
        if self._failure is not None:
            raise self._failure
        assert self._output is not None
        output, self._output = self._output, None  # so that a second call fails
        return output


class FakeModelRunner:
    """Same interface as `ModelRunner`. The integer `salt` stands for the weights."""

    def __init__(self, num_pages: int, page_size: int, max_rows: int = 8, context_length: int = 512) -> None:
        self.num_pages, self.page_size, self.max_rows = num_pages, page_size, max_rows
        self.context_length, self.vocab_size = context_length, VOCAB
        self.device = torch.device("cpu")
        self.overlaps = False
        self.step_budget: int | None = None
        self.step_bytes: Callable[[SampleSpec], int] = lambda spec: 0
        self.can_warm_up = False
        self.is_early: Callable[[], bool] = lambda: False
        """Called at each launch: returns True if the device has finished all its work by now."""
        self.is_computed: Callable[[], bool] | None = None
        """What a launch passes to `make_masks`."""
        self.queue: list[FakeStep] = []
        self.uncollected = 0
        """The number of steps whose result was not collected yet."""
        self.last_tokens = [_GARBAGE] * max_rows
        self.salt = 0
        self.kv = [_GARBAGE] * (num_pages * page_size)
        self.table = [[0] * (context_length // page_size + 1) for _ in range(max_rows)]
        self.batches: list[ForwardBatch] = []
        self.on_launch: Callable[[ForwardBatch], None] | None = None
        self.after_entry: Callable[[ForwardBatch, int, list[int], list[int]], None] | None = None
        """Called with a batch, an entry, the entry's new tokens, and the KV of the entry's whole context."""
        self.fail_with: Exception | None = None
        """Raised by the next launch, if set."""
        self.fail_sampling_with: Exception | None = None
        """Raised by the next launch with masks, after the masks were made, if set."""
        self.fail_later_with: Exception | None = None
        """Raised by the result of the next step, if set."""
        self.masks: TokenMasks | None = None
        """The masks of the step that is computed."""
        self.nan_at: Callable[[list[int]], bool] | None = None
        self.computed_tokens = 0

    def launch(
        self, batch: ForwardBatch, specs: list[SampleSpec] | None, make_masks: MakeMasks | None = None
    ) -> FakeStep:
        assert specs is not None
        self._check_shape(batch, specs)
        if self.on_launch is not None:
            self.on_launch(batch)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        step = FakeStep(self, batch, specs)
        self.queue.append(step)
        if make_masks is not None:
            step.masks = make_masks(self.is_computed)
            if self.fail_sampling_with is not None:
                self.queue.remove(step)
                self.uncollected -= 1
                error, self.fail_sampling_with = self.fail_sampling_with, None
                raise error
        if not self.overlaps or self.is_early():
            self.compute_until(step)
        return step

    def compute_until(self, step: FakeStep) -> None:
        """Compute the launched steps up to `step`, unless `step` was computed already."""
        while step in self.queue:
            self.queue.pop(0).compute()

    def compute(self, batch: ForwardBatch, specs: list[SampleSpec]) -> ForwardOutput:
        for row, column, pages in batch.page_updates:
            self.table[row][column : column + len(pages)] = pages
        contexts = self._write_all(batch)
        self.batches.append(batch)
        out = ForwardOutput([], [], [], [])
        for row, (spec, entry) in enumerate(zip(specs, batch.sample, strict=True)):
            kv = contexts[entry]
            token, position = next_token(kv, self.salt), len(kv)
            if spec.adds_policy:
                out.policy_logprobs[row] = -1.0
            if self.masks is not None and row in self.masks.rows:
                allowed = allowed_tokens(self.masks, row)
                token = allowed[token % len(allowed)] if allowed else _GARBAGE  # the mask is late
            out.next_ids.append(token)
            self.last_tokens[batch.rows[entry]] = token
            bad = self.nan_at is not None and self.nan_at(spec.prompt_ids)
            out.logprobs.append(float("nan") if bad else logprob_of(token, position, self.salt))
            out.top_logprobs.append(self._candidates(spec.top_logprobs_num, token))
            asked = spec.token_ids_logprob
            out.token_ids_logprobs.append(None if asked is None else TokenLogprobs.of([-1.0] * len(asked), asked))
        self._prompt_logprobs(batch, out)
        return out

    def warm_up(self) -> bool:
        raise AssertionError("there is nothing to warm up")

    @property
    def memory(self) -> FakeModelRunner:
        return self

    def figures(self) -> dict[str, Any]:
        return {"weight_bytes": 0, "kv_cache_bytes": len(self.kv) * 8}

    def _check_shape(self, batch: ForwardBatch, specs: list[SampleSpec]) -> None:
        assert len(batch.rows) == len(batch.cached_lens) == len(batch.extend_lens) > 0
        assert len(set(batch.rows)) == len(batch.rows), "a row occurs twice in a batch"
        assert sum(batch.extend_lens) == len(batch.input_ids) and min(batch.extend_lens) >= 1
        assert self.overlaps or min(batch.input_ids) >= 0, (
            "a token is pending, but every step was collected before the next one"
        )
        for spec, entry in zip(specs, batch.sample, strict=True):
            position = batch.cached_lens[entry] + batch.extend_lens[entry]
            known = len(spec.prompt_ids) + len(spec.output_ids)
            assert known == position or (position == known + 1 and self.overlaps and not spec.reads_outputs)

    def _slot(self, row: int, position: int) -> int:
        return self.table[row][position // self.page_size] * self.page_size + position % self.page_size

    def _write_all(self, batch: ForwardBatch) -> list[list[int]]:
        """Write the new tokens of all entries, then read and return the whole context of each entry."""
        start, salt = 0, self.salt
        new_tokens = []
        for row, cached, extend in zip(batch.rows, batch.cached_lens, batch.extend_lens, strict=True):
            tokens = batch.input_ids[start : start + extend]
            if tokens == [-1]:
                tokens = [self.last_tokens[row]]
            before = self.kv[self._slot(row, cached - 1)] if cached else 1
            for position, token in enumerate(tokens, cached):
                before = kv_entry(before, token, position, salt)
                self.kv[self._slot(row, position)] = before
            new_tokens.append(tokens)
            start += extend
        self.computed_tokens += start
        contexts = []
        for entry, row in enumerate(batch.rows):
            length = batch.cached_lens[entry] + batch.extend_lens[entry]
            contexts.append([self.kv[self._slot(row, position)] for position in range(length)])
            if self.after_entry is not None:
                self.after_entry(batch, entry, new_tokens[entry], contexts[-1])
        return contexts

    def _candidates(self, count: int, token: int) -> TokenLogprobs | None:
        return TokenLogprobs.of([-0.5] * count, [token] * count) if count else None

    def _prompt_logprobs(self, batch: ForwardBatch, out: ForwardOutput) -> None:
        starts = [sum(batch.extend_lens[:entry]) for entry in range(len(batch.rows))]
        asked = zip(batch.prompt_logprobs, batch.prompt_next_ids, strict=True)
        for (entry, first, top_num, requested), next_id in asked:
            start, extend = starts[entry], batch.extend_lens[entry]
            tokens = batch.input_ids[start + first + 1 : start + extend] + ([next_id] if next_id >= 0 else [])
            position = batch.cached_lens[entry] + first + 1
            out.prompt_logprobs[entry] = PromptLogprobs.of(
                token_ids=tokens,
                logprobs=[logprob_of(token, position + i, self.salt) for i, token in enumerate(tokens)],
                ranks=[1] * len(tokens),
                top=[self._candidates(top_num, token) for token in tokens] if top_num else None,
                requested=[TokenLogprobs.of([-2.0], [requested[0]]) for _ in tokens] if requested else None,
            )


class FakeWeights:
    """Same interface as `WeightUpdater`. Every update increments the salt. In a transaction, only the end does."""

    def __init__(self, runner: FakeModelRunner) -> None:
        self.runner = runner
        self.version, self.state, self.epoch = "0", "serving", 0
        self.reason: str | None = None
        self.next_outcome = "ok"  # or "refused", "torn"
        self.next_check: VerlServerError | None = None
        self.handled: list[WeightReq] = []
        self.in_transaction = False
        self.wrote_in_transaction = False
        self.released: list[str] = []

    def refusal(self) -> str | None:
        return self.reason

    def check(self, req: WeightReq) -> None:
        if self.next_check is not None:
            error, self.next_check = self.next_check, None
            raise error

    def handle(self, req: WeightReq, prepared: Prepared | None = None) -> ControlReply:
        self.handled.append(req)
        name = type(req).__name__
        outcome, self.next_outcome = self.next_outcome, "ok"
        if outcome == "refused":
            return ControlReply(id=req.id, success=False, message="refused", status_code=400)
        if isinstance(req, UpdateReq):
            if outcome == "torn":
                self._change()
                self.state, self.reason = "torn", "The weights are torn."
                return ControlReply(id=req.id, success=False, message="torn", status_code=500)
            if self.in_transaction:
                self.wrote_in_transaction = True
            else:
                self._change(req.weight_version)
        elif isinstance(req, BeginWeightUpdateReq):
            self.in_transaction = True
        elif isinstance(req, EndWeightUpdateReq):
            if self.wrote_in_transaction and req.discard:
                self._change()
                self.state, self.reason = "torn", "The weights are torn."
            elif self.wrote_in_transaction:
                self._change(req.weight_version)
            self.in_transaction = self.wrote_in_transaction = False
        elif isinstance(req, UpdateWeightVersionReq):
            self.version = req.new_version
        elif name == "ReleaseMemoryOccupationReq":
            self.state, self.reason = "asleep", "The KV cache is released."
            self.runner.kv = [_GARBAGE] * len(self.runner.kv)
            self.epoch += 1
        elif name == "ResumeMemoryOccupationReq":
            self.state, self.reason = "serving", None
        return ControlReply(id=req.id, success=True, message=name)

    def _change(self, label: str | None = None) -> None:
        self.runner.salt += 1
        self.epoch += 1
        self.version = label or str(self.runner.salt)
        self.state, self.reason = "serving", None


class FakeStager:
    """Same interface as `Stager`. Requests are staged at once, or in `finish`. `next_refusal` refuses the next one."""

    def __init__(self) -> None:
        self.hold = False
        """Keep submitted requests until `finish` is called."""
        self.next_refusal: VerlServerError | None = None
        self.waiting: list[StagedReq] = []
        self.staged: dict[int, StagedReq] = {}
        self.dropped: list[int] = []
        self._outcomes: list[tuple[int, VerlServerError | None]] = []

    def submit(self, req: StagedReq) -> None:
        self.waiting.append(req)
        if not self.hold:
            self.finish()

    def finish(self) -> None:
        """Stage or refuse all submitted requests."""
        for req in self.waiting:
            error, self.next_refusal = self.next_refusal, None
            if error is None and req.id not in self.dropped:
                self.staged[req.id] = req
            self._outcomes.append((req.id, error))
        self.waiting = []

    def finished(self) -> list[tuple[int, VerlServerError | None]]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take(self, request_id: int) -> Staged:
        return Staged(self.staged.pop(request_id))

    def drop(self, request_id: int) -> None:
        self.dropped.append(request_id)
        self.staged.pop(request_id, None)


class Clock:
    """A clock that moves only when a test changes `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Harness:
    """A scheduler over the fakes. It records the messages that the scheduler sends, and checks the stream's rules."""

    def __init__(self, num_pages: int = 64, page_size: int = 4, max_rows: int = 8, **settings: Any) -> None:
        context_length = settings.pop("context_length", 512)
        overlaps = settings.pop("overlaps", False)
        defaults = {"model_path": "fake", "chunked_prefill_size": 16, "check_invariants": True, "random_seed": 0}
        self.args = ServerArgs(page_size=page_size, max_running_requests=max_rows, **(defaults | settings))
        self.clock = Clock()
        self.worker = self.make_worker(num_pages, page_size, max_rows, context_length)
        self.runner.overlaps = overlaps
        self.worker.is_recoverable = self.is_recoverable  # type: ignore[method-assign]
        self.runner.is_early = functools.partial(random.Random(0).choice, [True, False, False])
        self.scheduler = Scheduler(self.args, self.worker, self.receive, self.clock)
        self.sent: list[SchedulerOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.versions: dict[str, list[str]] = {}
        self.finished: dict[str, FinishReason] = {}
        self.last: dict[str, tuple[BatchTokenIDOut, int]] = {}
        self.replies: dict[int, ControlReply] = {}

    def make_worker(self, num_pages: int, page_size: int, max_rows: int, context_length: int) -> TpWorker:
        self.runner = FakeModelRunner(num_pages, page_size, max_rows, context_length)
        self.weights = FakeWeights(self.runner)
        self.stager = FakeStager()
        return TpWorker(self.runner, self.weights, self.stager, TpGroup())

    def is_recoverable(self, error: Exception) -> bool:
        """Return what the real worker returns, but False for a failed assertion of a fake, which must fail the test."""
        return not isinstance(error, AssertionError) and TpWorker.is_recoverable(self.worker, error)

    def receive(self, message: SchedulerOutput) -> None:
        self.sent.append(message)
        if isinstance(message, ControlReply):
            assert message.id not in self.replies, "two replies to one control request"
            self.replies[message.id] = message
            return
        for index, rid in enumerate(message.rids):
            assert rid not in self.finished, f"{rid} was mentioned after its terminal entry"
            tokens = message.output_ids[index]
            assert len(message.output_logprobs[index]) in (0, len(tokens))
            self.tokens.setdefault(rid, []).extend(tokens)
            self.logprobs.setdefault(rid, []).extend(message.output_logprobs[index])
            self.versions.setdefault(rid, []).extend([message.weight_version] * len(tokens))
            self.last[rid] = (message, index)
            if (part := message.prompt_logprobs.get(index)) is not None:
                assert len(part.logprobs) == len(part.token_ids), "log-probabilities of a prompt are missing"
            if (reason := message.finish_reasons[index]) is not None:
                self.finished[rid] = reason

    def add(
        self, rid: str, prompt: Sequence[int], new: int | None = 8, frequency_penalty: float = 0.0, **fields: Any
    ) -> None:
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0, frequency_penalty=frequency_penalty)
        self.scheduler.handle(TokenizedGenerateReq(rid=rid, input_ids=list(prompt), sampling=sampling, **fields))

    def abort(self, rid: str) -> None:
        self.scheduler.handle(AbortReq(rid=rid))

    def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.advance()

    def control(self, message: Any) -> ControlReply | None:
        """Send a control request, advance the scheduler once, and return the reply if there is one."""
        self.scheduler.handle(message)
        self.scheduler.advance()
        return self.replies.get(message.id)

    def run(self, limit: int = 2000) -> None:
        """Advance the scheduler until it has no work."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            self.scheduler.advance()
        raise AssertionError(f"still running after {limit} turns: {list(self.scheduler.requests)}")


def prompt(seed: int, length: int) -> list[int]:
    """Return a deterministic prompt, another one for every seed."""
    return [10 + (seed * 7919 + i * i * 31 + i) % (VOCAB - 10) for i in range(length)]


def update(id: int, mode: Any = "wait", **fields: Any) -> UpdateWeightsFromTensorReq:
    return UpdateWeightsFromTensorReq(id=id, named_tensors=[], mode=mode, **fields)


def join(id: int) -> InitWeightsUpdateGroupReq:
    return InitWeightsUpdateGroupReq(id=id, master_address="h", master_port=1, rank_offset=1, world_size=2)


NOWHERE = WeightsDescription(id="d", allocations=[], tensors=[])
ELSEWHERE = WeightsDescription(id="e", allocations=[], tensors=[])


def serving(new: int = 10, count: int = 2, **settings: Any) -> Harness:
    """Return a harness with `count` running requests, three steps after their start."""
    h = Harness(**({"chunked_prefill_size": 64} | settings))
    for i in range(count):
        h.add(f"r{i}", prompt(i, 9), new)
    h.steps(3)
    return h
