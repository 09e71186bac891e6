"""Registrations on the trainer's side: what each push requests, and the memory held for the server."""

from __future__ import annotations

import torch

from verl_server.engine.push import Push, ServerRegistrations
from verl_server.errors import ControlTimeoutError, ServerDiedError, UnansweredError, WeightUpdateError


class Bench:
    """Pushes sets of names, each with a given outcome."""

    def __init__(self) -> None:
        self.registrations = ServerRegistrations()

    def push(
        self, names: str, id: str, *, register: bool = False, can_be_kept: bool = True, error: Exception | None = None
    ) -> Push:
        terms = self.registrations.next_push(names, id, list, register=register, can_be_kept=can_be_kept)
        if error is None:
            self.registrations.succeeded(names, terms)
        else:
            self.registrations.failed(terms, error)
        return terms


def test_second_sight() -> None:
    bench = Bench()
    assert bench.push("model", "a") == Push("a", by_id=False, keep=False, forget=[])
    assert bench.push("model", "a") == Push("a", by_id=False, keep=True, forget=[])
    assert bench.push("model", "a") == Push("a", by_id=True, keep=True, forget=[])
    assert bench.registrations.open_ids() == ["a"]


def test_temporaries_are_never_kept() -> None:
    bench = Bench()
    for id in "abcdef":
        assert not bench.push("state dict", id).keep
    assert bench.registrations.open_ids() == []


def test_what_moved_is_forgotten_with_the_next_request() -> None:
    bench = Bench()
    for _ in range(3):
        bench.push("model", "a")
    assert bench.push("model", "b") == Push("b", by_id=False, keep=False, forget=["a"])
    assert bench.registrations.open_ids() == []
    assert bench.push("model", "b").keep


def test_explicit_registration_needs_no_second_sight() -> None:
    bench = Bench()
    assert bench.push("model", "a", register=True) == Push("a", by_id=False, keep=True, forget=[])
    assert bench.push("model", "a", register=True).by_id
    assert bench.push("model", "b", register=True) == Push("b", by_id=False, keep=True, forget=["a"])


def test_a_version_in_several_pushes_keeps_all_of_them() -> None:
    bench = Bench()
    for _ in range(2):
        for names in "xyz":
            bench.push(names, names + "1")
    assert [bench.push(names, names + "1") for names in "xyz"] == [
        Push(names + "1", by_id=True, keep=True, forget=[]) for names in "xyz"
    ]


def test_sets_beyond_the_bound_are_forgotten() -> None:
    bench = Bench()
    for i in range(40):
        bench.push(f"set {i}", f"id {i}", register=True)
    assert len(bench.registrations.open_ids()) <= 17
    assert not bench.push("set 0", "id 0", register=True).by_id


def test_a_refused_push_is_not_taken_as_kept() -> None:
    bench = Bench()
    bench.push("model", "a")
    assert bench.push("model", "a", error=WeightUpdateError("no")).keep
    assert bench.registrations.open_ids() == ["a"], "the server may have opened it before the refusal"
    terms = bench.push("model", "a")
    assert terms.keep and not terms.by_id
    assert bench.push("model", "a").by_id


def test_memory_is_held_while_the_outcome_is_unknown() -> None:
    for error in (ControlTimeoutError("late"), UnansweredError("silent"), ServerDiedError("cut off"), OSError("odd")):
        bench = Bench()
        bench.push("model", "a", error=error)
        assert bench.registrations.open_ids() == ["a"], "the server may still read it"
    assert bench.push("model", "b", error=WeightUpdateError("no")).forget == ["a"]
    assert bench.registrations.open_ids() == ["a"], "the server may or may not have forgotten it"
    assert bench.push("model", "c").forget == ["a"]
    assert bench.registrations.open_ids() == []


def test_memory_whose_changes_cannot_be_seen_is_not_kept() -> None:
    bench = Bench()
    for _ in range(4):
        assert bench.push("model", "a", can_be_kept=False) == Push("a", by_id=False, keep=False, forget=[])


def test_an_engine_that_released_memory_gets_nothing_by_itself() -> None:
    bench = Bench()
    bench.registrations.second_sight = False
    for _ in range(3):
        assert not bench.push("model", "a").keep
    assert bench.push("model", "a", register=True).keep


def test_only_cuda_memory_is_held() -> None:
    registrations = ServerRegistrations()
    storage = torch.zeros(4).untyped_storage()
    registrations.next_push("model", "a", lambda: [storage], register=True, can_be_kept=True)
    assert registrations._open == {"a": []}, "freeing shared memory that a server maps is safe"
