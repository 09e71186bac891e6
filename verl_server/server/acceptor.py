"""`Acceptor`: takes connections from a listening socket while file descriptors are left for them.

Made by `http_process` for its uvicorn server, on the TokenizerManager's loop. When descriptors run out, uvloop's own
servers accept waiting connections and close them at once, which clients see as a reset. Here they wait in the kernel's
backlog until others end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection
from typing import Any

logger = logging.getLogger(__name__)

_BATCH = 64
"""Connections that are accepted before other work of the loop has its turn."""
_RETRY_SECONDS = 0.05
"""Pause between looks when all places are taken, or the system has no descriptor left."""


class Acceptor:
    """Use it on `loop` only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        connections: Collection[Any],
        limit: int,
    ) -> None:
        """`connections` are uvicorn's open ones, kept by it; `limit` is the most of them at a time."""
        self._loop, self._sock, self._make_protocol = loop, sock, make_protocol
        self._connections, self._limit = connections, limit
        self._opening: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._was_full = False
        sock.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Accept no more. The socket stays open. Idempotent."""
        self._loop.remove_reader(self._sock)
        if self._retry is not None:
            self._retry.cancel()

    def _listen(self) -> None:
        self._retry = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            if len(self._connections) + len(self._opening) >= self._limit:
                self._make_room()
                self._pause(f"all {self._limit} connections that the limit of open files allows are in use")
                return
            try:
                connection, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                self._was_full = False
                return
            except ConnectionError:  # the client left while it waited
                continue
            except OSError as error:  # no descriptors or no memory, in this process or in the system
                self._pause(str(error))
                return
            opening = self._loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError:  # it broke already
            connection.close()

    def _make_room(self) -> None:
        """Have the connections that are answered next close after their answer, rather than be kept for the client."""
        for connection in self._connections:
            if connection.cycle is not None and not connection.cycle.response_complete:
                connection.cycle.keep_alive = False

    def _pause(self, reason: str) -> None:
        if not self._was_full:
            logger.warning("New connections wait to be accepted: %s. Raise the hard limit (ulimit -Hn).", reason)
        self._was_full = True
        self._loop.remove_reader(self._sock)
        with contextlib.suppress(RuntimeError):  # the loop ends
            self._retry = self._loop.call_later(_RETRY_SECONDS, self._listen)
