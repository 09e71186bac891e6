"""Messages between the ranks of one host arrive in order, every wait is bounded, and an error reaches all ranks."""

from __future__ import annotations

import datetime
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.depth import at_depth
from verl_server.ipc import rank_sockets
from verl_server.ipc.rank_sockets import GlooChannel, RankSockets

WAIT = 30.0


class Star:
    """The ranks of a host, each in a thread of this process."""

    def __init__(self, size: int, timeout: float | None = 20.0) -> None:
        pairs = [socket.socketpair() for _ in range(size - 1)]
        bounds = {"gather_timeout": timeout, "broadcast_timeout": timeout}
        others = list(range(1, size))
        self.ranks = [RankSockets([ours for ours, _ in pairs], ranks=others, is_hub=True, **bounds)]
        self.ranks += [RankSockets([theirs], ranks=[0], is_hub=False, **bounds) for _, theirs in pairs]
        self._threads = ThreadPoolExecutor(size)

    def on(self, rank: int, call: Callable[[RankSockets], object]) -> Future[object]:
        return self._threads.submit(call, self.ranks[rank])

    def on_all(self, call: Callable[[RankSockets], object]) -> list[object]:
        return [future.result(WAIT) for future in [self.on(rank, call) for rank in range(len(self.ranks))]]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._threads.shutdown()


@pytest.fixture
def make_star() -> Iterator[Callable[..., Star]]:
    stars: list[Star] = []

    def make(size: int, timeout: float | None = 20.0) -> Star:
        stars.append(Star(size, timeout))
        return stars[-1]

    yield make
    for star in stars:
        star.close()


MakeStar = Callable[..., Star]


@pytest.mark.parametrize("length", [0, 1, 5_000, 3_000_000])
def test_every_rank_gets_everything_in_the_order_of_ranks(make_star: MakeStar, length: int) -> None:
    star = make_star(3)
    expected = [bytes([65 + rank]) * (length // (rank + 1)) for rank in range(3)]
    for _ in range(3):
        assert star.on_all(lambda me: me.gather(expected[star.ranks.index(me)])) == [expected] * 3


def test_broadcasts_arrive_in_order_and_are_confirmed_only_when_received(make_star: MakeStar) -> None:
    star = make_star(3)
    for k in range(50):
        star.ranks[0].broadcast(b"%d" % k)  # no rank has to wait for it yet
    heard = [star.on(rank, lambda me: [me.receive_broadcast() for _ in range(50)]) for rank in (1, 2)]
    assert [future.result(WAIT) for future in heard] == [[b"%d" % k for k in range(50)]] * 2
    told = star.on(0, lambda me: me.broadcast(b"outcome", confirmed=True))
    assert star.ranks[1].receive_broadcast() == b"outcome"
    star.ranks[1].close()  # as if the program of this rank had ended
    with pytest.raises(TimeoutError):
        told.result(0.2)
    assert star.ranks[2].receive_broadcast() == b"outcome"
    told.result(WAIT)


@pytest.mark.parametrize("waits", ["gather", "receive_broadcast", "broadcast"])
def test_silence_ends_with_the_bound(make_star: MakeStar, waits: str) -> None:
    star = make_star(2, timeout=0.1)
    rank, call = {
        "gather": (0, lambda me: me.gather(b"")),
        "receive_broadcast": (1, lambda me: me.receive_broadcast()),
        "broadcast": (0, lambda me: me.broadcast(b"outcome", confirmed=True)),
    }[waits]
    with pytest.raises(RuntimeError, match=r"nothing within 0.1 s|timed out"):
        star.on(rank, call).result(WAIT)
    for other in star.ranks:
        with pytest.raises(RuntimeError, match=r"earlier call|is gone|rank\(s\) 1 sent nothing"):
            other.gather(b"")


def test_every_rank_hears_which_ones_did_not_come(make_star: MakeStar) -> None:
    star = make_star(4, timeout=0.2)
    came = [star.on(rank, lambda me: me.gather(b"")) for rank in (0, 2)]
    for future in came:
        with pytest.raises(RuntimeError, match=r"rank\(s\) 1, 3 sent nothing within 0.2 s"):
            future.result(WAIT)
    with pytest.raises(RuntimeError, match=r"rank\(s\) 1, 3 sent nothing"):
        star.on(3, lambda me: me.gather(b"late")).result(WAIT)


def test_a_first_rank_that_does_not_come_is_named(make_star: MakeStar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sockets, "_MISSING_GRACE", 0.0)
    star = make_star(2, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"rank\(s\) 0 sent nothing within 0.2 s"):
        star.on(1, lambda me: me.gather(b"")).result(WAIT)


@pytest.mark.parametrize("dying", [0, 1, 2])
@pytest.mark.parametrize("heard_before", [False, True])
def test_a_rank_that_goes_ends_the_wait_of_all_others(make_star: MakeStar, dying: int, heard_before: bool) -> None:
    """There is no bound, so that only the end of a rank can end the wait. The last rank never calls `gather`."""
    star = make_star(4, timeout=None)
    if heard_before and dying:
        star.ranks[dying]._send_to_all(0, b"its entry")
    waiting = [star.on(rank, lambda me: me.gather(b"")) for rank in range(3) if rank != dying]
    star.ranks[dying].close()
    for future in waiting:
        with pytest.raises(RuntimeError, match="is gone"):
            future.result(WAIT)
    with pytest.raises(RuntimeError, match="is gone"):
        star.on(3, lambda me: me.gather(b"")).result(WAIT)


def test_an_outcome_of_a_call_that_a_rank_left_is_not_taken_for_a_later_one(make_star: MakeStar) -> None:
    star = make_star(3)
    told = star.on(0, lambda me: me.broadcast(b"old", confirmed=True))
    assert star.ranks[1].receive_broadcast() == b"old"
    with pytest.raises(RuntimeError, match=r"left an earlier call|is gone"):
        star.ranks[2].gather(b"later")
    with pytest.raises(RuntimeError, match=r"left an earlier call|is gone"):
        told.result(WAIT)
    with pytest.raises(RuntimeError, match="is gone"):
        star.on(1, lambda me: me.gather(b"later")).result(WAIT)


def test_an_interrupt_inside_a_wait_loses_the_connection(make_star: MakeStar, monkeypatch: pytest.MonkeyPatch) -> None:
    star = make_star(2)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(rank_sockets, "_receive", _interrupted)
        star.ranks[1].receive_broadcast()
    with pytest.raises(RuntimeError, match="is gone"):
        star.on(0, lambda me: me.gather(b"")).result(WAIT)


def _interrupted(*_: object) -> tuple[int, bytes]:
    raise KeyboardInterrupt


# -- how ranks connect -------------------------------------------------------------------------------------------


def connect(rank: int, size: int, place: str, one_host: bool, folder: str) -> None:
    """Connect as one rank, in a process of its own. Without `one_host`, rank 1 cannot reach the first rank's socket."""
    if not one_host and rank == 1:
        rank_sockets._connected = lambda address, rank: None
    tempfile.tempdir = folder
    bound = datetime.timedelta(seconds=WAIT)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=size, timeout=bound)
    group = dist.new_group(backend="gloo", timeout=bound)
    channel = RankSockets.connect(group, WAIT, WAIT) or GlooChannel(group, group, first=0)
    assert isinstance(channel, RankSockets) == one_host
    assert channel.gather(b"%d" % rank) == [b"%d" % other for other in range(size)]
    assert not list(Path(folder).iterdir()), "the first rank must remove the socket before the first call"
    for confirmed in (False, True):
        if rank == 0:
            channel.broadcast(b"news", confirmed=confirmed)
        else:
            assert channel.receive_broadcast() == b"news"
    brief = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=1.0))
    meeting = RankSockets.connect(group, 1.0, WAIT) or GlooChannel(brief, brief, first=0, gather_timeout=1.0)
    if rank < 2:  # the last rank does not call it
        named = r"[Rr]ank(s|\(s\)) (1, )?2 "
        with pytest.raises(RuntimeError, match=named if rank == 0 or one_host else "rank 0"):
            meeting.gather(b"")
    channel.gather(b"all are done")
    dist.destroy_process_group()


@pytest.mark.parametrize("one_host", at_depth([True, False]))
def test_ranks_of_one_host_connect_and_leave_nothing_behind(tmp_path: Path, one_host: bool) -> None:
    folder = tempfile.mkdtemp()  # short enough for a socket's path
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # the fork server imports torch once for all ranks
    ranks = [
        context.Process(target=connect, args=(rank, 3, str(tmp_path / "meet"), one_host, folder)) for rank in range(3)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 2 * WAIT
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0, 0]
    Path(folder).rmdir()
