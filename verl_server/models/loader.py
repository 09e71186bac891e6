"""The `WeightMap` from checkpoint tensors to parameters, and the reading of checkpoints.

For every tensor of a Hugging Face checkpoint, the map holds the places of its parts in this rank's fused and sharded
parameters. Loading a checkpoint, random initialization and every later weight update copy through the map, into storage
that never moves.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_server.errors import BadRequestError
from verl_server.weight_sync.copying.finite import holds_nonfinite

Index = tuple[slice, ...]
_FLOATS = ("F", "BF")
"""The names that safetensors gives to floating-point dtypes begin with one of these."""


@dataclass
class WeightSlot:
    """One checkpoint tensor. `view.copy_(source[index])` for all pieces installs the tensor on this rank."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor, as Hugging Face stores it."""
    dtype: torch.dtype
    """Dtype of this rank's parameter. A source of another dtype is converted by the copy."""
    pieces: list[tuple[Tensor, Index]]
    """(view into this rank's parameter, index into the full source); empty if this rank holds only padding."""

    @classmethod
    def whole(cls, name: str, parameter: Tensor) -> WeightSlot:
        """Return the slot of a tensor that every rank holds in full."""
        return cls(name, tuple(parameter.shape), parameter.dtype, [(parameter.data, (slice(None),) * parameter.dim())])

    def copy_from(self, source: Tensor) -> None:
        """Install the full tensor `source`. The caller has checked its shape."""
        for destination, index in self.pieces:
            destination.copy_(source[index])


@dataclass
class WeightStack:
    """Several checkpoint tensors in one, as some trainers hold them. `source[index][0]` is a member's tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full stack. A member has one dimension less."""
    dtype: torch.dtype
    members: dict[str, Index]
    """Slot -> its box in the stack, of length 1 in the first dimension. The boxes tile the stack."""


class WholeTensorLoader(Protocol):
    """Installs whole checkpoint tensors in a model whose storage another engine arranges."""

    names: frozenset[str]
    """Tensors that the loader installs. The other slots have pieces, or nothing on this rank."""

    @property
    def refusal(self) -> str:
        """The reason why no update can be installed now, by pieces or by the loader.

        Empty if updates can be installed.
        """

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Install the tensors. They may be freed afterwards. An error leaves the weights torn."""

    def lacking(self, names: Iterable[str]) -> list[str]:
        """Return the parameters that must be installed together with `names` and are not among them."""


@dataclass
class WeightMap:
    slots: dict[str, WeightSlot] = field(default_factory=dict)
    """Hugging Face name -> slot, once for every parameter, in model order."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names that a checkpoint may use: a tied `lm_head.weight` -> the name of the embedding."""
    stacks: dict[str, WeightStack] = field(default_factory=dict)
    """Names under which several slots may come as one tensor."""
    loader: WholeTensorLoader | None = None
    """Installs some of the tensors in place of pieces, for an engine that arranges its weights itself."""
    unserved: frozenset[str] = frozenset()
    """Slots that the model reads on no rank, such as layers of the checkpoint that the engine leaves out. An update may
    contain these slots, and is complete without these slots."""

    def add(self, slots: Iterable[WeightSlot]) -> None:
        for slot in slots:
            assert slot.name not in self.slots, slot.name
            self.slots[slot.name] = slot

    @cached_property
    def parameters(self) -> Collection[str]:
        """The names of the tensors of a complete update, in model order: one name for each slot that is served."""
        return [name for name in self.slots if name not in self.unserved] if self.unserved else self.slots

    def canonical(self, name: str) -> str:
        return self.aliases.get(name, name)

    def read(self, name: str) -> Tensor:
        """Return a copy of this rank's part of a tensor (the whole tensor if it is replicated), float32 on the CPU."""
        slot = self.slots[self.canonical(name)]
        if not slot.pieces:
            return torch.empty((0, *slot.shape[1:]))
        parts = [destination.float().cpu() for destination, _ in slot.pieces]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def loaded(self, names: Iterable[str]) -> list[str]:
        """Return the canonical names among `names` that the loader installs, so that no piece can be read."""
        return [] if self.loader is None else [n for n in names if n in self.loader.names]

    def unknown(self, names: Iterable[str]) -> list[str]:
        """Return the names that belong to no parameter, without buffers that old checkpoints contain."""
        return [
            n
            for n in names
            if self.canonical(n) not in self.slots and n not in self.stacks and not n.endswith("rotary_emb.inv_freq")
        ]

    def members(self, name: str) -> list[str]:
        """Return the slots that a tensor of this canonical name fills."""
        return list(self.stacks[name].members) if name in self.stacks else [name]

    def pieces(self, name: str) -> list[tuple[Tensor, Index]]:
        """Return (view into this rank's parameter, index into the full source) of each piece of a slot or stack."""
        if name not in self.stacks:
            return self.slots[name].pieces
        return [
            (destination.unsqueeze(0), _shifted(index, within))
            for member, within in self.stacks[name].members.items()
            for destination, index in self.slots[member].pieces
        ]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return the parameters of a whole update that `names` does not contain."""
        given = {self.canonical(n) for n in names}
        return [n for n in self.parameters if n not in given]


def _shifted(index: Index, within: Index) -> Index:
    """Convert an index into a member into an index into its stack. `within` is the member's box in the stack."""
    expert, *others = within
    parts = [part.indices(whole.stop - whole.start) for part, whole in zip(index, others, strict=True)]
    moved = [slice(whole.start + part[0], whole.start + part[1]) for part, whole in zip(parts, others, strict=True)]
    return (expert, *moved)


def iter_checkpoint(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, memory-mapped tensor) of a safetensors checkpoint, file by file. Raise BadRequestError."""
    for file in checkpoint_files(Path(folder)):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BadRequestError(f"Cannot read {file}: {error}. Is the file complete?") from error


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint, read from the file headers only. Raise BadRequestError."""
    return {name: shape for _, name, shape, _ in _headers(folder)}


def _headers(folder: str | Path) -> Iterator[tuple[Path, str, tuple[int, ...], str]]:
    """Yield (file, name, shape, dtype as safetensors names it) of every tensor of a checkpoint."""
    for file in checkpoint_files(Path(folder)):
        try:
            with safe_open(file, framework="pt", device="cpu") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    part = shard.get_slice(name)
                    yield file, name, tuple(part.get_shape()), str(part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise BadRequestError(f"Cannot read {file}: {error}. Is the file complete?") from error


def load_checkpoint(weight_map: WeightMap, folder: str | Path) -> None:
    """Install a whole checkpoint. Names, shapes and dtypes are checked before the first byte is written.

    A tied head that is stored must be equal to the embedding. The rules are those of an update.

    Raise BadRequestError also if a weight is NaN or infinite in the dtype of its parameter.
    """
    headers = list(_headers(folder))
    check_covers(weight_map, {name: shape for _, name, shape, _ in headers}, str(folder))
    for file, name, _, dtype in headers:
        if weight_map.canonical(name) in weight_map.slots and not dtype.startswith(_FLOATS):
            raise BadRequestError(
                f"{file}: {name} is stored as {dtype}, but the model's weights are floating-point numbers. "
                "Store it as float32, bfloat16 or float16; quantized checkpoints are not supported."
            )
    twins = check_tied(weight_map.aliases, folder)
    for name, tensor in iter_checkpoint(folder):
        slot = weight_map.slots.get(weight_map.canonical(name))
        if slot is not None and name not in twins:
            slot.copy_from(tensor)
    _refuse_nonfinite(weight_map, {weight_map.canonical(name): file for file, name, _, _ in headers})


def check_tied(aliases: Mapping[str, str], folder: str | Path) -> set[str]:
    """Return the names in `aliases` (name -> tensor that it is tied to) that a checkpoint stores besides that tensor.

    Raise BadRequestError if two tied tensors differ in shape or values.
    """
    files = {name: file for file, name, _, _ in _headers(folder)}
    twins = {alias: name for alias, name in aliases.items() if alias in files and name in files}
    for alias, name in twins.items():
        with safe_open(files[alias], framework="pt") as one, safe_open(files[name], framework="pt") as two:
            first, second = one.get_tensor(alias), two.get_tensor(name)
        if first.shape != second.shape or not torch.equal(first.to(second.dtype), second):
            raise BadRequestError(
                f"{files[alias]}: {alias} differs from {name}, but config.json ties them (tie_word_embeddings=true). "
                f"Set it to false there, or remove {alias} from the checkpoint."
            )
    return set(twins)


def _refuse_nonfinite(weight_map: WeightMap, files: Mapping[str, Path]) -> None:
    """Raise BadRequestError if this rank's part of a tensor has NaN or infinity. Reads the parameters once."""
    wrong = [
        name
        for name, slot in weight_map.slots.items()
        if any(holds_nonfinite(destination) for destination, _ in slot.pieces)
    ]
    if wrong:
        raise BadRequestError(
            f"{files[wrong[0]]}: {wrong[0]}{f' and {len(wrong) - 1} other tensors' if wrong[1:] else ''} of the "
            "checkpoint have NaN or infinity in the dtype of the server. Use another checkpoint, or set dtype to one "
            "that holds its numbers."
        )


def check_covers(weight_map: WeightMap, shapes: dict[str, tuple[int, ...]], where: str) -> None:
    """Raise BadRequestError that lists missing tensors, unknown tensors and tensors of another shape in `shapes`."""
    missing = weight_map.missing(shapes)
    unknown = weight_map.unknown(shapes)
    wrong = [
        f"{n}: {list(shape)} instead of {list(weight_map.slots[weight_map.canonical(n)].shape)}"
        for n, shape in shapes.items()
        if weight_map.canonical(n) in weight_map.slots and weight_map.slots[weight_map.canonical(n)].shape != shape
    ]
    problems = [
        f"{what}: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}"
        for what, names in (("missing", missing), ("not in the model", unknown), ("wrong shape", wrong))
        if names
    ]
    if problems:
        raise BadRequestError(f"The weights in {where} do not fit the model. {'; '.join(problems)}.")


def fill_dummy(weight_map: WeightMap, device: torch.device) -> None:
    """Fill the parameters with random weights, equal at every start: the seed of each full tensor follows from its
    name.

    So all ranks and all replicas have the same model, for every `tp_size` and `random_seed`.
    """
    for name, full in dummy_tensors(weight_map.slots, device):
        weight_map.slots[name].copy_from(full)


def dummy_tensors(slots: Mapping[str, WeightSlot], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of the weights of `load_format="dummy"`, on `device`."""
    for name, slot in slots.items():
        # The CPU generator ignores the upper half of a seed, so 32 bits are enough.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"0:{name}".encode()))
        full = torch.empty(slot.shape, dtype=slot.dtype, device=device).normal_(0.0, 0.02, generator=generator)
        if "norm" in name:
            full.add_(1.0)
        yield name, full


def checkpoint_files(folder: Path) -> list[Path]:
    """Return model.safetensors, else the files that the index names, else all safetensors files of the folder.

    All files come last because some repositories also have a consolidated copy under other names. The order is that of
    transformers, which leaves an old index behind when it saves one file into a folder. Raise BadRequestError if there
    are no files, if the index names a missing file, or if there are shards that the index does not name.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        return [single]
    if index.is_file():
        names = _shards_of(index)
        if absent := [n for n in names if not (folder / n).is_file()]:
            raise BadRequestError(f"{index} names files that do not exist: {', '.join(absent)}.")
        shards = {path.name for path in folder.glob("model-*-of-*.safetensors")}
        if strange := sorted(shards - set(names)):
            raise BadRequestError(
                f"{folder} has shards that its index does not name: {', '.join(strange[:8])}. They may be of another "
                f"checkpoint. Remove them, or remove {index.name} if it is the old one."
            )
        return [folder / n for n in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadRequestError(
            f"{folder} has no *.safetensors. Convert the checkpoint with "
            "`save_pretrained(..., safe_serialization=True)`, or use load_format='dummy' for random weights."
        )
    return files


def _shards_of(index: Path) -> list[str]:
    """Return the names of the files that an index lists. Raise BadRequestError unless all are in its folder."""
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        if not names or any(name != Path(name).name for name in names):
            raise ValueError("weight_map must name files in the folder of the index")
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise BadRequestError(f"Cannot read {index}: {type(error).__name__}: {error}. Is it complete?") from None
    return names
