"""`HttpServer` runs uvicorn on the TokenizerManager's event loop, over a socket that the launcher has already bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading

from verl_server.errors import ServerLaunchError
from verl_server.ipc.descriptors import DESCRIPTOR_SLACK, raise_descriptor_limit
from verl_server.ipc.sockets import BACKLOG
from verl_server.server.app import create_app
from verl_server.server.sessions.service import SessionService
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs
from verl_server.web.http_server import GuardedServer

_KEEP_ALIVE = 600
"""Seconds that an idle connection stays open.

Clients close idle connections earlier (`HttpServerEngineAdapter` after 60 s). So no client sends a request on a
connection that the server is closing.
"""
_GRACEFUL = 5
"""Seconds that a shutdown waits for responses in progress."""
_MAIN_THREAD_POLL = 0.5
_UNBOUNDED_QUEUE = 4096
"""Number of waiting requests for which descriptors are reserved if `max_queued_requests` sets no bound."""


class HttpServer:
    """One uvicorn server on a manager's event loop. Call `stop` on the loop, and the other methods in other threads."""

    def __init__(self, manager: TokenizerManager, server_args: ServerArgs, sock: socket.socket) -> None:
        self._manager = manager
        self._sock = sock
        self._done = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._sessions = SessionService(manager, server_args)
        level = server_args.log_level_http or "warning"
        self._uvicorn = GuardedServer(
            create_app(manager, server_args, self._sessions),
            _connection_limit(server_args),
            log_level=level,
            access_log=level in ("debug", "info"),
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_GRACEFUL,
            backlog=BACKLOG,
        )

    def start(self) -> None:
        """Begin to serve. Return when the server accepts connections."""
        self._manager.run_sync(self._start(), timeout=30)

    async def _start(self) -> None:
        self._manager.add_http_server(self.stop)
        self._task = asyncio.ensure_future(self._serve())
        while not self._uvicorn.started:
            if self._task.done():
                raise ServerLaunchError("The HTTP server ended while starting.")
            await asyncio.sleep(0.01)

    async def _serve(self) -> None:
        try:
            await self._uvicorn.serve(sockets=[self._sock])
        except (Exception, SystemExit):
            logging.getLogger(__name__).exception("The HTTP server failed.")
        finally:
            self._done.set()

    def open_sessions(self) -> None:
        """Read the session store, and begin to serve sessions. Call it when the engine is ready."""
        self._manager.run_sync(self._sessions.open())

    async def stop(self) -> None:
        """Stop accepting connections, wait a few seconds for responses in progress, and close all connections."""
        self._uvicorn.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(self._task, _GRACEFUL + 3)
        await self._sessions.close()

    def join(self) -> None:
        """Block until the server has ended.

        When the program's main thread ends, end the server too: otherwise a thread that waits in this method would keep
        the interpreter from exiting.
        """
        while not self._done.wait(_MAIN_THREAD_POLL):
            if not threading.main_thread().is_alive():
                self._uvicorn.should_exit = True

    def end(self) -> None:
        """Stop the server, and wait a bounded time for its end. Call it in any thread except the loop's."""
        self._uvicorn.should_exit = True
        self._done.wait(_GRACEFUL + 5)


def _connection_limit(server_args: ServerArgs) -> int:
    """Raise the limit of open files. Return the number of connections that it permits. Each request holds one."""
    queued = server_args.max_queued_requests
    limit = raise_descriptor_limit(
        server_args.max_running_requests + (_UNBOUNDED_QUEUE if queued is None else queued),
        f"max_running_requests={server_args.max_running_requests} and "
        + (f"{_UNBOUNDED_QUEUE} waiting requests" if queued is None else f"max_queued_requests={queued}"),
    )
    return max(limit - DESCRIPTOR_SLACK, limit // 2)
