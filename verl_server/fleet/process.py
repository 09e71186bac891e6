"""The process of `verl-server router`: options, socket, event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvloop

from verl_server.files.command_options import parse_options
from verl_server.fleet.keys import RouterKeys
from verl_server.fleet.members import Fleet
from verl_server.fleet.operations import server_operations
from verl_server.fleet.options import RouterArgs
from verl_server.fleet.router import Router
from verl_server.ipc.descriptors import DESCRIPTOR_SLACK, raise_descriptor_limit
from verl_server.ipc.sockets import BACKLOG, bind_socket
from verl_server.web.http_server import GuardedServer

_KEEP_ALIVE = 600
"""Seconds that an idle connection of a client stays open, as at a server."""
_GRACEFUL = 5


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_options(RouterArgs, argv, "verl-server router")
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    serve(args, lambda url: print(f"Ready: {url}", file=sys.stderr, flush=True))
    return 0


def serve(args: RouterArgs, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. `on_ready(url)` is called when the router answers."""
    keys = RouterKeys(args)
    limit = raise_descriptor_limit()
    with bind_socket(args.host, args.port) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{sock.getsockname()[1]}"
        # A request takes two descriptors: the client's connection and the server's.
        runner.run(_run(args, keys, sock, max(limit - DESCRIPTOR_SLACK, limit // 2) // 2, lambda: on_ready(url)))


class _Server(GuardedServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the server by SIGTERM and Ctrl-C. uvicorn's own way raises the signal again, which ends the process."""
        loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


async def _run(
    args: RouterArgs, keys: RouterKeys, sock: socket.socket, limit: int, on_started: Callable[[], None]
) -> None:
    fleet = Fleet(args, keys.of_router)
    router = Router(fleet, keys, server_operations())
    server = _Server(
        router,
        limit,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=_GRACEFUL,
        backlog=BACKLOG,
    )
    server.on_started = on_started
    fleet.start()
    try:
        await server.serve(sockets=[sock])
    finally:
        await fleet.stop()
