"""Functions that wait for a descriptor work with a descriptor of any number."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
import time

import pytest

from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.ipc.readiness import may_spin, spin, spin_until_readable, wait_readable, wait_writable


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


@pytest.mark.parametrize(("cpus", "switch", "expected"), [(8, "", True), (8, "0", False), (7, "", False)])
def test_a_wait_without_sleep_takes_many_cpus(
    cpus: int, switch: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cpus)))
    monkeypatch.setenv("VERL_SERVER_SPIN", switch)
    assert may_spin.__wrapped__() is expected


def test_a_wait_without_sleep_ends_with_a_message_or_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.ipc.readiness.may_spin", lambda: True)
    near, far = socket.socketpair()
    poller = select.poll()
    poller.register(near, select.POLLIN)
    with near, far:
        start = time.monotonic()
        assert spin(poller, 0.01) == []
        assert time.monotonic() - start >= 0.01
        far.send(b"!")
        assert spin(poller, 60.0) == [(near.fileno(), select.POLLIN)]
        spin_until_readable(near, 60.0)
        assert near.recv(1) == b"!"
        far.close()
        spin_until_readable(near, 60.0)
        assert near.recv(1) == b""


def test_no_wait_where_no_process_may_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.ipc.readiness.may_spin", lambda: False)
    near, far = socket.socketpair()
    with near, far:
        start = time.monotonic()
        spin_until_readable(near, 60.0)
        assert time.monotonic() - start < 30.0
