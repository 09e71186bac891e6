"""`RankSockets`: short messages between the ranks of one host, over a star of Unix sockets around the first one.

Trainer ranks (`rank_group`) and the scheduler's ranks (`tp_group`) meet here at every push and every step, so a message
must cost no more than waking its reader: a Gloo collective takes several times as long. Ranks of several hosts use
`GlooChannel`, which does the same.

Every wait has the bound that it was given, or ends with the peer. After an error of any kind, Ctrl-C included, the
connection is lost for all ranks at once: messages of one call can never be taken for those of another.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from verl_server.ipc.collectives import all_gather_bytes, broadcast_bytes

if TYPE_CHECKING:
    import torch.distributed as dist

_HEAD = struct.Struct("<BQ")
"""Kind and length of a message."""
_ENTRY, _ENTRIES, _NEWS, _NEWS_TO_CONFIRM, _CONFIRMED, _MISSING = range(6)
_RANK = struct.Struct("<I")
_VERDICT_GRACE = 10.0
"""Seconds over the bound of a gather that the others wait for the first rank: it knows which ranks did not come."""


class RankSockets:
    """One rank's end. All ranks make the same calls in the same order; each from one thread at a time."""

    def __init__(
        self,
        peers: list[socket.socket],
        *,
        ranks: list[int],
        is_hub: bool,
        gather_timeout: float | None,
        hear_timeout: float | None,
    ) -> None:
        """`peers`: on the first rank the others in their order, on those the first one. Takes them over.

        `ranks`: the numbers of the peers, for error messages.
        """
        self._peers = peers
        self._ranks = ranks
        self._is_hub = is_hub
        self._gather_timeout, self._hear_timeout = gather_timeout, hear_timeout

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, gather_timeout: float | None, hear_timeout: float | None
    ) -> RankSockets | None:
        """Connect the ranks of a CPU group; None on all of them if not all are on one host. Timeouts in seconds."""
        import torch.distributed as dist

        rank, size, first = dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)
        with contextlib.ExitStack() as cleanup:
            listener, address = None, b""
            if rank == 0:
                folder = tempfile.mkdtemp(prefix="verl-ranks-")  # mode 0700: nobody else can connect
                cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
                listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
                address = os.path.join(folder, "hub").encode()
                with contextlib.suppress(OSError):  # a path too long for a socket: the others will not find it
                    listener.bind(address)
                    listener.listen(size)
            address = broadcast_bytes(address or None, first, group)
            peer = None if rank == 0 else _connected(address, rank)
            is_here = listener is not None or peer is not None
            if not all(all_gather_bytes(b"1" if is_here else b"", group)):
                if peer is not None:
                    peer.close()
                return None
            peers = [peer] if peer is not None else _accepted(listener, size - 1)
        first_one, *others = dist.get_process_group_ranks(group)
        ranks = others if rank == 0 else [first_one]
        return cls(peers, ranks=ranks, is_hub=rank == 0, gather_timeout=gather_timeout, hear_timeout=hear_timeout)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's data in the order of ranks, on every rank.

        Raises RuntimeError on every rank if one is gone, or late: then it names the late ones.
        """
        with self._lost_on_error():
            if self._is_hub:
                try:
                    entries = [data, *self._receive_from_all(_ENTRY, self._gather_timeout)]
                except _SilenceError as error:
                    self._send_to_all(_MISSING, str(error).encode())
                    raise
                self._send_to_all(_ENTRIES, msgspec.msgpack.encode(entries))
                return entries
            with contextlib.suppress(BrokenPipeError):  # the first rank gave up; what it said can still be read
                self._send_to_all(_ENTRY, data)
            bound = None if self._gather_timeout is None else self._gather_timeout + _VERDICT_GRACE
            (encoded,) = self._receive_from_all(_ENTRIES, bound)
            return msgspec.msgpack.decode(encoded, type=list[bytes])

    def tell(self, data: bytes, *, confirmed: bool = False) -> None:
        """On the first rank: what the next `hear` of every other rank returns; if `confirmed`, wait until it has."""
        with self._lost_on_error():
            self._send_to_all(_NEWS_TO_CONFIRM if confirmed else _NEWS, data)
            if confirmed:
                self._receive_from_all(_CONFIRMED, self._hear_timeout)

    def hear(self) -> bytes:
        """On the other ranks: what the first one tells next."""
        with self._lost_on_error():
            kind, data = _receive(self._peers[0], self._hear_timeout)
            if kind == _NEWS_TO_CONFIRM:
                self._send_to_all(_CONFIRMED, b"")
            elif kind != _NEWS:
                raise _out_of_step()
            return data

    @property
    def is_closed(self) -> bool:
        """By `close`, or by a call that failed."""
        return not self._peers

    def close(self) -> None:
        """Every other rank's call fails, now or later. Idempotent."""
        for peer in self._peers:
            peer.close()
        self._peers.clear()

    @contextlib.contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        if self.is_closed:
            raise RuntimeError("The connection between the ranks was lost in an earlier call.")
        try:
            yield
        except OSError as error:
            self.close()
            raise RuntimeError(f"another rank is gone ({error})") from error
        except BaseException:
            self.close()
            raise

    def _send_to_all(self, kind: int, data: bytes) -> None:
        message = _HEAD.pack(kind, len(data)) + data
        for peer in self._peers:
            peer.settimeout(self._gather_timeout)
            peer.sendall(message)

    def _receive_from_all(self, kind: int, timeout: float | None) -> list[bytes]:
        """One message of each peer. One that goes ends the wait for the others, though its entry has come, unless it
        has confirmed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        poller, received = select.poll(), dict[int, bytes]()
        peers = {peer.fileno(): peer for peer in self._peers}
        for fd in peers:
            poller.register(fd, select.POLLIN)
        while len(received) < len(peers):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = poller.poll(None if left is None else 1000.0 * left)
            if not ready:
                silent = [str(rank) for rank, fd in zip(self._ranks, peers, strict=True) if fd not in received]
                raise _SilenceError(f"rank(s) {', '.join(silent)} said nothing within {timeout:g} s")
            for fd, _ in ready:
                if fd in received:
                    raise RuntimeError("another rank is gone")
                got, received[fd] = _receive(peers[fd], left)
                if got == _MISSING:
                    raise RuntimeError(received[fd].decode())
                if got != kind:
                    raise _out_of_step()
                if kind == _CONFIRMED:
                    poller.unregister(fd)
                else:
                    poller.modify(fd, 0)  # tells of its end only
        return [received[fd] for fd in peers]


class _SilenceError(RuntimeError):
    """Some ranks did not come in time."""


def _connected(address: bytes, rank: int) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(address)
        peer.sendall(_RANK.pack(rank))
    except OSError:  # another host
        peer.close()
        return None
    return peer


def _accepted(listener: socket.socket | None, count: int) -> list[socket.socket]:
    """The others, who have all connected, in the order of ranks."""
    assert listener is not None
    by_rank: dict[int, socket.socket] = {}
    for _ in range(count):
        peer, _ = listener.accept()
        by_rank[_RANK.unpack(_exactly(peer, _RANK.size))[0]] = peer
    return [by_rank[rank] for rank in sorted(by_rank)]


def _receive(peer: socket.socket, timeout: float | None) -> tuple[int, bytes]:
    peer.settimeout(timeout)
    kind, length = _HEAD.unpack(_exactly(peer, _HEAD.size))
    return kind, _exactly(peer, length)


def _exactly(peer: socket.socket, count: int) -> bytes:
    data = peer.recv(count) if count else b""
    if len(data) == count:
        return data
    parts = bytearray(data)
    while len(parts) < count:
        if not data:
            raise ConnectionResetError("its connection was closed")
        data = peer.recv(min(count - len(parts), 1 << 20))
        parts += data
    return bytes(parts)


def _out_of_step() -> RuntimeError:
    return RuntimeError("another rank left an earlier call before its end")


class GlooChannel:
    """`RankSockets` for ranks of several hosts: the bounds are those of the groups."""

    def __init__(
        self, gathers: dist.ProcessGroup, news: dist.ProcessGroup, first: int, gather_timeout: float | None = None
    ) -> None:
        """`first`: global rank of the one that tells. The groups are of the same ranks.

        With `gather_timeout` (seconds) the first rank's error names the ranks that did not come to a gather, at the
        price of a second collective.
        """
        self._gathers, self._news, self._first = gathers, news, first
        self._gather_timeout = gather_timeout

    is_closed = False
    """A group that lost a rank says so at the next call."""

    def gather(self, data: bytes) -> list[bytes]:
        if self._gather_timeout is not None:
            import torch.distributed as dist

            bound = datetime.timedelta(seconds=self._gather_timeout)
            dist.monitored_barrier(self._gathers, timeout=bound, wait_all_ranks=True)
        return all_gather_bytes(data, self._gathers)

    def close(self) -> None:
        """Others notice by their bounds."""

    def tell(self, data: bytes, *, confirmed: bool = False) -> None:
        broadcast_bytes(data, self._first, self._news)  # does not return before it was heard

    def hear(self) -> bytes:
        return broadcast_bytes(None, self._first, self._news)
