"""Processes of an engine end with their parents. Needs no vLLM: any process can run the plugin."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from verl_server.backends.vllm.plugin import ENDS_WITH_PARENT, end_with_parent

_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
_CHILD = """
import time
from verl_server.backends.vllm.plugin import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
_PARENT_THAT_FORKS = """
import os, time
from verl_server.backends.vllm.plugin import end_with_parent
end_with_parent()
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(60)
"""
"""As vLLM on a GPU: it loads its plugins, and then forks the engine's process."""


@pytest.mark.parametrize("code", [[_PARENT, _CHILD], [_PARENT_THAT_FORKS]], ids=["spawned", "forked"])
def test_a_process_ends_with_its_parent(code: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.waiting import eventually

    monkeypatch.setenv(ENDS_WITH_PARENT, "1")
    parent = subprocess.Popen([sys.executable, "-c", *code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()

    def has_ended() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    assert eventually(has_ended)


def test_other_engines_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDS_WITH_PARENT, raising=False)
    end_with_parent()
