"""Servers and the router are killed in the middle of everything: every reply and every record stays right.

Each case kills in one phase and leaves the fleet whole again. Tokens are those of an undisturbed run wherever a seed is
given; no request is answered by a server that nobody pushed to since it was started.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.fleet.dialects import DIALECTS, Dialect, Said, Stream
from tests.fleet.playing import SEEDS, Creators, Talk, Traffic, again, short
from tests.fleet.servers import OWNER, SETTLE_SECONDS, Fleet, Server, make_model, version
from tests.waiting import eventually

LONG = 800
"""Tokens of a generation that is killed in its middle: about two seconds."""
NAME = "X-SMG-Routing-Key"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, make_model(folder / "model"), "--probe-timeout", "2") as fleet:
        fleet.push_all()
        yield fleet


@dataclass
class Kill:
    """Processes that the case kills. The first server has the stream, turn or push of the case."""

    name: str
    servers: int = 0
    router: bool = False
    is_pause: bool = False
    """Stop the first server by SIGSTOP until it counts as dead, and let it go on."""

    def __str__(self) -> str:
        return self.name

    def __call__(self, fleet: Fleet, first: Server) -> list[Server]:
        """Kill. Return the servers that are gone."""
        others = [server for server in fleet.servers if server is not first]
        gone = [first, *others][: self.servers]
        for server in gone:
            server.kill()
        if self.is_pause:
            first.signal(signal.SIGSTOP)
            fleet.until(lambda states: states[first.url] == "dead", 3 * SETTLE_SECONDS)
            gone = [first]
        if self.router:
            fleet.router.kill()
            fleet.router.start()
            fleet.router.wait_ready()
        return gone

    def undo(self, fleet: Fleet, gone: list[Server]) -> None:
        if self.is_pause:
            for server in gone:
                server.signal(signal.SIGCONT)


ONE, ROUTER, TWO, PAUSE = (
    Kill("a server", servers=1),
    Kill("the router", router=True),
    Kill("two servers", servers=2),
    Kill("a stopped server", is_pause=True),
)
KILLS = [ONE, ROUTER, TWO, PAUSE]


# -- in the middle of a push ---------------------------------------------------------------------------------------


@dataclass
class Expected:
    """The tokens of each seed in each version."""

    ids: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def learn(self, server: Server) -> None:
        for seed in SEEDS:
            answer = httpx.post(f"{server.url}/generate", json=short(seed), headers=OWNER, trust_env=False).json()
            label = answer["meta_info"]["weight_version"]
            assert self.ids.setdefault((label, seed), answer["output_ids"]) == answer["output_ids"]


@dataclass
class Phase:
    name: str
    pushed: int
    """Number of servers that have the new version when something is killed."""
    is_committed: bool = False
    is_half: bool = False
    """Another server has half of the weights."""

    def __str__(self) -> str:
        return self.name


PHASES = [
    Phase("one server has the version", 1),
    Phase("before the push", 0),
    Phase("in the push to a server", 0, is_half=True),
    Phase("two servers have the version", 2),
    Phase("all servers have the version", 3),
    Phase("the push was declared", 3, is_committed=True),
]


def cases() -> list[Any]:
    quick = {("a server", PHASES[0].name), ("the router", PHASES[3].name), ("two servers", PHASES[5].name)}
    return [
        pytest.param(
            kill,
            phase,
            id=f"{kill}, {phase}",
            marks=() if (kill.name, phase.name) in quick else pytest.mark.exhaustive,
        )
        for kill in KILLS
        for phase in PHASES
    ]


@pytest.mark.parametrize(("kill", "phase"), cases())
def test_a_push_that_is_disturbed(fleet: Fleet, kill: Kill, phase: Phase) -> None:
    fleet.heal()
    old, new = version(fleet.number), version(fleet.number + 1)
    expected = Expected()
    expected.learn(fleet.servers[0])
    with Traffic(fleet) as traffic, ThreadPoolExecutor(2) as pool:
        traffic.wait_for(4)
        fleet.number += 1
        demands = [
            pool.submit(demand, fleet, name, new)
            for name in ("X-Verl-Min-Weight-Version", "X-Verl-Exact-Weight-Version")
        ]
        for server in fleet.servers[: phase.pushed]:
            fleet.push(server, fleet.number)
        if phase.is_committed:
            fleet.commit(fleet.number)
        finish = fleet.begin_push(fleet.servers[0], fleet.number) if phase.is_half else None
        gone = kill(fleet, fleet.servers[0])
        killed = time.monotonic()
        alive = [server for server in fleet.servers if server not in gone]
        if finish is None or fleet.servers[0] in gone:
            first = traffic.wait_for(4)
            assert time.monotonic() - killed < SETTLE_SECONDS, "the others go on"
            assert {reply.server for reply in first} <= {server.url for server in alive}

        # The trainer ends its push, without the servers that are gone.
        if finish is not None and fleet.servers[0] in alive:
            finish()
        for server in alive:
            fleet.push(server, fleet.number)
        fleet.commit(fleet.number)
        pushed = time.monotonic()
        for each in demands:
            reply = each.result(SETTLE_SECONDS)
            assert reply["meta_info"]["weight_version"] == new
        assert {reply.version for reply in traffic.wait_for(4)} == {new}
        expected.learn(alive[0])

        # A server that is back serves nothing before it is pushed to.
        kill.undo(fleet, gone)
        started = fleet.restart()
        back = gone if kill.is_pause else started
        fleet.until(lambda states: all(states[server.url] in ("stale", "healthy") for server in back))
        behind = back if kill.is_pause and phase.pushed == 0 else started
        assert all(fleet.states()[server.url] == "stale" for server in behind), fleet.states()
        for reply in traffic.wait_for(20):
            assert reply.server not in {server.url for server in behind}
            assert reply.version == new
        if finish is not None and kill.is_pause:
            finish()
        for server in back:
            fleet.push(server, fleet.number)
        fleet.until_healthy()
        urls = {server.url for server in fleet.servers}
        assert eventually(lambda: {reply.server for reply in traffic.since(pushed)} == urls, SETTLE_SECONDS)
    assert not traffic.refused
    for reply in traffic.replies:
        assert reply.ids == expected.ids[reply.version, reply.seed], reply
        assert reply.version in (old, new)
        assert kill.router or not reply.trouble, reply
        assert reply.seconds < SETTLE_SECONDS, reply


def demand(fleet: Fleet, header: str, label: str) -> dict[str, Any]:
    """Send a request that demands a version which no server has yet. The router holds it."""
    answer, _ = again(lambda: fleet.client.post("/generate", json=short(0), headers={header: label}))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_the_router_that_is_asked_to_end_ends_its_streams_first(fleet: Fleet) -> None:
    fleet.heal()
    running = Running(fleet, DIALECTS[0], "any", is_stream=True)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(running.run)
        assert eventually(lambda: running.has_begun)
        fleet.router.signal(signal.SIGTERM)
        assert len(result.result(30)) == LONG
        assert running.stream is not None and running.stream.is_whole
        assert fleet.router.ended() == 0
    fleet.heal()


# -- in the middle of generation and of sessions -------------------------------------------------------------------


class Running:
    """A stream or an answer of one dialect that is under way."""

    def __init__(self, fleet: Fleet, dialect: Dialect, name: str, *, is_stream: bool) -> None:
        self.dialect, self.is_stream = dialect, is_stream
        self._fleet, self._headers = fleet, {NAME: name}
        self.stream: Stream | None = None
        self.first_server = ""
        self.trouble: list[str] = []

    @property
    def has_begun(self) -> bool:
        return not self.is_stream or (self.stream is not None and len(self.stream.events) > 3)

    def run(self) -> Said:
        """Return what was said in full, after repeating what was cut off."""
        path, body = self.dialect.path, self.dialect.body(LONG)
        if not self.is_stream:
            answer, self.trouble = again(lambda: self._fleet.client.post(path, json=body, headers=self._headers))
            assert answer.status_code == 200, answer.text
            self.first_server = answer.headers["x-verl-server"]
            return self.dialect.said(answer.json())
        try:
            body |= {"stream": True}
            with self._fleet.client.stream("POST", path, json=body, headers=self._headers) as answer:
                assert answer.status_code == 200, answer.read()
                self.first_server = answer.headers["x-verl-server"]
                self.stream = Stream(self.dialect, answer)
                while self.stream.read():
                    pass
        except httpx.HTTPError as error:
            self.trouble = [type(error).__name__]
        assert self.stream is not None
        return self.stream.heard


def undisturbed(server: Server) -> dict[str, Said]:
    """Return what each dialect says in the request of `Running`, by its path."""

    def ask(dialect: Dialect) -> Said:
        answer = httpx.post(
            f"{server.url}{dialect.path}", json=dialect.body(LONG), headers=OWNER, trust_env=False, timeout=60
        )
        return dialect.said(answer.raise_for_status().json())

    with ThreadPoolExecutor(len(DIALECTS)) as pool:
        return dict(zip([dialect.path for dialect in DIALECTS], pool.map(ask, DIALECTS), strict=True))


@pytest.mark.parametrize(
    "kill", [pytest.param(k, marks=() if k in (ONE, ROUTER) else pytest.mark.exhaustive, id=str(k)) for k in KILLS]
)
def test_what_runs_when_something_is_killed(fleet: Fleet, kill: Kill) -> None:
    fleet.heal()
    whole = undisturbed(fleet.servers[2])
    name = f"name-{time.monotonic_ns()}"
    first = fleet.server(fleet.client.post("/generate", json=short(0), headers={NAME: name}).headers["x-verl-server"])
    third = [server for server in fleet.servers if server is not first][1]
    calm = Talk.on(fleet, third.url)
    told = [calm.turn(), calm.turn(LONG), calm.turn()]

    between, within, elsewhere = Talk.on(fleet, first.url), Talk.on(fleet, first.url), Talk.on(fleet, third.url)
    talks = [between, within, elsewhere]
    for talk in talks:
        assert talk.turn() == told[0]
    running = [
        Running(fleet, dialect, name, is_stream=is_stream) for dialect in DIALECTS for is_stream in (True, False)
    ]
    with Traffic(fleet) as traffic, Creators(fleet) as creators, ThreadPoolExecutor(len(running) + 3) as pool:
        results: list[Future[Said]] = [pool.submit(each.run) for each in running]
        turns = [pool.submit(talk.turn, LONG) for talk in (within, elsewhere)]
        assert eventually(lambda: all(each.has_begun for each in running), 30)
        assert eventually(lambda: first.running_requests >= len(running) + 1, 30), first.running_requests
        gone = kill(fleet, first)
        killed = time.monotonic()
        traffic.wait_for(4)
        assert time.monotonic() - killed < SETTLE_SECONDS, "the others go on"
        kill.undo(fleet, gone)
        started = fleet.restart()
        fleet.until(lambda states: all(states[server.url] == "stale" for server in started))
        stale = {server.url for server in started}
        assert not {reply.server for reply in traffic.wait_for(20)} & stale
        for server in started:
            fleet.push(server, fleet.number)
        fleet.until_healthy()
        said = [result.result(60) for result in results]
        for turn in turns:
            assert turn.result(60) == told[1]
        for talk in talks:
            if talk is between:
                assert talk.turn(LONG) == told[1]
            assert talk.turn() == told[2]
        traffic.wait_for(4)

    for each, content in zip(running, said, strict=True):
        check_running(each, content, whole[each.dialect.path], kill, gone)
    for talk in talks:
        assert talk.replies == told and talk.began == ["root", None, None]
        assert talk.recorded() == talk.replies, "each turn is in the record once, and no other one"
    assert bool(within.trouble) and (kill.router or not elsewhere.trouble)
    assert not creators.failures, creators.failures
    check_created(fleet, creators)
    assert not traffic.refused
    assert {reply.version for reply in traffic.replies} == {version(fleet.number)}


def check_running(each: Running, content: Said, whole: Said, kill: Kill, gone: list[Server]) -> None:
    if not each.is_stream:
        assert content == whole, each.dialect
        if kill.router:
            assert each.trouble, each.dialect
        else:
            assert not each.trouble, (each.dialect, each.trouble)
            assert each.first_server not in {server.url for server in gone}
        return
    stream = each.stream
    assert stream is not None
    assert 0 < len(content) < len(whole) and content == whole[: len(content)], each.dialect
    assert not stream.is_whole
    if kill.router:
        assert each.trouble and stream.error is None
    else:
        assert not each.trouble and stream.error is not None, (each.dialect, each.trouble)
        assert "Repeat the request" in str(stream.error)


def check_created(fleet: Fleet, creators: Creators) -> None:
    """Assert that each session exists once, and that its record has the turn that its agent got."""
    found: list[str] = []
    for server in fleet.servers:
        after: str | None = None
        while True:
            query = {"limit": "1000"} | ({"after": after} if after else {})
            answer = httpx.get(f"{server.url}/sessions", params=query, headers=OWNER, trust_env=False, timeout=60)
            page = answer.raise_for_status().json()
            found += [each["id"] for each in page["sessions"]]
            after = page["next"]
            if after is None:
                break
    twice = [name for name in creators.names if found.count(name) > 1]
    assert not twice, twice
    assert all(name in found for name in creators.unclear)
    for talk in creators.talks:
        assert talk.recorded() == talk.replies
