"""A plugin of pytest for the tests that need a GPU: their markers, and a lock on the GPUs of the machine.

Several processes run such tests at once: workers of pytest-xdist, or test runs side by side. A test marked `gpu_alone`
runs while no other one does, because it measures or fills the memory of a device. The lock is held for one test, from
before its fixtures are made until after they ended. So a fixture that holds memory of a GPU must have the scope
"function".
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import inspect
import os
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_files import TESTS, names_cuda

MOST_SECONDS = 600.0
"""Longest wait for the GPUs. Not part of the timeout of the test, which pytest-timeout measures."""
_INTERVAL = 0.02
WITHOUT_GPU = {"tiny_llama", "tiny_qwen2", "tiny_qwen3", "text_folder", "cpu_kernels", "one_thread"}
"""Fixtures of a wider scope than a test that hold no GPU."""


class GpusBusyError(Exception):
    """The GPUs were not free within the bound."""


class GpuLock:
    """A lock that processes of one user share through two files: held by one process alone, or by several together.

    A process first passes the turnstile. One that waits to be alone stays in it, so that no other process can overtake.
    The system releases the lock of a process that ends. Child processes do not inherit it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        place = folder or Path(tempfile.gettempdir())
        self._turnstile, self._gpus = (
            os.open(place / f"verl-server-{name}-{os.getuid()}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            for name in ("turnstile", "gpus")
        )

    def acquire(self, *, alone: bool, seconds: float) -> None:
        """Wait for the lock. Raise GpusBusyError after `seconds`; 0 tries once."""
        deadline = time.monotonic() + seconds
        try:
            self._take(self._turnstile, fcntl.LOCK_EX, deadline)
            try:
                self._take(self._gpus, fcntl.LOCK_EX if alone else fcntl.LOCK_SH, deadline)
            finally:
                fcntl.flock(self._turnstile, fcntl.LOCK_UN)
        except BlockingIOError:
            use = "for this test alone" if alone else "to share with other tests"
            raise GpusBusyError(
                f"The GPUs of this machine were not free {use} within {seconds:g} s. Tests of {self._holders()} hold "
                "or await them. End those, or wait until they are done."
            ) from None

    def release(self) -> None:
        fcntl.flock(self._gpus, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._turnstile)
        os.close(self._gpus)

    @staticmethod
    def _take(file: int, operation: int, deadline: float) -> None:
        """Lock `file`, or raise BlockingIOError after the deadline."""
        while True:
            try:
                return fcntl.flock(file, operation | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_INTERVAL)

    def _holders(self) -> str:
        """Return "processes 12, 34": those that the system lists as holders of either file."""
        inodes = {str(os.fstat(file).st_ino) for file in (self._turnstile, self._gpus)}
        pids: set[str] = set()
        with contextlib.suppress(OSError):
            for line in Path("/proc/locks").read_text().splitlines():
                fields = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:131 0 EOF
                if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].rpartition(":")[2] in inodes:
                    pids.add(fields[4])
        return f"processes {', '.join(sorted(pids, key=int))}" if pids else "other processes"


# -- hooks of pytest ---------------------------------------------------------------------------------------------

_LOCK = pytest.StashKey[GpuLock]()
_BUSY = pytest.StashKey[GpusBusyError]()
_left_allocated = 0
"""Bytes that torch's allocator still had in use after the last test, such as workspaces of cuBLAS."""


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "cuda: needs an NVIDIA GPU",
        "gpu_alone: measures or fills the memory of a GPU, so no other test marked cuda runs meanwhile",
        "two_gpus: needs two GPUs, and works on a machine with more",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests marked `gpu_alone` last: workers that have nothing else to do wait for them without a loss."""
    check_cuda_tests(items)
    items.sort(key=runs_alone)


def runs_on_gpu(item: pytest.Item) -> bool:
    """Return True if `item` needs a GPU and no marker skips it."""
    return item.get_closest_marker("cuda") is not None and item.get_closest_marker("skip") is None


def runs_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu_alone") is not None


def check_cuda_tests(items: list[pytest.Item]) -> None:
    """Raise UsageError for a test that `make test-cuda` misses, or that could use a GPU without the lock."""
    on_cuda = [item for item in items if item.get_closest_marker("cuda") is not None]
    for item in items:
        if runs_alone(item) and item.get_closest_marker("cuda") is None:
            raise pytest.UsageError(f"{item.nodeid} is marked gpu_alone, but not cuda.")
    for path, item in {item.path: item for item in on_cuda}.items():
        if not names_cuda(path):
            raise pytest.UsageError(f"{item.nodeid} is marked cuda, but tests/cuda_files.py does not find its file.")
    for item in on_cuda:
        for name, scope in _wide_fixtures(item).items():
            if name not in WITHOUT_GPU:
                raise pytest.UsageError(
                    f"{item.nodeid} is marked cuda and uses the fixture {name!r} of scope {scope!r}, but the lock on "
                    "the GPUs is held for one test. Let the scope be 'function', or list the fixture in WITHOUT_GPU of "
                    "tests/gpu_plugin.py if it holds no GPU."
                )


def _wide_fixtures(item: pytest.Item) -> dict[str, str]:
    """Return the scopes of this project's fixtures that `item` uses and that may outlive it."""
    definitions: dict[str, Any] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    scopes = {}
    for name, (*_, last) in definitions.items():
        code = getattr(inspect.unwrap(last.func), "__code__", None)  # other plugins' fixtures need not be functions
        if last.scope != "function" and code is not None and Path(code.co_filename).is_relative_to(TESTS):
            scopes[name] = last.scope
    return scopes


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold the lock for the whole test. `pytest_runtest_setup` reports a wait that was too long."""
    if not runs_on_gpu(item):
        return (yield)
    if _LOCK not in item.config.stash:
        item.config.stash[_LOCK] = GpuLock()
    lock = item.config.stash[_LOCK]
    try:
        lock.acquire(alone=runs_alone(item), seconds=MOST_SECONDS)
    except GpusBusyError as error:
        item.stash[_BUSY] = error
        return (yield)
    try:
        free_memory(collect=runs_alone(item))
        return (yield)
    finally:
        free_memory()
        lock.release()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _BUSY in item.stash:
        pytest.fail(str(item.stash[_BUSY]), pytrace=False)


def free_memory(*, collect: bool = False) -> None:
    """Return the unused memory of torch's allocator to the device, and collect garbage if it holds GPU memory.

    `collect` does so in any case. A collection takes a fifth of a second after an import of torch.
    """
    global _left_allocated
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)  # pytest keeps the frames of the last failure there, and they keep its tensors
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # every call fails after a fault of the device, which the test reports
        if collect or torch.cuda.memory_allocated() > _left_allocated:
            gc.collect()
        _left_allocated = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
