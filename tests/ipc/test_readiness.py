"""Functions that wait for a descriptor work with a descriptor of any number."""

from __future__ import annotations

import fcntl
import resource
import socket

import pytest

from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.ipc.readiness import wait_readable, wait_writable


def test_a_descriptor_beyond_the_range_of_select() -> None:
    raise_descriptor_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= 2000:
        pytest.skip("the hard limit of open files is too low")
    near, far = socket.socketpair()
    with near, far, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 1500)) as high:
        assert high.fileno() >= 1500
        assert wait_writable(high, 0) and not wait_readable(high, 0.01)
        far.send(b"!")
        assert wait_readable(high, 1)
