"""Pushes of every kind, transactions, generations, pauses, sleeps, faults and lost leases, interleaved at random.

The scheduler, the control queue, transactions, the `WeightUpdater`, its sources and their plans over shared memory are
real. The model is a fake whose next token is a hash of every weight and of all keys and values that it reads. Three
independent checks judge the run:

- the shadow of test_scheduler_fuzz: what each context must have read through the page table;
- a book that is kept from the replies alone: what every parameter must be now, and whether requests may generate;
- recomputation of whole streams under the versions that their tokens carry, and of all log-probabilities.

Requests mix priorities, sessions, grammars, bad words of several tokens, and log-probabilities of prompts and of
candidates.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.grammar.conftest import EOS
from tests.grammar.local_matchers import LocalMatchers
from tests.parity.mixed_requests import grammar_tokenizer
from tests.scheduler.fakes import FakeModelRunner, Harness, generate, logprob_of, prompt
from tests.scheduler.monkey import Shadow
from tests.weight_sync import described
from tests.weight_sync.fakes import SHAPES, FakeRunner, random_weights
from verl_server.errors import VerlServerError
from verl_server.grammar.source import Grammar, translate
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import (
    BatchTokenIDOut,
    ContinueGenerationReq,
    ControlReply,
    FlushCacheReq,
    PauseGenerationReq,
    SchedulerOutput,
    TokenizedGenerateReq,
    WithdrawReq,
)
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    StagedReq,
    UnregisterWeightsReq,
    UpdateReq,
    UpdateWeightsFromTensorReq,
    WeightsCheckerReq,
)
from verl_server.sampling_params import SamplingParams
from verl_server.weight_sync.receiver.plan import UpdatePlan
from verl_server.worker.tp_worker import TpWorker
from verl_server.worker.weights.stager import Staged, discard
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater

Weights = dict[str, torch.Tensor]


def salt_of(weights: Weights) -> int:
    """Return a number that depends on every bit of every parameter."""
    salt = 0
    for name in SHAPES:
        for value in weights[name].flatten().tolist():
            salt = (salt * 1_000_003 + hash(value)) & ((1 << 61) - 1)
    return salt


class WeighedRunner(FakeModelRunner):
    """The scheduler's fake model runner, with real weights from which `salt` is computed."""

    def __init__(self, *sizes: int, has_backup: bool) -> None:
        self.parts = FakeRunner()
        self.weight_map = self.parts.weight_map
        super().__init__(*sizes)
        self._backup: Weights | None = None
        self._has_backup = has_backup

    @property
    def salt(self) -> int:
        return salt_of(self.held())

    @salt.setter
    def salt(self, value: int) -> None:
        pass

    def held(self) -> Weights:
        return {name: self.weight_map.read(name) for name in SHAPES}

    def fill(self, weights: Weights) -> None:
        for name, slot in self.weight_map.slots.items():
            slot.copy_from(weights[name])

    def synchronize(self) -> None: ...

    def release_weights(self, keep_contents: bool | None = None) -> None:
        self._backup = self.held() if self._has_backup else None
        self.fill({name: torch.full(shape, -7.0) for name, shape in SHAPES.items()})

    def resume_weights(self) -> bool:
        self.fill(self._backup or {name: torch.zeros(shape) for name, shape in SHAPES.items()})
        return self._backup is not None

    @property
    def memory(self) -> WeighedRunner:
        return self

    def check_release(self, tags: list[str]) -> None: ...

    def release_kv_cache(self) -> None:
        self.kv = [-7] * len(self.kv)

    def resume_kv_cache(self) -> None: ...

    def release_cuda_graphs(self) -> None: ...

    def resume_cuda_graphs(self) -> None: ...


class TurnedStager:
    """A `Stager` without a thread, over real sources. `turn` prepares one request."""

    def __init__(self, sources: WeightSources) -> None:
        self._sources = sources
        self.queue: list[Staged] = []
        self._items: dict[int, Staged] = {}
        self._outcomes: list[tuple[int, VerlServerError | None]] = []

    def submit(self, req: StagedReq) -> None:
        self._items[req.id] = Staged(req)
        self.queue.append(self._items[req.id])

    def turn(self) -> None:
        item = self.queue.pop(0)
        try:
            prepared = self._sources.prepare(item.req)
        except VerlServerError as error:
            self._items.pop(item.req.id, None)
            self._outcomes.append((item.req.id, error))
            return
        if item.dropped:
            discard(prepared)
        else:
            item.prepared = prepared
        self._outcomes.append((item.req.id, None))

    def finished(self) -> list[tuple[int, VerlServerError | None]]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take(self, request_id: int) -> Staged:
        return self._items.pop(request_id)

    def drop(self, request_id: int) -> None:
        item = self._items.pop(request_id)
        item.dropped = True
        if item.prepared is not None:
            discard(item.prepared)


class Book:
    """The expected weights, computed from the requests and from their replies in order."""

    def __init__(self, weights: Weights, has_backup: bool) -> None:
        self.meant, self._has_backup = dict(weights), has_backup
        self.version = "default"
        self.unwritten: set[str] = set()
        self.asleep = self.kv_released = False
        self.transaction: BeginWeightUpdateReq | None = None
        self.transaction_wrote: set[str] = set()
        self.transaction_failed = False
        self.sent: dict[int, tuple[Any, Weights, bool]] = {}
        """Request id -> (request, its weights, True if its copy fails half way)."""
        self.salts: dict[str, int] = {}
        self.torn = self.nonfinite = self.lost_leases = 0

    @property
    def touched(self) -> bool:
        return self.transaction is not None and (bool(self.transaction_wrote) or self.transaction_failed)

    @property
    def serves(self) -> bool:
        return not (self.asleep or self.kv_released or self.unwritten or self.transaction)

    def on_tokens(self, message: BatchTokenIDOut, salt: int) -> None:
        assert self.serves, "generated without whole weights"
        assert message.weight_version == self.version
        assert salt == salt_of(self.meant), "the weights differ from those that were pushed"
        assert self.salts.setdefault(self.version, salt) == salt, "one version has two contents"

    def on_reply(self, reply: ControlReply) -> None:
        req, brings, fails = self.sent.pop(reply.id)
        if isinstance(req, UpdateReq):
            self._on_update(req, reply, brings, fails)
        elif not reply.success:
            return
        elif isinstance(req, BeginWeightUpdateReq):
            assert self.transaction is None and not self.asleep
            self.transaction, self.transaction_wrote, self.transaction_failed = req, set(), False
        elif isinstance(req, EndWeightUpdateReq):
            assert self.transaction is not None and req.transaction_id == self.transaction.transaction_id
            if req.discard:
                self.lose_transaction()
            else:
                self._on_end(req, reply)
        elif isinstance(req, ReleaseMemoryOccupationReq):
            self._on_release(req.tags or ["weights", "kv_cache"])
        elif isinstance(req, ResumeMemoryOccupationReq):
            self._on_resume(req.tags)
        elif isinstance(req, WeightsCheckerReq):
            self.unwritten = set(SHAPES)

    def _on_update(self, req: UpdateReq, reply: ControlReply, brings: Weights, fails: bool) -> None:
        is_bad = not all(bool(tensor.isfinite().all()) for tensor in brings.values())
        is_found = reply.status_code == 400 and "holds NaN or infinity" in reply.message
        self.nonfinite += is_found
        if not reply.success and not is_found and not (fails and reply.status_code == 500):
            assert reply.status_code in (400, 404, 409, 499, 503, 504), reply.message
            return
        assert not self.asleep
        assert not is_found or (is_bad and not req.allow_nonfinite)
        assert not reply.success or not is_bad or req.allow_nonfinite, "NaN or infinity would be served"
        self.meant |= brings
        names = set(brings)
        is_whole = names == set(SHAPES)
        assert is_whole or req.partial or req.transaction_id is not None, "nobody said that the update is partial"
        if not reply.success:
            self.torn += 1
            if self.transaction is None:
                self.unwritten = set(SHAPES)
            else:
                self.transaction_wrote, self.transaction_failed = set(), True
        elif self.transaction is None:
            self.unwritten -= names
            self.version = reply.payload["weight_version"]
            self._check_coverage(reply, names)
        else:
            assert "weight_version" not in reply.payload
            self.transaction_wrote |= names

    def _check_coverage(self, reply: ControlReply, written: set[str]) -> None:
        """Assert that the reply to a new version names the parameters that it did not bring."""
        rest = [name for name in SHAPES if name not in written]
        assert reply.payload["not_covered"] == {"count": len(rest), "names": rest}
        assert ("Not covered" in reply.message) == (bool(rest) and bool(written))

    def _on_end(self, req: EndWeightUpdateReq, reply: ControlReply) -> None:
        assert self.transaction is not None
        self._check_coverage(reply, self.transaction_wrote)
        full = self.transaction.full
        if full is None:
            full = self.transaction.transaction_id is not None
        if (full and not req.partial) or self.transaction_failed:
            assert self.transaction_wrote == set(SHAPES), "the transaction ended with parameters missing"
        self.unwritten -= self.transaction_wrote
        self.version = reply.payload["weight_version"]
        self.transaction = None

    def lose_transaction(self) -> None:
        self.unwritten = set(SHAPES) if self.touched else self.unwritten
        self.transaction = None

    def _on_release(self, tags: list[str]) -> None:
        self.kv_released |= "kv_cache" in tags
        if "weights" in tags:
            assert self.transaction is None
            self.asleep = True

    def _on_resume(self, tags: list[str] | None) -> None:
        if tags is None or "kv_cache" in tags:
            self.kv_released = False
        if self.asleep and (tags is None or "weights" in tags):
            self.asleep = False
            if not self._has_backup:
                self.unwritten = set(SHAPES)


class WeighedHarness(Harness):
    has_backup = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scheduler.grammars.make_matchers = LocalMatchers
        self.scheduler.handle(grammar_tokenizer())
        self.asked: dict[str, TokenizedGenerateReq] = {}

    def make_worker(self, *sizes: int) -> TpWorker:
        self.runner = self.weighed = WeighedRunner(*sizes, has_backup=self.has_backup)
        self.weighed.fill(random_weights(0))
        tp = TpGroup()
        self.sources = WeightSources(self.weighed, tp, self.args)  # type: ignore[arg-type]
        self.turned = TurnedStager(self.sources)
        self.updater = WeightUpdater(self.weighed, tp, self.sources, self.args)  # type: ignore[arg-type]
        self.book = Book(random_weights(0), self.has_backup)
        return TpWorker(self.runner, self.updater, self.turned, tp)

    def receive(self, message: SchedulerOutput) -> None:
        if isinstance(message, ControlReply):
            self.book.on_reply(message)
        elif any(message.output_ids):
            self.note_lost_lease()
            self.book.on_tokens(message, self.weighed.salt)
            self.check_logprobs(message, self.weighed.salt)
        super().receive(message)

    def check_logprobs(self, message: BatchTokenIDOut, salt: int) -> None:
        """Assert that a message has what its requests asked for, computed under the version of its tokens."""
        for index, rid in enumerate(message.rids):
            if rid not in self.asked:  # other tests use this harness with requests of their own
                continue
            req, tokens = self.asked[rid], message.output_ids[index]
            before = len(self.tokens.get(rid, ()))
            position = len(req.input_ids) + before
            logprobs = [logprob_of(token, position + i, salt) for i, token in enumerate(tokens)]
            assert message.output_logprobs[index] == (logprobs if req.return_logprob else [])
            reported = bool(tokens) and req.return_logprob
            assert (index in message.top_logprobs) == (reported and req.top_logprobs_num > 0)
            assert (index in message.token_ids_logprobs) == (reported and req.token_ids_logprob is not None)
            has_prompt = reported and req.logprob_start_len >= 0 and not before
            assert (index in message.prompt_logprobs) == has_prompt
            if has_prompt:
                start, part = req.logprob_start_len, message.prompt_logprobs[index]
                prompt = [logprob_of(token, i, salt) for i, token in enumerate(req.input_ids)]
                assert part.logprobs == [None, *prompt[start + 1 :]]
                assert req.top_logprobs_num == 0 or len(part.top or ()) == len(part.logprobs)

    def note_lost_lease(self) -> None:
        """Record a lost lease, which is the one change without a reply."""
        if self.book.transaction is not None and not self.scheduler.control.transaction.is_open:
            self.book.lost_leases += 1
            self.book.lose_transaction()


class Trainer:
    """Registered memory, which is written only while no push of it is in flight, as a sender ensures."""

    def __init__(self, id: str, names: list[str]) -> None:
        self.id, self.names = id, names
        self._memory = described.Trainer()
        for name in names:
            self._memory.place(name, torch.zeros(SHAPES[name]))

    def description(self) -> Any:
        return self._memory.description(self.id)

    def step(self, weights: Weights) -> Weights:
        for name in self.names:
            self._memory.placed[name][0].copy_(weights[name])
        return {name: weights[name] for name in self.names}


class Monkey:
    """Sends random messages, and advances the stager and the clock at random between steps."""

    def __init__(self, seed: int, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        WeighedHarness.has_backup = seed % 2 == 1
        self.h = WeighedHarness(
            num_pages=20,
            max_rows=6,
            weight_update_lease=12.0,
            control_timeout=100.0,
            overlaps=seed % 4 >= 2,
            schedule_policy=policy,
            schedule_max_age=40.0,
        )
        self.book = self.h.book
        self.shadow = Shadow(self.h)
        self.serial = self.made = 0
        self.prompts: dict[str, list[int]] = {}
        self.trainers: list[Trainer] = []
        self.in_flight: dict[int, Trainer] = {}
        self._failing: set[int] = set()
        self._patch(monkeypatch)

    def _patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the copies of the requests in `_failing` raise after they wrote."""
        handle, commit, failing = self.h.updater.handle, UpdatePlan.commit, self._failing
        current: list[int] = []

        def watched_handle(req: Any, prepared: Any = None) -> ControlReply:
            current[:] = [req.id]
            return handle(req, prepared)

        def watched_commit(plan: UpdatePlan) -> None:
            commit(plan)
            if current[0] in failing:
                raise RuntimeError("device lost")

        monkeypatch.setattr(self.h.updater, "handle", watched_handle)
        monkeypatch.setattr(UpdatePlan, "commit", watched_commit)

    def send(self, message: Any, brings: Weights | None = None, fails: bool = False) -> None:
        self.serial += 1
        message.id = self.serial
        if fails:
            self._failing.add(message.id)
        self.book.sent[message.id] = (message, brings or {}, fails)
        self.h.scheduler.handle(message)

    # -- actions -------------------------------------------------------------------------------------------------

    def play(self, turns: int) -> None:
        for _ in range(turns):
            if len(self.h.scheduler.requests) < 10 and self.rng.random() < 0.4:
                self.add_request()
            if self.rng.random() < 0.4:
                self.disturb()
            self.turn()

    def turn(self) -> None:
        if self.h.turned.queue and self.rng.random() < 0.5:
            self.h.turned.turn()
        self.h.clock.now += self.rng.choice([0.0, 1.0, 1.0, 3.0])
        self.h.steps()
        self.h.note_lost_lease()
        self.check()

    def check(self) -> None:
        book, h = self.book, self.h
        if book.serves:
            assert h.updater.refusal() is None, h.updater.refusal()
            assert h.weighed.salt == salt_of(book.meant) and h.updater.version == book.version
        elif book.transaction is None:
            assert h.updater.refusal() is not None

    def add_request(self) -> None:
        rng, rid = self.rng, f"r{len(self.prompts)}"
        ids = prompt(rng.randrange(5), rng.choice([3, 7, 12, 20]))
        self.prompts[rid] = ids
        fields: dict[str, Any] = {}
        if rng.random() < 0.15:
            fields = {"grammar": translate(Grammar("regex", "([a-f][0-9]){2,9}x"), {}), "stop_ids": [EOS]}
        req = TokenizedGenerateReq(
            rid=rid,
            input_ids=ids,
            sampling=SamplingParams(
                max_new_tokens=rng.choice([1, 4, 12, 30]),
                temperature=rng.choice([0.0, 1.0]),
                frequency_penalty=rng.choice([0.0, 0.0, 0.0, 1.0]),
            ),
            return_logprob=rng.random() < 0.6,
            logprob_start_len=rng.choice([-1, -1, 0, len(ids) // 2]),
            top_logprobs_num=rng.choice([0, 0, 3]),
            token_ids_logprob=rng.choice([None, None, [11, 12]]),
            bad_words_ids=[[20, 21]] if rng.random() < 0.05 else [],
            namespace=rng.choice(["", "", "salt"]),
            priority=rng.choice([0, 0, 0, 5, -5]),
            session_id=rng.choice(["", "", f"s{len(self.prompts) // 8}"]),
            **fields,
        )
        self.h.asked[rid] = req
        self.h.scheduler.handle(req)
        for waiting in self.h.scheduler.grammars.waiting.values():  # so that a seed plays the same game every time
            assert waiting.grammar is not None
            waiting.grammar.start.exception(timeout=20)

    def disturb(self) -> None:
        rng = self.rng
        kind = rng.choices(
            [
                "push",
                "registered",
                "register",
                "unregister",
                "transaction",
                "end",
                "pause",
                "memory",
                "flush",
                "odd",
                "give_up",
            ],
            [8, 8, 2, 1, 2, 4, 4, 2, 1, 2, 5],
        )[0]
        getattr(self, f"_{kind}")()

    def _fields(self) -> dict[str, Any]:
        """Return random fields. Most requests during a transaction name it, as those of a well-behaved client do."""
        transaction, rng = self.book.transaction, self.rng
        mine = transaction.transaction_id if transaction is not None and rng.random() < 0.85 else None
        partial = rng.choice([None, True, True])
        mode = rng.choice(["wait", "in_place", "retract", "abort"])
        return {"mode": mode, "transaction_id": mine, "partial": partial}

    def _new(self) -> Weights:
        self.made += 1
        return random_weights(self.made)

    def _names(self) -> list[str]:
        """Return mostly all names, because weights that were torn serve only after all were written again."""
        return list(SHAPES) if self.rng.random() < 0.7 else self.rng.sample(list(SHAPES), 2)

    def _spoil(self, weights: Weights) -> bool:
        """Make one number infinite at random, and return at random whether the request allows such numbers."""
        if self.rng.random() < 0.12:
            values = weights[self.rng.choice(list(weights))].view(-1)
            values[self.rng.randrange(len(values))] = self.rng.choice([float("inf"), -float("inf")])
        return self.rng.random() < 0.2

    def _push(self) -> None:
        new, names = self._new(), self._names()
        brings = {name: new[name] for name in names}
        allow = self._spoil(brings)
        _, description = described.described(brings, f"one-shot {self.made}")
        fails = self.rng.random() < 0.08
        req = UpdateWeightsFromTensorReq(description=description, allow_nonfinite=allow, **self._fields())
        self.send(req, brings, fails)

    def _idle_trainers(self) -> list[Trainer]:
        busy = [self.in_flight[id] for id in self.in_flight if id in self.book.sent]
        return [trainer for trainer in self.trainers if trainer not in busy]

    def _registered(self) -> None:
        if not (idle := self._idle_trainers()):
            return self._register()
        trainer, rng = rng_choice(self.rng, idle), self.rng
        new = {name: tensor for name, tensor in self._new().items() if name in trainer.names}
        allow = self._spoil(new)
        brings = trainer.step(new)
        fails = rng.random() < 0.05
        self.in_flight[self.serial + 1] = trainer
        if rng.random() < 0.3:  # as if the server had forgotten the registration
            source: dict[str, Any] = {"description": trainer.description(), "keep": rng.random() < 0.8}
        else:
            source = {"registration": trainer.id}
        self.send(UpdateWeightsFromTensorReq(**source, allow_nonfinite=allow, **self._fields()), brings, fails)

    def _register(self) -> None:
        if len(self.trainers) < 6:
            self.trainers.append(Trainer(f"t{len(self.trainers)}", self._names()))
        self.send(RegisterWeightsReq(description=self.trainers[-1].description()))

    def _unregister(self) -> None:
        ids = None if self.rng.random() < 0.3 else [t.id for t in self.trainers[:2]]
        self.send(UnregisterWeightsReq(registrations=ids))

    def _transaction(self) -> None:
        name = self.rng.choice([None, f"s{self.serial}"])
        self.send(
            BeginWeightUpdateReq(
                transaction_id=name,
                full=self.rng.choice([None, True, False]),
                mode=self.rng.choice(["wait", "in_place", "retract"]),
            )
        )

    def _end(self) -> None:
        name = self.book.transaction.transaction_id if self.book.transaction is not None else None
        if self.rng.random() < 0.1:
            name = "another"
        self.send(
            EndWeightUpdateReq(transaction_id=name, discard=self.rng.random() < 0.2, partial=self.rng.random() < 0.3)
        )

    def _pause(self) -> None:
        if self.rng.random() < 0.3:
            self.send(PauseGenerationReq(mode=self.rng.choice(["abort", "retract", "in_place"])))
        else:
            self.send(ContinueGenerationReq())

    def _memory(self) -> None:
        tags = self.rng.choice([None, ["weights"], ["kv_cache"]])
        if self.h.updater.refusal() is None or self.rng.random() < 0.2:
            self.send(ReleaseMemoryOccupationReq(tags=tags))
        else:
            self.send(ResumeMemoryOccupationReq())

    def _flush(self) -> None:
        self.send(FlushCacheReq(timeout=5.0))

    def _odd(self) -> None:
        """Send an update that is refused, or overwrite the weights with noise."""
        if self.rng.random() < 0.1:
            self.send(WeightsCheckerReq(action="reset_tensors"))
            return
        _, description = described.described({"no.such": torch.ones(2)}, "odd")
        self.send(UpdateWeightsFromTensorReq(description=description))

    def _give_up(self) -> None:
        """Withdraw a recent request, whether it was answered or not. The trainer may then write its memory again."""
        if self.serial:
            self.h.scheduler.handle(WithdrawReq(id=self.rng.randint(max(1, self.serial - 4), self.serial)))

    def settle(self) -> None:
        """End all transactions, pauses, sleeps and requests, and replace torn weights."""
        for _ in range(3):
            while self.h.turned.queue:
                self.h.turned.turn()
            self.h.clock.now += 200.0  # past every deadline and every lease
            self.turn()
        self.send(ContinueGenerationReq())
        if self.book.asleep or self.book.kv_released:
            self.send(ResumeMemoryOccupationReq())
        new = self._new()
        _, description = described.described(new, "last")
        self.send(UpdateWeightsFromTensorReq(description=description), new)
        for _ in range(3000):
            self.turn()
            if not self.h.scheduler.has_work() and not self.book.sent:
                return
        raise AssertionError(f"never answered: {list(self.book.sent)}, {list(self.h.scheduler.requests)}")


def rng_choice(rng: random.Random, trainers: list[Trainer]) -> Trainer:
    return trainers[rng.randrange(len(trainers))]


@pytest.fixture(autouse=True)
def end_trainers() -> Iterator[None]:
    yield
    described.opened.clear()


@pytest.mark.parametrize("seed", at_depth(range(6)))
@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_every_token_is_computed_under_exactly_the_version_that_it_carries(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkey = Monkey(seed, policy, monkeypatch)
    monkey.play(700)
    monkey.settle()
    h, book = monkey.h, monkey.book
    assert book.serves and h.updater.refusal() is None
    assert not h.scheduler.requests and sorted(h.replies) == list(range(1, monkey.serial + 1))
    assert len(h.sources._receiver._memory) <= sum(len(t.names) > 0 for t in monkey.trainers), "one-shot memory closed"
    recomputed = 0
    for rid, tokens in h.tokens.items():
        versions = list(dict.fromkeys(h.versions[rid]))
        is_free = not h.asked[rid].grammar
        if len(versions) == 1 and is_free and h.last[rid][0].num_retractions[h.last[rid][1]] == 0:
            assert tokens == generate(monkey.prompts[rid], len(tokens), book.salts[versions[0]])
            recomputed += 1
    assert recomputed > 10 and len(book.salts) > 5
    assert h.scheduler.planner.num_cached_tokens > 0, "the prefix cache was used"
    assert h.scheduler.planner.num_retractions > 0
    ends = [reason.type for reason in h.finished.values()]
    assert ends.count("length") > 20 and set(ends) <= {"length", "stop", "abort"}


@pytest.mark.exhaustive
def test_the_monkey_meets_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torn and infinite weights, lost leases and all status codes occur in random runs.

    Without them, the test above would show less.
    """
    torn = nonfinite = leases = 0
    statuses: set[int] = set()
    for seed in range(10, 14):
        with monkeypatch.context() as patch:
            monkey = Monkey(seed, ["lpm", "fcfs"][seed % 2], patch)
            monkey.play(500)
            monkey.settle()
        torn += monkey.book.torn
        nonfinite += monkey.book.nonfinite
        leases += monkey.book.lost_leases
        statuses |= {reply.status_code for reply in monkey.h.replies.values() if not reply.success}
    met = torn, nonfinite, leases, statuses
    assert torn > 5 and nonfinite > 5 and leases > 3 and statuses >= {400, 404, 409, 499, 500}, met
