"""Faults during weight updates, end to end: real trainer ranks, real servers over HTTP with one and two ranks.

Processes are killed or stopped, memory is cut off, and calls are misused. Every trainer rank must get a clear error, or
success, within ten seconds. Afterwards the server serves exactly the old weights or exactly the new ones (checksums of
every parameter on every rank, and tokens and log-probabilities of transformers), refuses with 503 until a full push, or
has ended with the cause. Servers have both scheduling policies.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.depth import at_depth
from tests.faults.judge import GREEDY, PROMPT, Judge, Weights, weights_of
from tests.faults.pauses import trap
from tests.faults.server import launched
from tests.faults.trainer import BOUND, Answer, Ranks, ranks
from tests.waiting import eventually
from tests.weight_sync import described
from verl_server import (
    HttpServerEngineAdapter,
    ServerDiedError,
    ServerUnavailableError,
    VerlServerError,
    WeightUpdateError,
    errors,
)
from verl_server.errors import UpdateConflictError
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq
from verl_server.weight_sync.handles import WeightsDescription

Kind = tuple[int, str]
"""(tensor-parallel size, scheduling policy) of a server."""
KINDS: list[Kind] = [(2, "lpm"), (1, "fcfs"), (2, "fcfs"), (1, "lpm")]
"""`make test` runs the first one of a size."""


class Served:
    """A server that is started again after a fault ended it."""

    def __init__(self, model: Path, folder: Path, tp_size: int, policy: str) -> None:
        self.model, self.folder, self.tp_size, self._policy = model, folder, tp_size, policy
        self.last_rank = tp_size - 1
        self.judge = Judge(model, tp_size)
        self._engine: HttpServerEngineAdapter | None = None

    @property
    def engine(self) -> HttpServerEngineAdapter:
        if self._engine is None:
            settings = {"tp_size": self.tp_size, "schedule_policy": self._policy}
            self._engine = launched(self.folder, self.model, **settings)
        return self._engine

    @property
    def url(self) -> str:
        assert self.engine.url is not None
        return self.engine.url

    def weights(self, seed: int) -> Weights:
        return weights_of(self.model, seed)

    def heal(self, seed: int = 0) -> None:
        """Push all weights from a trainer without faults."""
        self.engine.update_weights_from_tensor(self.weights(seed).items(), partial=False, mode="abort")
        self.expect(seed)

    def expect(self, seed: int, version: str | None = None) -> None:
        self.judge.expect_served(self.engine, self.weights(seed), version)

    def schedulers(self) -> list[int]:
        """Return the process ids by tensor-parallel rank."""
        children = Path(f"/proc/{self.engine.pid}/task/{self.engine.pid}/children").read_text().split()
        names = {Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in children}
        return [names[f"verl-sched-tp{rank}"] for rank in range(self.tp_size)]

    def expect_ended(self, *causes: str) -> None:
        """Assert that the server exits, and that the next call of its owner raises the causes."""
        assert eventually(lambda: self.engine._child is not None and self.engine._child.poll() is not None)
        with pytest.raises(ServerDiedError) as caught:
            self.engine.generate(input_ids=PROMPT, sampling_params=GREEDY, timeout=10)
        assert all(cause in str(caught.value) for cause in causes), str(caught.value)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{self.url}/health", timeout=10)
        self.shutdown()

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None


@pytest.fixture(scope="module")
def servers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Kind, Served]]:
    """Servers by tensor-parallel size and policy. Each is started by the first test that needs it."""
    servers = {kind: Served(tiny_llama, tmp_path_factory.mktemp("faults"), *kind) for kind in KINDS}
    yield servers
    for served in servers.values():
        served.shutdown()


@pytest.fixture
def served(servers: dict[Kind, Served], request: pytest.FixtureRequest) -> Iterator[Served]:
    """A server in the state of a new one."""
    served = servers[request.param]
    try:
        served.heal()
    except (VerlServerError, AssertionError):  # another test failed half way
        served.shutdown()
        served.heal()
    yield served
    described.opened.clear()


@pytest.fixture
def trainer(served: Served) -> Iterator[Ranks]:
    """Two trainer ranks, which have pushed step 1 by registration."""
    with ranks(served.model, served.folder, served.url) as started:
        started.done("register")
        started.done("push", seed=1)
        yield started


def on_tp(*sizes: int) -> pytest.MarkDecorator:
    """Run a test on servers of these sizes: two ranks where they could end differently, or see different things.

    `make test` runs the largest size, with one policy: two ranks have "lpm", and one rank has "fcfs". `make test-all`
    runs the others, too.
    """
    return on_kinds([kind for kind in KINDS if kind[0] in sizes], quick=1)


def on_kinds(kinds: list[Kind], quick: int) -> pytest.MarkDecorator:
    values = at_depth([(kind,) for kind in kinds], quick)
    return pytest.mark.parametrize("served", values, indirect=True, ids=named)


def named(value: Any) -> str:
    return f"tp{value[0]}-{value[1]}" if isinstance(value, tuple) else str(value)


def expect_error(answers: list[Answer], kind: type[Exception], text: str) -> None:
    for answer in answers:
        assert issubclass(getattr(errors, answer.error, object), kind), answer
        assert text in answer.text, answer


# -- a trainer rank is killed ---------------------------------------------------------------------------------------


@on_tp(1)
def test_a_rank_is_killed_before_the_push(served: Served, trainer: Ranks) -> None:
    trainer.kill(1)
    trainer.call("push", seed=2)
    expect_error(trainer.answers(), VerlServerError, "push_weights: another rank of this VerlEngine ended")
    served.expect(1)
    served.heal(3)


@on_tp(1, 2)
def test_a_rank_is_killed_while_its_memory_is_opened(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "staging", served.last_rank) as held:
        trainer.call("update", seed=2)
        held.wait()
        trainer.kill(1)
        held.go()
        expect_error(trainer.answers(), VerlServerError, "another rank of this VerlEngine ended")
    served.expect(1)
    served.heal(3)


@on_tp(1, 2)
def test_a_rank_is_killed_when_all_is_open(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "turn", served.last_rank) as held:
        trainer.call("update", seed=2)
        held.wait()
        trainer.kill(1)
        held.go()
        expect_error(trainer.answers(), VerlServerError, "another rank of this VerlEngine ended")
    served.expect(2)
    served.heal(3)


@pytest.mark.parametrize("by_id", [True, False], ids=["registered", "described"])
@on_tp(1, 2)
def test_a_rank_is_killed_during_the_copy(served: Served, trainer: Ranks, by_id: bool) -> None:
    with trap(served.folder, "copying", served.last_rank) as held:
        trainer.call("push" if by_id else "update", seed=2)
        held.wait()
        trainer.kill(1)
        held.go()
        expect_error(trainer.answers(), VerlServerError, "another rank of this VerlEngine ended")
    served.expect(2)
    served.heal(3)


@on_tp(1)
def test_a_rank_is_killed_after_the_push(served: Served, trainer: Ranks) -> None:
    trainer.done("push", seed=2)
    trainer.kill(1)
    served.expect(2)
    trainer.call("push", seed=3)
    expect_error(trainer.answers(), VerlServerError, "push_weights: another rank of this VerlEngine ended")
    served.expect(2)
    served.heal(3)


@on_tp(1)
def test_the_rank_that_acts_is_killed_while_its_memory_is_opened(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "staging", served.last_rank) as held:
        trainer.call("update", seed=2)
        held.wait()
        trainer.kill(0)
        expect_error(trainer.answers(), VerlServerError, "another rank of this VerlEngine ended")
        held.go()
    served.expect(1)
    served.heal(3)


@on_tp(1)
def test_the_rank_that_acts_is_killed_during_the_copy(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "copying", served.last_rank) as held:
        trainer.call("push", seed=2)
        held.wait()
        trainer.kill(0)
        expect_error(trainer.answers(), VerlServerError, "push_weights: another rank of this VerlEngine ended")
        held.go()
    served.expect(2)
    served.heal(3)


# -- a trainer rank is stopped --------------------------------------------------------------------------------------


@on_tp(1)
def test_a_rank_is_stopped_before_the_ranks_meet(served: Served, trainer: Ranks) -> None:
    trainer.send_signal(1, signal.SIGSTOP)
    trainer.call("push", seed=2)
    expect_error([trainer.answer(0)], VerlServerError, "rank(s) 1 sent nothing within 3 s")
    served.expect(1)
    trainer.send_signal(1, signal.SIGCONT)
    expect_error([trainer.answer(1)], VerlServerError, "push_weights: another rank")
    served.expect(1)
    served.heal(3)


@on_tp(1)
def test_the_rank_that_acts_is_stopped_during_the_copy(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "copying", served.last_rank) as held:
        trainer.call("push", seed=2)
        held.wait()
        trainer.send_signal(0, signal.SIGSTOP)
        held.go()
        expect_error([trainer.answer(1)], VerlServerError, "push_weights: another rank")
    served.expect(2)
    trainer.send_signal(0, signal.SIGCONT)
    expect_error([trainer.answer(0)], VerlServerError, "push_weights: another rank")
    served.heal(3)


@on_tp(1)
def test_a_rank_that_only_owns_memory_is_stopped_during_the_copy(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "copying", served.last_rank) as held:
        trainer.call("push", seed=2)
        held.wait()
        trainer.send_signal(1, signal.SIGSTOP)
        held.go()
        first = trainer.answer(0)
    served.expect(2)
    trainer.send_signal(1, signal.SIGCONT)
    # Rank 1 learns the outcome only if it had begun to wait for it before it was stopped.
    assert bool(first.error) == bool(trainer.answer(1).error), "the ranks report different outcomes"
    served.heal(3)


# -- pushes that are refused ----------------------------------------------------------------------------------------


@on_tp(1)
def test_a_missing_name(served: Served, trainer: Ranks) -> None:
    trainer.call("update", seed=2, without="model.norm.weight")
    expect_error(trainer.answers(), WeightUpdateError, "missing: 'model.norm.weight'")
    served.expect(1)
    trainer.done("push", seed=2)
    served.expect(2)


@on_tp(1)
def test_integers(served: Served, trainer: Ranks) -> None:
    trainer.call("update", seed=2, dtype="int32")
    expect_error(trainer.answers(), WeightUpdateError, "int32")
    served.expect(1)
    trainer.done("push", seed=2)
    served.expect(2)


@on_tp(1, 2)
def test_a_push_during_sleep(served: Served, trainer: Ranks) -> None:
    trainer.done("release_memory_occupation")
    for kind in ("push", "update"):
        trainer.call(kind, seed=2)
        expect_error(trainer.answers(), WeightUpdateError, "resume_memory_occupation")
        served.judge.expect_refused(served.engine, "The weights are released")
    trainer.done("resume_memory_occupation")
    served.judge.expect_refused(served.engine, "not loaded")
    trainer.done("push", seed=2)
    served.expect(2)


# -- a copy that fails ----------------------------------------------------------------------------------------------


@on_tp(1, 2)
def test_a_copy_that_fails_half_way_on_one_rank(served: Served, trainer: Ranks) -> None:
    with trap(served.folder, "copying", served.last_rank) as held:
        trainer.call("push", seed=2)
        held.wait()
        held.go("fail")
        expect_error(trainer.answers(), VerlServerError, "a fault that a test made")
    served.judge.expect_refused(served.engine, "torn")
    trainer.call("update", seed=2, without="model.norm.weight", partial=True)
    assert not any(answer.error for answer in trainer.answers())
    served.judge.expect_refused(served.engine, "model.norm.weight")
    trainer.done("push", seed=3)
    served.expect(3)


# -- two writers, and transactions -----------------------------------------------------------------------------------


@on_tp(1)
def test_two_writers_one_after_the_other(served: Served, trainer: Ranks) -> None:
    with ThreadPoolExecutor(1) as thread, trap(served.folder, "copying", served.last_rank) as held:
        trainer.call("push", seed=2)
        held.wait()
        second = thread.submit(served.engine.update_weights_from_tensor, served.weights(3).items())
        held.go()
        assert not any(answer.error for answer in trainer.answers())
        assert second.result(BOUND)[0]
    served.expect(3)


@on_tp(2)
def test_a_second_writer_during_a_transaction(served: Served, trainer: Ranks) -> None:
    transaction = served.engine.begin_weight_update("mine")
    for kind in ("push", "update"):
        trainer.call(kind, seed=2)
        expect_error(trainer.answers(), UpdateConflictError, f"'{transaction}' is open")
    trainer.call("begin_weight_update")
    expect_error(trainer.answers(), UpdateConflictError, f"'{transaction}' is open")
    assert httpx.get(f"{served.url}/health", timeout=10).status_code == 200
    served.engine.update_weights_from_tensor(served.weights(3).items())
    served.engine.end_weight_update()
    served.expect(3)
    trainer.done("push", seed=2)
    served.expect(2)


@pytest.mark.parametrize("wrote", [False, True])
@on_tp(1, 2)
def test_a_transaction_that_is_never_ended(served: Served, trainer: Ranks, wrote: bool) -> None:
    trainer.done("begin_weight_update", lease_seconds=0.5)
    if wrote:
        trainer.done("update", seed=2, without="model.norm.weight")
    answer = httpx.post(f"{served.url}/generate", json={"input_ids": PROMPT, "sampling_params": GREEDY}, timeout=BOUND)
    assert answer.status_code == (503 if wrote else 200), "the request waits until the lease ends, and is then answered"
    if wrote:
        served.judge.expect_refused(served.engine, "torn")
    else:
        served.expect(1)
    trainer.call("update", seed=2)
    expect_error(trainer.answers(), UpdateConflictError, "is not open")
    trainer.call("end_weight_update")
    expect_error(trainer.answers(), WeightUpdateError, "no weight-update session is open")
    trainer.done("push", seed=2)
    served.expect(2)


# -- shared memory that is cut off ----------------------------------------------------------------------------------


class Unsealed:
    """A trainer in this process whose memory can be cut off, unlike that of real trainers, which is sealed."""

    def __init__(self, served: Served, seed: int) -> None:
        weights = served.weights(seed)
        self._memory = described.SharedMemory(8 << 20, sealed=False)
        self._tensors = []
        for name, tensor in weights.items():
            shard = self._memory.shard(self._memory.put(tensor), [0] * tensor.dim())
            self._tensors.append(
                described.DescribedTensor(name=name, dtype="float32", shape=list(tensor.shape), shards=[shard])
            )
        self._engine = served.engine

    def push(self, **options: Any) -> tuple[bool, str]:
        description = WeightsDescription(id="cut", allocations=[self._memory.allocation], tensors=self._tensors)
        return self._engine._update(UpdateWeightsFromTensorReq(description=description, keep=True, **options))

    def push_again(self) -> tuple[bool, str]:
        return self._engine._update(UpdateWeightsFromTensorReq(registration="cut"))

    def cut(self) -> None:
        os.ftruncate(self._memory.fd, 4096)


@on_tp(1, 2)
def test_memory_is_cut_off_before_it_is_copied(served: Served) -> None:
    other = Unsealed(served, 2)
    with ThreadPoolExecutor(1) as thread, trap(served.folder, "turn", served.last_rank) as held:
        push = thread.submit(other.push)
        held.wait()
        other.cut()
        held.go()
        with pytest.raises(WeightUpdateError, match="was cut off while it was read, at byte 4,096"):
            push.result(BOUND)
    served.expect(0)
    with pytest.raises(WeightUpdateError, match="was cut off while it was read"):
        other.push_again()
    served.expect(0)
    with pytest.raises(WeightUpdateError, match="was cut off while it was read"):
        other.push()
    served.heal(3)


@on_tp(2)
def test_memory_is_cut_off_during_the_copy(served: Served) -> None:
    other = Unsealed(served, 2)
    with ThreadPoolExecutor(1) as thread, trap(served.folder, "copying", served.last_rank) as held:
        push = thread.submit(other.push)
        held.wait()
        other.cut()
        held.go()
        push.result(BOUND)  # the memory was read before the first write
    served.expect(2)
    with pytest.raises(WeightUpdateError, match="was cut off while it was read"):
        other.push_again()
    served.expect(2)


# -- a server rank is killed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("served", "when"),
    at_depth([((2, "lpm"), "copying"), ((1, "fcfs"), "idle"), ((2, "fcfs"), "copying"), ((1, "lpm"), "idle")]),
    indirect=["served"],
    ids=named,
)
def test_a_server_rank_is_killed(served: Served, trainer: Ranks, when: str) -> None:
    victim = served.schedulers()[served.last_rank]
    if when == "idle":
        os.kill(victim, signal.SIGKILL)
        trainer.call("push", seed=2)
        answers = trainer.answers()
    else:
        with trap(served.folder, "copying", served.last_rank) as held:
            trainer.call("push", seed=2)
            held.wait()
            os.kill(victim, signal.SIGKILL)
            answers = trainer.answers()
    for answer in answers:
        assert answer.error in (ServerDiedError.__name__, ServerUnavailableError.__name__), answer
    served.expect_ended(f"scheduler-tp{served.last_rank} ended with signal SIGKILL")


def test_a_server_ends_with_the_rank_that_launched_it(tiny_llama: Path, tmp_path: Path) -> None:
    with ranks(tiny_llama, tmp_path, None) as trainer:
        trainer.done("register")
        with trap(tmp_path, "copying", 1) as held:
            trainer.call("push", seed=2)
            held.wait()
            trainer.kill(0)
            expect_error(trainer.answers(), VerlServerError, "push_weights: another rank of this VerlEngine ended")

        def is_gone() -> bool:
            try:
                httpx.get(f"{trainer.url}/health", timeout=10)
            except httpx.TransportError:
                return True
            return False

        assert eventually(is_gone)
