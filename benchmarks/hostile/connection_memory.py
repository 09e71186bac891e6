"""`report_connection_memory`: the memory that an idle and a half-open connection cost the server process.

An idle connection has had one answer, and waits for its next request. A half-open one has sent half a head. The figure
is the difference of the resident memory of the HTTP process, divided by the number of connections. Both kinds stay open
until the end, so that no freed memory is used a second time. Buffers of the kernel are not in it.
"""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.parse
from pathlib import Path
from typing import Any

from benchmarks.options import report
from verl_server import HttpServerEngineAdapter
from verl_server.ipc.descriptors import raise_descriptor_limit

_SECONDS = 30.0
_SETTLE_SECONDS = 0.5
_WARM_UP = 20
_HALF_A_HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
_HEAD = _HALF_A_HEAD + b"\r\n"


def report_connection_memory(settings: dict[str, Any], count: int) -> None:
    raise_descriptor_limit(2 * count, "connections of this benchmark")
    with HttpServerEngineAdapter(port=0, **settings) as server, contextlib.ExitStack() as open_connections:
        assert server.url is not None and server.pid is not None
        kinds = {"half_open": _HALF_A_HEAD, "idle": _HEAD}
        for request in kinds.values():  # before the measurement, so that everything has been used once
            _open(server.url, request, _WARM_UP, open_connections)
        for kind, request in kinds.items():
            before = resident_bytes(server.pid)
            _open(server.url, request, count, open_connections)
            grown = resident_bytes(server.pid) - before
            report(f"{kind}_connection_bytes", grown / count, "bytes", connections=count, grown_bytes=grown)


def resident_bytes(pid: int) -> int:
    """The resident memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def _open(url: str, request: bytes, count: int, kept: contextlib.ExitStack) -> None:
    """Open connections that send `request`, and wait until the server has read all of them."""
    address = urllib.parse.urlsplit(url)
    for _ in range(count):
        connection = kept.enter_context(socket.create_connection((address.hostname, address.port), _SECONDS))
        connection.sendall(request)
        if request == _HEAD:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    with socket.create_connection((address.hostname, address.port), _SECONDS) as last:  # accepted after the others
        last.sendall(_HEAD)
        assert last.recv(4096).startswith(b"HTTP/1.1 200")
    time.sleep(_SETTLE_SECONDS)
