"""Weights over a process group: how a server rank joins trainers of other hosts, and receives what they broadcast.

The stager of each rank holds one `WeightGroup` for each name. The layout is SGLang's, so its trainers can be used
as they are: rank 0 is the trainer, which hosts the store and is the source of every broadcast; server rank i of
an engine is `rank_offset + i`. `broadcast` has the trainer's side.

Two things must hold. *Bounded*: joining, and the arrival of a window, end within `timeout` seconds, and at once
when the process that hosts the store dies. *Only the group dies*: no fault in it may hang or end the server.
Whatever can block for ever runs in a thread of its own, which is given up if it must be, and NCCL's own
watchers, which end the process, are off for these groups. After a fault the group is broken: each further call
says so, until it was destroyed and joined again. It does not heal, for both sides count their broadcasts.

With NCCL a waiting receive is a kernel that spins on the GPU, on a stream of its own. Others must therefore wait
for their own streams and events meanwhile, never for the device. If the server's ranks use NCCL among themselves
(tensor parallelism), two communicators are in flight with no order between them, which NCCL does not promise to
survive: receive while no step runs.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.io_struct import InitWeightsUpdateGroupReq

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ALIGNMENT = 256
"""Bytes between the starts of tensors in a window: any dtype may begin there."""
_NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # an error of the group is not the end of the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor is a watchdog that waits for an abort
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


class WeightGroup:
    """This rank's membership in one group. Not thread-safe: one thread joins, receives and closes."""

    def __init__(
        self, name: str, group: dist.ProcessGroup, device: torch.device, timeout: float, line: Lifeline
    ) -> None:
        self.name = name
        self.broken = ""
        """Why nothing can be received any more."""
        self._group, self._device, self._timeout, self._lifeline = group, device, timeout, line
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def join(cls, req: InitWeightsUpdateGroupReq, rank: int, device: torch.device, timeout: float) -> WeightGroup:
        """Meet the others as `req.rank_offset + rank`, in at most `timeout` seconds.

        With Gloo this returns when all ranks are there; with NCCL, as in SGLang, when the trainer's store is: the
        ranks meet in the first broadcast. `device` is where the server's weights are; over Gloo, tensors arrive on
        the CPU. Raises BadRequestError for a layout that cannot be, WeightUpdateError if the group did not form.
        """
        _check_layout(req, rank, device)
        where = f"{req.master_address}:{req.master_port}"
        target = device if req.backend == "nccl" else torch.device("cpu")
        limit = datetime.timedelta(seconds=timeout)

        def meet() -> dist.ProcessGroup:
            store = TCPStore(req.master_address, req.master_port, req.world_size, False, limit)
            group_rank = req.rank_offset + rank
            return connect(req.backend, req.group_name, store, group_rank, req.world_size, target, limit)

        line, deadline = Lifeline(), time.monotonic() + timeout
        try:
            line.connect(req.master_address, req.master_port, timeout)
            group = in_thread(meet).result(deadline - time.monotonic())
        except (OSError, RuntimeError, TimeoutError) as error:
            line.close()
            raise WeightUpdateError(
                f"Could not join the group '{req.group_name}' at {where} within {timeout:g} s "
                f"({_first_line(error)}). Is the trainer (rank 0) creating the group there now, with "
                f"world_size={req.world_size}, backend='{req.backend}' and the same group_name?"
            ) from None
        return cls(req.group_name, group, target, timeout, line)

    def receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], load_format: str | None, window_bytes: int
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield (name, tensor) lists as they arrive: all at once if they fit `window_bytes`, else in windows.

        A window has at most half of `window_bytes` (or one tensor that is larger), and the next one arrives while
        the caller copies: use its tensors on the current stream, before asking for more. "flattened_bucket" is one
        window, as large as the sender made it. Leaving the iterator early breaks the group. Raises
        BadRequestError, or WeightUpdateError if not everything arrived; both break the group, for the trainer
        counts on its broadcasts being received.
        """
        if self.broken:
            raise WeightUpdateError(
                f"The group '{self.name}' is broken ({self.broken}). Call destroy_weights_update_group, then "
                "init_weights_update_group again."
            )
        finished = False
        try:
            windows = _windows(names, dtypes, shapes, load_format, window_bytes)
            yield from self._pipeline(windows)
            finished = True
        except (BadRequestError, WeightUpdateError) as error:
            self._break(str(error))
            raise
        except (RuntimeError, MemoryError) as error:  # no memory for a window, most likely
            self._break(_first_line(error))
            raise WeightUpdateError(f"Receiving from the group '{self.name}' failed: {self.broken}") from error
        finally:
            if not finished:
                self._break("an update was not received to its end")

    def close(self) -> None:
        """Leave the group. Bounded; the other members need not leave at the same time."""
        self.broken = self.broken or "it was destroyed"
        self._lifeline.close()
        self._abort()

    # -- receiving ---------------------------------------------------------------------------------------------

    def _pipeline(self, windows: list[Window]) -> Iterator[list[tuple[str, Tensor]]]:
        """Two buffers: one is filled while the caller copies from the other."""
        size = max(window.nbytes for window in windows)
        pinned = self._device.type == "cpu" and torch.cuda.is_available()
        buffers = [torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pinned) for _ in windows[:2]]
        arrival = self._start(windows[0], buffers[0])
        for index, window in enumerate(windows):
            self._await(arrival, window)
            if index + 1 < len(windows):
                # The other buffer: what the caller launched on it comes before in its stream.
                arrival = self._start(windows[index + 1], buffers[(index + 1) % 2])
            yield window.tensors(buffers[index % 2])

    def _start(self, window: Window, buffer: Tensor) -> Future[None]:
        """Receive into `buffer` once the current stream has come to here."""
        stream = self._stream
        free = torch.cuda.current_stream(self._device).record_event() if stream is not None else None
        options = dist.BroadcastOptions()
        options.rootRank = 0

        def run() -> None:
            if stream is None or free is None:
                for work in [self._group.broadcast([part], options) for part in window.parts(buffer)]:
                    work.wait()
                return
            with torch.cuda.device(self._device), torch.cuda.stream(stream):
                stream.wait_event(free)
                for work in [self._group.broadcast([part], options) for part in window.parts(buffer)]:
                    work.wait()
                stream.record_event().synchronize()

        return in_thread(run)

    def _await(self, arrival: Future[None], window: Window) -> None:
        """Return when the window is there; raise if the trainer is gone, failed, or is too slow."""
        done, _ = wait([arrival, self._lifeline.lost], self._timeout, FIRST_COMPLETED)
        what = f"'{window.names[0]}'" + (f" and {len(window.names) - 1} more" if len(window.names) > 1 else "")
        if arrival in done:
            error = arrival.exception()
            if error is not None:
                raise WeightUpdateError(
                    f"Receiving {what} from the group '{self.name}' failed ({_first_line(error)}). Did the trainer "
                    "die, or broadcast another size?"
                )
        elif done:
            raise WeightUpdateError(f"The trainer of the group '{self.name}' went away before {what} arrived.")
        else:
            raise WeightUpdateError(
                f"Not everything came from the group '{self.name}' within {self._timeout:g} s (waited for {what}). "
                "Does the trainer broadcast these names, dtypes and shapes from rank 0, in this order?"
            )

    # -- ending ------------------------------------------------------------------------------------------------

    def _break(self, reason: str) -> None:
        if not self.broken:
            self.broken = reason
            self._abort()

    def _abort(self) -> None:
        """End what is in flight: NCCL's kernel leaves the GPU, Gloo's sockets close."""
        try:
            in_thread(self._group.abort).result(self._timeout)
        except TimeoutError:
            logger.error("The group '%s' does not end: a kernel of it may occupy the GPU until a restart", self.name)
        except RuntimeError as error:
            logger.warning("Ending the group '%s': %s", self.name, _first_line(error))


class Window:
    """Consecutive tensors of one update, and where each lies in a buffer."""

    def __init__(self, flattened: bool) -> None:
        self.names: list[str] = []
        self.nbytes = 0
        self._flattened = flattened
        self._items: list[tuple[torch.dtype, list[int], int, int]] = []

    def add(self, name: str, dtype: torch.dtype, shape: list[int]) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        start = self.nbytes if self._flattened else _aligned(self.nbytes)
        self.names.append(name)
        self._items.append((dtype, shape, start, nbytes))
        self.nbytes = start + nbytes

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """What is broadcast, in order, as bytes: each tensor, or all of them in one."""
        if self._flattened:
            return [buffer[: self.nbytes]]
        return [buffer[start : start + nbytes] for _, _, start, nbytes in self._items]

    def tensors(self, buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Views into `buffer`; copies where a bucket of mixed dtypes puts a tensor at an odd byte."""
        result = []
        for name, (dtype, shape, start, nbytes) in zip(self.names, self._items, strict=True):
            data = buffer[start : start + nbytes]
            result.append((name, (data.clone() if start % dtype.itemsize else data).view(dtype).view(shape)))
        return result


def _windows(
    names: list[str], dtypes: list[str], shapes: list[list[int]], load_format: str | None, window_bytes: int
) -> list[Window]:
    """Cut an update into windows. BadRequestError if its three lists do not describe tensors."""
    if load_format not in (None, "auto", "flattened_bucket"):
        raise BadRequestError(f"load_format={load_format!r} is not supported; unset it or use 'flattened_bucket'.")
    if not len(names) == len(dtypes) == len(shapes) or not names:
        raise BadRequestError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: give one each.")
    flattened = load_format == "flattened_bucket"
    everything, windows = Window(flattened), [Window(flattened)]
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape) or math.prod(shape) >= 2**48:
            raise BadRequestError(f"'{name[:100]}': dtype '{dtype_name[:50]}' and shape {shape[:16]} are no tensor's.")
        everything.add(name, dtype, shape)
        if windows[-1].names and _aligned(windows[-1].nbytes) + math.prod(shape) * dtype.itemsize > window_bytes // 2:
            windows.append(Window(flattened))
        windows[-1].add(name, dtype, shape)
    return [everything] if flattened or everything.nbytes <= window_bytes else windows


# -- what both sides of a group use ---------------------------------------------------------------------------


def connect(
    backend: str,
    group_name: str,
    store: Store,
    rank: int,
    world_size: int,
    device: torch.device,
    timeout: datetime.timedelta,
) -> dist.ProcessGroup:
    """A group of its own on `store`, beside (not within) torch.distributed's default group.

    The prefixes are those that `PrefixStore(group_name, store)` and torch's `_new_process_group_helper` make, which
    is how SGLang's trainers create it. Nothing is registered globally: the name may be used again, and
    `dist.destroy_process_group()` of the surrounding program does not touch it.
    """
    kind = "cuda" if backend == "nccl" else "cpu"
    prefixed = PrefixStore(f"{kind}/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
    group = dist.ProcessGroup(prefixed, rank, world_size)
    if backend == "gloo":
        gloo = dist.ProcessGroupGloo(prefixed, rank, world_size, timeout=timeout)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group
    with _environment(_NCCL_SETTINGS), torch.cuda.device(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = datetime.timedelta(days=365)  # the bound is ours to keep
        nccl = dist.ProcessGroupNCCL(prefixed, rank, world_size, options)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(torch.device(kind), dist.ProcessGroup.BackendType.NCCL, nccl)
    return group


class Lifeline:
    """A silent connection to the process that hosts the store: it ends when that process does."""

    def __init__(self) -> None:
        self.lost: Future[None] = Future()
        self._socket: socket.socket | None = None

    def connect(self, host: str, port: int, timeout: float) -> None:
        """Wait at most `timeout` seconds for the other side to listen, then watch the connection in a thread."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = socket.create_connection((host, port), max(0.01, deadline - time.monotonic()))
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)  # nothing tells when a port of another host will be open
        line.settimeout(None)
        # A host that lost its power says nothing: ask after 10 s of silence, every 5 s, three times.
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = line
        threading.Thread(target=self._watch, args=(line,), name="weight-group-lifeline", daemon=True).start()

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _watch(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            line.recv(1)  # the store's side never speaks first
        self.lost.set_result(None)


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread: what may never end must not keep this process from ending."""
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
    """torch reads these when a group is made, for that group."""
    before: dict[str, Any] = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _check_layout(req: InitWeightsUpdateGroupReq, rank: int, device: torch.device) -> None:
    if req.backend not in ("nccl", "gloo"):
        raise BadRequestError(f"backend={req.backend!r} is not supported; use 'nccl' or 'gloo'.")
    if req.backend == "nccl" and device.type != "cuda":
        raise BadRequestError("backend='nccl' needs GPUs, but this server runs on the CPU; use 'gloo' on both sides.")
    if not 1 <= req.rank_offset <= req.rank_offset + rank < req.world_size:
        raise BadRequestError(
            f"rank_offset={req.rank_offset} and tensor-parallel rank {rank} do not fit world_size={req.world_size}: "
            "rank 0 is the trainer's, and every server rank needs one."
        )
    if not 0 < req.master_port < 65536:
        raise BadRequestError(f"master_port={req.master_port} is no port.")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
