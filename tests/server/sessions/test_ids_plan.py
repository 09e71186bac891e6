"""The plan finds the stored turn that a prompt of token ids follows, and compares each turn once."""

from __future__ import annotations

import asyncio
from array import array

from tests.server.sessions.building import created, ids, plan, turn
from tests.steps import Steps
from verl_server.server.sessions.ids_plan import plan_ids
from verl_server.server.sessions.ledger import SessionLedger


def test_ids_follow_the_longest_turn() -> None:
    async def main() -> None:
        ledger = SessionLedger()
        who = created(ledger)
        session = ledger.table.find(who.session_id)
        assert (await plan_ids(session, ids([1]))).began == "root"
        await turn(ledger, who, plan([1, 2]), [3])
        await turn(ledger, who, plan([4], 0, 3), [5])
        await turn(ledger, who, plan([7]), [8])

        async def planned(*values: int) -> tuple[int, int, list[int], str | None]:
            found = await plan_ids(session, ids(values))
            return found.parent, found.kept, array("i", found.added).tolist(), found.began

        assert await planned(1, 2, 3, 4, 5, 6) == (1, 5, [6], None)
        assert await planned(1, 2, 3, 9) == (0, 3, [9], "edited")
        assert await planned(1, 2) == (0, 2, [], "retry")
        assert await planned(7, 9) == (-1, 0, [7, 9], "child")
        assert await planned(7, 8, 9) == (2, 2, [9], None)
        assert (await plan_ids(None, ids([1]))).began == "root"

    asyncio.run(main())


def test_each_turn_is_compared_once() -> None:
    """A long conversation of ids, and a prompt that parts from it: no sequence is joined for each turn."""

    async def main() -> None:
        counts: list[int] = []
        for length in (50, 100):
            ledger = SessionLedger()
            who = created(ledger)
            known = [1]
            await turn(ledger, who, plan(known), [2])
            known.append(2)
            for k in range(length):
                await turn(ledger, who, plan([3], k, len(known)), [4])
                known += [3, 4]
            session = ledger.table.find(who.session_id)
            with Steps() as steps:
                found = await plan_ids(session, ids([*known[:-1], 9, 9]))
            assert (found.parent, found.kept) == (length - 1, len(known) - 2)
            counts.append(steps.count)
        assert counts[1] < 2.5 * counts[0], counts

    asyncio.run(main())
