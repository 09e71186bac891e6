"""`UpdatePlan`: plans the copies from sources to this rank's parameters.

The `WeightReceiver` creates a plan outside the scheduler's loop. The loop only calls `commit`. Every slot of the
`WeightMap` is filled from all source parts that overlap it, so trainer and server may shard the tensors differently.
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
    """A checked update whose sources can all be read.

    It is copied once or, while the sources' memory stays, many times.

    One thread creates a plan, another thread commits it, and any thread may close it. The plan keeps its sources'
    memory open until `close`. The scheduler's loop calls `ready`, `commit`, `nonfinite`, `confirm` and `discard`; see
    `worker/weights/prepared.py`.
    """

    names: list[str]
    """Parameters that the update replaces, by their names in the `WeightMap`."""
    destinations: list[Tensor]
    sources: list[Tensor]
    """This rank copies `sources[i]` into the view `destinations[i]`. Both lists are empty after `close`."""
    loaded: dict[str, Source]
    """Whole tensors that the `WeightMap`'s loader installs, by the names of slots or stacks. Empty after `close`."""
    nbytes: int
    """Bytes that this rank writes."""
    missing: list[str]
    """Parameters of the model that the update does not replace."""
    changes_under_its_names: str
    """The reasons why this plan cannot be kept for later pushes. Empty if the plan can be kept."""
    is_registered: bool = False
    """True if the plan is kept after this push, so that later pushes may use it by its id."""

    def __init__(
        self, weight_map: WeightMap, sources: Sequence[tuple[str, Source]], memory: HeldMemory, *, fused: bool
    ) -> None:
        """Plan copies from `sources`, which are under the model's names or aliases, each name once.

        Raise WeightUpdateError for wrong shapes and dtypes, and for a tied head whose values differ from the embedding.
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
        """True if the update replaces every parameter."""
        return not self.missing

    @property
    def owners(self) -> list[int]:
        """Processes whose memory the plan reads."""
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

        The whole tensor is read, even if this rank copies only a slice. Raise WeightUpdateError if the update does not
        contain a name of `checksums`, or if a checksum differs.
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
        """Raise WeightUpdateError if a source can no longer be read. The loop calls this right before a commit.

        The call is cheap, with one exception: a plan that was kept and that reads memory which cannot be mapped copies
        the present values.
        """
        self._check_open()
        self._read_again()

    def commit(self) -> None:
        """Copy in place, and convert dtypes. An error may leave the weights torn.

        On CUDA this call only enqueues the copies: synchronize before the owner writes to the sources again.
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
        """Return the trainer's names of the tensors in which the last commit wrote NaN or infinity.

        The device must have completed the commit. A conversion writes infinity for a number that the model's dtype
        cannot hold.
        """
        copied = [] if self._copy is None else self._copy.nonfinite()
        loaded = [name for name, found in self._nonfinite_loaded if found]
        return list(dict.fromkeys([*(self._names_of_copies[i] for i in copied), *loaded]))

    def confirm(self, checksums: Mapping[str, str]) -> None:
        """Compare with the trainer's checksums again, after the copy.

        The owner may have written since the first comparison.
        """
        if checksums:
            self._compare(checksums)

    def keep(self) -> None:
        """Keep the plan for later pushes. Each later push copies again the memory that cannot be mapped."""
        self.is_registered = self._was_kept = True

    def discard(self) -> None:
        """End one push: close the plan unless it is kept for later pushes."""
        if not self.is_registered:
            self.close()

    def close(self) -> None:
        """Close the sources' memory, after a commit in progress. Memory that other plans read, too, stays open."""
        with self._lock:
            if self._copied is not None:
                self._copied.synchronize()
            self._copy, self.destinations, self.sources, self._given, self.loaded = None, [], [], {}, {}
            self._memory.clear()

    def views(self) -> list[Tensor]:
        """Open all memory that this rank reads, and return the tensors."""
        return [*self.sources, *(s.read(part) for s in self.loaded.values() for part in s.parts)]

    def _check_open(self) -> None:
        if self._copy is None:
            raise WeightUpdateError("The memory of this update is closed already: it was unregistered meanwhile.")

    def _read_again(self) -> None:
        if self._was_kept:
            with self._lock:
                self._memory.read_again()

    def _whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors for the loader one after the other.

        Record those that have NaN or infinity in the model's dtype.
        """
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

    If an update has only one of two tied tensors, this tensor is the source of both. If the update has both, their
    values must be equal; otherwise raise WeightUpdateError.
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
    """Return the slots that the sources fill.

    Raise WeightUpdateError for a slot that comes both alone and in a stack.
    """
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
    """Return (destinations, sources, links, source names) of the copies: one for each part that overlaps a piece."""
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
