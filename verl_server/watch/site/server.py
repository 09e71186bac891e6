"""`serve`: runs the page's server until SIGTERM or Ctrl-C. `cli.watch` calls it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from verl_server.errors import ServerLaunchError
from verl_server.ipc.sockets import bind_socket
from verl_server.watch.site.app import create_watch_app
from verl_server.watch.site.doors import WatchDoor, check_address
from verl_server.watch.site.live import LiveStreams
from verl_server.watch.site.runs import OpenRuns
from verl_server.web.http_server import GuardedServer

_CONNECTIONS = 256
_PORTS = 20
"""Ports that are tried, from the given one on."""
_STOP_SECONDS = 1
"""Seconds that open requests have when the server stops."""


def serve(runs: OpenRuns, host: str, port: int, api_key: str | None, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `on_ready(url)` is called when the server answers.

    Raise BadRequestError for an address that needs a key, and ServerLaunchError if no port is free.
    """
    check_address(host, api_key)
    with bind_free(host, port) as sock:
        shown = f"[{host}]" if ":" in host else host
        asyncio.run(_serve(runs, host, sock, api_key, lambda: on_ready(f"http://{shown}:{sock.getsockname()[1]}/")))


async def _serve(
    runs: OpenRuns, host: str, sock: socket.socket, api_key: str | None, on_started: Callable[[], None]
) -> None:
    streams = LiveStreams(runs)
    server = _WatchServer(
        WatchDoor(create_watch_app(runs, streams), host, api_key),
        _CONNECTIONS,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_STOP_SECONDS,
    )
    server.streams = streams
    server.on_started = on_started
    await server.serve([sock])


class _WatchServer(GuardedServer):
    """Ends the live streams when it stops; they would be waited for otherwise."""

    streams: LiveStreams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.streams.stop()
        await super().shutdown(sockets)


def bind_free(host: str, port: int) -> socket.socket:
    """Return a listening socket on `port`, or on the next free one. Port 0 chooses any."""
    for candidate in range(port, min(port + _PORTS, 65535) + 1):
        try:
            return bind_socket(host, candidate)
        except ServerLaunchError:
            if port == 0 or candidate == min(port + _PORTS, 65535):
                raise
    raise AssertionError("unreachable: the last candidate returns or raises")
