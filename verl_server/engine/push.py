"""The flow of a push, from the tensors of all ranks to the outcome on all ranks.

`EngineBase` holds a `WeightPusher` for this process alone, `VerlEngine` one for its ranks. A push is: every rank
describes its memory (`sender`), with all of its writes done; the ranks meet, handing descriptions on only when
they changed; the first rank sends one request; the outcome reaches every rank, and until then nobody returns, for
the server may be reading the memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec
from torch import nn

from verl_server.errors import BadRequestError, ServerDiedError, UnansweredError, VerlServerError
from verl_server.weight_sync.handles import LocalSerializedTensor, WeightsDescription
from verl_server.weight_sync.trainer.memory_layout import NamedTensors
from verl_server.weight_sync.trainer.merge import merge, merged_id
from verl_server.weight_sync.trainer.sender import Described, Mapping, WeightSender, describe_tensors
from verl_server.weight_sync.trainer.server_registrations import PushTerms, ServerRegistrations
from verl_server.weight_sync.trainer.trainer_modules import ModuleParameters

T = TypeVar("T")
Named = Iterable[tuple[str, Any]]
Origin = nn.Module | Named | Callable[[], Named]
"""Source of the pushed tensors: a module's parameters, these very tensors, or a function called at each push."""

Send = Callable[["Push"], Any]
"""Sends one request; runs on the first rank only."""


class Ranks(Protocol):
    """The ranks that push together: those of one engine (`RankGroup`), or of several (`JointRanks`)."""

    rank: int
    size: int
    """Number of this engine's ranks."""

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]: ...

    def own(self, parts: list[T]) -> list[T]: ...

    def act(self, what: str, act: Callable[[], Any]) -> Any: ...


class OneRank:
    """A trainer of one process."""

    rank, size = 0, 1

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        return [prepare()]

    def own(self, parts: list[T]) -> list[T]:
        return parts

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        return act()


@dataclass(frozen=True)
class Push:
    """The request of one push, which the first rank sends."""

    terms: PushTerms | None = None
    describe: Callable[[], WeightsDescription] | None = None
    """The description that `terms` speaks of, for a server that does not have it."""
    named_tensors: list[tuple[str, LocalSerializedTensor]] | None = None
    """Instead of the two: handles that the caller made."""

    def for_readers(self, count: int) -> Push:
        """The same push for `count` server ranks, of which each reads one value of every handle."""
        handles = self.named_tensors
        if handles is not None:
            handles = [(name, _spread(value, count)) for name, value in handles]
        return replace(self, named_tensors=handles)


class _Part(msgspec.Struct, array_like=True):
    """One rank's share of a push, which the ranks exchange."""

    id: str = ""
    names_id: str = ""
    can_be_kept: bool = True
    description: WeightsDescription | None = None
    """None if the first rank has this description already."""
    handles: list[tuple[str, LocalSerializedTensor]] | None = None


class WeightPusher:
    """Pushes the weights of some ranks to one engine. Thread-safe: one push at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sender = WeightSender()
        self._registrations = ServerRegistrations()
        self._source: Callable[[], Named] | None = None
        self._mapping: Mapping | None = None
        self._registered = ""
        """names_id of what was registered last."""
        self._told = ""
        """Id of the description of this rank that the first rank has."""
        self._peers: dict[int, WeightsDescription] = {}
        """Last description of each rank that pushes; used on the first rank only."""
        self._lock = threading.Lock()

    @property
    def has_source(self) -> bool:
        """True if weights are registered, so that `push` has something to send."""
        return self._source is not None

    def update(self, named_tensors: Named, mapping: Mapping | None, send: Send) -> Any:
        """Push these tensors, by id if the server knows them; returns what `send` returns."""
        with self._lock:
            return self._push("update_weights_from_tensor", lambda: named_tensors, mapping, send)

    def register(self, source: Origin, mapping: Mapping | None, send: Send) -> Any:
        """Have the server open them now; `push` sends them from then on."""
        with self._lock:
            listed = _listing(source)
            result = self._push("register_weights", listed, mapping, send, register=True)
            self._source, self._mapping = listed, mapping
            return result

    def push(self, send: Send) -> Any:
        """Push what was registered, as it is now."""
        with self._lock:
            if self._source is None:
                raise BadRequestError("No weights are registered: call register_weights(model) first.")
            return self._push("push_weights", self._source, self._mapping, send, register=True)

    def unregister(self, send: Callable[[list[str]], Any]) -> None:
        """Have the server close everything that it may have open; afterwards the memory may be freed."""
        with self._lock:
            ids = self._registrations.open_ids()
            self._ranks.gather("unregister_weights", bytes)
            self._ranks.act("unregister_weights", lambda: send(ids) if ids else None)
            self._source = self._mapping = None
            self._registrations.clear()

    def released(self, tags: list[str] | None) -> None:
        """The engine released memory: it shares its device with the trainer, and closed what it had of ours."""
        with self._lock:
            self._registrations.second_sight = False
            if tags is None or "weights" in tags:
                self._registrations.clear()

    def end(self) -> list[str]:
        """Hold nothing any more; returns what the server may still have open. Waits for no push."""
        ids = self._registrations.open_ids()
        self._source = self._mapping = None
        self._registrations.clear()
        return ids

    # -- inside ------------------------------------------------------------------------------------------------

    def _push(
        self, what: str, source: Callable[[], Named], mapping: Mapping | None, send: Send, register: bool = False
    ) -> Any:
        alive: list[Any] = []  # until the outcome is known: temporaries have no other owner
        mine: list[Described] = []

        def prepare() -> bytes:
            tensors = _expanded(source(), mapping)
            alive.append(tensors)
            return msgspec.msgpack.encode(self._part(tensors, mine))

        parts = [msgspec.msgpack.decode(data, type=_Part) for data in self._ranks.gather(what, prepare)]
        if any(part.handles is not None for part in parts):
            own = self._ranks.own(parts)
            with _saying_what_is_certain():
                return self._ranks.act(what, lambda: send(Push(named_tensors=_combined(own))))
        names_id, id = merged_id([part.names_id for part in parts]), merged_id([part.id for part in parts])
        self._told = mine[0].description.id
        if register:
            if self._registered != names_id:
                self._registrations.replace(self._registered)
            self._registered = names_id
        can_be_kept = all(part.can_be_kept for part in parts)
        terms = self._registrations.next_push(
            names_id, id, mine[0].storages, register=register, can_be_kept=can_be_kept
        )
        try:
            with _saying_what_is_certain():
                result = self._ranks.act(what, lambda: send(Push(terms, self._description(parts))))
        except BaseException as error:  # also Ctrl-C
            self._told = ""  # whatever went wrong, the next push starts from nothing
            self._registrations.failed(terms, error)
            raise
        self._registrations.succeeded(names_id, terms)
        return result

    def _part(self, tensors: list[tuple[str, Any]], mine: list[Described]) -> _Part:
        if not isinstance(tensors, NamedTensors) and any(isinstance(t, LocalSerializedTensor) for _, t in tensors):
            return _Part(handles=_handles(tensors, self._ranks))
        described = self._sender.describe(tensors)
        mine.append(described)
        id, names_id = described.description.id, described.names_id
        known = self._told == id
        return _Part(id, names_id, described.can_be_kept, None if known else described.description)

    def _description(self, parts: list[_Part]) -> Callable[[], WeightsDescription]:
        """Returns a function that merges the descriptions of all ranks. Runs on the first rank."""
        self._peers |= {rank: part.description for rank, part in enumerate(parts) if part.description is not None}
        known = [self._peers.get(rank) for rank in range(len(parts))]
        own = self._ranks.own(list(range(len(parts))))
        return lambda: merge(
            [_expected(description, part) for description, part in zip(known, parts, strict=True)], own
        )


@contextlib.contextmanager
def _saying_what_is_certain() -> Iterator[None]:
    """Add to an error that is no answer of the server's what became of the push."""
    try:
        yield
    except BaseException as error:
        answered = isinstance(error, VerlServerError) and not isinstance(error, (UnansweredError, ServerDiedError))
        if not answered:
            error.add_note(
                "This push ended without the server's answer. A server that lives drops it, unless it was copying at "
                "that moment: then it finishes, and serves what the tensors held meanwhile. Which of the two, is "
                "certain again after the next push that succeeds."
            )
        raise


def _expected(description: WeightsDescription | None, part: _Part) -> WeightsDescription:
    if description is None or description.id != part.id:
        raise RuntimeError("A rank pushed by an id that the first rank does not know.")
    return description


def _listing(source: Origin) -> Callable[[], Named]:
    if isinstance(source, nn.Module):
        return ModuleParameters(source).named
    if callable(source):
        return source
    pairs = list(source)
    if all(_is_pair(pair) and not isinstance(pair[1], LocalSerializedTensor) for pair in pairs):
        pairs = NamedTensors(pairs)
    return lambda: pairs


def _expanded(named: Named, mapping: Mapping | None) -> list[tuple[str, Any]]:
    """(name, tensor) pairs as the server shall see them."""
    pairs: list[tuple[str, Any]] = named if isinstance(named, NamedTensors) else _checked(named)
    return pairs if mapping is None else [entry for name, tensor in pairs for entry in mapping(name, tensor)]


def _checked(named: Named) -> list[tuple[str, Any]]:
    pairs = list(named)
    for pair in pairs:
        if not _is_pair(pair):
            raise BadRequestError(
                f"named_tensors must yield (name, tensor) pairs, not {type(pair).__name__}: pass "
                "model.named_parameters() or model.state_dict().items()."
            )
    return pairs


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str)


def _handles(tensors: list[tuple[str, Any]], ranks: Ranks) -> list[tuple[str, LocalSerializedTensor]]:
    """Handles of all tensors in order. Where a handle has one value for each rank, this rank's value."""
    described = iter(describe_tensors([(n, t) for n, t in tensors if not isinstance(t, LocalSerializedTensor)]))
    handles = [(n, t) if isinstance(t, LocalSerializedTensor) else next(described) for n, t in tensors]
    if ranks.size == 1:
        return handles
    return [(name, LocalSerializedTensor(values=[value.get(ranks.rank)])) for name, value in handles]


def _combined(parts: list[_Part]) -> list[tuple[str, LocalSerializedTensor]]:
    """Handles with one value for each trainer rank; server rank i reads value i."""
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
    """Raise BadRequestError unless both ranks push the same names in one order: position matches handles."""
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
