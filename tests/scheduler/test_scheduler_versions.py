"""Requests that demand a weight version: their end at the border between two versions, in each mode and state."""

from __future__ import annotations

import pytest

from tests.scheduler.fakes import Harness, generate, prompt, update
from verl_server.messages.io_struct import ContinueGenerationReq, PauseGenerationReq
from verl_server.messages.weight_requests import BeginWeightUpdateReq, EndWeightUpdateReq, UpdateWeightVersionReq

A, B = "aaaaaaaa", "bbbbbbbb"
V1, V2, OTHER = f"1@{A}", f"2@{A}", f"1@{B}"
DEMANDS = {"none": "", "exact": V1, "min": f">={V1}"}


def served(label: str = V1, **settings: object) -> Harness:
    """Return a harness that serves version `label`, with one row less than its requests: one of them waits."""
    h = Harness(chunked_prefill_size=64, max_rows=3, **settings)
    assert h.control(UpdateWeightVersionReq(id=100, new_version=label)).success  # type: ignore[union-attr]
    for name, demand in DEMANDS.items():
        h.add(name, prompt(len(name), 9), 12, weight_demand=demand)
    for name, demand in DEMANDS.items():
        h.add(f"{name}-waits", prompt(9 + len(name), 9), 3, weight_demand=demand)
    h.steps(4)
    assert {len(h.tokens[name]) for name in DEMANDS} <= {3, 4} and len(h.scheduler.planner.waiting) == 3
    return h


def ended(h: Harness, rid: str) -> tuple[object, ...]:
    reason = h.finished[rid]
    return reason.type, reason.status_code, reason.code, reason.at_border


LENGTH = "length", None, None, False
SUPERSEDED = "abort", 409, "weight_version_superseded", True
ABORTED = "abort", None, None, False


def push(h: Harness, way: str, label: str) -> None:
    """Make `label` the served version."""
    if way in ("in_place", "retract", "wait", "abort"):
        h.control(update(1, way, weight_version=label))
    elif way == "relabel":
        h.control(UpdateWeightVersionReq(id=1, new_version=label, abort_all_requests=False))
    elif way == "transaction":
        h.control(BeginWeightUpdateReq(id=1, transaction_id="t", mode="in_place"))
        h.control(update(2, transaction_id="t"))
        assert h.weights.version == V1, "the end activates the version"
        h.control(EndWeightUpdateReq(id=3, transaction_id="t", weight_version=label))
    else:
        pause, _, mode = way.partition("+")
        h.control(PauseGenerationReq(id=1, mode=pause))  # type: ignore[arg-type]
        h.control(update(2, mode, weight_version=label))
        h.scheduler.handle(ContinueGenerationReq(id=3))
    while not all(h.replies[id].success for id in h.replies) or h.weights.version != label:
        h.steps()


KEPT = ["in_place", "retract", "relabel", "transaction", "in_place+in_place", "retract+in_place", "in_place+wait"]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("label", [V2, OTHER, "free"])
@pytest.mark.parametrize("way", KEPT)
def test_at_a_border_requests_end_whose_demand_excludes_the_new_version(way: str, label: str, overlaps: bool) -> None:
    h = served(overlaps=overlaps)
    push(h, way, label)
    h.run()
    satisfied = {"none", "min"} if label == V2 else {"none"}
    for name in DEMANDS:
        versions = h.versions[name]
        if name in satisfied:
            assert ended(h, name) == ended(h, f"{name}-waits") == LENGTH
            assert {V1, label} == set(versions) and len(versions) == 12
        else:
            assert ended(h, name) == ended(h, f"{name}-waits") == SUPERSEDED
            assert set(versions) == {V1} and 3 <= len(versions) < 12, "the tokens of the version before are delivered"
            assert h.tokens[name] == generate(prompt(len(name), 9), len(versions), 0)
            assert len(h.logprobs[name]) in (0, len(versions))
            assert h.tokens.get(f"{name}-waits", []) == []
    assert not h.scheduler.requests


def test_with_wait_running_requests_finish_and_waiting_ones_end() -> None:
    h = served()
    push(h, "wait", V2)
    h.run()
    for name in DEMANDS:
        assert ended(h, name) == LENGTH and set(h.versions[name]) == {V1}
        assert ended(h, f"{name}-waits") == (SUPERSEDED if name == "exact" else LENGTH)


def test_abort_is_what_it_was() -> None:
    h = served()
    push(h, "abort", V2)
    assert {ended(h, name) for name in (*DEMANDS, *(f"{name}-waits" for name in DEMANDS))} == {ABORTED}


def test_a_push_that_fails_or_keeps_the_label_ends_no_request() -> None:
    h = served()
    h.weights.next_outcome = "refused"
    assert not h.control(update(1, "in_place", weight_version=V2)).success  # type: ignore[union-attr]
    assert h.control(update(2, "in_place", weight_version=V1)).success  # type: ignore[union-attr]
    h.run()
    assert {ended(h, name) for name in DEMANDS} == {LENGTH}


def test_an_arrival_is_judged_by_the_version_of_now() -> None:
    """The front may have judged it by the version before: the request and the push pass each other."""
    h = Harness()
    h.control(UpdateWeightVersionReq(id=1, new_version=V1))
    h.control(update(2, "in_place", weight_version=V2))
    rows = {"exact": (V1, SUPERSEDED), "now": (V2, LENGTH), "min": (f">={V1}", LENGTH)}
    rows["later"] = (f">=3@{A}", ("abort", 409, "weight_version_behind", True))
    for rid, (demand, _) in rows.items():
        h.add(rid, prompt(1, 9), 2, weight_demand=demand)
    h.run()
    assert {rid: ended(h, rid) for rid in rows} == {rid: end for rid, (_, end) in rows.items()}


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_prefill_that_has_no_token_yet_ends_with_the_error(mode: str) -> None:
    h = Harness(chunked_prefill_size=16)
    h.control(UpdateWeightVersionReq(id=1, new_version=V1))
    h.add("long", prompt(1, 60), 4, weight_demand=V1)
    h.steps(2)
    h.control(update(2, mode, weight_version=V2))
    h.run()
    assert ended(h, "long") == SUPERSEDED and not h.tokens["long"]


def test_a_retracted_request_does_not_start_again_under_another_version() -> None:
    h = served()
    h.control(PauseGenerationReq(id=1, mode="retract"))
    assert any(req.started for req in h.scheduler.planner.waiting)
    h.control(update(2, "in_place", weight_version=V2))
    assert ended(h, "exact") == SUPERSEDED, "while generation is paused, not when it goes on"
    h.scheduler.handle(ContinueGenerationReq(id=3))
    h.run()
    assert set(h.versions["exact"]) == {V1}


def test_the_pages_of_ended_requests_are_not_used_under_the_new_version() -> None:
    h = served()
    push(h, "in_place", V2)
    h.add("again", [*prompt(len("exact"), 9), *h.tokens["exact"]], 4)
    h.run()
    message, index = h.last["again"]
    assert message.cached_tokens[index] == 0
    assert h.tokens["again"] == generate([*prompt(len("exact"), 9), *h.tokens["exact"]], 4, 1)


def test_weights_that_cannot_serve_are_said_before_a_version() -> None:
    h = Harness()
    h.control(UpdateWeightVersionReq(id=1, new_version=V1))
    h.weights.reason = "The weights are torn."
    h.add("exact", prompt(1, 9), 2, weight_demand=V2)
    h.steps()
    assert h.finished["exact"].status_code == 503
    reply = h.control(UpdateWeightVersionReq(id=2, new_version=V1))
    assert reply is not None and reply.weights_refusal == "The weights are torn."


def test_a_transaction_is_no_refusal() -> None:
    h = Harness()
    h.weights.reason = "The weights are torn (a transaction wrote some parameters and has not ended)."
    reply = h.control(BeginWeightUpdateReq(id=1, transaction_id="t"))
    assert reply is not None and reply.weights_refusal is None
