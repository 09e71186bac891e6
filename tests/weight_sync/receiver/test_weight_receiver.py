"""The receiver plans from every kind of named tensor, and releases each reference of a pickle exactly once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.multiprocessing as mp

from tests.weight_sync import sglang_payloads as sglang
from tests.weight_sync.described import described
from tests.weight_sync.fakes import EMBED, NORM, FakeRunner, random_weights
from verl_server.weight_sync.handles import TensorHandle
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver
from verl_server.weight_sync.sglang.payloads import parse_payload

HEAD = "lm_head.weight"
BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"
"""A buffer that old checkpoints carry."""


@pytest.fixture(autouse=True)
def file_system() -> Iterator[None]:
    before = mp.get_sharing_strategy()
    mp.set_sharing_strategy("file_system")
    yield
    mp.set_sharing_strategy(before)


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def receiver(runner: FakeRunner) -> WeightReceiver:
    return WeightReceiver(runner.weight_map, 0, 1, torch.device("cpu"))


def pickled(weights: dict[str, torch.Tensor]) -> list[tuple[str, TensorHandle]]:
    """Return the handles of one pickle of `weights`, which adds a reference to each tensor's file."""
    return parse_payload(sglang.dumps(list(weights.items())), None)


def references(handles: list[tuple[str, TensorHandle]]) -> list[int]:
    counts = []
    for _, handle in handles:
        with open(f"/dev/shm/{handle.allocation.name}", "rb") as file:
            counts.append(int.from_bytes(file.read(4), "little"))
    return counts


def test_a_pickle_that_is_read_releases_its_references_once(receiver: WeightReceiver, runner: FakeRunner) -> None:
    weights = random_weights(1)
    first, _ = pickled(weights), pickled(weights)
    assert references(first) == [3] * len(weights), "the owner's reference, and one for each pickle"
    receiver.stage_named(first, strict_dtype=False, partial=False).commit()
    assert references(first) == [2] * len(weights) and runner.holds(weights)


def test_a_tensor_that_is_left_out_releases_its_reference(receiver: WeightReceiver, runner: FakeRunner) -> None:
    tensors = {NORM: torch.ones(4), BUFFER: torch.ones(2)}
    handles, _ = pickled(tensors), pickled(tensors)
    plan = receiver.stage_named(handles, strict_dtype=False, partial=True)
    assert plan.names == [NORM] and references(handles) == [2, 2]


def test_every_kind_of_named_tensor_leaves_out_the_same(receiver: WeightReceiver) -> None:
    tensors = {NORM: torch.ones(4), BUFFER: torch.ones(2)}
    trainer, description = described(tensors)
    options = {"strict_dtype": False, "partial": True}
    plans = [
        receiver.stage(description, **options),
        receiver.stage_named(pickled(tensors), **options),
        receiver.plan(list(tensors.items()), **options),
    ]
    assert trainer.ranks and [plan.names for plan in plans] == [[NORM]] * 3


def test_a_tied_head_is_compared_only_beside_the_embedding(receiver: WeightReceiver) -> None:
    embed, head, norm = torch.ones(8, 4), torch.ones(8, 4), torch.ones(4)
    assert receiver.compared([(NORM, norm), (HEAD, head)]) == []
    found = receiver.compared([(HEAD, head), (NORM, norm), (f"module.{EMBED}", embed)])
    assert len(found) == 2 and found[0] is head and found[1] is embed
