"""The parts of each tensor that the ranks of a tensor-parallel server hold, which a push reads from the trainer.

Benchmarks use this module in the trainer, to compute the checksums that the server should report, and to count the
elements that go over each link. It builds the server's own parameter map on the meta device, without memory.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from verl_server.ipc.tp_group import TpGroup
from verl_server.models.config import load_model_config
from verl_server.models.expert_stacks import expanded_shapes
from verl_server.models.loader import Index, WeightMap
from verl_server.models.transformer import Decoder
from verl_server.weight_sync.checksum import tensor_checksums


@dataclass(frozen=True)
class ServedTensor:
    """One tensor of the checkpoint, as the ranks of a server hold it."""

    name: str
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    pieces: list[list[Index]]
    """Parts of the full tensor that each server rank holds."""

    def slices(self, full: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """The pieces of `full` that the server ranks hold, converted to `dtype`, rank after rank."""
        for rank in self.pieces:
            yield from (full[index].to(dtype) for index in rank)


def expected_checksums(
    served: list[ServedTensor], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> list[dict[str, str]]:
    """Return name -> checksum for each server rank: the report of `/weights_checker` after a push of the full tensors.

    The tensors may come in any order.
    """
    by_name = {tensor.name: tensor for tensor in served}
    names: list[str] = []

    def slices() -> Iterator[Tensor]:
        for name, full in tensors:
            names.append(name)
            yield from by_name[name].slices(full, dtype)

    found = iter(tensor_checksums(slices()))
    ranks: list[dict[str, str]] = [{} for _ in served[0].pieces]
    for name in names:
        for rank, pieces in zip(ranks, by_name[name].pieces, strict=True):
            rank[name] = "".join(itertools.islice(found, len(pieces)))
    return ranks


def served_tensors(folder: Path, tp_size: int) -> list[ServedTensor]:
    """The tensors that a server with `tp_size` ranks expects, under their Hugging Face names, in model order."""
    maps = [_weight_map(folder, TpGroup(rank, tp_size)) for rank in range(tp_size)]
    return [
        ServedTensor(name, slot.shape, [[index for _, index in m.slots[name].pieces] for m in maps])
        for name, slot in maps[0].slots.items()
    ]


def tensors_of_engine(engine: str, folder: Path, tp_size: int) -> list[ServedTensor]:
    """The tensors that the ranks of an engine (a value of `ServerArgs.engine`) serve.

    One rank of another project's engine serves whole tensors, of any model. Several ranks cut dense models as the
    embedded engine does.
    """
    return whole_tensors(folder) if engine != "embedded" and tp_size == 1 else served_tensors(folder, tp_size)


def whole_tensors(folder: Path) -> list[ServedTensor]:
    """The tensors that one rank of any engine serves whole, under the names of a checkpoint."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = expanded_shapes({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    return [ServedTensor(name, shape, [[(slice(None),) * len(shape)]]) for name, shape in shapes.items()]


def _weight_map(folder: Path, tp: TpGroup) -> WeightMap:
    config = load_model_config(folder)
    meta = torch.device("meta")
    with meta:
        return Decoder(config, tp, config.max_position_embeddings, meta).weight_map()


def traffic(served: list[ServedTensor], trainer_ranks: int) -> Counter[tuple[int, int]]:
    """(server rank, trainer rank) -> number of elements that the server rank reads from the trainer rank.

    The trainer's ranks hold equal blocks of rows, as FSDP2 shards parameters.
    """
    elements: Counter[tuple[int, int]] = Counter()
    for tensor in served:
        rows_per_owner = -(-tensor.shape[0] // trainer_ranks)
        for reader, pieces in enumerate(tensor.pieces):
            for index in pieces:
                (first, last), *others = [part.indices(n)[:2] for part, n in zip(index, tensor.shape, strict=True)]
                width = 1
                for start, stop in others:
                    width *= stop - start
                for owner in range(trainer_ranks):
                    start, stop = owner * rows_per_owner, (owner + 1) * rows_per_owner
                    if (rows := min(last, stop) - max(first, start)) > 0:
                        elements[reader, owner] += rows * width
    return elements
