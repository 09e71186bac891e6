"""`Acceptor` accepts connections from a listening socket while file descriptors are free.

`GuardedServer` creates one for each of its listening sockets. When no descriptor is free,
uvloop's own servers accept waiting connections and close them at once, which clients see as a reset. With an
`Acceptor`, the connections wait in the kernel's backlog until other connections end; idle ones are ended for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection
from typing import Any

from verl_server.web.http_protocol import GuardedProtocol

logger = logging.getLogger(__name__)

_BATCH = 64
"""Largest number of connections that are accepted before the event loop runs other work."""
_IDLE_SECONDS = 5.0
"""Seconds that a connection may wait for its next request while other connections wait to be accepted.

If none could be accepted for as many seconds, connections in use are closed after their response.
"""
_FIRST_SECONDS = 1.0
"""Seconds that a new connection may take for its first request while others wait for a place."""
_RETRY_SECONDS = 0.05
"""Seconds until the next attempt, after the limit was reached or the system had no free descriptor."""


class Acceptor:
    """Accepts connections from one listening socket. Use it on the thread of its event loop only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[Any],
        limit: int,
    ) -> None:
        """Start to accept connections from `sock`.

        `connections` is uvicorn's collection of open connections, which uvicorn itself updates. `limit` is the largest
        number of connections that may be open at the same time.
        """
        self._loop, self._sock, self._make_protocol = loop, sock, make_protocol
        self._connections, self._limit = connections, limit
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._was_full = False
        self._full_since: float | None = None
        """Time of the event loop since which no connection was accepted because of the limit."""
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Stop accepting connections. The socket stays open. Idempotent."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for accepted in range(_BATCH):
            if len(self._connections) + len(self._opening) >= self._limit:
                if not accepted:  # otherwise the loop calls again at once if another connection waits
                    self._make_room()
                    self._pause(f"all {self._limit} connections that the limit of open files permits are in use")
                return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                self._was_full = False
                return
            except ConnectionError:  # the client closed the connection while it waited in the backlog
                continue
            except OSError as error:  # no descriptors or no memory, in this process or in the system
                self._pause(str(error))
                return
            self._full_since = None
            opening = self._loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # the client has closed the connection already
            connection.close()

    def _make_room(self) -> None:
        """Close connections that have waited for a request for too long.

        While this makes room, connections in use stay open. If it makes no room for `_IDLE_SECONDS`, the connections in
        use are closed after their response. WebSockets, which uvicorn serves with another class, stay.
        """
        now = self._loop.time()
        if self._full_since is None:
            self._full_since = now
        for connection in list(self._connections):
            if not isinstance(connection, GuardedProtocol):
                continue
            if connection.is_idle:
                patience = _FIRST_SECONDS if connection.cycle is None else _IDLE_SECONDS
                if connection.idle_since <= now - patience:
                    connection.transport.close()
            elif self._full_since <= now - _IDLE_SECONDS:
                connection.cycle.keep_alive = False

    def _pause(self, reason: str) -> None:
        if not self._was_full:
            logger.warning("New connections wait, because %s. Raise the hard limit of open files (ulimit -Hn).", reason)
        self._was_full = True
        self._loop.remove_reader(self._sock)
        with contextlib.suppress(RuntimeError):  # the event loop is already closed
            self._retry = self._loop.call_later(_RETRY_SECONDS, self._listen)
