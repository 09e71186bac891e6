"""Ports of this host for servers of tests."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port that no other process is given inside the block, but on which a server may listen.

    The system hands out no port to which a socket is bound. A server that sets SO_REUSEADDR, as most do, can listen on
    it all the same, because this socket does not listen.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, 0))
        yield bound.getsockname()[1]
