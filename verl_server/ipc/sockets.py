"""Listening TCP sockets and free ports."""

from __future__ import annotations

import errno
import socket

from verl_server.errors import ServerLaunchError

BACKLOG = 4096
"""Largest number of connections that wait to be accepted."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 chooses a free port. Raise ServerLaunchError with the address and remedy."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Listen at once: on Linux two sockets may share an address until the first one listens.
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = "it is in use by another process" if error.errno == errno.EADDRINUSE else str(error)
        raise ServerLaunchError(
            f"Cannot listen on {host}:{port}: {reason}. Choose another port, or port=0 for a free one."
        ) from error
    sock.set_inheritable(False)
    return sock


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of `host` that was free at the time of the call."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])
