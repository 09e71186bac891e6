"""The broadcasts of prime-rl's trainers, written anew: an update that announces its tensors in pickled headers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import torch

StateDict = dict[str, torch.Tensor]


def number(value: int) -> torch.Tensor:
    """One int64, as the bytes of its broadcast."""
    return torch.tensor([value], dtype=torch.long).view(torch.uint8)


def pickled_header(state_dict: StateDict) -> bytes:
    by_dtype: dict[torch.dtype, list[tuple[str, torch.Size, int]]] = {}
    for name, tensor in state_dict.items():
        by_dtype.setdefault(tensor.dtype, []).append((name, tensor.shape, tensor.numel()))
    return pickle.dumps(by_dtype)


def broadcasts(state_dicts: list[StateDict], headers: dict[int, bytes] | None = None) -> Iterator[torch.Tensor]:
    """Yield the byte tensors of an update in order. `headers` replaces the headers of some state dicts."""
    yield number(len(state_dicts))
    for index, state_dict in enumerate(state_dicts):
        header = (headers or {}).get(index, pickled_header(state_dict))
        yield number(len(header))
        yield torch.frombuffer(bytearray(header), dtype=torch.uint8)
        for dtype in dict.fromkeys(tensor.dtype for tensor in state_dict.values()):
            same = [tensor.flatten() for tensor in state_dict.values() if tensor.dtype == dtype]
            yield torch.cat(same).view(torch.uint8)


def layers(weights: StateDict) -> list[StateDict]:
    """Split weights as prime-rl does: the parameters outside the layers first, then layer by layer."""
    prefix = "model.layers."
    numbers = sorted({int(name.removeprefix(prefix).split(".")[0]) for name in weights if name.startswith(prefix)})
    outside = {name: tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    inside = [{n: t for n, t in weights.items() if n.startswith(f"{prefix}{layer}.")} for layer in numbers]
    return [outside, *inside]
