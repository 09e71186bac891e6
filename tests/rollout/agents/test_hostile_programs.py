"""Hostile programs try to escape, to choose their own end, and to exhaust the machine."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.bubblewrap import needs_bubblewrap
from tests.rollout.agents.common import play_isolated, wait_for
from verl_server.ipc.sockets import free_port
from verl_server.rollout.agents import bridge as bridge_module
from verl_server.rollout.environments.isolation import isolated

_CHANGEABLE = """
import os
def opens(path):
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        return True
    except OSError:
        return False
found = [name for name in os.listdir("/proc") if opens("/proc/" + name)]
for top in ("sys", "irq", "bus", "fs", "pressure", "dynamic_debug", "driver", "acpi"):
    for folder, _, names in os.walk("/proc/" + top):
        found += [name for name in names if opens(f"{folder}/{name}")]
print(found)
"""


pytestmark = needs_bubblewrap


def test_it_changes_no_setting_of_the_kernel(tmp_path: Path) -> None:
    """A runner that is root is so for /proc/sys, too, and core_pattern names a program that runs as root outside."""
    assert play_isolated(_CHANGEABLE, tmp_path).stdout == "[]\n"
    tool = isolated([sys.executable, "-I", "-S", "-c", _CHANGEABLE], "bubblewrap")
    assert subprocess.run(tool, capture_output=True, text=True, timeout=60).stdout == "[]\n"


def test_it_sees_certificates_and_no_private_keys(tmp_path: Path) -> None:
    code = "print([os.path.exists(f'/etc/{name}') for name in ('ssl/certs', 'ssl/private', 'pki/tls/private')])"
    seen = [Path("/etc/ssl/certs").exists(), False, False]
    assert play_isolated(code, tmp_path).stdout == f"{seen}\n"


def test_connections_to_all_ports_at_once_are_no_fault_of_the_sandbox(tmp_path: Path) -> None:
    """The bridge runs out of descriptors at both ports in the same moment, and serves the program afterwards."""
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(socket.socket(socket.AF_UNIX))
        outside.bind(str(tmp_path / "outside"))
        outside.listen(1024)
        ports = [free_port(), free_port()]
        offered = [f"{port}={tmp_path / 'outside'}" for port in ports]
        bridge = subprocess.Popen(
            [sys.executable, "-I", "-S", bridge_module.__file__, *offered, "--", "/bin/sleep", "60"],
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
        )
        stack.callback(bridge.wait)
        stack.callback(bridge.kill)
        assert wait_for(lambda: all(_is_open(port) for port in ports))
        bridge.send_signal(signal.SIGSTOP)
        held = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(60)]
        bridge.send_signal(signal.SIGCONT)
        outside.settimeout(10)
        for _ in range(16):
            held.append(outside.accept()[0])
        for one in held:
            one.close()
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=10) as inside:
            inside.sendall(b"mark")
            while outside.accept()[0].recv(4) != b"mark":
                assert bridge.poll() is None


def _is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
