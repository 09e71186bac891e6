"""The memory of a trainer that a server may have open, and the terms about this memory in the next push.

Each rank of an engine holds one `ServerRegistrations`. All ranks feed it the same ids and outcomes, so all ranks
decide alike: whether a push travels by id, whether the server keeps the memory open afterwards, and which
registrations it closes. Freeing CUDA memory that another process maps is undefined behaviour. So this object refers to
storages from before a request is sent until the server is known to have closed them, also after an error that left the
outcome unknown.

*Second sight*: a set of tensors is kept open only when two pushes in a row brought it in the same memory.
Temporaries (a copied state dict, gathered parameters) are thus never held.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_server.errors import ControlTimeoutError, ServerDiedError, VerlServerError

_SETS = 16
"""Sets of names that are remembered: one version may come in several pushes. The least recently used goes first."""


@dataclass(frozen=True)
class PushTerms:
    """The fields of a push request about registrations."""

    id: str
    by_id: bool
    """The server has this memory registered: the id is enough."""
    keep: bool
    """The server keeps the memory open after the push."""
    forget: list[str]
    """Registrations that the server closes first."""


@dataclass
class _Set:
    last: str = ""
    """Id of its last push."""
    kept: str = ""
    """Id under which the server keeps it open, as far as we know."""


class ServerRegistrations:
    """The sets of tensors that go to one engine. Not thread-safe: its pushes come one after the other."""

    def __init__(self) -> None:
        self.second_sight = True
        """Off for an engine that shares its memory with the trainer: what is held could not be offloaded."""
        self._sets: collections.OrderedDict[str, _Set] = collections.OrderedDict()
        self._open: dict[str, list[torch.UntypedStorage]] = {}
        """Every id that the server may have open or may still read, with the CUDA storages behind it."""

    def next_push(
        self,
        names_id: str,
        id: str,
        storages: Callable[[], list[torch.UntypedStorage]],
        *,
        register: bool,
        can_be_kept: bool,
    ) -> PushTerms:
        """Terms of a push of the tensors `names_id` in the memory `id`; from now on its storages are held.

        `register`: the caller asked for a registration. `can_be_kept`: every change of this memory would be noticed.
        """
        known = self._sets.setdefault(names_id, _Set())
        self._sets.move_to_end(names_id)
        while len(self._sets) > _SETS:
            self._sets.popitem(last=False)
        seen_before = self.second_sight and id == known.last
        keep = can_be_kept and (register or id in self._open or seen_before)
        kept = {other.kept for other in self._sets.values() if other is not known} | {id}
        terms = PushTerms(
            id, by_id=keep and id == known.kept, keep=keep, forget=[k for k in self._open if k not in kept]
        )
        known.last = id
        if id not in self._open:
            self._open[id] = [storage for storage in storages() if storage.device.type == "cuda"]
        return terms

    def replace(self, names_id: str) -> None:
        """Drop a set of names that will not be pushed again. The next request makes the server forget the set."""
        self._sets.pop(names_id, None)

    def succeeded(self, names_id: str, terms: PushTerms) -> None:
        """The request was carried out: the server has closed what it was told to forget."""
        for id in terms.forget:
            self._open.pop(id, None)
        if not terms.keep:
            self._open.pop(terms.id, None)
        if names_id in self._sets:  # not if everything was cleared meanwhile, at shutdown
            self._sets[names_id].kept = terms.id if terms.keep else ""

    def failed(self, terms: PushTerms, error: BaseException) -> None:
        """The request was refused, which is its end: or late, or without an answer, and the server may still have its
        memory open, as it may when the connection broke or Ctrl-C came."""
        is_over = isinstance(error, VerlServerError) and not isinstance(error, (ControlTimeoutError, ServerDiedError))
        if is_over and not terms.keep:
            self._open.pop(terms.id, None)

    def open_ids(self) -> list[str]:
        """Everything that the server may have open."""
        return list(self._open)

    def clear(self) -> None:
        """The server has closed everything, or ended."""
        self._sets.clear()
        self._open.clear()
