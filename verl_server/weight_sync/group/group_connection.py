"""The connections of a weight-update group for both sides, and the detection of a trainer that died.

`process_group` (the servers' side) and `broadcast` (the trainer's side) use this module.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

T = TypeVar("T")

_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error of the group must not end the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # neither must a watchdog that waits for an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


class Meeting(Protocol):
    """Address of the group, and this process's rank in the group: the fields of `InitWeightsUpdateGroupReq`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str

    @property
    def rendezvous(self) -> str: ...


def connect_gloo(
    group_name: str, store: Store, rank: int, world_size: int, address: str, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Return a new Gloo group on `store` when all ranks have joined. The other ranks reach this rank at `address`.

    Neither this function nor `connect_nccl` uses torch.distributed's default group or its table of names. So a name may
    be used again, and `dist.destroy_process_group()` of the surrounding program does not destroy the group.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # Gloo gets the address, because a tensor-parallel server sets GLOO_SOCKET_IFNAME to its loopback.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = timeout
    prefixed = _prefixed(store, group_name, "cpu")
    backend = dist.ProcessGroupGloo(prefixed, rank, world_size, options)
    return _group_of(backend, dist.ProcessGroup.BackendType.GLOO, "cpu", prefixed, rank, world_size)


def connect_nccl(group_name: str, store: Store, rank: int, world_size: int, device: torch.device) -> dist.ProcessGroup:
    """Return a new NCCL group on `store` at once. Its ranks meet in the first collective."""
    return nccl_group(_prefixed(store, group_name, "cuda"), rank, world_size, device)


def nccl_group(store: Store, rank: int, world_size: int, device: torch.device) -> dist.ProcessGroup:
    """Return an NCCL group that finds NCCL's unique id in `store`, where torch's rank 0 puts it."""
    with _environment(_NCCL_SETTINGS), torch.cuda.device(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(days=365)  # the caller bounds each wait
        backend = dist.ProcessGroupNCCL(store, rank, world_size, options)
    return _group_of(backend, dist.ProcessGroup.BackendType.NCCL, "cuda", store, rank, world_size)


def _prefixed(store: Store, group_name: str, device_type: str) -> Store:
    """Return `store` with the prefixes of SGLang's trainers.

    These trainers pass `PrefixStore(group_name, store)` to torch's `_new_process_group_helper`, which adds two more
    prefixes.
    """
    return PrefixStore(f"{device_type}/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))


def _group_of(
    backend: dist.ProcessGroupGloo | dist.ProcessGroupNCCL,
    kind: dist.ProcessGroup.BackendType,
    device_type: str,
    store: Store,
    rank: int,
    world_size: int,
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, world_size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device_type), kind, backend)
    return group


class Lifeline:
    """An idle connection to the process that hosts the store. The connection closes when that process ends."""

    def __init__(self) -> None:
        self.lost: Future[None] = Future()
        self._socket: socket.socket | None = None

    def connect(self, host: str, port: int, timeout: float) -> str:
        """Wait at most `timeout` seconds for the other side to listen, then watch the connection in a thread.

        Return the address of this host on the way to the other.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # there is no event for a port of another host that opens
        line.settimeout(None)
        # A host that lost its power sends nothing: probe it after 10 s of silence, every 5 s, three times.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = line
        address: str = line.getsockname()[0]
        threading.Thread(target=self._watch, args=(line,), name="weight-group-lifeline", daemon=True).start()
        return address

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _watch(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            line.recv(1)  # the store's side never speaks first
        self.lost.set_result(None)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread. `work` may never return, and must not keep this process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="weight-group", daemon=True).start()
    return future


@contextlib.contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set the environment variables that torch reads when it creates a group, while one group is created."""
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
