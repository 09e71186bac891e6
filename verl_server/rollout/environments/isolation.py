"""The isolation of what runs a policy's code or commands: bubblewrap, or no isolation if the caller requests it.

`isolated` is for code that needs nothing but the system (`CodeTool`). `isolated_program` is for programs that are
agents, and for checks of their work: `rollout.agents.program` and environments call it, and `rollout.launched` runs the
command. With bubblewrap a program has no network, sees the system's programs (read-only), its installation
(`installation.py`) and its own folders, an empty /tmp and its own processes. It reaches a server only through the Unix
sockets that the caller names, which `agents/bridge.py` offers at TCP ports of the sandbox.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from verl_server.errors import BadRequestError

Isolation = Literal["bubblewrap", "none"]
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")
_SYSTEM_OF_PROGRAMS = (
    *(*_SYSTEM, "/lib32", "/etc/ca-certificates", "/etc/ca-certificates.conf"),
    # Not all of /etc/ssl and /etc/pki: private keys of the machine are beside the certificates.
    *("/etc/ssl/certs", "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/pki/ca-trust"),
    *("/etc/pki/tls/certs", "/etc/pki/tls/cert.pem", "/etc/pki/tls/openssl.cnf"),
    *("/etc/localtime", "/etc/timezone", "/etc/mime.types", "/etc/magic", "/etc/services", "/etc/protocols"),
)
_PROC = ("--proc", "/proc", "--remount-ro", "/proc")
"""If this process is root, the user of the sandbox is root for the kernel's settings in /proc/sys, such as the program
that the kernel starts, outside of any sandbox, when a process crashes. Bubblewrap itself leaves them writable."""
_ETC = Path(__file__).with_name("sandbox_etc")
_BRIDGE = Path(__file__).parents[1] / "agents" / "bridge.py"
_INSIDE = Path("/run/verl")
"""Folder of the sandbox with the bridge and its sockets."""
_SANDBOX_ID = "1000"
"""User and group id in the sandbox, which `sandbox_etc` names. Some programs refuse to work as root."""
_TMP_BYTES = 2**30
"""Size of /tmp and of /dev/shm in the sandbox, which lie in memory."""
_TRIAL_SECONDS = 20.0
_LONGEST_CHAIN = 40
_REMEDY = 'or accept that the code can do all that this user can: isolation="none" (--isolation none)'


def check_isolation(isolation: str) -> None:
    """Raise BadRequestError unless this machine can isolate code, or the caller requested "none".

    The first call starts bubblewrap once: the kernel, AppArmor or a container may forbid its namespaces.
    """
    if isolation not in ("bubblewrap", "none"):
        raise BadRequestError(f'isolation must be "bubblewrap" or "none", not {isolation!r}.')
    if isolation == "bubblewrap":
        _try(_bwrap())


def _bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise BadRequestError(
            "A program that runs a policy's code needs isolation, and there is no `bwrap` on PATH. Install bubblewrap "
            f"(apt install bubblewrap), {_REMEDY}."
        )
    return found


@functools.cache
def _try(bwrap: str) -> None:
    """Run `true` as an isolated program. A failure is not remembered, so that a repaired machine works at once."""
    command = isolated_program(["/bin/true"], cwd=Path("/tmp"))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRIAL_SECONDS, env={}
        )
        wrong = "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        wrong = f"no answer within {_TRIAL_SECONDS:.0f} s"
    except OSError as error:
        wrong = str(error)
    if wrong:
        raise BadRequestError(
            f"bubblewrap ({bwrap}) cannot isolate a program on this machine: {wrong[-500:]}. Allow unprivileged user "
            "namespaces: an AppArmor profile for bwrap on Ubuntu (or sysctl kernel.apparmor_restrict_unprivileged_"
            "userns=0), sysctl user.max_user_namespaces, or a container with --security-opt seccomp=unconfined "
            f"--security-opt systempaths=unconfined; {_REMEDY}."
        )


def isolated(argv: Sequence[str], isolation: Isolation) -> list[str]:
    """Return the command that runs `argv` in bubblewrap, or `argv` itself if `isolation` is "none".

    Raise what `check_isolation` raises.
    """
    check_isolation(isolation)
    if isolation == "none":
        return list(argv)
    bwrap = _bwrap()
    shown = [*_SYSTEM, sys.base_prefix, sys.prefix]
    binds = [word for path in dict.fromkeys(shown) if Path(path).exists() for word in ("--ro-bind", path, path)]
    binds = [*_memory_folder(bwrap, "/tmp"), *binds]  # in this order: an environment of Python may lie in /tmp
    separate = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    own = [*_PROC, "--dev", "/dev", *_memory_folder(bwrap, "/dev/shm"), "--remount-ro", "/dev", "--remount-ro", "/"]
    own += ["--chdir", "/tmp"]
    variables = ["--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"]
    return [bwrap, *separate, *binds, *own, *variables, "--", *argv]


def isolated_program(
    argv: Sequence[str],
    *,
    cwd: Path,
    readable: Sequence[Path] = (),
    writable: Sequence[Path] = (),
    readable_at: Mapping[Path, Path] | None = None,
    writable_at: Mapping[Path, Path] | None = None,
    hidden: Sequence[Path] = (),
    sockets: Mapping[int, Path] | None = None,
    limits: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the command that runs `argv` in bubblewrap, for a `launched.Program` with `is_isolated=True`.

    `readable` are files and folders that the program may read, such as its installation, and `writable` those that it
    may also change. Their paths are the same inside and outside; the keys of `readable_at` and `writable_at` are paths
    inside. `hidden` are parts of `readable` and `writable` that it must not see: a hidden folder or file is empty.
    `sockets` maps a port of the sandbox's 127.0.0.1 to a Unix socket outside.
    `limits` (name of RLIMIT_… -> value) hold for the program and its descendants, not for bubblewrap and the bridge.
    The program's variables are those of the command (`Program.env`): variables on the command line would show the
    session key to every user of the host.

    Raise BadRequestError if a path does not exist or would show the user's HOME or all of /tmp, or without bubblewrap.
    """
    sockets, limits = sockets or {}, limits or {}
    bwrap = _bwrap()
    python = os.path.realpath(sys.executable)
    for path in (*readable, *writable):
        _check_shown(path)
    known = _known_options(bwrap)
    command = [bwrap, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", _SANDBOX_ID, "--gid", _SANDBOX_ID, "--hostname", "sandbox"]
    if "--disable-userns" in known:  # further user namespaces would open more of the kernel to the program
        command += ["--disable-userns"]
    for name in _SYSTEM_OF_PROGRAMS:
        if os.path.islink(name) and os.path.dirname(name) == "/":
            command += ["--symlink", os.readlink(name), name]
        elif os.path.exists(name):
            command += ["--ro-bind", name, name]
    for file in ("passwd", "group", "hosts", "nsswitch.conf", "gitconfig"):
        command += ["--ro-bind", str(_ETC / file), f"/etc/{file}"]
    command += [*_PROC, "--dev", "/dev", *_memory_folder(bwrap, "/dev/shm"), *_memory_folder(bwrap, "/tmp")]
    command += _binds([*readable, *_python_files(python)], writable, hidden)
    for inside, outside in sorted((writable_at or {}).items()):
        command += ["--bind", str(outside), str(inside)]
    offered = {_INSIDE / str(port): path for port, path in sockets.items()} | {_INSIDE / "bridge.py": _BRIDGE}
    for inside, outside in (offered | dict(readable_at or {})).items():
        command += ["--ro-bind", str(outside), str(inside)]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(cwd)]
    bridge = [f"{name}={value}" for name, value in limits.items()]
    bridge += [f"{port}={_INSIDE / str(port)}" for port in sockets]
    return [*command, "--", python, "-I", "-S", str(_INSIDE / "bridge.py"), *bridge, "--", *argv]


def _memory_folder(bwrap: str, path: str) -> list[str]:
    """Return the options that make a folder in memory, which all may write, and which has `_TMP_BYTES` at most."""
    size = ["--size", str(_TMP_BYTES)] if "--size" in _known_options(bwrap) else []
    return [*size, "--perms", "1777", "--tmpfs", path]


@functools.cache
def _known_options(bwrap: str) -> frozenset[str]:
    """Return the options that this version of bubblewrap has. 0.6 (Ubuntu 22.04) lacks some of 0.8."""
    try:
        done = subprocess.run([bwrap, "--help"], capture_output=True, text=True, timeout=_TRIAL_SECONDS, env={})
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(word for word in (done.stdout + done.stderr).split() if word.startswith("--"))


def _python_files(python: str) -> list[Path]:
    """Return what the interpreter of the bridge needs: itself, its standard library and its shared libraries."""
    prefix = Path(sys.base_prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = [path for path in (prefix / "lib").glob("lib*.so*") if path.is_file()]
    return [path for path in (Path(python), prefix / "lib" / version, *libraries) if not is_system(path)]


def _binds(readable: Sequence[Path], writable: Sequence[Path], hidden: Sequence[Path]) -> list[str]:
    """Return the options that show folders and files at their own paths.

    A symbolic link on the way to a path becomes the same link inside. Outer folders come before those within them.
    """
    mounts: dict[Path, str] = {}
    links: dict[Path, str] = {}
    for path, option in (*((p, "--ro-bind") for p in readable), *((p, "--bind") for p in writable)):
        found, real = links_on(path)
        links |= found
        if not is_system(real):
            mounts[real] = option
    mounts = {path: option for path, option in mounts.items() if not _is_covered(path, option, mounts)}
    words: list[str] = []
    for path in sorted(mounts, key=lambda path: len(path.parts)):
        words += [mounts[path], str(path), str(path)]
    for link, target in links.items():
        if not is_system(link) and not any(link.is_relative_to(path) for path in mounts):
            words += ["--symlink", target, str(link)]
    for masked in map(Path, map(os.path.realpath, hidden)):
        if any(masked.is_relative_to(shown) for shown in mounts) and masked.exists():
            empty = ["--tmpfs", str(masked), "--remount-ro", str(masked)]
            words += empty if masked.is_dir() else ["--ro-bind", str(_ETC / "empty"), str(masked)]
    return words


def _is_covered(path: Path, option: str, mounts: Mapping[Path, str]) -> bool:
    """Return True if the nearest outer mount shows `path` in the same way."""
    for outer in path.parents:
        if outer in mounts:
            return mounts[outer] == option
    return False


def links_on(path: Path) -> tuple[dict[Path, str], Path]:
    """Return (link -> target for every symbolic link on the way to a path, the real path).

    The folder of each link is a real path. Raise BadRequestError if the links never end or nothing is there.
    """
    links: dict[Path, str] = {}
    rest, real = list(reversed(Path(os.path.abspath(path)).parts[1:])), Path("/")
    while rest:
        part = rest.pop()
        step = real / part
        if part == "..":
            real = real.parent
        elif step.is_symlink():
            if len(links) == _LONGEST_CHAIN:
                raise BadRequestError(f"{path} has more than {_LONGEST_CHAIN} symbolic links on its way.")
            links[step] = os.readlink(step)
            rest += reversed(Path(links[step]).parts)
        else:
            real = step  # an absolute target begins with "/", which replaces what was before it
    if not os.path.lexists(real):
        raise BadRequestError(f"There is no file or folder {path}{f' ({real})' if real != path else ''}.")
    return links, real


def is_system(path: Path) -> bool:
    """Return True if every isolated program sees this path."""
    return any(path.is_relative_to(shown) for shown in _SYSTEM_OF_PROGRAMS)


def _check_shown(path: Path) -> None:
    """Raise BadRequestError if a path would show the program more than its own files."""
    real = Path(os.path.realpath(path))
    private = {"HOME": Path.home(), "the folder of temporary files": Path(tempfile.gettempdir()), "/tmp": Path("/tmp")}
    private |= {name: Path(name) for name in ("/proc", "/sys", "/dev", "/run", "/etc", "/var", "/home", "/root")}
    for name, folder in private.items():
        if Path(os.path.realpath(folder)).is_relative_to(real):
            raise BadRequestError(
                f"An isolated program must not see {path}, because {name} is, or lies in, this folder. Name a folder "
                "that has only what the program needs, install the program elsewhere, or use --isolation none."
            )
