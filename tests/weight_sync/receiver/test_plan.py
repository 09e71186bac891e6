"""Update plans: every number of a description is checked, and valid tensors are copied, sliced and converted."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from tests.weight_sync.described import SharedMemory, Trainer, described, split_over
from tests.weight_sync.fakes import EMBED, NORM, O_PROJ, SHAPES, FakeRunner, Q, random_weights
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.checksum import tensor_checksum
from verl_server.weight_sync.handles import (
    Allocation,
    DescribedTensor,
    LocalSerializedTensor,
    TensorHandle,
    WeightsDescription,
)
from verl_server.weight_sync.receiver import sources as sources_module
from verl_server.weight_sync.receiver.plan import UpdatePlan
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver

CPU = torch.device("cpu")
HEAD = "lm_head.weight"


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def receiver(runner: FakeRunner) -> WeightReceiver:
    return WeightReceiver(runner.weight_map, 0, 1, CPU)


def stage(receiver: WeightReceiver, what: dict[str, torch.Tensor] | WeightsDescription, **options: Any) -> UpdatePlan:
    description = what if isinstance(what, WeightsDescription) else described(what)[1]
    return receiver.stage(description, **({"strict_dtype": False, "partial": True} | options))


def untouched(runner: FakeRunner) -> bool:
    return runner.holds({name: torch.zeros(shape) for name, shape in SHAPES.items()})


def test_a_full_update_is_copied(receiver: WeightReceiver, runner: FakeRunner) -> None:
    weights = random_weights(1)
    plan = stage(receiver, weights, partial=False, strict_dtype=True)
    assert untouched(runner), "staging writes nothing"
    assert plan.names == list(SHAPES)
    assert plan.covers_all
    assert plan.nbytes == sum(w.nbytes for w in weights.values())
    plan.commit()
    assert runner.holds(weights)


@pytest.mark.parametrize("size", [1, 2])
def test_each_rank_takes_its_slices_and_dtypes_convert(size: int) -> None:
    weights = random_weights(1, torch.float64)
    _, description = described(weights)
    for rank in range(size):
        runner = FakeRunner(rank, size, dtype=torch.bfloat16)
        receiver = WeightReceiver(runner.weight_map, rank, size, CPU)
        receiver.stage(description, strict_dtype=False, partial=False).commit()
        assert runner.holds(weights)


def test_handles_of_one_update_are_read_by_rank() -> None:
    both = [random_weights(seed) for seed in (1, 2)]
    trainers = [described(weights)[0] for weights in both]
    named = []
    for name, shape in SHAPES.items():
        handles = []
        for trainer in trainers:
            shard = trainer.ranks[0].shard(trainer.placed[name][0], [0] * len(shape))
            handles.append(
                TensorHandle(
                    allocation=trainer.ranks[0].allocation,
                    dtype="float32",
                    shape=shard.shape,
                    stride=shard.stride,
                    storage_offset=shard.storage_offset,
                )
            )
        named.append((name, LocalSerializedTensor(values=handles)))
    for rank, weights in enumerate(both):
        runner = FakeRunner(rank, 2)
        receiver = WeightReceiver(runner.weight_map, rank, 2, CPU)
        receiver.stage_named(named, strict_dtype=False, partial=False).commit()
        assert runner.holds(weights)
    receiver = WeightReceiver(FakeRunner().weight_map, 0, 1, CPU)
    with pytest.raises(WeightUpdateError, match="2 values, but this server has 1"):
        receiver.stage_named(named, strict_dtype=False, partial=False)
    first = [(name, value.values[0]) for name, value in named]
    receiver.stage_named(first, strict_dtype=False, partial=False)
    outside = msgspec.structs.replace(first[0][1], storage_offset=1 << 30)
    with pytest.raises(WeightUpdateError, match=f"'{EMBED}': .*needs"):
        receiver.stage_named([(EMBED, outside)], strict_dtype=False, partial=True)


def test_full_tensors_of_this_process_are_planned_alike(receiver: WeightReceiver, runner: FakeRunner) -> None:
    weights = random_weights(1)
    receiver.plan(list(weights.items()), strict_dtype=True, partial=False).commit()
    assert runner.holds(weights)
    meta = [(name, torch.empty(shape, device="meta")) for name, shape in SHAPES.items()]
    plan = receiver.plan([*meta, (HEAD, meta[0][1])], strict_dtype=True, partial=False)
    with pytest.raises(WeightUpdateError, match="closed"):
        plan.commit()
    with pytest.raises(WeightUpdateError, match=r"shape \[5\]"):
        receiver.plan([(NORM, torch.empty(5, device="meta"))], strict_dtype=True, partial=True)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({"model.norm.wieght": torch.ones(4)}, {}, "no parameter 'model.norm.wieght'.*like 'model.norm.weight'"),
        ({NORM: torch.ones(5)}, {}, r"\[5\], but the model's is \[4\]"),
        ({NORM: torch.ones(2, 2)}, {}, r"\[2, 2\]"),
        ({NORM: torch.ones(4, dtype=torch.int32)}, {}, "int32"),
        (
            {NORM: torch.ones(4, dtype=torch.float16)},
            {"strict_dtype": True},
            f"'{NORM}' is torch.float16.*strict_dtype",
        ),
        ({NORM: torch.ones(4)}, {"partial": False}, f"missing: '{EMBED}', '{Q}'"),
        ({NORM: torch.ones(4), f"module.{NORM}": torch.ones(4)}, {}, "twice"),
        ({NORM: torch.ones(4)}, {"checksums": {EMBED: "0"}}, f"checksums for '{EMBED}'"),
        ({}, {}, "no tensors"),
    ],
)
def test_what_does_not_fit_is_refused(
    receiver: WeightReceiver, runner: FakeRunner, tensors: dict[str, torch.Tensor], options: Any, message: str
) -> None:
    with pytest.raises(WeightUpdateError, match=message):
        stage(receiver, tensors, **options)
    assert untouched(runner)


# -- forged descriptions -------------------------------------------------------------------------------------


def forged(change: dict[str, Any], shard: dict[str, Any]) -> WeightsDescription:
    """Describe an embedding in two shards of 4 rows, with changes to the tensor and to the second shard."""
    trainer = Trainer(2)
    trainer.place(EMBED, torch.ones(8, 4), split_over(0, 2)((8, 4)))
    description = trainer.description()
    (source,) = description.tensors
    first, second = source.shards
    shards = [first, msgspec.structs.replace(second, **shard)]
    source = msgspec.structs.replace(source, **({"shards": shards} | change))
    return msgspec.structs.replace(description, tensors=[source])


@pytest.mark.parametrize(
    ("change", "shard", "message"),
    [
        ({}, {"allocation": 2}, "allocation 2, but the description has 2"),
        ({}, {"allocation": -1}, "allocation -1"),
        ({}, {"allocation": 2**80}, "but the description has 2"),
        ({}, {"offset": [5, 0]}, r"at offset \[5, 0\] does not lie inside \[8, 4\]"),
        ({}, {"offset": [-1, 0]}, "does not lie inside"),
        ({}, {"offset": [2**70, 0]}, "does not lie inside"),
        ({}, {"shape": [-4, 4]}, "does not lie inside"),
        ({}, {"shape": [2**63, 4]}, "does not lie inside"),
        ({}, {"shape": [4]}, "do not have 2 dimensions"),
        ({}, {"offset": [4, 0, 0]}, "do not have 2 dimensions"),
        ({}, {"stride": [4]}, "do not have 2 dimensions"),
        ({}, {"stride": [-4, 1]}, "do not describe a tensor"),
        ({}, {"stride": [2**40, 1]}, "needs .* bytes, but its allocation has"),
        ({}, {"storage_offset": 2**66}, "needs"),
        ({}, {"storage_offset": -1}, "do not describe a tensor"),
        ({}, {"offset": [3, 0]}, r"\[0:4, 0:4\] and \[3:7, 0:4\] overlap"),
        ({}, {"shape": [3, 4]}, r"no shard covers \[7:8, 0:4\] of \[8, 4\]"),
        ({}, {"shape": [0, 4]}, r"no shard covers \[4:8, 0:4\]"),
        ({}, {"offset": [0, 0]}, r"no shard covers \[4:8, 0:4\]"),
        ({"shards": []}, {}, r"no shard covers \[0:8, 0:4\]"),
        ({"dtype": "int8"}, {}, "int8 is not among"),
        ({"dtype": "x" * 10_000}, {}, "xxx is not among"),
        ({"shape": [8, 4, 1]}, {}, "do not have 3 dimensions"),
        ({"shape": [-8, 4]}, {}, "shape is none"),
        ({"shape": [1] * 100_000}, {}, "shape is none"),
        ({"shape": [2**70, 2**70]}, {}, "no shard covers"),
    ],
)
def test_every_number_of_a_description_is_checked(
    receiver: WeightReceiver, runner: FakeRunner, change: dict[str, Any], shard: dict[str, Any], message: str
) -> None:
    stage(receiver, forged({}, {}))
    with pytest.raises(WeightUpdateError, match=f"^'{EMBED}': .*{message}") as refused:
        stage(receiver, forged(change, shard))
    assert len(str(refused.value)) < 1000
    assert untouched(runner)
    assert len(receiver._memory) == 0


def test_sizes_of_a_description_bound_its_work(receiver: WeightReceiver) -> None:
    memory = SharedMemory()
    row = memory.put(torch.ones(4))
    boxes = [memory.shard(row[None], [i, 0]) for i in range(8)]
    (source,) = forged({}, {}).tensors
    many = msgspec.structs.replace(source, shards=boxes * 1000)  # a thousand replicas
    description = WeightsDescription(id="x", allocations=[memory.allocation], tensors=[many])
    assert len(stage(receiver, description).sources) == 8
    with pytest.raises(WeightUpdateError, match="twice"):
        stage(receiver, msgspec.structs.replace(description, tensors=[many] * 1000))


def test_empty_shards_and_ignored_tensors_are_fine(receiver: WeightReceiver, runner: FakeRunner) -> None:
    weights = random_weights(1)
    trainer = Trainer(9)
    for name, tensor in weights.items():
        trainer.place(name, tensor, split_over(0, 9)(tensor.shape))  # more ranks than rows
    trainer.place("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(3))
    stage(receiver, trainer.description(), partial=False).commit()
    assert runner.holds(weights)


# -- copies --------------------------------------------------------------------------------------------------


def replicas(ranks: int) -> tuple[Trainer, WeightsDescription]:
    """Return a trainer whose ranks each hold a copy of the norm, filled with the rank's number, and its description."""
    trainer = Trainer(ranks)
    trainer.place(NORM, torch.zeros(4), [([0], [4])] * ranks)
    for rank, view in enumerate(trainer.placed[NORM]):
        view.fill_(rank)
    return trainer, trainer.description()


@pytest.mark.parametrize(("copies", "expected"), [(1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3])])
def test_ranks_spread_over_the_copies(copies: int, expected: list[int]) -> None:
    _, description = replicas(copies)
    read = []
    for rank in range(4):
        runner = FakeRunner()
        receiver = WeightReceiver(runner.weight_map, rank, 4, CPU)
        stage(receiver, description).commit()
        read.append(int(runner.norm[0]))
        assert len(receiver._memory) <= 1, "only the chosen copy is opened"
    assert read == expected


def test_a_copy_on_the_ranks_own_gpu_is_chosen_first() -> None:
    receiver = WeightReceiver(FakeRunner().weight_map, 1, 2, CPU)
    copies = [Allocation(id=str(i), kind="cuda", nbytes=1, device_uuid=uuid) for i, uuid in enumerate("abc")]
    for gpu, chosen in (("a", 0), ("c", 2), ("elsewhere", 1), ("", 1)):
        receiver._gpu = gpu
        assert receiver._nearest(copies) == chosen
    receiver._gpu = "c"
    assert receiver._nearest([copies[0], msgspec.structs.replace(copies[1], device_uuid="GPU-c")]) == 1


# -- tied heads ----------------------------------------------------------------------------------------------


def with_head(weights: dict[str, torch.Tensor], head: torch.Tensor | None) -> WeightsDescription:
    """Describe `weights` with a head that has memory of its own, or shares the embedding's memory if `head` is None."""
    _, description = described(weights if head is None else weights | {HEAD: head})
    if head is None:
        (embed,) = (t for t in description.tensors if t.name == EMBED)
        description.tensors.append(msgspec.structs.replace(embed, name=HEAD))
    return description


def test_a_tied_head_may_be_absent_the_same_equal_or_alone_but_not_different(
    receiver: WeightReceiver, runner: FakeRunner
) -> None:
    weights = random_weights(1)
    stage(receiver, with_head(weights, None), partial=False).commit()
    assert runner.holds(weights)
    stage(receiver, with_head(weights, weights[EMBED].clone()), partial=False).commit()
    for other in (weights[EMBED] + 1, weights[EMBED].double()):
        with pytest.raises(WeightUpdateError, match="tie_word_embeddings"):
            stage(receiver, with_head(weights, other))
    with pytest.raises(WeightUpdateError, match=rf"'{HEAD}' has shape \[4, 4\]"):
        stage(receiver, with_head(weights, weights[EMBED][:4]))
    changed = weights[EMBED].clone()
    changed[7, 3] = torch.nextafter(changed[7, 3], torch.tensor(9.0))
    with pytest.raises(WeightUpdateError, match=f"'{HEAD}' differs from '{EMBED}'"):
        stage(receiver, with_head(weights, changed))
    alone = described({HEAD: weights[EMBED] + 1})[1]
    stage(receiver, alone).commit()
    assert runner.holds(weights | {EMBED: weights[EMBED] + 1})


def test_tied_tensors_of_another_shape_are_not_compared(receiver: WeightReceiver) -> None:
    _, description = described(random_weights(1))
    (embed,) = (t for t in description.tensors if t.name == EMBED)
    shard = msgspec.structs.replace(embed.shards[0], shape=[1 << 30, 4], stride=[0, 1])  # hours, and 16 bytes of memory
    for name in (EMBED, HEAD):
        description.tensors.append(DescribedTensor(name=name, dtype="float32", shape=shard.shape, shards=[shard]))
    description.tensors.remove(embed)
    with pytest.raises(WeightUpdateError, match=r"has shape \[1073741824, 4\]"):
        stage(receiver, description)


def test_tied_shards_are_compared_whatever_their_cut(receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "_COMPARED", 5)  # compare a few rows at a time
    nan = random_weights(1)[EMBED]
    nan[2, 2] = float("nan")  # bits are compared, so that NaN equals NaN
    for wrong in (None, (0, 0), (4, 1), (7, 3)):
        trainer = Trainer(2)
        trainer.place(EMBED, nan, split_over(0, 3)(nan.shape))
        trainer.place(HEAD, nan, split_over(1, 2)(nan.shape))
        if wrong is None:
            assert stage(receiver, trainer.description()).changes_under_its_names
            continue
        trainer.placed[HEAD][wrong[1] // 2][wrong[0], wrong[1] % 2] += 1
        with pytest.raises(WeightUpdateError, match="differs"):
            stage(receiver, trainer.description())


# -- checksums -----------------------------------------------------------------------------------------------


def test_checksums_are_of_what_lies_in_the_trainers_memory_now(receiver: WeightReceiver) -> None:
    weights = random_weights(1)
    trainer = Trainer(3)
    for name, tensor in weights.items():
        trainer.place(f"module.{name}", tensor, split_over(0, 2)(tensor.shape) if name == O_PROJ else None)
    sums = {f"module.{name}": tensor_checksum(tensor) for name, tensor in weights.items()}
    plan = stage(receiver, trainer.description(), checksums=sums)
    plan.verify({name: checksum.upper() for name, checksum in sums.items()})
    trainer.placed[f"module.{O_PROJ}"][1][1, 1] += 1
    trainer.placed[f"module.{NORM}"][0][0] += 1
    with pytest.raises(
        WeightUpdateError, match=f"checksum of 'module.{O_PROJ}', 'module.{NORM}' differs from the trainer's"
    ):
        plan.verify(sums)
    with pytest.raises(WeightUpdateError, match="checksum"):
        stage(receiver, trainer.description(), checksums=sums)
