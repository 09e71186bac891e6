"""A loader's copies are recorded from tensors without memory, and a proof with codes notices each wrong copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from verl_server.weight_sync.receiver.load_trace.codes import ROUNDS, coded
from verl_server.weight_sync.receiver.load_trace.proof import ParameterProof
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace, record
from verl_server.weight_sync.receiver.load_trace.regions import LoadedCopy

SHAPES = {
    "embed": (10, 6),
    "q": (8, 6),
    "k": (4, 6),
    "v": (4, 6),
    "experts.0.gate": (6, 6),
    "experts.0.up": (6, 6),
    "experts.1.gate": (6, 6),
    "experts.1.up": (6, 6),
    "conv": (6, 4),
    "flat": (2, 3, 4),
    "norm": (6,),
    "scale": (1,),
    "decay": (6,),
    "unused": (3,),
}
RANK, RANKS = 1, 2


def empty_parameters(device: str) -> dict[str, Tensor]:
    """The parameters of rank 1 of 2, as an engine fuses, shards, pads, stacks and transposes them."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (8, 6),  # 5 rows and 3 rows of padding
        "qkv": (8, 6),
        "experts": (2, 6, 6),
        "conv": (4, 6),
        "flat": (24,),
        "norm": (6,),
        "scale": (1,),
        "decay": (6,),
    }
    dtypes = {"norm": torch.float32}
    return {
        name: torch.full(shape, 7.0, dtype=dtypes.get(name, torch.bfloat16), device=device)
        for name, shape in shapes.items()
    }


def shard(tensor: Tensor, dim: int = 0) -> Tensor:
    size = tensor.shape[dim] // RANKS
    return tensor.narrow(dim, RANK * size, size)


def loader_of(parameters: dict[str, Tensor]) -> Callable[[Iterable[tuple[str, Tensor]]], None]:
    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            if name == "embed":
                parameters["embed"][:5].data.copy_(shard(loaded))
                parameters["embed"][5:].data.fill_(0)
            elif name in ("q", "k", "v"):
                start, size = {"q": (0, 4), "k": (4, 2), "v": (6, 2)}[name]
                parameters["qkv"].data.narrow(0, start, size).copy_(shard(loaded))
            elif name.startswith("experts"):
                _, expert, half = name.split(".")
                rows = parameters["experts"].data[int(expert)].narrow(0, 0 if half == "gate" else 3, 3)
                rows.copy_(shard(loaded.to(torch.bfloat16)))
            elif name == "conv":
                parameters["conv"].data.copy_(loaded.t())
            elif name == "flat":
                parameters["flat"].data.copy_(loaded.contiguous().view(-1))
            elif name == "norm":
                parameters["norm"].data.copy_(loaded.to(torch.float32))
            elif name == "scale":
                parameters["scale"].data.fill_(loaded.item())
            elif name == "decay":
                parameters["decay"].data.copy_(-loaded.exp())

    return load


@pytest.fixture(scope="module")
def trace() -> LoadTrace:
    sources = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in SHAPES.items()}
    parameters = empty_parameters("meta")
    return record(loader_of(parameters), sources, parameters)


def load_codes(parameters: dict[str, Tensor], round_: int) -> Callable[[str], Tensor]:
    """Load the codes of one round by the loader. Returns the codes by name."""
    cpu = torch.device("cpu")
    codes = {
        name: coded(number, shape, torch.bfloat16, cpu, round_) for number, (name, shape) in enumerate(SHAPES.items())
    }
    loader_of(parameters)(codes.items())
    return codes.__getitem__


def holds(copies: dict[str, list[LoadedCopy]]) -> dict[str, bool]:
    parameters = empty_parameters("cpu")
    loader_of(parameters)((name, torch.randn(shape).bfloat16()) for name, shape in SHAPES.items())
    proofs = {name: ParameterProof(parameters[name], of_it) for name, of_it in copies.items()}
    found = dict.fromkeys(proofs, True)
    for round_ in range(ROUNDS):
        code = load_codes(parameters, round_)
        found = {name: found[name] and proof.holds(code) for name, proof in proofs.items()}
    return found


def test_copies_of_all_kinds_are_recorded(trace: LoadTrace) -> None:
    assert set(trace.copies) == {"embed", "qkv", "experts", "conv", "flat", "norm"}
    assert [(copy.source, copy.index) for copy in trace.copies["qkv"]] == [
        ("q", (slice(4, 8), slice(0, 6))),
        ("k", (slice(2, 4), slice(0, 6))),
        ("v", (slice(2, 4), slice(0, 6))),
    ]
    assert len(trace.copies["experts"]) == 4
    assert trace.feeds["experts.1.up"] == {"experts"}


def test_computed_values_are_noted(trace: LoadTrace) -> None:
    assert trace.computed.keys() == {"decay"}
    assert trace.feeds["decay"] == {"decay"}
    assert trace.read.keys() == {"scale"}
    assert "unused" not in trace.feeds


def test_a_copy_to_a_tensor_that_is_no_parameter_is_noted() -> None:
    """A tensor that the loader copies somewhere else is not one that nothing reads."""
    kept = torch.zeros(3)
    parameters = {"norm": torch.empty(6, device="meta")}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, loaded in weights:
            (parameters["norm"] if name == "norm" else kept).copy_(loaded)

    trace = record(load, {name: torch.empty(SHAPES[name], device="meta") for name in ("norm", "unused")}, parameters)
    assert trace.feeds.keys() == {"norm"} and trace.read.keys() == {"unused"}
    assert kept.tolist() == [0, 0, 0]


def test_a_tensor_that_the_loader_changes_is_noted() -> None:
    parameters = {"norm": torch.empty(6, device="meta")}

    def load(weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, loaded in weights:
            parameters["norm"].copy_(loaded[:].zero_())

    trace = record(load, {"norm": torch.empty(6, device="meta")}, parameters)
    assert trace.overwritten == trace.read.keys() == {"norm"}


def test_the_copies_install_what_the_loader_installs(trace: LoadTrace) -> None:
    weights = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    loaded = empty_parameters("cpu")
    loader_of(loaded)(weights.items())
    copied = empty_parameters("cpu")
    copied["embed"][5:] = 0
    for name, copies in trace.copies.items():
        for copy in copies:
            copy.destination.view(copied[name]).copy_(weights[copy.source][copy.index])
        assert torch.equal(copied[name], loaded[name]), name


def test_the_proof_holds(trace: LoadTrace) -> None:
    assert all(holds(trace.copies).values())


def skip(copies: list[LoadedCopy]) -> list[LoadedCopy]:
    return copies[1:]


def swap_halves(copies: list[LoadedCopy]) -> list[LoadedCopy]:
    """Exchange the destinations of an expert's gate and up rows, as kernels that want [up, gate] do."""
    first, second, *rest = copies
    return [
        dataclasses.replace(first, destination=second.destination),
        dataclasses.replace(second, destination=first.destination),
        *rest,
    ]


def permute_rows(copies: list[LoadedCopy]) -> list[LoadedCopy]:
    """Copy the rows of the first tensor in another order."""
    first, *rest = copies
    (rows, *others), where = first.index, first.destination
    order = [1, 0, *range(2, rows.stop - rows.start)]
    parts = []
    for to, row in enumerate(order):
        region = dataclasses.replace(where, shape=(1, *where.shape[1:]), offset=where.offset + to * where.stride[0])
        parts.append(LoadedCopy(first.source, (slice(rows.start + row, rows.start + row + 1), *others), region))
    return [*parts, *rest]


def shift(copies: list[LoadedCopy]) -> list[LoadedCopy]:
    """Take the rows of the neighbouring rank."""
    first, *rest = copies
    rows, *others = first.index
    moved = slice(rows.start - 1, rows.stop - 1)
    return [dataclasses.replace(first, index=(moved, *others)), *rest]


def write_twice(copies: list[LoadedCopy]) -> list[LoadedCopy]:
    return [copies[0], *copies]


@pytest.mark.parametrize("mutate", [skip, swap_halves, permute_rows, shift, write_twice])
def test_a_wrong_copy_is_noticed(trace: LoadTrace, mutate: Callable[[list[LoadedCopy]], list[LoadedCopy]]) -> None:
    wrong = trace.copies | {"experts": mutate(trace.copies["experts"])}
    found = holds(wrong)
    assert not found.pop("experts")
    assert all(found.values())


def test_padding_that_a_load_changes_is_noticed(trace: LoadTrace) -> None:
    parameters = empty_parameters("cpu")
    loader_of(parameters)((name, torch.randn(shape).bfloat16()) for name, shape in SHAPES.items())
    proof = ParameterProof(parameters["embed"], trace.copies["embed"])
    code = load_codes(parameters, 0)
    assert proof.holds(code)
    parameters["embed"][6, 2] = 1.0
    assert not proof.holds(code)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_are_finite_and_distinct(dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    rounds = [
        torch.cat([coded(number, (50, 40), dtype, cpu, round_).view(-1) for number in range(20)])
        for round_ in range(ROUNDS)
    ]
    assert all(bool((codes.isfinite() & (codes.abs() < 2)).all()) for codes in rounds)
    bits = [codes.view(torch.int16 if dtype.itemsize == 2 else torch.int32).long() for codes in rounds]
    assert len(torch.unique(bits[0] * (1 << 32) + bits[1])) > 39_990, "40,000 elements, 30 bits"


def test_codes_do_not_depend_on_their_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_server.weight_sync.receiver.load_trace import codes

    cpu = torch.device("cpu")
    whole = coded(3, (7, 11), torch.bfloat16, cpu, 1)
    monkeypatch.setattr(codes, "_CHUNK", 10)
    assert torch.equal(coded(3, (7, 11), torch.bfloat16, cpu, 1), whole)
