"""The work of a request, and the counted memory, as a session and its server grow. Steps are counted, not seconds."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.server.conftest import MakeStack
from tests.server.sessions.building import Clock, caller, created, finished, node, plan, turn
from tests.server.sessions.test_routes import Owner
from tests.steps import Steps
from verl_server.chat.history import NODE, MessageKey, chain
from verl_server.messages.session_types import CreateSession, RewardBody
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.limits import Bounds
from verl_server.server.sessions.message_nodes import MessageNodes
from verl_server.server.sessions.session import SessionCaller
from verl_server.server.sessions.turn_ledger import TurnLedger


def run(coro: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coro, 60))


def flat(make: Callable[[int], Awaitable[Callable[[], Any]]], sizes: tuple[int, int], slack: int = 60) -> None:
    """Check that an operation takes about as many steps at both sizes. `make` returns the operation at a size."""

    async def main() -> None:
        counts: list[int] = []
        for size in sizes:
            operation = await make(size)
            with Steps() as steps:
                result = operation()
                if asyncio.iscoroutine(result):
                    await result
            counts.append(steps.count)
        assert counts[1] < counts[0] + slack, counts

    run(main())


# -- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_equal_messages_are_appended_as_one_block(known: bool) -> None:
    async def make(size: int) -> Callable[[], Any]:
        ledger = SessionLedger()
        who, next = created(ledger), plan([1], new_nodes=node("same") * size)
        turns = TurnLedger(ledger)
        if known:
            turns.begin(who, next, None, b"")
        return lambda: turns.begin(who, next, None, b"")

    flat(make, (100, 4000))


def test_the_samples_of_one_request_count_its_messages_once() -> None:
    ledger = SessionLedger(Bounds(max_nodes=10))
    who, turns, next = created(ledger), TurnLedger(ledger), plan([1], new_nodes=node("same") * 8)
    assert [turns.begin(who, next, None, b"").sibling for _ in range(2)] == [0, 1]
    with pytest.raises(Exception, match="10 messages"):
        turns.begin(who, plan([1], new_nodes=node("other") * 3), None, b"")


def test_nodes_are_those_of_a_search_through_all_of_them() -> None:
    class Slow:
        def __init__(self) -> None:
            self.rows: list[tuple[int, int, bytes]] = []

        def append(self, texts: list[str], after: int) -> int:
            for text in texts:
                row = (after, -1, node(text)[8:36])
                if row not in self.rows:
                    self.rows.append(row)
                after = self.rows.index(row)
            return after

    draw = random.Random(1)
    for _ in range(60):
        slow, fast, restored = Slow(), MessageNodes(), MessageNodes()
        for k in range(40):
            after = draw.randrange(-1, len(slow.rows))
            if draw.random() < 0.2 and after >= 0:
                slow.rows.append((after, k, node(f"reply {k}", 3)[8:36]))
                record = NODE.unpack(node(f"reply {k}", 3))
                assert fast.append_reply(after, k, 3, record[4], record[5]) == len(slow.rows) - 1
            else:
                texts = [draw.choice("ab") for _ in range(draw.randrange(4))]
                assert fast.append(b"".join(map(node, texts)), after) == slow.append(texts, after)
            restored.extend(bytes(fast.data[len(restored.data) :]))
        rows = [(r[0], r[1], fast.data[44 * i + 8 : 44 * i + 36]) for i, r in enumerate(NODE.iter_unpack(fast.data))]
        assert rows == slow.rows
        assert (restored.data, restored._starts) == (fast.data, fast._starts)


# -- turns --------------------------------------------------------------------------------------------------


async def conversation(size: int, ledger: SessionLedger) -> SessionCaller:
    """A session with `size` turns that follow each other, and as many that begin with the same prompt."""
    who = created(ledger)
    await turn(ledger, who, plan([1], new_nodes=node("hi")), [2], key=b"first")
    for k in range(size):
        await turn(ledger, who, plan([3], -1 if k % 2 else k, 0 if k % 2 else 2, began="retry"), [4], key=b"%d" % k)
    return who


@pytest.mark.parametrize("what", ["begin a root", "begin a follower", "cancel", "view", "deliver", "name", "info"])
def test_a_turn_takes_the_same_steps_in_a_long_session(what: str) -> None:
    async def make(size: int) -> Callable[[], Any]:
        ledger = SessionLedger()
        turns, who = TurnLedger(ledger), await conversation(size, ledger)
        session = ledger.table.find(who.session_id)
        opened = turns.begin(who, plan([7]), b"k", b"b")
        return {
            "begin a root": lambda: turns.begin(who, plan([3], began="retry"), None, b""),
            "begin a follower": lambda: turns.begin(who, plan([9], 0, 2), None, b""),
            "cancel": lambda: turns.cancel(opened),
            "view": lambda: turns.view(who),
            "deliver": lambda: turns.delivered(who.session_id, 1),
            "name": lambda: turns.turn_of(who, "rid"),
            "info": session.info,
        }[what]

    flat(make, (20, 200))


def test_an_idempotency_key_keeps_no_turns_that_were_aborted() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        who, turns = created(ledger), TurnLedger(ledger)
        for _ in range(5):
            await turn(ledger, who, plan([1]), [2], key=b"k", aborted=True)
            assert turns.answered(who, b"k", b"b" * 16) == []
        assert ledger.table.find(who.session_id).keys == {}
        await turn(ledger, who, plan([1]), [2], key=b"k", body=b"b" * 16)
        assert [each.turn for each in turns.answered(who, b"k", b"b" * 16)] == [5]

    run(main())


def test_siblings_are_counted_until_they_are_cancelled() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        who, turns = created(ledger), TurnLedger(ledger)
        first, second = (turns.begin(who, plan([1]), None, b"") for _ in range(2))
        assert (first.sibling, second.sibling) == (0, 1)
        turns.cancel(second)
        await turns.commit(first, finished(plan([1]), [2]))
        third = turns.begin(who, plan([1]), None, b"")
        assert third.sibling == 1
        turns.cancel(third)
        longer = turns.begin(who, plan([3], 0, 2), None, b"")
        again = turns.begin(who, plan([3], 0, 2), None, b"")
        branches = [turns.described(each, plan([3], 0, 2))["branch"] for each in (longer, again)]
        assert branches[0] == 0 and branches[1] > 0, "the second continuation begins a branch"

    run(main())


# -- the server ---------------------------------------------------------------------------------------------


def test_making_room_does_not_look_at_all_sessions() -> None:
    async def make(size: int) -> Callable[[], Any]:
        ledger = SessionLedger(Bounds(max_sessions=size))
        for _ in range(size):
            created(ledger)

        def refused() -> None:
            with pytest.raises(Exception, match="max_sessions"):
                ledger.create(CreateSession())

        return refused

    flat(make, (50, 500))


def test_a_sweep_lets_the_loop_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_server.server import slices

    monkeypatch.setattr(slices, "_SLICE_SECONDS", -1.0)  # each piece of work is a slice

    async def main() -> None:
        clock = Clock()
        ledger = SessionLedger(Bounds(ttl=1.0), clock=clock)
        names = [created(ledger).session_id for _ in range(20)]
        clock.now += 5
        sweep, turns_of_the_loop = asyncio.ensure_future(ledger.sweep()), 0
        while not sweep.done():
            await asyncio.sleep(0)
            turns_of_the_loop += 1
            if turns_of_the_loop == 3:
                ledger.delete(names[10])
        assert turns_of_the_loop >= 20
        assert all(session.state == "expired" for session in ledger.table.roots())

    run(main())


def test_the_tree_of_a_session_is_listed_in_slices(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_server.server import slices

    owner = Owner(make_stack(api_key="owner"))
    made = owner.create()
    for k in range(10):
        owner.turn(made["id"], plan([k]), [3])
    monkeypatch.setattr(slices, "_SLICE_SECONDS", -1.0)
    sleeps: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay: float) -> None:
        sleeps.append(delay)
        await sleep(delay)

    monkeypatch.setattr(slices.asyncio, "sleep", counted)
    assert len(owner.call("GET", f"/sessions/{made['id']}").json()["tree"]) == 10
    assert len(sleeps) >= 10


def measured(make: Callable[[], Awaitable[tuple[int, int]]], is_right: Callable[[int, int], bool]) -> None:
    """Check (counted bytes, bytes that this process holds more than before) of what `make` does.

    Threads that earlier tests have left behind allocate, too, so it is tried up to three times.
    """
    found = []
    for _ in range(3):
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            counted, used = run(make())
            found.append((counted, used - before))
        finally:
            tracemalloc.stop()
        if is_right(*found[-1]):
            return
    pytest.fail(f"(counted, used) bytes: {found}")


def test_values_of_callers_do_not_outlive_their_session() -> None:
    async def main() -> tuple[int, int]:
        ledger = SessionLedger()
        for k in range(20):
            who = created(ledger)
            for i in range(10):
                stop = f"{k} {i} " + "x" * 1000
                await turn(ledger, who, plan([1]), [2], finish=("stop", stop), sampling=stop.encode())
            ledger.delete(who.session_id)
            del who
        gc.collect()
        return ledger.table.memory, tracemalloc.get_traced_memory()[0]

    measured(main, lambda counted, used: counted == 0 and used < 100_000)


@pytest.mark.parametrize("what", ["metadata", "keys", "cancelled messages", "rewards", "conditions", "running"])
def test_counted_bytes_are_about_the_memory(what: str) -> None:
    async def main() -> tuple[int, int]:
        ledger = SessionLedger(Bounds(max_sessions=10_000))
        turns, who = TurnLedger(ledger), created(ledger)
        begun = ledger.table.memory
        for k in range(300):
            match what:
                case "metadata":
                    created(ledger, metadata={"x": [{"a": i} for i in range(100)]})
                case "keys":
                    await turn(ledger, who, plan([k]), [2], key=b"%16d" % k, body=b"%16d" % k)
                case "cancelled messages":
                    keys = [MessageKey(2, b"%8d%8d" % (k, i), bytes(8)) for i in range(30)]
                    turns.cancel(turns.begin(who, plan([1], new_nodes=chain(keys)), None, b""))
                case "rewards":
                    ledger.reward(who.session_id, RewardBody(float(k), name=f"reward {k}"))
                case "conditions":
                    await turn(ledger, who, plan([k]), [2], sampling=b"%d" % k + b"x" * 2000)
                case "running":
                    body = b"m" * 4000
                    turns.begin(
                        caller(created(ledger).session_id), plan(range(500), messages=body + b"%d" % k), None, b""
                    )
        gc.collect()
        return ledger.table.memory - begun, tracemalloc.get_traced_memory()[0]

    measured(main, lambda counted, used: 0.7 < counted / used < 2.0)


def test_the_sampling_parameters_of_a_session_are_bounded() -> None:
    ledger = SessionLedger()
    with pytest.raises(Exception, match="bytes of JSON"):
        created(ledger, sampling_params={"stop": ["x" * 300_000]})
