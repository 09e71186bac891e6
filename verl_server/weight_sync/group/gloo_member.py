"""A child process that is this server rank's member of a Gloo group.

`process_group` starts one for each group that it joins over Gloo, and kills it to leave. So a fault of the group that
ends a process ends only this child. The child takes about 220 MB of memory while the group exists. Parent and child
exchange JSON over a socket. The child receives the data into a memfd of the parent, which the child maps.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_server.ipc.child_env import clean_child_env
from verl_server.ipc.readiness import wait_readable
from verl_server.weight_sync.group.group_connection import Meeting, connect_gloo

_START_SECONDS = 60.0
_CANARY_BYTES = 16
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


class GlooMember:
    """The parent's side. Any thread may call `abort`, even while another thread receives."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._files: dict[int, int] = {}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=_child_env(),
                start_new_session=True,  # Ctrl-C is for the server, which ends it
            )
        self._connection = Connection(ours.detach())
        try:
            self._answer(_START_SECONDS)
        except RuntimeError:
            self.abort()
            raise

    def join(self, req: Meeting, group_rank: int, address: str, timeout: float) -> None:
        """Join the group. Raise RuntimeError if not all ranks have joined within `timeout` seconds."""
        self._send(
            host=req.master_address,
            port=req.master_port,
            name=req.group_name,
            rank=group_rank,
            world_size=req.world_size,
            address=address,
            timeout=timeout,
        )
        self._answer(timeout)

    def allocate(self, nbytes: int) -> Tensor:
        """Return a buffer for the child to receive into, uint8 [nbytes].

        Raise MemoryError if the host lacks the memory.
        """
        if nbytes > _available_bytes():
            raise MemoryError(f"{nbytes:,} bytes are more than this host has left; send smaller buckets")
        fd = os.memfd_create("verl-weight-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, max(1, nbytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.posix_fallocate(fd, 0, max(1, nbytes))  # without this, a lack of memory is SIGBUS later
            buffer = torch.frombuffer(mmap.mmap(fd, max(1, nbytes)), dtype=torch.uint8)[:nbytes]
        except BaseException:
            os.close(fd)
            raise
        self._files[buffer.data_ptr()] = fd
        return buffer

    def free(self, buffer: Tensor) -> None:
        """Close the file of a buffer. The memory is freed with the last tensor that uses it."""
        os.close(self._files.pop(buffer.data_ptr()))

    def receiving(self, buffer: Tensor, parts: list[tuple[int, int]]) -> Callable[[], None]:
        """Return a function that waits for one broadcast into each (start, bytes) of the buffer.

        The function raises RuntimeError if the group fails.
        """

        def run() -> None:
            self._send(fd=self._files[buffer.data_ptr()], nbytes=buffer.numel(), parts=parts)
            self._answer(None)

        return run

    def abort(self) -> None:
        """Kill the child."""
        self._process.kill()
        self._process.wait()

    def _send(self, **message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def _answer(self, timeout: float | None) -> None:
        try:
            if timeout is not None and not self._connection.poll(timeout):
                raise RuntimeError(f"no answer within {timeout:g} s")
            error = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            raise RuntimeError("its process ended; did more bytes come than were announced?") from None
        if error:
            raise RuntimeError(error)


def _available_bytes() -> int:
    """Return the number of bytes that can be reserved.

    A larger reservation would start the system's out-of-memory killer.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _child_env() -> dict[str, str]:
    env = clean_child_env()
    path = env.get("PYTHONPATH")
    return env | {"PYTHONPATH": _PACKAGE_ROOT + (os.pathsep + path if path else ""), "CUDA_VISIBLE_DEVICES": ""}


# -- the child ------------------------------------------------------------------------------------------------


def main(connection: Connection, parent: int) -> None:
    """Join the group, then receive until the parent ends.

    Answer every message with an error text, or with an empty reply.
    """
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection.send_bytes(b"")
    group: dist.ProcessGroup | None = None
    while True:
        try:
            message = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            if group is None:
                group = _join(**message)
            else:
                _receive(group, f"/proc/{parent}/fd/{message['fd']}", message["nbytes"], message["parts"])
        except (RuntimeError, OSError, ValueError) as error:
            connection.send_bytes(str(error).encode()[:4000] or b"failed")
        else:
            connection.send_bytes(b"")


def _end_with(parent: int) -> None:
    """End this process when the parent has ended, even during a receive, which may last minutes."""
    pidfd = os.pidfd_open(parent)
    wait_readable(pidfd)
    os._exit(1)


def _join(
    host: str, port: int, name: str, rank: int, world_size: int, address: str, timeout: float
) -> dist.ProcessGroup:
    limit = datetime.timedelta(seconds=timeout)
    store = TCPStore(host, port, world_size, False, limit)
    return connect_gloo(name, store, rank, world_size, address, limit)


def _receive(group: dist.ProcessGroup, path: str, nbytes: int, parts: list[list[int]]) -> None:
    """Receive each part of the buffer.

    Gloo accepts fewer bytes than were announced. So a mark at the end of each part shows if the whole part was written.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, max(1, nbytes))
    finally:
        os.close(fd)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    canaries = []
    for start, size in parts:
        canary = os.urandom(_CANARY_BYTES) if size >= _CANARY_BYTES else b""
        memory[start + size - len(canary) : start + size] = canary
        canaries.append(canary)
    for work in [group.broadcast([buffer[start : start + size]], options) for start, size in parts]:
        work.wait()
    for (start, size), canary in zip(parts, canaries, strict=True):
        if canary and memory[start + size - len(canary) : start + size] == canary:
            raise ValueError(f"fewer than the {size:,} bytes came that were announced")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Connection(int(sys.argv[1])), os.getppid())
