"""The trainer's side of a process group, which sends weights to servers on other hosts.

Use it for servers that cannot read the trainer's memory. The trainer's first rank calls it with engines over HTTP, or
with any objects that have the two methods of `GroupMember`:

    with init_weights_update_group(engines, "10.0.0.7", backend="nccl", device="cuda:0") as group:
        while training:
            ...
            broadcast_weights(group, model.state_dict().items())

All servers receive the same broadcasts. If a server answers with an error, the call closes the group and raises the
error; then create a new group. Servers of SGLang can be members too.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from verl_server.errors import VerlServerError, WeightUpdateError
from verl_server.weight_sync.group.group_connection import connect_gloo, connect_nccl, in_thread

_ANSWER_SECONDS = 5.0


class GroupMember(Protocol):
    """The methods of an engine that this module calls.

    Each method returns when the server has completed the request. Otherwise it raises an error.
    """

    def init_weights_update_group(self, *args: Any, **kwargs: Any) -> Any: ...

    def update_weights_from_distributed(self, *args: Any, **kwargs: Any) -> Any: ...


class BroadcastGroup:
    """The trainer's membership in a group. `init_weights_update_group` creates it."""

    def __init__(
        self,
        name: str,
        engines: Sequence[GroupMember],
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        store: TCPStore,
    ) -> None:
        self.name, self.engines, self.device, self.timeout = name, engines, device, timeout
        self._group: dist.ProcessGroup | None = group
        self._store: TCPStore | None = store  # the servers notice its end

    def __enter__(self) -> BroadcastGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the group.

        The servers answer further updates with an error until a new group of this name is created.
        """
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with contextlib.suppress(RuntimeError, TimeoutError):
                in_thread(group.abort).result(self.timeout)

    def broadcast(self, parts: Iterable[Tensor]) -> None:
        """Send contiguous byte tensors in order. On CUDA, the sends begin after the work on the current stream."""
        group = self._opened()
        options = dist.BroadcastOptions()
        options.rootRank = 0
        for work in [group.broadcast([part], options) for part in parts]:
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def check_open(self) -> None:
        """Raise WeightUpdateError after `close`, or after an update that failed."""
        self._opened()

    def _opened(self) -> dist.ProcessGroup:
        if self._group is None:
            raise WeightUpdateError(f"The group '{self.name}' is closed; call init_weights_update_group again.")
        return self._group


def init_weights_update_group(
    engines: Sequence[GroupMember],
    master_address: str,
    *,
    tp_size: int = 1,
    backend: str = "nccl",
    device: torch.device | str = "cuda",
    group_name: str = "weight_update_group",
    timeout: float = 60.0,
) -> BroadcastGroup:
    """Make a group of this process (rank 0) and all tensor-parallel ranks of `engines`, in that order.

    `master_address` is the address under which the servers reach this host. The store listens at this address only, on
    a free port. Each group has a store of its own, so no group reads keys of an earlier group. The store has no
    passwords: use a network that only the training job can access. Raise the error that a server answered, or
    WeightUpdateError after `timeout` seconds.
    """
    device, limit = torch.device(device), datetime.timedelta(seconds=timeout)
    world_size = 1 + tp_size * len(engines)
    family = socket.AF_INET6 if ":" in master_address else socket.AF_INET
    listener = socket.create_server((master_address, 0), family=family, backlog=world_size)
    port = listener.getsockname()[1]
    store = TCPStore(
        master_address, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )

    def ask(engine: GroupMember, rank_offset: int) -> Callable[[], Any]:
        return lambda: engine.init_weights_update_group(
            master_address=master_address,
            master_port=port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    def join() -> dist.ProcessGroup:
        if backend == "nccl":
            return connect_nccl(group_name, store, 0, world_size, device)
        return connect_gloo(group_name, store, 0, world_size, master_address, limit)

    joined = in_thread(join)
    calls = [in_thread(ask(engine, 1 + index * tp_size)) for index, engine in enumerate(engines)]
    _all(calls, joined, 2 * timeout, f"The group '{group_name}' did not form")
    return BroadcastGroup(group_name, list(engines), joined.result(), device, timeout, store)


def broadcast_weights(
    group: BroadcastGroup,
    named_tensors: Iterable[tuple[str, Tensor]],
    *,
    bucket_bytes: int | None = None,
    **options: Any,
) -> list[Any]:
    """Send tensors to all engines of the group, and return their answers.

    Without `bucket_bytes` the tensors are one update: all names are sent first, then each tensor in a broadcast of its
    own. With `bucket_bytes`, tensors are read from `named_tensors`, concatenated into buckets of about that many bytes,
    and sent bucket by bucket. This suits many small tensors, or a `named_tensors` that computes full tensors one by
    one. Each bucket is then an update of its own. Call `engine.begin_weight_update()` before and `end_weight_update()`
    after to make all buckets one version. `options` are passed to `update_weights_from_distributed` (weight_version,
    mode, ...). On any error the group is closed.
    """
    if bucket_bytes is None:
        return _send(group, list(named_tensors), flattened=False, options=options)
    answers: list[Any] = []
    for bucket in _buckets(named_tensors, bucket_bytes):
        answers = _send(group, bucket, flattened=True, options=options)
    return answers


def _send(
    group: BroadcastGroup, named_tensors: list[tuple[str, Tensor]], *, flattened: bool, options: dict[str, Any]
) -> list[Any]:
    """Call one update on every engine, and broadcast the tensors that it waits for."""
    group.check_open()
    names = [name for name, _ in named_tensors]
    dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named_tensors]
    shapes = [list(tensor.shape) for _, tensor in named_tensors]
    parts = [tensor.detach().to(group.device).contiguous().view(-1).view(torch.uint8) for _, tensor in named_tensors]
    if flattened:
        options = {**options, "load_format": "flattened_bucket"}
        parts = [torch.cat(parts)]
    # The current stream and device belong to a thread: the copies above come first.
    ready = torch.cuda.current_stream(group.device).record_event() if group.device.type == "cuda" else None

    def send() -> None:
        if ready is None:
            group.broadcast(parts)
            return
        with torch.cuda.device(group.device):
            torch.cuda.current_stream().wait_event(ready)
            group.broadcast(parts)

    def ask(engine: GroupMember) -> Callable[[], Any]:
        return lambda: engine.update_weights_from_distributed(
            names=names, dtypes=dtypes, shapes=shapes, group_name=group.name, **options
        )

    calls = [in_thread(ask(engine)) for engine in group.engines]
    try:
        _all(calls, in_thread(send), None, f"The update over the group '{group.name}' failed")
    except BaseException:
        group.close()
        raise
    return [call.result() for call in calls]


def _all(calls: list[Future[Any]], own: Future[Any], timeout: float | None, what: str) -> None:
    """Wait for the engines' answers and for this rank's broadcasts. Raise the first error.

    The engines' calls have time limits of their own.
    """
    done, pending = wait([*calls, own], timeout, FIRST_EXCEPTION)
    if own in done and own.exception() is not None:
        done |= wait(calls, _ANSWER_SECONDS, FIRST_EXCEPTION).done  # a server knows better what went wrong
    errors = [error for error in (future.exception() for future in [*calls, own] if future in done) if error]
    for error in errors:
        if isinstance(error, VerlServerError):
            raise error
    if errors:
        raise WeightUpdateError(f"{what}: {errors[0]}") from errors[0]
    if pending:
        raise WeightUpdateError(f"{what} within {timeout:g} s. Can the servers reach this host?")


def _buckets(named_tensors: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    bucket: list[tuple[str, Tensor]] = []
    for name, tensor in named_tensors:
        if bucket and sum(held.nbytes for _, held in bucket) + tensor.nbytes > nbytes:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    if bucket:
        yield bucket
