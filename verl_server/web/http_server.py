"""`GuardedServer`: a uvicorn server with bounds on the number of connections and on the headers of a request.

`server.http_process` and `env_server` run it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from verl_server.web.acceptor import Acceptor
from verl_server.web.http_protocol import GuardedProtocol


class GuardedServer(uvicorn.Server):
    """Serves sockets that are bound already. An `Acceptor` accepts the connections."""

    def __init__(self, app: ASGIApp, connection_limit: int, **settings: Any) -> None:
        """`connection_limit` is the largest number of connections at one time. `settings` are those of uvicorn."""
        super().__init__(
            uvicorn.Config(
                app, http=GuardedProtocol, log_config=None, server_header=False, proxy_headers=False, **settings
            )
        )
        self._connection_limit = connection_limit
        self._acceptors: list[Acceptor] = []
        self.on_started: Callable[[], None] = lambda: None
        """Called when the server accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # without sockets, uvicorn prepares everything and accepts no connection
        loop, connections = asyncio.get_running_loop(), self.server_state.connections
        for sock in sockets or []:
            self._acceptors.append(Acceptor(loop, sock, self._make_protocol, connections, self._connection_limit))
        if self.started:
            self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        return GuardedProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
