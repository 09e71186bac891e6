"""A request goes to the server whose cache has its beginning, until that server has much more work than another."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fleet.fakes import FakeServer, run, running
from tests.fleet.simulated import GENERATE, Workload, play
from verl_server.fleet.members import Member
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.placement import Placement, rendezvous
from verl_server.fleet.requests import RoutedRequest
from verl_server.fleet.upstream import Connection, Upstream

URLS = [f"http://server{number}:1" for number in range(3)]


def members(*loads: int) -> list[Member]:
    """Return members with so many tokens in flight, of 1,000."""
    made = []
    for url, load in zip(URLS, loads, strict=False):
        member = Member(url, Upstream(url, 1.0))
        member.capacity, member.reported_tokens = 1000, load
        made.append(member)
    return made


def asking(text: str = "", **headers: str) -> RoutedRequest:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return RoutedRequest(GENERATE, "POST", b"/generate", sent, json.dumps({"text": text}).encode())


def long_text(seed: int, blocks: int = 8) -> str:
    return random.Random(seed).randbytes(512 * blocks).hex()


def test_the_least_loaded_server_gets_what_nobody_knows() -> None:
    placement, three = Placement(0.2), members(300, 100, 200)
    assert placement.choose(asking("a"), three) is three[1]
    assert placement.counts == {"load": 1}


def test_equal_servers_take_turns() -> None:
    placement, three = Placement(0.2), members(0, 0, 0)
    chosen = Counter(placement.choose(asking("a"), three).url for _ in range(30))
    assert set(chosen.values()) == {10}


@pytest.mark.parametrize("header", ["x_smg_routing_key", "x_session_id"])
@pytest.mark.parametrize(
    ("loads", "reason"),
    [((0, 0), "conversation"), ((390, 0), "conversation"), ((410, 0), "spilled"), ((690, 300), "conversation"),
     ((710, 300), "spilled"), ((1400, 950), "conversation"), ((1430, 950), "spilled")],
)  # fmt: skip
def test_a_conversation_stays_until_its_server_has_much_more_work(
    header: str, loads: tuple[int, int], reason: str
) -> None:
    placement, two = Placement(0.2), members(0, 500)
    first = placement.choose(asking("a", **{header: "c1"}), two)
    assert first is two[0]
    two[0].reported_tokens, two[1].reported_tokens = loads
    again = placement.choose(asking("another", **{header: "c1"}), two)
    assert placement.counts[reason] == 1 and (again is first) == (reason == "conversation")
    two[0].reported_tokens = two[1].reported_tokens = 0
    assert placement.choose(asking("third", **{header: "c1"}), two) is again, "the conversation stays where it went"


def test_a_known_beginning_counts_from_half_of_the_prompt_on() -> None:
    placement, two = Placement(0.2), members(0, 10)
    shared = long_text(1)
    assert placement.choose(asking(shared), two) is two[0]
    two[0].reported_tokens = 100
    assert placement.choose(asking(shared + long_text(2, 6)), two) is two[0]
    assert placement.choose(asking(shared + long_text(3, 20)), two) is two[1]
    assert placement.counts == {"load": 2, "prefix": 1}


def test_samples_of_a_group_stay_together_until_the_margin() -> None:
    placement, two = Placement(0.2), members(0, 0)
    request = asking(long_text(1))
    chosen = []
    for _ in range(8):
        member = placement.choose(request, two)
        member.began(50)
        chosen.append(two.index(member))
    assert len(set(chosen[:5])) == 1 and placement.counts["spilled"] == 1 and placement.counts["prefix"] == 6, chosen
    assert abs(2 * sum(chosen) - len(chosen)) <= 4, "the copies that spilled over attract the next ones"


def test_the_second_best_prefix_is_better_than_none() -> None:
    placement, three = Placement(0.2), members(0, 0, 0)
    prompt = long_text(1)
    placement.prefixes.add(asking(prompt).blocks, URLS[0])
    placement.prefixes.add(asking(prompt).blocks[:6], URLS[1])
    three[0].reported_tokens = 900
    assert placement.choose(asking(prompt), three) is three[1]


def test_a_paused_server_gets_nothing_while_another_is_not() -> None:
    placement, two = Placement(0.2), members(0, 0)
    assert placement.choose(asking("a", x_smg_routing_key="c"), two) in two
    for member in two:
        member.is_paused = True
        other = next(each for each in two if each is not member)
        assert {placement.choose(asking(f"{n}"), two).url for n in range(5)} == {other.url}
        assert placement.choose(asking("a", x_smg_routing_key="c"), two) is other
        other.is_paused = True
        assert placement.choose(asking("a"), two) in two
        member.is_paused = other.is_paused = False


CREATE = RoutedOperation(("/sessions",), ("POST",), "sessions", "owner")


def test_sessions_that_are_created_at_once_are_spread() -> None:
    now = [0.0]
    placement, three = Placement(0.2, lambda: now[0]), members(0, 0, 0)
    for member, tokens in zip(three, (0, 20_000, 40_000), strict=True):
        member.capacity, member.reported_tokens = 100_000, tokens
    request = RoutedRequest(CREATE, "POST", b"/sessions", [], b"{}")
    chosen = Counter(placement.choose(request, three).url for _ in range(128))
    assert min(chosen.values()) >= 35, chosen
    assert chosen[URLS[0]] > chosen[URLS[1]] > chosen[URLS[2]], "the least loaded server gets the most"
    now[0] = 31.0
    assert placement.choose(request, three) is three[0], "their turns count now, not the sessions"


def keyed(key: str, body: Any = None, **headers: str) -> RoutedRequest:
    return asking("" if body is None else body, idempotency_key=key, **headers)


def test_a_request_with_a_key_has_the_same_server_after_a_restart_of_the_router() -> None:
    before, after = Placement(0.2), Placement(0.2)
    three = members(0, 500, 900)
    owners = {}
    for number in range(100):
        request = keyed(f"k{number}")
        owners[number] = before.choose(request, three)
        assert before.keyed_owner(request, URLS) == after.keyed_owner(request, URLS[::-1]) == owners[number].url
        assert after.choose(request, three[::-1]) is owners[number]
    assert min(Counter(member.url for member in owners.values()).values()) > 15


def test_a_repeated_request_is_looked_for_where_it_went() -> None:
    placement, three = Placement(0.2), members(0, 0, 0)
    request = keyed("k")
    owner = placement.keyed_owner(request, URLS)
    others = [member for member in three if member.url != owner]
    elsewhere = placement.choose(request, others)
    assert placement.keyed_owner(request, URLS) == elsewhere.url != owner


def test_keys_of_two_callers_are_two_keys() -> None:
    one, other = keyed("k"), keyed("k")
    one.keys, other.keys = [b"caller-1"], [b"caller-2"]
    assert one.idempotency != other.idempotency
    assert asking("a").idempotency is None


def test_turns_with_keys_stay_with_their_conversation() -> None:
    placement, three = Placement(0.2), members(0, 0, 0)
    for name in "abcdef":
        turns = [keyed(f"{name}{turn}", x_smg_routing_key=name) for turn in range(8)]
        assert len({placement.choose(turn, three).url for turn in turns}) == 1
        assert len({Placement(0.2).keyed_owner(turn, URLS) for turn in turns}) == 1


def test_rendezvous_moves_only_the_keys_of_a_server_that_leaves() -> None:
    keys = [b"%d" % number for number in range(200)]
    before = {key: rendezvous(key, URLS) for key in keys}
    for key in keys:
        now = rendezvous(key, URLS[:2])
        assert now == before[key] or before[key] == URLS[2]
    assert len({rendezvous(b"x" * 100 + b"%d" % number, URLS) for number in range(50)}) == 3, "every byte counts"


WORKLOADS = {
    "histories": Workload(prompt=(100, 300), observation=(30, 120), output=(30, 120)),
    "groups with short prompts": Workload(group=8, prompt=(30, 90), observation=(30, 120), output=(50, 200)),
    "a prompt of the system": Workload(group=4, system=600, prompt=(50, 150), observation=(30, 90), output=(30, 90)),
}


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_two_caches_hit_as_often_as_one(name: str) -> None:
    """128 conversations of 8 turns: with hints, and with prefixes alone, at least 0.95 of the hits of one cache."""
    work, capacity = WORKLOADS[name], 200_000
    one = play(work, 1, capacity, hints=False)
    for hints in (True, False):
        two = play(work, 2, capacity, hints=hints)
        assert two.hit >= 0.95 * one.hit, (hints, two.hit, one.hit)
        assert max(two.shares) < 0.7, (hints, two.shares)
    assert one.hit > 0.99, "the cache of one server holds all of it"


def test_small_caches_are_used_as_one_large_one() -> None:
    work = WORKLOADS["histories"]
    large = play(work, 1, 80_000, hints=False)
    for hints in (True, False):
        assert play(work, 2, 40_000, hints=hints).hit >= 0.95 * large.hit


def test_many_requests_at_once_spread_before_a_connection_is_open() -> None:
    async def scenario() -> None:
        async with running(FakeServer(), FakeServer(), probe_interval=60.0) as fleet:
            are_placed = asyncio.Event()
            for member in fleet.fleet.members:
                member.upstream.close("so that connections must be opened")
                member.upstream._open = opened_after(are_placed, member.upstream._open)  # type: ignore[method-assign]
            fleet.fleet.members[0].reported_tokens = 1
            asked = [asyncio.ensure_future(fleet.post("/generate", {"text": f"prompt {n}"})) for n in range(40)]
            while fleet.router.placement.counts.total() < 40:
                await asyncio.sleep(0)
            are_placed.set()
            counts = Counter(map(fleet.at, await asyncio.gather(*asked)))
            assert min(counts[0], counts[1]) >= 15

    run(scenario())


def opened_after(event: asyncio.Event, open_one: Callable[[], Awaitable[Connection]]) -> Any:
    async def opened() -> Connection:
        await event.wait()
        return await open_one()

    return opened


def test_weights_that_change_end_what_is_known_of_a_cache() -> None:
    async def scenario() -> None:
        a, b = FakeServer(), FakeServer()
        async with running(a, b) as fleet:
            prompt = {"text": long_text(1)}
            first = fleet.at(await fleet.post("/generate", prompt))
            assert {fleet.at(await fleet.post("/generate", prompt)) for _ in range(4)} == {first}
            [a, b][first].version = "2@00000001"
            await fleet.fleet.look_now()
            known = fleet.router.placement.prefixes.known
            blocks = RoutedRequest(GENERATE, "POST", b"/", [], json.dumps(prompt).encode()).blocks
            assert [a, b][first].url not in known(blocks)

    run(scenario())
