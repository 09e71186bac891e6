"""The ledger of sessions: prompts from stored ids, siblings, branches, children, limits, ends and bytes."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import tracemalloc
from typing import Any

import pytest

from tests.server.sessions.building import Clock, caller, created, finished, floats, ids, node, plan, turn
from verl_server.errors import (
    BadRequestError,
    ContextLengthError,
    IdempotencyConflictError,
    SessionBusyError,
    SessionEndedError,
    SessionExistsError,
    SessionLimitError,
    SessionNotFoundError,
    SessionUnavailableError,
)
from verl_server.messages.session_types import CreateSession, RewardBody, SessionLimits
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.limits import Bounds
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.turn import ABORTED, sequence
from verl_server.server.sessions.turn_ledger import TurnLedger


def run(coro: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coro, 20))


# -- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_is_the_parents_sequence_and_what_is_new() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who = created(ledger)
        first = await turn(ledger, who, plan([1, 2, 3]), [4, 5])
        assert (first.turn, first.parent, first.shared, first.prompt) == (0, -1, 0, ids([1, 2, 3]))
        second = turns.begin(who, plan([6, 7], parent=0, kept=5), None, b"")
        assert (second.prompt, second.shared) == (ids([1, 2, 3, 4, 5, 6, 7]), 5)
        await turns.commit(second, finished(plan([6, 7], parent=0, kept=5), [8]))
        third = turns.begin(who, plan([9], parent=1, kept=4), None, b"")
        assert (third.prompt, third.parent, third.shared) == (ids([1, 2, 3, 4, 9]), 0, 4), "a sibling of turn 1"
        whole = turns.begin(who, plan([1, 2, 3, 4, 5, 6, 7, 8, 9], parent=1, kept=-1, began="head"), None, b"")
        assert (whole.parent, whole.shared) == (1, 8)
        assert turns.described(whole, plan([], parent=1, kept=-1, began="head"))["began"] is None
        retry = turns.begin(who, plan([], parent=1, kept=7, began="retry"), None, b"")
        assert (retry.prompt, retry.parent, retry.shared, retry.sibling) == (second.prompt, 0, 5, 1)
        root = turns.begin(who, plan([], parent=0, kept=3, began="retry"), None, b"")
        assert (root.prompt, root.parent, root.shared, root.sibling) == (first.prompt, -1, 0, 1)
        assert sequence(ledger.table.find(who.session_id).turns, 1) == ids(range(1, 9))
        assert [sequence(ledger.table.find(who.session_id).turns, 1, kept) for kept in range(9)] == [
            ids(range(1, 1 + kept)) for kept in range(9)
        ]

    run(main())


def test_turns_that_left_no_record_are_counted() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns, who = TurnLedger(ledger), created(ledger)
        session = ledger.table.find(who.session_id)
        await turn(ledger, who, plan([1]), [2])
        left = turns.begin(who, plan([1, 3]), None, b"")
        assert session.unrecorded_turns == 0, "it runs"
        turns.cancel(left)
        assert session.unrecorded_turns == 1

    run(main())


def test_sequences_of_random_trees() -> None:
    """Every prompt and sequence is what a table with whole copies has."""

    async def main() -> None:
        draw = random.Random(0)
        ledger = SessionLedger()
        who = created(ledger)
        known: list[list[int]] = []
        for i in range(200):
            parent = draw.randrange(-1, i)
            added = [draw.randrange(3) for _ in range(draw.randrange(1, 6))]
            kept = 0 if parent < 0 else draw.choice([-1, draw.randrange(len(known[parent]) + 1)])
            prompt = added if kept < 0 or parent < 0 else known[parent][:kept] + added
            output = [draw.randrange(3) for _ in range(draw.randrange(5))]
            opened = await turn(ledger, who, plan(added, parent, kept), output)
            assert opened.prompt == ids(prompt)
            if kept < 0 <= parent:
                assert (
                    opened.prompt[: 4 * opened.shared]
                    == ids(known[opened.parent] if opened.parent >= 0 else [])[: 4 * opened.shared]
                )
            known.append(prompt + output)
            assert sequence(ledger.table.find(who.session_id).turns, i) == ids(known[i])
            some = draw.randrange(len(known[i]) + 1)
            assert sequence(ledger.table.find(who.session_id).turns, i, some) == ids(known[i][:some])
        for stored, all_ids in zip(stored_turns(ledger.table.find(who.session_id)), known, strict=True):
            assert stored.prompt_ids() + stored.output_ids() == all_ids
            assert stored.output_logprobs() == [-0.5] * len(stored.output_ids())

    run(main())


def test_a_parent_that_has_not_finished_is_refused() -> None:
    ledger = SessionLedger()
    turns = TurnLedger(ledger)
    who = created(ledger)
    turns.begin(who, plan([1]), None, b"")
    with pytest.raises(SessionNotFoundError, match="no finished turn 0"):
        turns.begin(who, plan([2], parent=0, kept=1), None, b"")


# -- the tree -----------------------------------------------------------------------------------------------


def test_turns_with_equal_prompts_are_siblings_with_seeds_of_their_own() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who = created(ledger, seed=7)
        next = plan([1], new_nodes=node("head", 0) + node("hi"))
        three = [turns.begin(who, next, None, b"") for _ in range(3)]
        assert [each.sibling for each in three] == [0, 1, 2]
        assert len({each.seed for each in three}) == 3
        for each in three:
            await turns.commit(each, finished(next, [2]))
            assert turns.described(each, next)["child"] is None
        assert len(turns.view(who).nodes) == 5 * 44, "one head, one message, three replies"
        again = turns.begin(who, plan([1], after_node=1, matched_messages=1, began="retry"), None, b"")
        assert again.sibling == 3
        other = SessionLedger()
        same = TurnLedger(other).begin(created(other, seed=7), next, None, b"")
        assert same.seed == three[0].seed, "a seed depends on the session's seed and on the tree only"

    run(main())


def test_the_first_turn_that_continues_a_sequence_continues_its_branch() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who = created(ledger)
        branches = []
        for added, parent, kept in [([1], -1, 0), ([3], 0, 2), ([4], 0, 2), ([5], 1, 4), ([6], 1, 1), ([9], -1, 0)]:
            next = plan(added, parent, kept)
            branches.append(turns.described(await turn(ledger, who, next, [2]), next)["branch"])
        assert branches == [0, 0, 1, 0, 2, 3]

    run(main())


def test_a_conversation_without_common_messages_is_a_child() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who = created(ledger)
        main_turn, sub = plan([1]), plan([2])
        assert turns.described(await turn(ledger, who, main_turn, [5]), main_turn)["child"] is None
        described = turns.described(await turn(ledger, who, sub, [6]), sub)
        assert (described["child"], described["began"]) == ("auto-1", "child")
        later = plan([7], parent=1, kept=2)
        assert turns.described(await turn(ledger, who, later, [8]), later)["child"] == "auto-1"
        twice = turns.begin(who, sub, None, b"")
        assert (twice.sibling, turns.described(twice, sub)["child"]) == (1, "auto-1")

    run(main())


def test_a_named_child_has_its_own_tree_and_its_parents_limits() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who = created(ledger, limits=SessionLimits(max_turns=2), seed=1)
        helper = caller(who.session_id, "helper")
        assert turns.view(helper).decoded().replies == []
        opened = await turn(ledger, helper, plan([1]), [2])
        assert opened.session.id == f"{who.session_id}.helper"
        assert turns.view(who).decoded().replies == []
        assert [each.turn for each in turns.view(helper).decoded().replies] == [0]
        await turn(ledger, who, plan([1]), [2])
        with pytest.raises(SessionLimitError, match="max_turns=2"):
            turns.view(helper)
        assert [each.id for each in ledger.table.family(ledger.table.find(who.session_id))] == [
            who.session_id,
            opened.session.id,
        ]
        ledger.delete(who.session_id)
        assert opened.session.id not in ledger.table
        assert ledger.table.memory == 0

    run(main())


@pytest.mark.parametrize("name", ["", "a b", "../x", "auto-1", "x" * 65])
def test_a_bad_name_of_a_child_is_refused(name: str) -> None:
    ledger = SessionLedger()
    turns = TurnLedger(ledger)
    with pytest.raises(BadRequestError, match="X-Session-Child"):
        turns.view(caller(created(ledger).session_id, name))


# -- limits -------------------------------------------------------------------------------------------------


def test_limits() -> None:
    async def main() -> None:
        clock = Clock()
        ledger = SessionLedger(clock=clock)
        turns = TurnLedger(ledger)
        who = created(ledger, limits=SessionLimits(max_tokens=5, max_context=8, max_concurrent=2, seconds=60))
        opened = turns.begin(who, plan([1, 2]), None, b"")
        assert opened.max_new_tokens == 5
        second = turns.begin(who, plan([1, 2, 3, 4]), None, b"")
        assert second.max_new_tokens == 4
        with pytest.raises(SessionBusyError, match="max_concurrent=2") as busy:
            turns.view(who)
        assert busy.value.status_code == 429  # 503 would be a fault of the server
        turns.cancel(second)
        await turns.commit(opened, finished(plan([1, 2]), [1, 1]))
        assert turns.begin(who, plan([9], parent=0, kept=4), None, b"").max_new_tokens == 3
        with pytest.raises(ContextLengthError, match=r"length is 8 tokens \(max_context of the session ses_\w+\)"):
            turns.begin(who, plan([1] * 8), None, b"")
        await turn(ledger, who, plan([1]), [1, 1, 1])
        with pytest.raises(SessionLimitError, match=r"session ses_\w+ has used its max_tokens=5|max_tokens=5"):
            turns.view(who)
        clock.now += 61
        with pytest.raises(SessionEndedError, match="seconds=60"):
            turns.view(who)
        with pytest.raises(SessionEndedError, match=r"expired \(seconds\)"):
            turns.view(who)

    run(main())


def test_bounds_of_the_server() -> None:
    async def main() -> None:
        ledger = SessionLedger(Bounds(max_sessions=2, max_turn_tokens=4, max_nodes=2))
        turns = TurnLedger(ledger)
        who = created(ledger)
        created(ledger)
        with pytest.raises(SessionUnavailableError, match="max_sessions"):
            created(ledger)
        with pytest.raises(ContextLengthError, match="max_session_turn_tokens"):
            turns.begin(who, plan([1] * 4), None, b"")
        with pytest.raises(SessionLimitError, match="2 messages"):
            turns.begin(who, plan([1], new_nodes=node("a") + node("b") + node("c")), None, b"")
        assert ledger.table.find(who.session_id).in_flight == 0

    run(main())


def test_memory_is_bounded_and_freed() -> None:
    async def main() -> None:
        ledger = SessionLedger(Bounds(memory_bytes=20_000))
        who = created(ledger)
        with pytest.raises(SessionUnavailableError, match="session_memory_bytes"):
            for _ in range(100):
                await turn(ledger, who, plan([1] * 100), [2] * 100)
        ledger.finish(who.session_id)
        with pytest.raises(SessionUnavailableError):
            created(ledger)
        ledger.read(ledger.table.find(who.session_id))
        created(ledger)
        assert who.session_id not in ledger.table

    run(main())


def test_sessions_expire_and_are_forgotten() -> None:
    clock = Clock()
    ledger = SessionLedger(Bounds(ttl=100, retention=10), clock=clock)
    turns = TurnLedger(ledger)
    idle, timed, other = (
        created(ledger, limits=SessionLimits(idle_seconds=5)),
        created(ledger, limits=SessionLimits(seconds=50)),
        created(ledger),
    )
    running = turns.begin(other, plan([1]), None, b"")
    clock.now += 6
    run(ledger.sweep())
    assert [ledger.table.find(each.session_id).state for each in (idle, timed, other)] == ["expired", "open", "open"]
    ledger.table.find(idle.session_id).fetched = True
    clock.now += 101
    run(ledger.sweep())
    assert ledger.table.find(timed.session_id).reason == "seconds"
    assert idle.session_id not in ledger.table
    assert ledger.table.find(other.session_id).state == "open", "a turn runs"
    turns.cancel(running)
    run(ledger.sweep())
    assert ledger.table.find(other.session_id).reason == "session_ttl"


# -- keys, ends, rewards, replays ---------------------------------------------------------------------------


def test_a_finished_session_has_no_key_and_aborts_its_turns() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        session, key = ledger.create(CreateSession())
        assert ledger.table.of_key(key) == session.id
        who, aborted = caller(session.id), []
        next = plan([1])
        opened = turns.begin(who, next, None, b"", abort=lambda: aborted.append(True))
        ledger.finish(session.id)
        assert aborted == [True]
        assert ledger.table.of_key(key) is None
        await turns.commit(opened, finished(next, [2], aborted=True))
        assert [bool(each.stored.flags & ABORTED) for each in stored_turns(session)] == [True]
        with pytest.raises(SessionEndedError):
            turns.view(who)
        assert ledger.finish(session.id, "again").reason == "done"

    run(main())


def test_a_turn_of_a_deleted_session_is_refused() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who = created(ledger)
        opened = turns.begin(who, plan([1]), None, b"")
        ledger.delete(who.session_id)
        with pytest.raises(SessionNotFoundError):
            await turns.commit(opened, finished(plan([1]), [2]))
        turns.cancel(opened)
        assert ledger.table.memory == 0

    run(main())


def test_ids_and_bodies() -> None:
    ledger = SessionLedger()
    created(ledger, id="mine")
    with pytest.raises(SessionExistsError):
        created(ledger, id="mine")
    for fields in ({"id": "a.b"}, {"id": ""}, {"metadata": {"x": "y" * 20000}}, {"limits": SessionLimits(max_turns=0)}):
        with pytest.raises(BadRequestError):
            created(ledger, **fields)


def test_rewards_replace_and_add() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        who = created(ledger)
        await turn(ledger, who, plan([1]), [2])
        assert ledger.reward(who.session_id, RewardBody(1.0)) == 1.0
        assert ledger.reward(who.session_id, RewardBody(0.5)) == 0.5
        assert ledger.reward(who.session_id, RewardBody(2.0, name="style")) == 2.5
        assert ledger.reward(who.session_id, RewardBody(9.0, turn=0)) == 2.5
        with pytest.raises(BadRequestError, match="no finished turn 1"):
            ledger.reward(who.session_id, RewardBody(1.0, turn=1))

    run(main())


def test_an_idempotency_key_finds_its_turns() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who, key, body = created(ledger), b"key", b"b" * 16
        assert turns.answered(who, key, body) == []
        await turn(ledger, who, plan([1]), [2], key=key, body=body)
        await turn(ledger, who, plan([1]), [3], key=key, body=body)
        assert [each.output_ids() for each in turns.answered(who, key, body)] == [[2], [3]]
        with pytest.raises(IdempotencyConflictError):
            turns.answered(who, key, b"x" * 16)
        assert turns.answered(created(ledger), key, body) == [], "another session"

    run(main())


def test_previous_response() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        who, other = created(ledger), created(ledger)
        await turn(ledger, who, plan([1]), [2])
        assert turns.view(who, f"resp_{who.session_id}_0").previous == 0
        for bad in (
            f"resp_{who.session_id}_1",
            f"resp_{other.session_id}_0",
            "resp_",
            "x",
            f"resp_{who.session_id}_-1",
        ):
            with pytest.raises(SessionNotFoundError, match="previous_response_id"):
                turns.view(who, bad)

    run(main())


# -- memory -------------------------------------------------------------------------------------------------


def test_a_token_takes_at_most_24_bytes_beside_its_text() -> None:
    """2,000 turns of 32 prompt and 32 sampled tokens with two messages each."""
    sessions, count, new = 20, 100, 32

    async def main() -> tuple[SessionLedger, int]:
        ledger = SessionLedger()
        turns = TurnLedger(ledger)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for s in range(sessions):
            who = created(ledger)
            for i in range(count):
                added = list(range(1000 * s, 1000 * s + new))
                next = plan(
                    added,
                    parent=i - 1,
                    kept=2 * new * i,
                    new_nodes=node(f"{s} {i}"),
                    after_node=2 * i - 1,
                    options=bytes([111] * 16),
                    began="root" if i == 0 else None,
                )
                opened = turns.begin(who, next, None, b"b" * 16)
                done = finished(
                    next,
                    added,
                    logprobs=floats([-0.25 - i] * new),
                    rid=f"{who.session_id}:{i:032d}",
                    times=(i + 0.5, i + 0.6, i + 0.7),
                    spans=[(f"v{i // 10}", 0)],
                    body=i.to_bytes(16, "little"),
                )
                await turns.commit(opened, done)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return ledger, after - before

    ledger, used = run(main())
    tokens = sessions * count * 2 * new
    texts = sum(sys.getsizeof(turn.reply) for each in ledger.table.all() for turn in each.turns if turn is not None)
    assert 0 < texts < used / 4 and (used - texts) / tokens <= 24, f"{(used - texts) / tokens:.1f} bytes a token"
    assert 0.8 < ledger.table.memory / used < 1.5, "the ledger's own count is about right"
