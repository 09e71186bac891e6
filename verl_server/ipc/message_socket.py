"""`MessageSocket`: whole messages between two processes, over a socket on which neither ever waits.

The TokenizerManager holds one end of a socket pair, rank 0's scheduler the other. A message is its length (8 bytes,
little-endian) and its bytes, whatever they mean. Each end belongs to one loop, which watches its `fileno`: readable
means `receive`, writable while something is `unsent` means `flush`. What the socket has no room for waits here, in
order, so a slow reader holds nobody up, and two ends that send much cannot wait for each other.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16
_CHUNKS_AT_ONCE = 16
"""Read or sent by one call: a peer that never pauses must not keep this end from the rest of its loop."""


class MessageSocket:
    """One end. Not thread-safe. A peer that is gone is no error here: it says nothing more, and hears nothing."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes over a connected stream socket."""
        sock.setblocking(False)
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._chunk = memoryview(bytearray(_CHUNK))
        self._peer_listens = True
        self.is_closed = False
        """The peer is gone and everything it said was received, or `close` was called."""

    @classmethod
    def pair(cls) -> tuple[MessageSocket, socket.socket]:
        """This process's end, and the one to hand to another process."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether messages wait for room in the socket, or for the next `flush`."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send, or keep to send it with `flush`; never waits."""
        had_unsent = bool(self._unsent)
        if self._peer_listens and len(message) < _CHUNK:
            self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        elif self._peer_listens:  # a copy of a large message would take longer than a second call does
            self._unsent += (memoryview(_LENGTH.pack(len(message))), memoryview(message))
        if not had_unsent:
            self.flush()

    def flush(self) -> None:
        """Send what there is room for, though not all of a long message at once: a fast reader would keep its sender
        from the rest of its loop."""
        unsent = self._unsent
        left = _CHUNK * _CHUNKS_AT_ONCE
        try:
            while unsent and left > 0:
                sent = self._socket.send(unsent[0][:left])
                left -= sent
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                else:
                    unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:  # what the peer said before it went can still be received
            self._peer_listens = False
            unsent.clear()

    def receive(self) -> list[bytes]:
        """The messages that have arrived whole, in order. More may be there: then the socket is still readable."""
        self._read()
        messages, start, received = [], 0, self._received
        while len(received) - start >= _LENGTH.size:
            first = start + _LENGTH.size
            last = first + _LENGTH.unpack_from(received, start)[0]
            if last > len(received):
                break
            messages.append(bytes(memoryview(received)[first:last]))
            start = last
        del received[:start]
        return messages

    def close(self) -> None:
        """Drop what is unsent, and hang up. Idempotent."""
        self._end()
        self._socket.close()

    def _read(self) -> None:
        if self.is_closed:
            return
        try:
            for _ in range(_CHUNKS_AT_ONCE):
                count = self._socket.recv_into(self._chunk)
                self._received += self._chunk[:count]
                if not count:
                    self._end()
                if count < _CHUNK:
                    return
        except BlockingIOError:
            pass
        except OSError:
            self._end()

    def _end(self) -> None:
        self.is_closed, self._peer_listens = True, False
        self._unsent.clear()
