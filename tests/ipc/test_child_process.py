"""A child reports ready or its own traceback, never outlives its parent, and ends within a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_server.errors import ServerLaunchError
from verl_server.ipc.child_process import ChildProcess, describe_exit

pytestmark = pytest.mark.usefixtures("real_processes")

_CHILD = """
import os, signal, sys, time
from verl_server.errors import BadRequestError
from verl_server.ipc.child_process import child_main

def target(argument, ready):
    print("child says", argument["say"], flush=True)
    if argument["do"] == "fail":
        raise ValueError("the shape is wrong")
    if argument["do"] == "refuse":
        raise BadRequestError("The shape is wrong. Give another one.")
    if argument["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if argument["do"] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if argument["do"] != "never":
        ready({"pid": os.getpid(), "env": {k: os.environ.get(k) for k in ("RANK", "MASTER_ADDR", "EXTRA")}})
    if argument["do"] == "fail later":
        raise ValueError("the shape is wrong" + 100 * "\\na line of a grandchild's log")
    time.sleep(60)

if __name__ == "__main__":
    child_main(target)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    (tmp_path / "a_child.py").write_text(_CHILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    children: list[ChildProcess] = []

    def make(do: str) -> ChildProcess:
        children.append(ChildProcess("worker", "a_child", {"do": do, "say": "hello"}, env={"EXTRA": "1"}))
        return children[-1]

    yield make
    for child in children:
        child.terminate(grace=0.1)


def _gone(pid: int, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_the_tail_of_the_log_says_how_a_long_error_begins(start) -> None:  # type: ignore[no-untyped-def]
    child = start("fail later")
    child.wait_ready(30)
    assert child.popen.wait(10) == 1
    assert child.log_tail().splitlines()[-1] == "ValueError: the shape is wrong"


def test_ready_info_and_clean_environment(start, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    child = start("serve")
    info = child.wait_ready(30)
    assert info == {"pid": child.pid, "env": {"RANK": None, "MASTER_ADDR": None, "EXTRA": "1"}}
    assert child.poll() is None
    assert child.terminate() == -signal.SIGTERM
    assert "child says hello" in child.log_tail()


def test_failure_carries_the_childs_traceback_and_log(start) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ServerLaunchError) as caught:
        start("fail").wait_ready(30)
    message = str(caught.value)
    assert "worker failed while starting: ValueError: the shape is wrong" in message
    assert 'raise ValueError("the shape is wrong")' in message
    assert "child says hello" in message
    assert message.count("ValueError: the shape is wrong") == 2, (
        "the error must be in the first line and in the traceback"
    )
    assert "child_main" not in message


def test_an_error_that_explains_itself_is_all_that_is_said(start, capfd: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    child = start("refuse")
    with pytest.raises(ServerLaunchError) as caught:
        child.wait_ready(30)
    assert str(caught.value) == "The shape is wrong. Give another one."
    assert child.popen.wait(10) == 1
    child.terminate()
    assert child.log_tail().splitlines()[3:] == ["child says hello"]
    assert "shape" not in capfd.readouterr().err


def test_sudden_death_while_starting_is_told(start) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ServerLaunchError, match=r"(?s)exited with signal SIGKILL while starting.*child says hello"):
        start("die").wait_ready(30)


def test_waiting_is_bounded_and_can_be_ended(start) -> None:  # type: ignore[no-untyped-def]
    child = start("never")
    with pytest.raises(ServerLaunchError, match="not ready within 1 s"):
        child.wait_ready(1.0)

    def sibling_died() -> None:
        raise RuntimeError("sibling died")

    with pytest.raises(RuntimeError, match="sibling died"):
        child.wait_ready(30, also=sibling_died)


def test_terminate_kills_a_stubborn_child_and_is_idempotent(start) -> None:  # type: ignore[no-untyped-def]
    child = start("stubborn")
    child.wait_ready(30)
    began = time.monotonic()
    assert child.terminate(grace=0.3) == -signal.SIGKILL
    assert child.terminate() == -signal.SIGKILL
    assert time.monotonic() - began < 5


def test_child_dies_with_its_parent(tmp_path: Path, start) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "in").touch()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time\nfrom verl_server.ipc.child_process import ChildProcess\n"
            "import sys; say = {'do': 'stubborn', 'say': 'hello', 'leftovers': [sys.argv[1]]}\n"
            "c = ChildProcess('worker', 'a_child', say)\n"
            "print(c.wait_ready(30)['pid'], flush=True)\ntime.sleep(60)",
            str(folder),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
    finally:
        parent.kill()
        parent.wait(timeout=10)
    assert _gone(pid, within=10), "the child outlived its parent"
    assert not folder.exists(), "the child must remove the folder that its killed parent could not remove"


@pytest.mark.parametrize(
    ("code", "text"), [(0, "code 0"), (1, "code 1"), (-9, "signal SIGKILL"), (-15, "signal SIGTERM")]
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code) == text
