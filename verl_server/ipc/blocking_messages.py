"""`BlockingMessages`: whole messages over a socket, for a thread that waits for them.

Text workers and the process of the matchers read their requests with it, and the scheduler the answers of the latter.
"""

from __future__ import annotations

import socket
import time

from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.readiness import wait_readable, wait_writable


class BlockingMessages:
    """One end of a connection. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a connected stream socket."""
        self._messages = MessageSocket(sock)
        self._waiting: list[bytes] = []

    def receive(self, seconds: float | None = None) -> bytes | None:
        """Return the next message, or None if the peer has closed the socket.

        Raise TimeoutError after `seconds`. None waits without a bound.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._waiting and not self._messages.is_closed:
            if not wait_readable(self._messages, _left(deadline)):
                raise TimeoutError(f"No message arrived within {seconds:g} s.")
            self._waiting += self._messages.receive()
        return self._waiting.pop(0) if self._waiting else None

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Send a message. If the peer has ended, it is discarded. Raise TimeoutError as `receive` does."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._messages.send(message)
        while self._messages.unsent:
            if not wait_writable(self._messages, _left(deadline)):
                raise TimeoutError(f"The peer read no message within {seconds:g} s.")
            self._messages.flush()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._messages.close()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
