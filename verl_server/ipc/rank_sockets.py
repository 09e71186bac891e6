"""`RankSockets`: short messages between the ranks of one host, over Unix sockets from every rank to the first rank.

Trainer ranks (`rank_group`) and the scheduler's ranks (`tp_group`) exchange messages at every push and every step. So a
message must cost no more than waking its reader: a Gloo collective takes several times as long. Ranks of several hosts
use `GlooChannel`, which has the same methods.

Every wait ends at its timeout, or when a peer ends. After an error of any kind, Ctrl-C included, the connection is
closed for all ranks, so that a message of one call is never read by another call.
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
"""Header of a message: its kind and its length in bytes."""
_ENTRY, _ENTRIES, _BROADCAST, _BROADCAST_TO_CONFIRM, _CONFIRMED, _MISSING = range(6)
"""Kinds: a rank's data for a gather, the data of all ranks, a broadcast without and with confirmation, the
confirmation, and the error of a gather in which ranks are missing."""
_RANK = struct.Struct("<I")
_MISSING_GRACE = 10.0
"""Seconds beyond the timeout of a gather that the other ranks wait for the first rank, which reports missing ranks."""


class RankSockets:
    """The connections of one rank. All ranks make the same calls in the same order, each from one thread at a time."""

    def __init__(
        self,
        peers: list[socket.socket],
        *,
        ranks: list[int],
        is_hub: bool,
        gather_timeout: float | None,
        broadcast_timeout: float | None,
    ) -> None:
        """On the first rank, `peers` are the sockets to the other ranks in order.

        On other ranks, `peers` is the socket to the first rank.

        This object owns the sockets. `ranks` are the global ranks of the peers, for error messages. Timeouts are in
        seconds; None waits without a bound.
        """
        self._peers = peers
        self._ranks = ranks
        self._is_hub = is_hub
        self._gather_timeout, self._broadcast_timeout = gather_timeout, broadcast_timeout

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, gather_timeout: float | None, broadcast_timeout: float | None
    ) -> RankSockets | None:
        """Connect the ranks of a CPU group. Return None on all ranks if they are not all on one host.

        Timeouts are in seconds.
        """
        import torch.distributed as dist

        rank, size, first = dist.get_rank(group), dist.get_world_size(group), dist.get_global_rank(group, 0)
        with contextlib.ExitStack() as cleanup:
            listener, address = None, b""
            if rank == 0:
                folder = tempfile.mkdtemp(prefix="verl-ranks-")  # mode 0700: no other user can connect
                cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
                listener = cleanup.enter_context(socket.socket(socket.AF_UNIX))
                address = os.path.join(folder, "hub").encode()
                with contextlib.suppress(OSError):  # the path is too long for a socket: no rank can connect
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
        first_rank, *other_ranks = dist.get_process_group_ranks(group)
        ranks = other_ranks if rank == 0 else [first_rank]
        return cls(
            peers, ranks=ranks, is_hub=rank == 0, gather_timeout=gather_timeout, broadcast_timeout=broadcast_timeout
        )

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of every rank, in the order of ranks, on every rank.

        Raise RuntimeError on every rank if a rank has ended or is late. The error names the late ranks.
        """
        with self._lost_on_error():
            if self._is_hub:
                try:
                    entries = [data, *self._receive_from_all(_ENTRY, self._gather_timeout)]
                except _MissingRanksError as error:
                    self._send_to_all(_MISSING, str(error).encode())
                    raise
                self._send_to_all(_ENTRIES, msgspec.msgpack.encode(entries))
                return entries
            with contextlib.suppress(BrokenPipeError):  # the first rank has closed; its last message can still be read
                self._send_to_all(_ENTRY, data)
            bound = None if self._gather_timeout is None else self._gather_timeout + _MISSING_GRACE
            (encoded,) = self._receive_from_all(_ENTRIES, bound)
            return msgspec.msgpack.decode(encoded, type=list[bytes])

    def broadcast(self, data: bytes, *, confirmed: bool = False) -> None:
        """Send `data` to all other ranks; the first rank calls it. If `confirmed`, wait until all have received it."""
        with self._lost_on_error():
            self._send_to_all(_BROADCAST_TO_CONFIRM if confirmed else _BROADCAST, data)
            if confirmed:
                self._receive_from_all(_CONFIRMED, self._broadcast_timeout)

    def receive_broadcast(self) -> bytes:
        """Return the data of the next `broadcast` of the first rank. The other ranks call it."""
        with self._lost_on_error():
            kind, data = _receive(self._peers[0], self._broadcast_timeout)
            if kind == _BROADCAST_TO_CONFIRM:
                self._send_to_all(_CONFIRMED, b"")
            elif kind != _BROADCAST:
                raise _out_of_step()
            return data

    @property
    def is_closed(self) -> bool:
        """True after `close`, or after a call that failed."""
        return not self._peers

    def close(self) -> None:
        """Close the sockets, so that the current or next call of every other rank fails. Idempotent."""
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
        """Return one message of `kind` from each peer, in their order.

        Raise RuntimeError if messages are missing at the timeout, or if a peer ends before all messages have arrived.
        Only a peer that has sent its confirmation (`_CONFIRMED`) may end.
        """
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
                raise _MissingRanksError(f"rank(s) {', '.join(silent)} sent nothing within {timeout:g} s")
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
                    poller.modify(fd, 0)  # reports the end of the peer only
        return [received[fd] for fd in peers]


class _MissingRanksError(RuntimeError):
    """Some ranks sent nothing before the timeout."""


def _connected(address: bytes, rank: int) -> socket.socket | None:
    """Return a socket to the first rank at `address`, or None if the first rank is on another host."""
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(address)
        peer.sendall(_RANK.pack(rank))
    except OSError:  # the first rank is on another host
        peer.close()
        return None
    return peer


def _accepted(listener: socket.socket | None, count: int) -> list[socket.socket]:
    """Return the sockets of the `count` other ranks, which have all connected already, in the order of ranks."""
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
    """The methods of `RankSockets` for ranks of several hosts. The timeouts are those of the process groups."""

    def __init__(
        self, gathers: dist.ProcessGroup, broadcasts: dist.ProcessGroup, first: int, gather_timeout: float | None = None
    ) -> None:
        """`gathers` and `broadcasts` are groups of the same ranks. `first` is the global rank that broadcasts.

        With `gather_timeout` (seconds) the first rank's error names the ranks that are missing in a gather, which needs
        a second collective.
        """
        self._gathers, self._broadcasts, self._first = gathers, broadcasts, first
        self._gather_timeout = gather_timeout

    is_closed = False
    """Always False. If a rank has ended, the next call raises an error."""

    def gather(self, data: bytes) -> list[bytes]:
        if self._gather_timeout is not None:
            import torch.distributed as dist

            bound = datetime.timedelta(seconds=self._gather_timeout)
            dist.monitored_barrier(self._gathers, timeout=bound, wait_all_ranks=True)
        return all_gather_bytes(data, self._gathers)

    def close(self) -> None:
        """Do nothing: calls of the other ranks fail at the timeouts of their groups."""

    def broadcast(self, data: bytes, *, confirmed: bool = False) -> None:
        broadcast_bytes(data, self._first, self._broadcasts)  # returns only after all ranks have received the data

    def receive_broadcast(self) -> bytes:
        return broadcast_bytes(None, self._first, self._broadcasts)
