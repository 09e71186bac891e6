"""A limit counts every GPU that its benchmark uses, and no figure of one GPU stands beside that of several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import colocated, decode_steps, offline, replicas, startup, weight_sync, workload
from benchmarks.options import gpus_of, measured_ceilings, report_graphs
from benchmarks.served_slices import served_tensors, tensors_of_engine, whole_tensors
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.verl_run import VerlRun, Workload
from benchmarks.workload import (
    Ceilings,
    least_seconds,
    make_workload,
    measure_ceilings,
    peer_of,
    rank_shape,
    training_flop,
)
from tests.benchmark.lines import figures

INFINITE = float("inf")


@pytest.mark.parametrize("ceilings", [Ceilings(1e12, INFINITE), Ceilings(INFINITE, 1e9)], ids=["arithmetic", "traffic"])
def test_two_gpus_halve_arithmetic_and_traffic(ceilings: Ceilings) -> None:
    work = make_workload("8b")
    one, two = (least_seconds(SHAPES["8b"], work, ceilings, itemsize=2, gpus=gpus) for gpus in (1, 2))
    assert two == pytest.approx(one / 2)


def test_ranks_without_a_head_of_their_own_share_one() -> None:
    shape = rank_shape(SHAPES["8b"], 16)
    assert (shape["num_attention_heads"], shape["num_key_value_heads"]) == (2, 1)
    assert rank_shape(SHAPES["8b"], 4)["num_key_value_heads"] == 2


def test_peers_stand_beside_one_gpu_only() -> None:
    assert peer_of("cuda", "8b", "output_tokens_per_s")["peer_value"] == 9128
    assert peer_of("cuda", "8b", "output_tokens_per_s", gpus=2) == {"peer": None, "peer_value": None}


def test_ceilings_are_those_of_the_slowest_gpu_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {0: Ceilings(9.0, 9.0), 2: Ceilings(8.0, 3.0), 3: Ceilings(4.0, 6.0)}
    current = []

    class Device:
        def __init__(self, gpu: int) -> None:
            self._gpu = gpu

        def __enter__(self) -> None:
            current.append(self._gpu)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("torch.cuda.device", Device)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr(workload, "_ceilings", lambda *_: rates[current[-1]])
    assert measure_ceilings("cuda", None) == rates[0]
    args = offline.parse_args(["--device", "cuda", "--tp", "2", "--set", "base_gpu_id=2"])
    assert gpus_of(args) == [2, 3]
    assert measured_ceilings(args) == Ceilings(4.0, 3.0)


def test_the_cpu_has_the_threads_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("benchmarks.options.measure_ceilings", lambda *args: given.append(args))
    for flags in ([], ["--set", "cpu_threads=3"]):
        measured_ceilings(offline.parse_args(["--tp", "2", *flags]))
    assert given == [("cpu", None, []), ("cpu", 6, [])]


def test_the_offline_limit_is_that_of_all_ranks() -> None:
    work, ceilings = make_workload("8b"), Ceilings(790e12, 4.0e12)

    def limit(*flags: str) -> float:
        return offline.limit_of(offline.parse_args(["--shape", "8b", *flags]), work, ceilings)

    assert limit("--device", "cuda", "--tp", "2") == pytest.approx(2 * limit("--device", "cuda"))
    assert limit("--tp", "2") == limit(), "ranks on the CPU share it"


class FakeEngine:
    def __init__(self, memory: dict[str, Any]) -> None:
        self._memory = memory

    def get_internal_state(self) -> dict[str, Any]:
        return {"memory": self._memory}


@pytest.mark.parametrize(
    ("memory", "least", "ranks"),
    [
        ({"cuda_graphs": 7, "ranks": [{"cuda_graphs": 7}, {"cuda_graphs": 0}]}, 0, [7, 0]),
        ({"cuda_graphs": 7, "cuda_graphs_to_capture": 2}, 7, [7]),
        ({}, None, None),  # an engine that does not count
    ],
)
def test_graphs_are_those_of_the_rank_with_the_fewest(
    memory: dict[str, Any], least: int | None, ranks: list[int] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = FakeEngine(memory)
    report_graphs(engine)
    line = figures(capsys).get("cuda_graphs", {})
    assert (line.get("value"), line.get("ranks")) == (least, ranks)


def test_the_limit_of_a_start_is_a_bare_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(startup, "start_bare", lambda device, bound: 2.5)
    monkeypatch.setattr(startup, "start_once", lambda settings, bound: {"ready": 9.0, "first_token": 10.0})
    startup.benchmark(startup.parse_args(["--tp", "2"]), tmp_path, "dummy")
    line = figures(capsys)["seconds_to_first_token"]
    assert (line["value"], line["limit"], line["peer"]) == (10.0, 2.5, None)


def test_decode_steps_are_those_of_one_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_steps.parse_args(["--tp", "2"])
    assert "--tp must be 1" in capsys.readouterr().err


def test_replicas_sum_their_limits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = replicas.parse_args(["--uniform", "2", "3", "50", "--device", "cuda"])
    replicas.report_runs(args, [(100.0, [(0.0, 9.0), (20.0, 22.0)]), (80.0, [(0.0, 9.0), (20.5, 24.0)])])
    found = figures(capsys)
    assert (found["output_tokens_per_s"]["value"], found["output_tokens_per_s"]["limit"]) == (50.0, 180.0)
    one = found["one_engine_tokens_per_s"]
    assert (one["each"], one["limit"]) == ([50.0, 28.6], 80.0)


@pytest.mark.exhaustive
def test_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    replicas.main(["--set", "cpu_threads=1", "--set", "kv_cache_gib=0.1", "--uniform", "2", "8", "4"])
    found = figures(capsys)
    assert found["output_tokens_per_s"]["replicas"] == 2
    assert found["output_tokens_per_s"]["value"] > 0 and found["output_tokens_per_s"]["limit"] > 0


def test_training_counts_the_ranks_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(colocated, "measure_ceilings", lambda *_: Ceilings(1e9, INFINITE))
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)
    group: Any = None
    flop = training_flop(SHAPES["tiny"], [(32, 32)] * 4, recompute=False)
    args = argparse.Namespace(shape="tiny", train_batch=[4, 32], trainer_ranks=2, device="cuda")
    assert colocated.train_limit_ms(args, group) == pytest.approx(flop / 1e6), "each GPU computes its own batch"
    args.device = "cpu"
    assert colocated.train_limit_ms(args, group) == pytest.approx(2 * flop / 1e6), "the ranks share the CPU"


# -- weight pushes -----------------------------------------------------------------------------------------------


def test_ranks_of_vllm_hold_the_slices_of_this_engine(tmp_path: Path) -> None:
    folder = shape_folder(tmp_path, "tiny")
    assert tensors_of_engine("vllm", folder, 2) == tensors_of_engine("embedded", folder, 2) == served_tensors(folder, 2)
    assert tensors_of_engine("vllm", folder, 1) == whole_tensors(folder)
    args = weight_sync.parse_args(["--engine", "vllm", "--tp", "2", "--trainer-ranks", "2"])
    assert set(weight_sync.elements_read(args, folder)) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_engines_without_gpus_of_their_own_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(SystemExit):
        weight_sync.parse_args(["--device", "cuda", "--trainer-ranks", "2", "--engines", "2", "--tp", "2"])
    assert "must be --tp or more" in capsys.readouterr().err


def test_the_copy_beside_verls_push_has_the_bytes_of_one_rank(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(4096))
    load = Workload(prompts=1, samples=1, prompt_tokens=1, response_tokens=1, steps=1)
    run = VerlRun(model=tmp_path, work=tmp_path, load=load, device="cuda", tp=2, has_spans=True)
    assert run.environment()["VERL_SPANS_PARAMETERS"] == "1024"
