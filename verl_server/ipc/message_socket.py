"""`MessageSocket`: whole messages between two processes, over a socket on which neither process ever waits.

The TokenizerManager holds one end of a socket pair, and the scheduler of rank 0 the other. A message is its length (8
bytes, little-endian) and its bytes. Each end belongs to one event loop, which watches its `fileno`: the loop calls
`receive` when the socket is readable, and `flush` when it is writable and `unsent` is true. Bytes that do not fit into
the socket stay in this object, in order. So a slow reader does not block the writer, and two ends that both send much
cannot block each other.
"""

from __future__ import annotations

import socket
import struct
from collections import deque

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16
_CHUNKS_AT_ONCE = 16
"""The most chunks that one call reads or sends.

A peer that never pauses must not keep this process from the rest of its loop.
"""


class MessageSocket:
    """One end of a connection. Not thread-safe.

    If the peer has ended, this is no error: `receive` returns no more messages, and `send` discards messages.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a connected stream socket."""
        sock.setblocking(False)
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()
        self._chunk = memoryview(bytearray(_CHUNK))
        self._peer_listens = True
        self.is_closed = False
        """True if the peer has ended and all its messages were received, or if `close` was called."""

    @classmethod
    def pair(cls) -> tuple[MessageSocket, socket.socket]:
        """Return (the end of this process, the socket to pass to another process)."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """True while messages wait for room in the socket, or for the next `flush`."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, or store it until `flush` if the socket has no room. Never waits."""
        had_unsent = bool(self._unsent)
        if self._peer_listens and len(message) < _CHUNK:
            self._unsent.append(memoryview(_LENGTH.pack(len(message)) + message))
        elif self._peer_listens:  # a copy of a large message would take longer than a second call of send
            self._unsent += (memoryview(_LENGTH.pack(len(message))), memoryview(message))
        if not had_unsent:
            self.flush()

    def flush(self) -> None:
        """Send stored messages, as many bytes as the socket has room for, up to a limit for each call. Without the
        limit, a fast reader would keep the sender from the rest of its loop."""
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
        except OSError:  # messages that the peer sent before it ended can still be received
            self._peer_listens = False
            unsent.clear()

    def receive(self) -> list[bytes]:
        """Return the messages that have arrived completely, in order. If more bytes wait, the socket stays readable."""
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
        """Discard unsent messages and close the socket. Idempotent."""
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
