"""The lock on the GPUs between processes, and the plugin that holds it for tests marked `cuda`: no GPU is needed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu_plugin import GpuLock, GpusBusyError
from tests.waiting import eventually

ROOT = Path(__file__).parents[1]
BOUND = 60.0


class Holder:
    """A child process that runs `gpu_lock_holder`."""

    def __init__(self, folder: Path, use: str) -> None:
        command = [sys.executable, "-m", "tests.gpu_lock_holder", str(folder), use]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def holds(self, seconds: float = BOUND) -> bool:
        """Wait until the process has the lock; return False if it does not get it within `seconds`."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return bool(ready) and self.process.stdout.readline() == b"held\n"

    def end(self) -> None:
        self.process.communicate(timeout=BOUND)


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[GpuLock]:
    lock = GpuLock(tmp_path)
    yield lock
    lock.close()


def is_refused(lock: GpuLock, *, alone: bool) -> bool:
    """Return True if `lock` cannot be taken now. It is not kept."""
    try:
        lock.acquire(alone=alone, seconds=0)
    except GpusBusyError:
        return True
    lock.release()
    return False


def test_processes_share_the_gpus_and_none_is_alone_meanwhile(lock: GpuLock, tmp_path: Path) -> None:
    holders = [Holder(tmp_path, "shared") for _ in range(2)]
    assert all(holder.holds() for holder in holders)
    assert not is_refused(lock, alone=False) and is_refused(lock, alone=True)
    holders[0].end()
    assert is_refused(lock, alone=True)
    holders[1].end()
    assert not is_refused(lock, alone=True)


def test_a_process_that_waits_to_be_alone_is_not_overtaken(lock: GpuLock, tmp_path: Path) -> None:
    lock.acquire(alone=False, seconds=0)
    other = GpuLock(tmp_path)
    assert not is_refused(other, alone=False)
    waiting = Holder(tmp_path, "alone")
    assert eventually(lambda: is_refused(other, alone=False), BOUND), "another test passed the one that waits"
    assert not waiting.holds(0)
    lock.release()
    assert waiting.holds()
    assert is_refused(other, alone=False)
    waiting.end()
    assert not is_refused(other, alone=False)
    other.close()


def test_a_process_that_dies_holds_nothing(lock: GpuLock, tmp_path: Path) -> None:
    holder = Holder(tmp_path, "alone")
    assert holder.holds()
    holder.process.kill()
    holder.end()
    lock.acquire(alone=True, seconds=BOUND)
    assert not any(map(os.get_inheritable, (lock._gpus, lock._turnstile))), "a child that lives on would keep the lock"


@pytest.mark.parametrize(("alone", "use"), [(True, "for this test alone"), (False, "to share with other tests")])
def test_a_wait_that_is_too_long_is_explained(lock: GpuLock, tmp_path: Path, alone: bool, use: str) -> None:
    holder = Holder(tmp_path, "alone")
    assert holder.holds()
    who = rf"processes \d*.*\b{holder.process.pid}\b" if Path("/proc/locks").read_text() else "other processes"
    with pytest.raises(GpusBusyError, match=rf"not free {use} within 0\.05 s.*{who}"):
        lock.acquire(alone=alone, seconds=0.05)
    holder.end()


# -- the plugin --------------------------------------------------------------------------------------------------

TWO_WORKERS = '''
import fcntl, os
from pathlib import Path
import pytest
from tests.gpu_plugin import GpuLock
from tests.waiting import eventually

HERE, WORKER = Path(os.environ["TMPDIR"]), os.environ["PYTEST_XDIST_WORKER"]

def is_awaited():
    """Return True if another process stands in the turnstile."""
    lock = GpuLock()
    try:
        fcntl.flock(lock._turnstile, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        lock.close()
    return False

@pytest.fixture
def memory():
    """Held while no other worker is inside."""
    (HERE / "inside").mkdir()
    yield
    (HERE / "inside").rmdir()

@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_alone(memory):
    is_first = not (HERE / "first").exists()
    (HERE / "first").touch()
    assert not is_first or eventually(is_awaited, 60), "the other worker does not wait"

@pytest.mark.cuda
def test_shared():
    assert not (HERE / "first").exists(), "tests that run alone come last"
    (HERE / f"shared-{WORKER}").touch()
    assert eventually(lambda: len(list(HERE.glob("shared-*"))) == 2, 60), "the other worker is kept out"
'''


def run_pytest(tmp_path: Path, tests: str, *options: str, before: str = "") -> str:
    """Run the tests with the plugin, and with lock files in `tmp_path`. Return the output."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider")
    (tmp_path / "test_it.py").write_text(tests)
    code = f"import sys, pytest, tests.gpu_plugin as plugin\n{before}\nsys.exit(pytest.main(sys.argv[1:]))"
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    command = [sys.executable, "-c", code, "-p", "tests.gpu_plugin", "test_it.py", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    return done.stdout + done.stderr


def test_workers_share_the_gpus_except_for_tests_that_need_them_alone(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    output = run_pytest(tmp_path, TWO_WORKERS, "--dist", "each", "--tx", "2*popen")
    assert " 4 passed" in output, output


def test_a_test_that_does_not_get_the_gpus_fails_and_skipped_tests_do_not_need_them(tmp_path: Path) -> None:
    holder = Holder(tmp_path, "alone")
    assert holder.holds()
    tests = (
        "import pytest\n"
        "@pytest.mark.cuda\ndef test_on_a_gpu(): ...\n"
        "@pytest.mark.cuda\n@pytest.mark.skip\ndef test_skipped(): ...\n"
        "def test_elsewhere(): ...\n"
    )
    output = run_pytest(tmp_path, tests, before="plugin.MOST_SECONDS = 0.05")
    holder.end()
    assert "1 passed, 1 skipped" in output and "1 error" in output and "were not free to share" in output, output


# -- rules for tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "use", "message"),
    [
        ("[pytest.mark.gpu_alone]", "", "is marked gpu_alone, but not cuda"),
        ("[getattr(pytest.mark, 'cuda')]", "", "is marked cuda, but tests/cuda_files.py does not find its file"),
        ("[pytest.mark.cuda]", "wide", "uses the fixture 'wide' of scope 'module'"),
    ],
)
def test_a_rule_that_a_test_breaks_is_named(tmp_path: Path, marks: str, use: str, message: str) -> None:
    tests = (
        f"import pytest\npytestmark = {marks}\n"
        "@pytest.fixture(scope='module')\ndef wide(): ...\n"
        f"def test_it({use}): ...\n"
    )
    output = run_pytest(tmp_path, tests, before="from pathlib import Path\nplugin.TESTS = Path.cwd()")
    assert message in output and "passed" not in output, output
