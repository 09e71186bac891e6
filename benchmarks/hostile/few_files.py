"""`server_with_few_files`: a server whose hard limit of open files is low, so that connections can use all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from verl_server import HttpServerEngineAdapter

_START_SECONDS = 120.0
_STOP_SECONDS = 60.0


@contextlib.contextmanager
def server_with_few_files(files: int, settings: dict[str, Any]) -> Iterator[str]:
    """Start a server with these settings and this limit, in a process of its own. Yield its URL.

    The limit cannot be raised again, so the calling process must not have it.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    parent = context.Process(target=_serve, args=(files, settings, there))
    parent.start()
    there.close()
    try:
        if not here.poll(_START_SECONDS):
            raise TimeoutError(f"The server was not ready within {_START_SECONDS} s.")
        yield here.recv()
    finally:
        here.close()
        parent.join(_STOP_SECONDS)
        if parent.is_alive():
            parent.kill()


def _serve(files: int, settings: dict[str, Any], pipe: Connection) -> None:
    """Run a server until the other end of the pipe is closed."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    with HttpServerEngineAdapter(port=0, **settings) as server, contextlib.suppress(EOFError):
        pipe.send(server.url)
        pipe.recv()
