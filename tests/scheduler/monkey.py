"""Random messages between the steps of a scheduler over the fakes, and the expected KV of every request."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.scheduler.fakes import VOCAB, Harness, chain, kv_entry, prompt
from verl_server.messages.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    FinishReq,
    FinishSessionReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
)
from verl_server.messages.weight_requests import (
    GetWeightsByNameReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.scheduler.schedule_batch import Req
from verl_server.worker.forward_batch import ForwardBatch


class Shadow:
    """The expected KV of each running request, recorded without the page table."""

    def __init__(self, harness: Harness) -> None:
        self._h = harness
        self.most_repeated = 0
        """The most tokens of a request that a step may compute again: 1 if masks may be late."""
        self._kv: dict[tuple[str, int], list[int]] = {}  # by key of `_life`
        self._lives: dict[int, list[tuple[str, int]]] = {}  # id of a batch -> keys of its entries
        harness.runner.on_launch = self.on_launch
        harness.runner.after_entry = self.after_entry

    def on_launch(self, batch: ForwardBatch) -> None:
        reqs = {req.row: req for req in self._h.scheduler.planner.running}
        self._lives[id(batch)] = [_life(reqs[row]) for row in batch.rows]
        for row, cached in zip(batch.rows, batch.cached_lens, strict=True):
            # KV that a new request finds in the prefix cache was computed under one version, the current one.
            if _life(reqs[row]) not in self._kv:
                self._kv[_life(reqs[row])] = chain(reqs[row].token_ids[:cached], self._h.runner.salt)

    def after_entry(self, batch: ForwardBatch, entry: int, tokens: list[int], context: list[int]) -> None:
        life, salt = self._lives[id(batch)][entry], self._h.runner.salt
        kv = self._kv[life]
        cached = batch.cached_lens[entry]
        assert 0 <= len(kv) - cached <= self.most_repeated
        del kv[cached:]
        for token in tokens:
            kv.append(kv_entry(kv[-1] if kv else 1, token, len(kv), salt))
        assert context == kv, f"{life} read wrong KV at {next(i for i, v in enumerate(kv) if context[i] != v)}"


def _life(req: Req) -> tuple[str, int]:
    """Return a key for the request from one retraction to the next."""
    return req.rid, req.num_retractions


class Monkey:
    """Sends random messages between steps."""

    def __init__(
        self,
        seed: int,
        modes: list[str],
        pause_modes: list[str],
        memory: bool,
        harness: Callable[..., Harness] = Harness,
        **settings: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.h = harness(**settings)
        self.h.runner.nan_at = lambda ids: self.rng.random() < 0.01
        self.shadow = Shadow(self.h)
        self.modes, self.pause_modes, self.memory = modes, pause_modes, memory
        self.prompts: dict[str, list[int]] = {}
        self.news: dict[str, int] = {}
        self.demands: dict[str, str] = {}
        self.silent: list[str] = []
        self.controls = 0
        self.arrival_rate, self.lengths = 0.5, [0, 1, 2, 5, 16, 30]
        """Probability of new requests before a step, and the values of their `max_new_tokens`."""

    def add_requests(self) -> None:
        rng, capacity = self.rng, self.h.scheduler.planner.max_tokens()
        length = rng.choice([1, 3, 4, 7, 12, 13, 20, 33])
        ids = prompt(rng.randrange(6), length)
        if rng.random() < 0.3 and (done := [rid for rid in self.h.finished if self.h.tokens.get(rid)]):
            before = rng.choice(done)  # the next turn of a conversation
            ids = (self.prompts[before] + self.h.tokens[before] + ids)[: capacity // 2]
        new = rng.choice(self.lengths)
        for _ in range(rng.choice([1, 1, 1, 4])):
            rid = f"r{len(self.prompts)}"
            self.prompts[rid], self.news[rid] = ids, new
            self.demands[rid] = self.h.weights.version if len(self.prompts) % 7 < 2 else ""
            self.h.add(
                rid,
                ids,
                new,
                return_logprob=rng.random() < 0.5,
                logprob_start_len=rng.choice([-1, -1, 0, len(ids) // 2]),
                stop_ids=rng.sample(range(9, VOCAB), 40) if rng.random() < 0.3 else [],
                frequency_penalty=rng.choice([0.0] * 19 + [1.0]),
                namespace=["", "", "salt", f"v{self.h.runner.salt}"][len(self.prompts) % 4],
                priority=[0, 0, 0, 5, -5][len(self.prompts) % 5],
                session_id=["", "", "a", f"s{len(self.prompts) // 8}"][len(self.prompts) % 4],
                weight_demand=self.demands[rid],
            )

    def disturb(self) -> None:
        rng, h = self.rng, self.h
        alive = list(h.scheduler.requests)
        dice = rng.random()
        if dice < 0.06 and alive:
            h.abort(rng.choice(alive))
        elif dice < 0.09 and alive:
            rid = rng.choice(alive)
            self.silent.append(rid)
            h.scheduler.handle(FinishReq(rid=rid))
        elif dice < 0.095:
            h.scheduler.handle(AbortReq(abort_all=True))
        elif dice < 0.11:
            few, broken = MemoryError("at its launch"), RuntimeError("an operator failed")
            h.runner.fail_with = few if len(self.prompts) % 2 else broken
        elif dice < 0.12:
            h.runner.fail_later_with = MemoryError("while it ran")
        elif dice < 0.16:
            self.send(UpdateWeightsFromTensorReq(named_tensors=[], mode=rng.choice(self.modes)))
        elif dice < 0.18:
            self.send(PauseGenerationReq(mode=rng.choice(self.pause_modes)))
        elif dice < 0.24:
            self.send(ContinueGenerationReq())
        elif dice < 0.26:
            self.send(FlushCacheReq(timeout=rng.choice([0.0, 20.0])))
        elif dice < 0.28:
            self.send(GetInternalStateReq())
        elif dice < 0.29:
            self.send(GetWeightsByNameReq(name="w"))
        elif dice < 0.3:
            h.scheduler.handle(FinishSessionReq(session_id=rng.choice(["a", f"s{len(self.prompts) // 8 - 1}"])))
        elif dice < 0.32 and self.memory:
            if h.weights.reason is None:
                self.send(ReleaseMemoryOccupationReq())
            else:
                self.send(ResumeMemoryOccupationReq())
                self.send(UpdateWeightsFromTensorReq(named_tensors=[]))

    def send(self, message: Any) -> None:
        self.controls += 1
        message.id = self.controls
        self.h.scheduler.handle(message)

    def play(self, requests: int) -> None:
        while len(self.prompts) < requests:
            if len(self.h.scheduler.requests) < 12 and self.rng.random() < self.arrival_rate:
                self.add_requests()
            self.disturb()
            self.h.clock.now += 1.0
            self.h.steps()
        self.send(ResumeMemoryOccupationReq())
        self.send(UpdateWeightsFromTensorReq(named_tensors=[]))
        self.send(ContinueGenerationReq())
        for _ in range(5000):
            if not self.h.scheduler.has_work():
                break
            self.h.clock.now += 1.0
            self.h.steps()

    def check_ends(self) -> None:
        h = self.h
        assert not h.scheduler.requests and sorted(h.replies) == list(range(1, self.controls + 1))
        ended = set(h.finished) | set(self.silent)
        assert ended == set(self.prompts) and not set(h.finished) & set(self.silent)
        for rid, reason in h.finished.items():
            if reason.type == "length":
                assert len(h.tokens[rid]) == self.news[rid]
            elif reason.type == "stop":
                assert reason.matched in ("NaN happened", *h.tokens[rid][-1:])
            else:
                assert reason.type == "abort" and reason.status_code in (None, 409, 500, 503), reason
                assert (reason.status_code == 409) == reason.at_border <= bool(self.demands[rid])
            assert not self.demands[rid] or set(h.versions[rid]) <= {self.demands[rid]}
            if h.logprobs[rid]:
                assert len(h.logprobs[rid]) == len(h.tokens[rid])
        assert h.runner.uncollected == 0
        planner = h.scheduler.planner
        planner.cache.evict(planner.pages.num_pages)
        assert planner.cache.num_namespaces == 0
        assert planner.pages.available == planner.pages.num_pages
