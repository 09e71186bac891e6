"""The stager alone: order, votes, wake-ups, dropped requests, hangs, and closing. Ranks are threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.weight_sync.fakes import Board, FakeTp
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq, StagedReq, UpdateWeightsFromDiskReq
from verl_server.worker.weights.stager import Stager

WAIT = 10.0


class Opened:
    """A `Prepared` that records its `discard`."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.names: list[str] = []

    def ready(self) -> None: ...

    def commit(self) -> None: ...

    def confirm(self) -> None: ...

    def discard(self) -> None:
        self._log.append(f"discard {self._name}")


class FakeSources:
    """Sources whose `prepare` first calls `does[name]`, if set; the name is the model path or the group's name."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.log: list[str] = []
        self.does: dict[str, Callable[[], Any]] = {}
        self.opened: list[weakref.ref[Opened]] = []
        self.names: list[str] = []
        """Names of the parameters of every request."""

    def adopt_thread(self) -> None: ...

    def prepare(self, req: StagedReq) -> Opened:
        name = _name(req)
        if name in self.does:
            self.does[name]()
        self.log.append(f"open {name}")
        opened = Opened(self.log, name)
        opened.names = self.names
        self.opened.append(weakref.ref(opened))
        return opened

    def refused(self, req: StagedReq, error: VerlServerError) -> None:
        self.log.append(f"refused {_name(req)}")

    def abandoned(self, req: StagedReq) -> None:
        self.log.append(f"abandoned {_name(req)}")


class Stagers:
    """One stager on each of `size` ranks."""

    def __init__(self, size: int = 1) -> None:
        self.boards = [Board(size) for _ in range(3)]
        self.sources = [FakeSources(rank) for rank in range(size)]
        self.all = [
            Stager(sources, FakeTp(rank, size, self.boards), take_timeout=WAIT)  # type: ignore[arg-type]
            for rank, sources in enumerate(self.sources)
        ]
        self.rang = threading.Semaphore(0)
        self.all[0].on_finished = self.rang.release
        self._outcomes: dict[int, VerlServerError | None] = {}

    def submit(self, id: int, name: str = "") -> None:
        for stager in self.all:
            stager.submit(UpdateWeightsFromDiskReq(id=id, model_path=name or str(id)))

    def join(self, id: int, name: str) -> None:
        req = InitWeightsUpdateGroupReq(
            id=id, master_address="h", master_port=1, rank_offset=1, world_size=2, group_name=name
        )
        for stager in self.all:
            stager.submit(req)

    def outcome(self, id: int) -> VerlServerError | None:
        """Return the outcome on rank 0 as the loop learns it: wait for the wake-up, then read the finished requests."""
        while id not in self._outcomes:
            assert self.rang.acquire(timeout=WAIT), f"request {id} did not finish"
            self._outcomes |= dict(self.all[0].finished())
        return self._outcomes[id]

    def drop(self, id: int) -> None:
        for stager in self.all:
            stager.drop(id)

    def close(self) -> None:
        for stager in self.all:
            stager.close(timeout=WAIT)


@pytest.fixture(params=[1, 2])
def stagers(request: pytest.FixtureRequest) -> Iterator[Stagers]:
    made = Stagers(request.param)
    yield made
    made.close()


def _name(req: StagedReq) -> str:
    return req.group_name if isinstance(req, InitWeightsUpdateGroupReq) else req.model_path  # type: ignore[union-attr]


def test_requests_are_staged_in_order_and_wait_for_their_turn(stagers: Stagers) -> None:
    for id in range(20):
        stagers.submit(id)
    assert stagers.outcome(19) is None
    for stager, sources in zip(stagers.all, stagers.sources, strict=True):
        for id in reversed(range(20)):
            taken = stager.take(id)
            assert _name(taken.req) == str(id) and taken.prepared is not None
        assert sources.log == [f"open {id}" for id in range(20)]
        with pytest.raises(KeyError):
            stager.take(3)


def test_ranks_that_would_write_other_parameters_write_nothing() -> None:
    stagers = Stagers(2)
    stagers.sources[0].names, stagers.sources[1].names = ["a", "b"], ["b", "a"]
    stagers.submit(1)
    assert stagers.outcome(1) is None, "the order does not matter"
    stagers.sources[1].names = ["b"]
    stagers.submit(2)
    error = stagers.outcome(2)
    assert error is not None and error.status_code == 400 and "of different names" in str(error)
    stagers.close()
    for sources in stagers.sources:
        assert sources.log == ["open 1", "open 2", "refused 2", "discard 2"]


def test_what_one_rank_refuses_all_refuse_and_close_again(stagers: Stagers) -> None:
    def fail() -> None:
        raise BadRequestError("no such folder")

    last = len(stagers.all) - 1
    stagers.sources[last].does["bad"] = fail
    stagers.submit(1, "bad")
    stagers.submit(2, "good")
    error = stagers.outcome(1)
    assert error is not None and error.status_code == 400 and "no such folder" in str(error)
    assert stagers.outcome(2) is None
    for rank, (stager, sources) in enumerate(zip(stagers.all, stagers.sources, strict=True)):
        assert stager.take(2).prepared is not None
        opened = [] if rank == last else ["open bad"]
        closed = [] if rank == last else ["discard bad"]
        assert sources.log == [*opened, "refused bad", *closed, "open good"]


def test_a_fault_is_a_500_and_the_next_request_is_staged(stagers: Stagers) -> None:
    def fail() -> None:
        raise OSError("ENXIO")

    stagers.sources[0].does["odd"] = fail
    stagers.submit(1, "odd")
    stagers.submit(2)
    error = stagers.outcome(1)
    assert error is not None and error.status_code == 500 and "ENXIO" in str(error)
    assert stagers.outcome(2) is None


@pytest.mark.parametrize("when", ["staged", "staging", "queued"])
def test_what_is_given_up_is_closed_on_every_rank_whenever_that_is(stagers: Stagers, when: str) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert go_on.wait(WAIT)

    stagers.sources[0].does["first"] = hang
    stagers.submit(1, "first")
    stagers.submit(2, "second")
    assert entered.wait(WAIT)
    if when == "staging":
        stagers.drop(1)
    elif when == "queued":
        stagers.drop(2)
    go_on.set()
    stagers.outcome(1)
    stagers.outcome(2)
    if when == "staged":
        stagers.all[-1].take(2)
        stagers.drop(1)
    stagers.close()
    for sources in stagers.sources:
        gone = "second" if when == "queued" else "first"
        opened, closed = sources.log.count(f"open {gone}"), sources.log.count(f"discard {gone}")
        assert opened == closed == 1 - sources.log.count(f"abandoned {gone}"), "opened and discarded, or abandoned"
    stagers.drop(1)  # a second drop, or the drop of an unknown id, has no effect
    stagers.drop(99)


def test_a_stager_that_hangs_holds_up_neither_joins_nor_the_loop_nor_the_end() -> None:
    stagers, go_on = Stagers(), threading.Event()
    stagers.sources[0].does["stuck"] = lambda: go_on.wait(WAIT)
    stagers.submit(1, "stuck")
    stagers.submit(2)
    stagers.join(3, "group")
    assert stagers.outcome(3) is None and stagers.all[0].take(3).prepared is not None
    assert not stagers._outcomes.get(1) and stagers.all[0].finished() == []
    stagers.drop(1)
    stagers.all[0].close(timeout=0.01)
    assert threading.active_count() > 1 and all(t.daemon for t in threading.enumerate() if "weight" in t.name)
    go_on.set()


def test_a_join_that_waits_for_its_trainer_holds_up_no_update(stagers: Stagers) -> None:
    go_on = threading.Event()
    stagers.sources[-1].does["slow"] = lambda: go_on.wait(WAIT)
    stagers.join(1, "slow")
    stagers.submit(2)
    assert stagers.outcome(2) is None
    go_on.set()
    assert stagers.outcome(1) is None


def test_a_rank_that_died_ends_the_loop_with_the_cause() -> None:
    stagers = Stagers(2)
    stagers.sources[1].does["dies"] = stagers.boards[1].abort
    stagers.submit(1, "dies")
    stagers.submit(2)
    assert stagers.rang.acquire(timeout=WAIT), "the loop is woken up"
    with pytest.raises(ConnectionError, match="lost each other"):
        stagers.all[0].finished()
    stagers.close()


def test_nothing_that_was_opened_outlives_its_request(stagers: Stagers) -> None:
    """No local variable, traceback or exception context keeps a trainer's memory mapped while the thread waits."""

    def fail() -> None:
        raise OSError("no such GPU")

    stagers.sources[-1].does["bad"] = fail
    stagers.submit(1, "bad")
    stagers.submit(2, "good")
    assert stagers.outcome(1) is not None and stagers.outcome(2) is None
    for stager in stagers.all:
        taken = stager.take(2)
        assert taken.prepared is not None
        taken.prepared.discard()
        del taken
    gc.collect()
    assert [ref() for sources in stagers.sources for ref in sources.opened if ref() is not None] == []
