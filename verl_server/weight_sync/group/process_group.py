"""Weights over a process group: a server rank joins trainers on other hosts, and receives their broadcasts.

The stager of each rank holds one `WeightGroup` for each name. The layout is that of SGLang and of vLLM, so their
trainers work without a change: rank 0 is the trainer, which hosts the store and is the source of every broadcast;
server rank i of an engine is `rank_offset + i`. SGLang and vLLM differ in how the ranks meet (`rendezvous`:
`group_connection`, `unique_id`), in the content of one broadcast (`load_format`), and in who describes the tensors: the
request, or the trainer's own broadcasts (`state_dicts`). `broadcast` has the trainer's side.

Two invariants hold. *Bounded waits*: a join and the wait for a window end within `timeout` seconds, and at once if the
process that hosts the store dies. *Only the group dies*: no fault of the group hangs or ends the server. After a fault
the group is broken: each further call raises, until the group is destroyed and joined again. A broken group cannot be
repaired, because both sides count their broadcasts. The two backends need different means:

- Gloo ends the process, from a thread of its own, when more bytes come than were expected. So the member is a child
  process (`gloo_member`), which receives into memory that it shares with the server.
- NCCL receives with a kernel on the GPU, which spins until data comes. The kernel has a stream of its own, and a thread
  that waits for it. On a fault the group is aborted, which ends the kernel. NCCL's own watchers, which end the process,
  are off for these groups. While a transfer runs, other code must wait for its own streams and events, never for the
  whole device. If the server's ranks use NCCL among themselves (tensor parallelism), two communicators are in flight
  without an order between them, for which NCCL gives no guarantee: receive while no step runs.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.group.gloo_member import GlooMember
from verl_server.weight_sync.group.group_connection import Lifeline, Meeting, connect_nccl, in_thread
from verl_server.weight_sync.group.state_dicts import (
    MOST_HEADER_BYTES,
    MOST_STATE_DICTS,
    NUMBER_BYTES,
    read_header,
    read_number,
)
from verl_server.weight_sync.group.unique_id import connect_by_unique_id
from verl_server.weight_sync.group.windows import Window, windows_of

logger = logging.getLogger(__name__)


class Member(Protocol):
    """The interface of a backend: this rank as a member of a group."""

    def allocate(self, nbytes: int) -> Tensor:
        """Return a buffer of `nbytes` bytes to receive into."""

    def free(self, buffer: Tensor) -> None:
        """Stop receiving into the buffer. The memory is freed with the last tensor that uses it."""

    def receiving(self, buffer: Tensor, parts: list[tuple[int, int]]) -> Callable[[], None]:
        """Return a function that waits, in any thread, for one broadcast into each (start, bytes) of the buffer.

        The broadcasts begin after the work that is on the caller's current stream now. The function raises RuntimeError
        if the group fails.
        """

    def abort(self) -> None:
        """Abort the broadcasts in flight, and leave the group."""


class WeightGroup:
    """This rank's membership in one group. Only one thread may receive at a time. Any thread may close."""

    def __init__(self, name: str, member: Member, lifeline: Lifeline, timeout: float) -> None:
        self.name = name
        self.broken = ""
        """The reason why nothing can be received any more, "" while the group works."""
        self._member, self._lifeline, self._timeout = member, lifeline, timeout

    @classmethod
    def join(cls, req: Meeting, rank: int, device: torch.device, timeout: float) -> WeightGroup:
        """Join the other ranks as `req.rank_offset + rank`, in at most `timeout` seconds.

        With Gloo, return when all ranks have joined. With NCCL, as in SGLang, return when the trainer's store answers:
        the ranks meet in the first broadcast. `device` has the server's weights; over Gloo, tensors arrive on the CPU.
        Raise BadRequestError for an impossible layout, and WeightUpdateError if not all ranks joined.
        """
        _check_layout(req, rank, device)
        lifeline = Lifeline()
        member: Member | None = None
        try:
            member = gloo = GlooMember() if req.backend == "gloo" else None
            deadline = time.monotonic() + timeout
            address = lifeline.connect(req.master_address, req.master_port, timeout)
            left = max(0.0, deadline - time.monotonic())
            if gloo is not None:
                gloo.join(req, req.rank_offset + rank, address, left)
                return cls(req.group_name, gloo, lifeline, timeout)
            nccl = in_thread(lambda: NcclMember(req, req.rank_offset + rank, device, timeout)).result(left)
            member = nccl
            if req.rendezvous == "unique_id":
                in_thread(nccl.meet).result(max(0.0, deadline - time.monotonic()))
            return cls(req.group_name, nccl, lifeline, timeout)
        except (OSError, RuntimeError, TimeoutError, UnicodeError) as error:  # UnicodeError: no name of a host
            lifeline.close()
            if member is not None:
                in_thread(member.abort)  # NCCL's abort may wait for a kernel that never ends
            raise WeightUpdateError(
                f"Could not join the group '{req.group_name}' at {req.master_address}:{req.master_port} within "
                f"{timeout:g} s ({_first_line(error)}). Is the trainer (rank 0) creating the group there now, with "
                f"world_size={req.world_size}, backend='{req.backend}' and the same group_name?"
            ) from None

    def receive(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        load_format: str | None,
        window_bytes: int,
        bucket_bytes: int = 0,
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield (name, tensor) lists as they arrive: all at once if they fit `window_bytes`, else in windows.

        A window has at most half of `window_bytes` (or one tensor that is larger). The next window arrives while the
        caller copies, so use a window's tensors on the current stream, before you ask for the next window. With
        "flattened_bucket", the sender's bucket is one window. With "packed", each bucket is one window, and ends with
        the tensor that makes it larger than `bucket_bytes`. A caller that leaves the iterator early breaks the group.
        Raise BadRequestError for a wrong request, and WeightUpdateError if not everything arrived. Both break the
        group, because the trainer's broadcasts were not received.
        """
        with self._update() as buffers:
            windows = windows_of(names, dtypes, shapes, load_format, window_bytes, bucket_bytes)
            size = max(window.nbytes for window in windows)
            for _ in windows[:2]:
                buffers.append(self._member.allocate(size))
            yield from self._pipeline(windows, buffers)

    def receive_state_dicts(self) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the (name, tensor) list of each state dict of an update that describes itself (`state_dicts`).

        Each list has memory of its own. Raise BadRequestError for a description that is refused, and WeightUpdateError
        if not everything arrived. These errors break the group. A caller that leaves the iterator early breaks the
        group, too.
        """
        with self._update() as buffers:
            number = self._bytes(NUMBER_BYTES, "the number of state dicts", buffers)
            for _ in range(read_number(number, "state dicts", MOST_STATE_DICTS)):
                number = self._bytes(NUMBER_BYTES, "the size of a header", buffers)
                nbytes = read_number(number, "bytes of a header", MOST_HEADER_BYTES)
                window = read_header(self._bytes(nbytes, "the header of a state dict", buffers))
                if window.names:
                    yield window.tensors(self._whole(window.nbytes, window.parts(), _named(window), buffers))

    @property
    def has_ended(self) -> bool:
        """True if nothing can be received any more: the group is broken, or the process of the store ended."""
        return bool(self.broken) or self._lifeline.lost.done()

    def close(self) -> None:
        """Leave the group, within a time limit. The other members need not leave at the same time."""
        self.broken = self.broken or "it was destroyed"
        self._lifeline.close()
        self._abort()

    # -- receiving ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _update(self) -> Iterator[list[Tensor]]:
        """Enclose one update. Yield a list, to which the update appends the buffers that must be freed at its end.

        Any error, or an early exit, breaks the group. Raise WeightUpdateError if the group is broken already.
        """
        if self.broken:
            raise WeightUpdateError(
                f"The group '{self.name}' is broken ({self.broken}). Call destroy_weights_update_group, then "
                "init_weights_update_group again."
            )
        finished = False
        buffers: list[Tensor] = []
        try:
            yield buffers
            finished = True
        except (BadRequestError, WeightUpdateError) as error:
            self._break(str(error))
            raise
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:  # most likely no memory for a window
            self._break(_first_line(error))
            raise WeightUpdateError(f"Receiving from the group '{self.name}' failed: {self.broken}") from error
        finally:
            if not finished:
                self._break("an update was not received to its end")
            for buffer in buffers:  # after the break, nothing is received into them any more
                self._member.free(buffer)

    def _bytes(self, nbytes: int, what: str, buffers: list[Tensor]) -> bytes:
        """Receive one broadcast of `nbytes` bytes and return them."""
        data: bytes = self._whole(nbytes, [(0, nbytes)], what, buffers).cpu().numpy().tobytes()
        return data

    def _whole(self, nbytes: int, parts: list[tuple[int, int]], what: str, buffers: list[Tensor]) -> Tensor:
        """Receive one broadcast into each (start, bytes) of a new buffer. The caller owns the buffer."""
        buffer = self._member.allocate(nbytes)
        buffers.append(buffer)
        self._await(in_thread(self._member.receiving(buffer, parts)), what)
        self._member.free(buffers.pop())
        return buffer

    def _pipeline(self, windows: list[Window], buffers: list[Tensor]) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the tensors of each window.

        There are two buffers: one receives while the caller copies from the other.
        """
        arrival = in_thread(self._member.receiving(buffers[0], windows[0].parts()))
        for index, window in enumerate(windows):
            self._await(arrival, _named(window))
            if index + 1 < len(windows):
                parts = windows[index + 1].parts()
                arrival = in_thread(self._member.receiving(buffers[(index + 1) % 2], parts))
            yield window.tensors(buffers[index % 2])

    def _await(self, arrival: Future[None], what: str) -> None:
        """Return when the transfer is complete. Raise WeightUpdateError if the trainer ended, failed, or is too slow.

        `what` names the transfer in the error.
        """
        done, _ = wait([arrival, self._lifeline.lost], self._timeout, FIRST_COMPLETED)
        if self.broken:  # check this first, because NCCL's kernel ends without an error when it is aborted
            raise WeightUpdateError(f"The group '{self.name}' was destroyed before {what} arrived.")
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
        """Abort the transfer in flight: NCCL's kernel ends, and Gloo's sockets close."""
        try:
            in_thread(self._member.abort).result(self._timeout)
        except TimeoutError:
            logger.error("The group '%s' does not end: a kernel of it may occupy the GPU until a restart", self.name)
        except (RuntimeError, OSError) as error:
            logger.warning("Ending the group '%s': %s", self.name, _first_line(error))


class NcclMember:
    """This process as a member of an NCCL group, with a stream of its own."""

    def __init__(self, req: Meeting, group_rank: int, device: torch.device, timeout: float) -> None:
        limit = datetime.timedelta(seconds=timeout)
        store = TCPStore(req.master_address, req.master_port, req.world_size, False, limit)
        self._device = device
        if req.rendezvous == "unique_id":
            self._group = connect_by_unique_id(store, group_rank, req.world_size, device)
        else:
            self._group = connect_nccl(req.group_name, store, group_rank, req.world_size, device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def meet(self) -> None:
        """Wait for the other ranks in an all-reduce of one number, with which vLLM's ranks begin."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._group.allreduce([torch.zeros(1, device=self._device)]).wait()
            self._stream.synchronize()

    def allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def free(self, buffer: Tensor) -> None:
        """Do nothing: torch's allocator reuses the buffer only after the caller's stream has used it."""

    def receiving(self, buffer: Tensor, parts: list[tuple[int, int]]) -> Callable[[], None]:
        before = torch.cuda.current_stream(self._device).record_event()
        options = dist.BroadcastOptions()
        options.rootRank = 0

        def run() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(before)
                works = [self._group.broadcast([buffer[start : start + size]], options) for start, size in parts]
                for work in works:
                    work.wait()
                arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps, does not spin
                arrived.record(self._stream)
                arrived.synchronize()

        return run

    def abort(self) -> None:
        self._group.abort()


def _named(window: Window) -> str:
    """Return the names of a window's tensors for an error."""
    return f"'{window.names[0]}'" + (f" and {len(window.names) - 1} more" if len(window.names) > 1 else "")


def _check_layout(req: Meeting, rank: int, device: torch.device) -> None:
    if req.backend not in ("nccl", "gloo"):
        raise BadRequestError(f"backend={req.backend!r} is not supported; use 'nccl' or 'gloo'.")
    if req.backend == "nccl" and device.type != "cuda":
        raise BadRequestError("backend='nccl' needs GPUs, but this server runs on the CPU; use 'gloo' on both sides.")
    if req.rendezvous == "unique_id" and req.backend != "nccl":
        raise BadRequestError(f"rendezvous='unique_id' is NCCL's: backend={req.backend!r} does not have it.")
    if not 1 <= req.rank_offset <= req.rank_offset + rank < req.world_size:
        raise BadRequestError(
            f"rank_offset={req.rank_offset} and tensor-parallel rank {rank} do not fit world_size={req.world_size}: "
            "rank 0 is the trainer's, and every server rank needs one."
        )
    if not 0 < req.master_port < 65536:
        raise BadRequestError(f"master_port={req.master_port} is no port.")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
