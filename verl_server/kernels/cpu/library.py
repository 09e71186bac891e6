"""`load_library`: compiles the C++ files of this folder for this machine, once, and keeps the library in a cache.

`CpuKernels` calls it. The name of a library is a hash of its sources, the command, the compiler and the processor's
features. So different machines may share one home folder, and a library in the cache is never out of date.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from verl_server.files.durable import replace_file

logger = logging.getLogger(__name__)

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")
_COMPILE_SECONDS = 120


class KernelsUnavailableError(Exception):
    """The kernels cannot be compiled or loaded. The message says why and names the remedy."""


@dataclass(frozen=True)
class Library:
    """A loaded library of compiled kernels."""

    code: ctypes.CDLL
    name: str
    """Name that differs whenever the compiled code may differ."""
    folder: Path | None
    """The cache folder with the library, None if the cache cannot be used."""


def load_library(arch: str = "native") -> Library:
    """Return the library for the processor `arch`, a value of `-march`. Compile it if the cache does not have it.

    Compiling takes some seconds, loading takes milliseconds. Raise KernelsUnavailableError if one of them fails.
    """
    try:
        compiler, flags = _compiler(), (*_FLAGS, f"-march={arch}")
        sources = sorted(Path(__file__).parent.glob("*.cpp"))
        content = b"".join(path.read_bytes() for path in sorted([*sources, *Path(__file__).parent.glob("*.h")]))
        # The predefined macros contain the compiler's version and the features of the processor.
        macros = _run([*compiler, f"-march={arch}", "-E", "-dM", "-x", "c++", "-"])
        digest = hashlib.sha256(b"\0".join([content, shlex.join([*compiler, *flags]).encode(), macros])).hexdigest()
        name, command = f"cpu-kernels-{digest[:32]}", [*compiler, *flags, *map(str, sources), "-o"]
        return _from_cache(name, command) or _without_cache(name, command)
    except OSError as error:
        raise KernelsUnavailableError(f"the compiled library could not be written or loaded: {error}.") from error


def _compiler() -> list[str]:
    wanted = shlex.split(os.environ.get("CXX", ""))
    found = shutil.which(wanted[0]) if wanted else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        missing = f"CXX={wanted[0]!r} was not found" if wanted else "no C++ compiler was found"
        raise KernelsUnavailableError(f"{missing}. Install one (apt install g++) or name it in CXX.")
    return [found, *wanted[1:]]


def _from_cache(name: str, command: list[str]) -> Library | None:
    """Return the library `name` from the cache, compiled first if necessary. None if the cache cannot be used."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-server"
        path = folder / f"{name}.so"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _compile(command, path)
        if path.stat().st_uid not in (os.getuid(), 0):
            return None  # another user's code
        return Library(ctypes.CDLL(str(path)), name, folder)
    except (OSError, RuntimeError) as error:  # no home folder, read-only, full, mounted noexec, or a broken file
        logger.info("The cache of compiled kernels cannot be used, so they are compiled at each start: %s", error)
        return None


def _compile(command: list[str], path: Path) -> None:
    """Compile into a temporary file, then rename it to `path`, because several processes may compile at once."""
    began = time.monotonic()
    descriptor, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(descriptor)
    try:
        _run([*command, made])
        os.chmod(made, 0o755)
        replace_file(Path(made), path)  # the linker made another file: a loss of power must not leave half of it
    except BaseException:
        Path(made).unlink(missing_ok=True)
        raise
    logger.info("Compiled the kernels for the CPU in %.1f s: %s", time.monotonic() - began, path)


def _without_cache(name: str, command: list[str]) -> Library:
    with tempfile.TemporaryDirectory(prefix="verl-server-") as folder:  # a loaded library does not need its file
        path = Path(folder) / "cpu-kernels.so"
        _compile(command, path)
        return Library(ctypes.CDLL(str(path)), name, None)


def _run(command: list[str]) -> bytes:
    try:
        # In some containers /dev/null is a regular file, which may contain what others wrote there.
        done = subprocess.run(command, capture_output=True, timeout=_COMPILE_SECONDS, input=b"")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailableError(f"{command[0]} could not be run: {error}.") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[:2000]
        raise KernelsUnavailableError(f"{command[0]} failed. It must support C++17 and OpenMP. Its output:\n{said}")
    return done.stdout
