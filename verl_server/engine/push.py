"""A weight push: from the tensors of all ranks to the outcome on all ranks.

`EngineBase` has a `WeightPusher` for this process alone, `VerlEngine` has one for its ranks. In a push, every rank
describes its memory (`weight_sync.trainer`) after all writes to this memory have finished. The ranks meet, and pass
descriptions that have changed to the first rank. The first rank sends one request. No rank returns before it has the
outcome, because the server may still be reading its memory.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    UnansweredError,
    VerlServerError,
)
from verl_server.weight_sync.handles import LocalSerializedTensor, WeightsDescription
from verl_server.weight_sync.trainer.description import merge, merged_id
from verl_server.weight_sync.trainer.sender import (
    Described,
    Handles,
    Mapping,
    Named,
    Origin,
    WeightSender,
    tensor_source,
)

T = TypeVar("T")
Send = Callable[["Push"], Any]
"""A function that sends one request. It runs on the first rank only."""

_SETS = 16
"""The most sets of names that are remembered, because one version may take several pushes.

The least recently used set is removed first.
"""


class Ranks(Protocol):
    """The ranks that push together: the ranks of one engine (`RankGroup`), or of several (`JointRanks`)."""

    rank: int
    size: int
    """Number of this engine's ranks."""

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]: ...

    def of_engine(self, parts: list[T]) -> list[T]: ...

    def act(self, what: str, act: Callable[[], Any]) -> Any: ...


class OneRank:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        return [prepare()]

    def of_engine(self, parts: list[T]) -> list[T]:
        return parts

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        return act()


@dataclass(frozen=True)
class Push:
    """The source of one update request, which the first rank sends: a description of memory, or handles."""

    id: str = ""
    by_id: bool = False
    """True if the server has registered this memory, so that the id is enough."""
    keep: bool = False
    """True if the server keeps the memory open after the push."""
    forget: list[str] = field(default_factory=list)
    """Registrations that the server closes first."""
    describe: Callable[[], WeightsDescription] | None = None
    """Returns the description with this id, for a server that does not have the description. None for handles."""
    handles: Handles | None = None
    """Handles that the caller created. They replace all fields above."""

    def for_readers(self, count: int) -> Push:
        """Return the same push for `count` server ranks. Each server rank reads one value of every handle."""
        handles = self.handles
        if handles is not None:
            handles = [(name, _spread(value, count)) for name, value in handles]
        return replace(self, handles=handles)


class _Part(msgspec.Struct, array_like=True):
    """One rank's share of a push, which the ranks exchange."""

    id: str = ""
    names_id: str = ""
    can_be_kept: bool = True
    description: WeightsDescription | None = None
    """None if the first rank has this description already."""
    handles: Handles | None = None


class WeightPusher:
    """Pushes the weights of some ranks to one engine. Thread-safe: one push at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sender = WeightSender()
        self._registrations = ServerRegistrations()
        self._source: Callable[[], Named] | None = None
        """Source of the registered weights."""
        self._mapping: Mapping | None = None
        self._sent_id = ""
        """Id of the description of this rank that the first rank has. Empty after an error."""
        self._descriptions: dict[int, WeightsDescription] = {}
        """Last description of each rank that pushes. Used on the first rank only."""
        self._lock = threading.Lock()

    @property
    def has_source(self) -> bool:
        """True if weights are registered, so that `push` has something to send."""
        return self._source is not None

    def update(self, named_tensors: Named, mapping: Mapping | None, send: Send) -> Any:
        """Push these tensors, by id if the server knows them. Return the result of `send`."""
        with self._lock:
            return self._push("update_weights_from_tensor", lambda: named_tensors, mapping, send)

    def register(self, origin: Origin, mapping: Mapping | None, send: Send) -> Any:
        """Make the server open the memory of `origin` now. From then on, `push` pushes `origin`."""
        with self._lock:
            source = tensor_source(origin)
            result = self._push("register_weights", source, mapping, send, register=True)
            self._source, self._mapping = source, mapping
            return result

    def push(self, send: Send) -> Any:
        """Push the current values of the registered weights."""
        with self._lock:
            if self._source is None:
                raise BadRequestError("No weights are registered: call register_weights(model) first.")
            return self._push("push_weights", self._source, self._mapping, send, register=True)

    def unregister(self, send: Callable[[list[str]], Any]) -> None:
        """Make the server close all memory that it may have open. After this call the memory may be freed."""
        with self._lock:
            ids = self._registrations.open_ids()
            self._ranks.gather("unregister_weights", bytes)
            self._ranks.act("unregister_weights", lambda: send(ids) if ids else None)
            self.end()

    def released(self, tags: list[str] | None) -> None:
        """Record that the engine released memory.

        So it shares its device with the trainer, and has closed the trainer's memory.
        """
        with self._lock:
            self._registrations.second_sight = False
            if tags is None or "weights" in tags:
                self._registrations.clear()

    def end(self) -> list[str]:
        """Release all memory. Return the ids that the server may still have open. Does not wait for a push."""
        ids = self._registrations.open_ids()
        self._source = self._mapping = None
        self._registrations.clear()
        return ids

    def _push(
        self, what: str, source: Callable[[], Named], mapping: Mapping | None, send: Send, register: bool = False
    ) -> Any:
        """Describe the memory, exchange descriptions, merge, send, and record the outcome.

        Return the result of `send` on every rank.
        """
        described: list[Described] = []  # refers to the tensors until the outcome is known: nobody else may do so

        def describe() -> bytes:
            described.append(self._sender.describe_source(source, mapping))
            return msgspec.msgpack.encode(self._part(described[0]))

        parts = [msgspec.msgpack.decode(data, type=_Part) for data in self._ranks.gather(what, describe)]
        if any(part.handles is not None for part in parts):
            with _note_if_unanswered():
                return self._ranks.act(what, lambda: send(Push(handles=_combined(self._ranks.of_engine(parts)))))
        self._sent_id = described[0].description.id
        names_id, id = merged_id([part.names_id for part in parts]), merged_id([part.id for part in parts])
        if register:
            self._registrations.replace_registered(names_id)
        can_be_kept = all(part.can_be_kept for part in parts)
        push = self._registrations.next_push(
            names_id, id, described[0].storages, register=register, can_be_kept=can_be_kept
        )

        def merge_and_send() -> Any:
            self._descriptions |= {rank: part.description for rank, part in enumerate(parts) if part.description}
            return send(replace(push, describe=lambda: self._merged(parts)))

        try:
            with _note_if_unanswered():
                result = self._ranks.act(what, merge_and_send)
        except BaseException as error:  # also Ctrl-C
            self._sent_id = ""  # the next push sends the whole description again
            self._registrations.failed(push, error)
            raise
        self._registrations.succeeded(names_id, push)
        return result

    def _part(self, described: Described) -> _Part:
        description, handles, rank = described.description, described.handles, self._ranks.rank
        if handles is not None and self._ranks.size > 1:  # a handle may have one value for each rank
            handles = [(name, LocalSerializedTensor(values=[value.get(rank)])) for name, value in handles]
        known = self._sent_id == description.id
        return _Part(description.id, described.names_id, described.can_be_kept, None if known else description, handles)

    def _merged(self, parts: list[_Part]) -> WeightsDescription:
        """Return the description of all ranks' memory. Runs on the first rank."""
        known = [self._descriptions.get(rank) for rank in range(len(parts))]
        descriptions = [
            each for each, part in zip(known, parts, strict=True) if each is not None and each.id == part.id
        ]
        if len(descriptions) < len(parts):
            raise RuntimeError("A rank pushed by an id that the first rank does not know.")
        return merge(descriptions, self._ranks.of_engine(list(range(len(parts)))))


@dataclass
class _Set:
    last: str = ""
    """Id in the last push of the set."""
    kept: str = ""
    """Id under which the server probably keeps the memory of the set open."""


class ServerRegistrations:
    """The memory of a trainer that one engine's server may have open, and the contents of the next push about it.

    All ranks of an engine call the methods with the same ids and outcomes. So all ranks make the same three decisions:
    whether a push is sent by id, whether the server keeps the memory open afterwards, and which registrations the
    server closes. It is undefined behaviour to free CUDA memory that another process maps. So this object has
    references to the storages from before a request is sent until the server is known to have closed them, even after
    an error with an unknown outcome.

    *Second sight*: unless the caller registers a set of tensors, the server keeps it open only after two consecutive
    pushes with the same memory. So temporaries (a copied state dict, gathered parameters) are never kept.

    Not thread-safe: the pushes of an engine run one after the other.
    """

    def __init__(self) -> None:
        self.second_sight = True
        """True if the server keeps memory from the second push on. False for an engine on the trainer's device, because
        the trainer could not offload memory that is kept.
        """
        self._sets: collections.OrderedDict[str, _Set] = collections.OrderedDict()
        self._open: dict[str, list[torch.UntypedStorage]] = {}
        """Every id whose memory the server may have open or may still read, with its CUDA storages."""
        self._registered = ""
        """Names of the latest registration."""

    def next_push(
        self,
        names_id: str,
        id: str,
        storages: Callable[[], list[torch.UntypedStorage]],
        *,
        register: bool,
        can_be_kept: bool,
    ) -> Push:
        """Return the `Push` of a set of tensors, and keep references to the storages of its memory.

        `names_id` identifies the set, and `id` its memory. `storages` is called if `id` is new. `register` is True if
        the caller requested a registration. `can_be_kept` is True if this process can detect every change of the
        memory.
        """
        known = self._sets.setdefault(names_id, _Set())
        self._sets.move_to_end(names_id)
        while len(self._sets) > _SETS:
            self._sets.popitem(last=False)
        seen_before = self.second_sight and id == known.last
        keep = can_be_kept and (register or id in self._open or seen_before)
        kept = {other.kept for other in self._sets.values() if other is not known} | {id}
        push = Push(id, by_id=keep and id == known.kept, keep=keep, forget=[k for k in self._open if k not in kept])
        known.last = id
        if id not in self._open:
            self._open[id] = [storage for storage in storages() if storage.device.type == "cuda"]
        return push

    def replace_registered(self, names_id: str) -> None:
        """Drop the earlier registration if its names differ. The next request makes the server close it."""
        if self._registered != names_id:
            self._sets.pop(self._registered, None)
        self._registered = names_id

    def succeeded(self, names_id: str, push: Push) -> None:
        """Record that the server executed the request, and closed the registrations in `push.forget`."""
        for id in push.forget:
            self._open.pop(id, None)
        if not push.keep:
            self._open.pop(push.id, None)
        if names_id in self._sets:  # not if everything was cleared meanwhile, at shutdown
            self._sets[names_id].kept = push.id if push.keep else ""

    def failed(self, push: Push, error: BaseException) -> None:
        """Record that the request failed. After a refusal, the server does not read the memory.

        After a late answer, a broken connection or Ctrl-C, the server may still have the memory open.
        """
        is_over = isinstance(error, VerlServerError) and not isinstance(error, (ControlTimeoutError, ServerDiedError))
        if is_over and not push.keep:
            self._open.pop(push.id, None)

    def open_ids(self) -> list[str]:
        """Return the ids of all memory that the server may have open."""
        return list(self._open)

    def clear(self) -> None:
        """Record that the server has closed all memory, or has ended."""
        self._sets.clear()
        self._open.clear()


@contextlib.contextmanager
def _note_if_unanswered() -> Iterator[None]:
    """Add a note about the outcome of the push to an error that is not the server's answer."""
    try:
        yield
    except BaseException as error:
        answered = isinstance(error, VerlServerError) and not isinstance(error, (UnansweredError, ServerDiedError))
        if not answered:
            error.add_note(
                "This push ended without the server's answer. A running server drops the push, unless it was already "
                "copying: then it finishes the copy, with the values that the tensors hold meanwhile. The server holds "
                "either the old or the new weights. The next successful push settles which."
            )
        raise


def _combined(parts: list[_Part]) -> list[tuple[str, LocalSerializedTensor]]:
    """Return handles with one value for each trainer rank. Server rank i reads value i."""
    first = parts[0].handles or []
    if len(parts) == 1:
        return first
    for rank, part in enumerate(parts):
        _check_same([name for name, _ in first], None if part.handles is None else [n for n, _ in part.handles], rank)
    values = zip(*([value for _, value in part.handles or []] for part in parts), strict=True)
    return [
        (name, LocalSerializedTensor(values=[local.values[0] for local in locals_]))
        for (name, _), locals_ in zip(first, values, strict=True)
    ]


def _spread(value: LocalSerializedTensor, count: int) -> LocalSerializedTensor:
    return LocalSerializedTensor(values=[value.get(i % len(value.values)) for i in range(count)])


def _check_same(first: list[str], other: list[str] | None, rank: int) -> None:
    """Raise BadRequestError unless both ranks push the same names in the same order.

    Handles are matched by position.
    """
    if first == other:
        return
    if other is None or not first:
        raise BadRequestError("Some ranks push handles (LocalSerializedTensor), others only tensors.")
    only_first = [name for name in first if name not in set(other)][:4]
    only_other = [name for name in other if name not in set(first)][:4]
    detail = f"only rank 0 has {only_first}, only rank {rank} has {only_other}"
    if not (only_first or only_other):
        detail = "the order differs" if len(first) == len(other) else "some come more than once"
    raise BadRequestError(f"Rank 0 pushes {len(first)} handles, rank {rank} pushes {len(other)}: {detail}.")
