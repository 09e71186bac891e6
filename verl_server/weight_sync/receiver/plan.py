"""`UpdatePlan`: turns sources into copies to this rank's parameters.

Made by the `WeightReceiver` off the loop; `commit` is all that the loop does. Every slot of the `WeightMap` is
filled from the parts that share something with it, so trainer and server may cut the tensors differently.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from verl_server.errors import WeightUpdateError
from verl_server.models.loader import WeightMap
from verl_server.weight_sync.checksum import tensor_checksums
from verl_server.weight_sync.copying.fused_copy import CopyPlan
from verl_server.weight_sync.receiver.boxes import common_box, index_in, indexed_box
from verl_server.weight_sync.receiver.names import lacking, listed
from verl_server.weight_sync.receiver.open_memory import FLOATING, HeldMemory
from verl_server.weight_sync.receiver.sources import Source


class UpdatePlan:
    """A checked update whose sources are all within reach: copied once or, while their memory stays, many times.

    Made on one thread, committed on another, and closed by any: it holds its sources' memory open until `close`.
    `ready`, `commit`, `nonfinite`, `confirm` and `discard` are what the loop calls, see `worker/weights/prepared.py`.
    """

    names: list[str]
    """Parameters that it replaces, by their names in the `WeightMap`."""
    destinations: list[Tensor]
    sources: list[Tensor]
    """Views that this rank writes and reads, in pairs; empty once closed."""
    loaded: dict[str, Source]
    """Whole tensors that the `WeightMap`'s loader installs, by the names of slots or stacks; empty once closed."""
    nbytes: int
    """Bytes that this rank writes."""
    missing: list[str]
    """Parameters of the model that it does not replace."""
    changes_under_its_names: str
    """The reasons why this plan cannot be kept for later pushes; empty if it can."""
    is_registered: bool = False
    """Later pushes may name it by its id: it outlives this one."""

    def __init__(
        self, weight_map: WeightMap, sources: Sequence[tuple[str, Source]], memory: HeldMemory, *, fused: bool
    ) -> None:
        """Plan copies from `sources`, each with the model's name or alias of it, every name once.

        Raise WeightUpdateError for shapes and dtypes that do not fit and a tied head that contradicts.
        """
        self._map, self._memory = weight_map, memory
        self._lock = threading.Lock()  # what `commit` reads, `close` must not take away
        self._copied: torch.cuda.Event | None = None
        self._given = {source.name: source for _, source in sources}
        self._was_kept = False
        target = weight_map.slots | weight_map.stacks
        for name, source in sources:  # before any of them is read: shapes bound the work
            _check_fits(source, target[weight_map.aliases.get(name, name)].shape)
        found, self.changes_under_its_names = _without_aliases(weight_map, sources)
        if not found:
            raise WeightUpdateError("The update has no tensors.")
        self.names = _filled(weight_map, found)
        self.missing = weight_map.missing(self.names)
        self._converted = [
            f"'{source.name}' is {source.dtype}, the model's is {target[name].dtype}"
            for name, source in found.items()
            if source.dtype != target[name].dtype
        ]
        self.destinations, self.sources, links, self._names_of_copies = _copies(weight_map, found)
        self.loaded = {name: source for name, source in found.items() if weight_map.loaded(weight_map.members(name))}
        self._nonfinite_loaded: list[tuple[str, Tensor]] = []
        self.nbytes = sum(view.nbytes for view in self.destinations) + sum(s.nbytes for s in self.loaded.values())
        # Tensors without memory stand for what is to come: only the checks are wanted.
        is_real = not _is_meta(*found.values())
        self._copy = CopyPlan(self.destinations, self.sources, fused=fused, links=links) if is_real else None

    @property
    def covers_all(self) -> bool:
        """True if it replaces every parameter."""
        return not self.missing

    @property
    def owners(self) -> list[int]:
        """Processes whose memory it reads."""
        return self._memory.owners

    @property
    def scattered(self) -> str:
        """Name of a tensor that takes long to read, row by row; empty if there is none."""
        return self._memory.scattered

    def check(self, *, strict_dtype: bool, partial: bool) -> None:
        """Raise WeightUpdateError for missing parameters unless `partial`, for other dtypes if `strict_dtype`."""
        if not partial and self.missing:
            raise WeightUpdateError(lacking(self.missing, len(self._map.parameters)))
        if strict_dtype and self._converted:
            raise WeightUpdateError(f"{self._converted[0]}, and strict_dtype=True.")

    def verify(self, checksums: Mapping[str, str]) -> None:
        """Read the sources again, and compare them with `checksums`: trainer's name -> `tensor_checksum` of the tensor.

        A tensor is read as a whole, even if this rank copies a slice of it. Raise WeightUpdateError if the update does
        not contain a name of `checksums`, or if a checksum differs.
        """
        unknown = [name for name in checksums if name not in self._given]
        if unknown:
            raise WeightUpdateError(f"There are checksums for {listed(unknown)}, which the update does not contain.")
        if checksums:
            self._read_again()
        self._compare(checksums)

    def _compare(self, checksums: Mapping[str, str]) -> None:
        found = tensor_checksums(self._given[name].whole() for name in checksums)
        wrong = [name for name, own in zip(checksums, found, strict=True) if own != checksums[name].lower()]
        if wrong:
            raise WeightUpdateError(
                f"The checksum of {listed(wrong)} differs from the trainer's: its memory was written after the "
                "trainer computed the checksum, or it was read wrongly."
            )

    def ready(self) -> None:
        """Raise WeightUpdateError if some source cannot be read any more. Called right before a commit.

        Cheap, but for a plan that was kept and whose memory cannot be mapped: its present values are copied.
        """
        self._check_open()
        self._read_again()

    def commit(self) -> None:
        """Copy in place, converting dtypes. An error in here may leave the weights torn.

        On CUDA this only enqueues: synchronize before the owner writes again.
        """
        with self._lock:
            self._check_open()
            assert self._copy is not None
            self._copy.run()
            if self.loaded:
                assert self._map.loader is not None
                self._nonfinite_loaded = []
                self._map.loader.load(self._whole_tensors())
            if any(destination.is_cuda for destination in self.destinations[:1]):
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def nonfinite(self) -> list[str]:
        """Tensors, by the trainer's names, of which the last commit wrote NaN or infinity; for when the device is done.

        Infinity may come of a conversion, from a number that the model's dtype cannot hold.
        """
        copied = [] if self._copy is None else self._copy.nonfinite()
        loaded = [name for name, found in self._nonfinite_loaded if found]
        return list(dict.fromkeys([*(self._names_of_copies[i] for i in copied), *loaded]))

    def confirm(self, checksums: Mapping[str, str]) -> None:
        """Compare with the trainer's checksums again after the copy: the owner may have written since they matched."""
        if checksums:
            self._compare(checksums)

    def keep(self) -> None:
        """Later pushes may name this plan: each of them copies again what cannot be mapped."""
        self.is_registered = self._was_kept = True

    def discard(self) -> None:
        """One push is over: close, unless later pushes may use the plan."""
        if not self.is_registered:
            self.close()

    def close(self) -> None:
        """Close the memory, after a commit that runs; what other plans read besides stays open for them."""
        with self._lock:
            if self._copied is not None:
                self._copied.synchronize()
            self._copy, self.destinations, self.sources, self._given, self.loaded = None, [], [], {}, {}
            self._memory.clear()

    def views(self) -> list[Tensor]:
        """Return all memory that this rank reads, opened."""
        return [*self.sources, *(s.read(part) for s in self.loaded.values() for part in s.parts)]

    def _check_open(self) -> None:
        if self._copy is None:
            raise WeightUpdateError("The memory of this update is closed already: it was unregistered meanwhile.")

    def _read_again(self) -> None:
        if self._was_kept:
            with self._lock:
                self._memory.read_again()

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the loader, one after the other, and note those that are not finite in its dtype."""
        for name, source in self.loaded.items():
            whole = source.whole()
            dtype = self._map.slots[self._map.members(name)[0]].dtype
            self._nonfinite_loaded.append((source.name, ~whole.to(dtype).isfinite().all()))
            if name not in self._map.stacks:
                yield name, whole
                continue
            members = self._map.stacks[name].members
            for member in self._map.loaded(members):
                yield member, whole[members[member]][0]


def _without_aliases(weight_map: WeightMap, sources: Sequence[tuple[str, Source]]) -> tuple[dict[str, Source], str]:
    """Return (source of each slot, reason). The reason says why later pushes cannot reuse the plan, "" if they can.

    If an update has only one of two tied tensors, it is the source of both. If it has both, their values must be equal:
    otherwise raise WeightUpdateError.
    """
    found = {name: source for name, source in sources if name not in weight_map.aliases}
    changes = ""
    for name, source in sources:
        if name not in weight_map.aliases:
            continue
        twin = found.setdefault(weight_map.aliases[name], source)
        if twin is source or twin.is_same_memory(source):
            continue
        if not _is_meta(twin, source) and not twin.has_same_values(source):
            raise WeightUpdateError(
                f"'{source.name}' differs from '{twin.name}', but this model ties them (tie_word_embeddings=true). "
                "Leave it out, or tie them in the trainer too."
            )
        changes = (
            f"'{source.name}' has memory of its own beside '{twin.name}', which this model ties to it, so every push "
            "must compare them. Leave it out."
        )
    return found, changes


def _filled(weight_map: WeightMap, found: Mapping[str, Source]) -> list[str]:
    """Return the slots that the sources fill. Raise WeightUpdateError if one comes alone and in a stack."""
    filled: dict[str, str] = {}
    for name, source in found.items():
        for member in weight_map.members(name):
            if member in filled:
                raise WeightUpdateError(f"The update has '{member}' twice, in '{filled[member]}' and '{source.name}'.")
            filled[member] = source.name
    return list(filled)


def _is_meta(*sources: Source) -> bool:
    return any(isinstance(p.data, Tensor) and p.data.device.type == "meta" for s in sources for p in s.parts)


def _check_fits(source: Source, shape: tuple[int, ...]) -> None:
    if source.shape != shape:
        raise WeightUpdateError(f"'{source.name}' has shape {list(source.shape)}, but the model's is {list(shape)}.")
    if source.dtype not in FLOATING.values():
        raise WeightUpdateError(f"'{source.name}' has dtype {source.dtype}, but weights are floating point.")


def _copies(
    weight_map: WeightMap, found: Mapping[str, Source]
) -> tuple[list[Tensor], list[Tensor], list[int], list[str]]:
    """(destinations, sources, links, names of the sources) of every piece's share of every part."""
    destinations, sources, links, names = [], [], [], []
    numbers: dict[str, int] = {}
    for name, source in found.items():
        views: dict[int, Tensor] = {}
        for destination, index in weight_map.pieces(name):
            wanted = indexed_box(index, source.shape)
            for i, part in enumerate(source.parts):
                common = common_box(wanted, part.box)
                if common is None:
                    continue
                if i not in views:
                    views[i] = source.read(part)
                destinations.append(destination[index_in(common, wanted)])
                sources.append(views[i][index_in(common, part.box)])
                links.append(numbers.setdefault(part.device_uuid, len(numbers)))
                names.append(source.name)
    return destinations, sources, links, names
