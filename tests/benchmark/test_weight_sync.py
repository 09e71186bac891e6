"""The benchmarks of weight sync run, and detect the faults that they look for."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import colocated, weight_sync
from benchmarks.push_trainer import Job, _Rank, write_parameters
from benchmarks.served_slices import expected_checksums, served_tensors, traffic
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.token_gaps import Streams, gap_figures


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shape_folder(tmp_path_factory.mktemp("shape"), "tiny")


# -- token gaps ------------------------------------------------------------------------------------------------


def test_gaps_belong_to_the_event_that_they_overlap() -> None:
    arrivals = [np.array([0.0, 0.01, 0.02, 0.05, 0.06, 0.07, 0.27, 0.28]), np.array([0.0, 0.01]), np.array([0.5])]
    figures = gap_figures(arrivals, {"push": [(0.025, 0.04)], "register": []}, busy=[(0.1, 0.2)])
    assert figures["quiet"]["count"] == 6
    assert figures["quiet"]["longest"] == pytest.approx(10.0)
    assert figures["push"]["longest"] == pytest.approx(30.0)
    assert figures["push_added"]["longest"] == pytest.approx(20.0)
    assert "register" not in figures


def test_gaps_of_nothing() -> None:
    assert gap_figures([], {"push": [(0.0, 1.0)]}, busy=[])["push"] == {"count": 0}


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        ({"output_ids": [1, 2, 3]}, "completed"),
        ({"output_ids": [1, 2]}, "lost"),  # a token is missing
        ({"error": {"message": "no"}}, "lost"),
        ({}, "lost"),  # the connection ended before the first frame
        ({"output_ids": [1], "finish": "abort"}, "aborted"),
        ({"output_ids": [1, 2, 3], "retractions": 1}, "restarted"),
    ],
)
def test_what_becomes_of_a_request_is_counted(answer: dict[str, Any], counted: str) -> None:
    streams = Streams("http://127.0.0.1:9", 1, 1, 3, 320)
    if "output_ids" in answer:
        finish = {"type": answer.pop("finish", "length")}
        answer["meta_info"] = {"finish_reason": finish, "num_retractions": answer.pop("retractions", 0)}
    streams._count_result(answer, 3)
    outcome = streams._outcome
    counts = {"completed": outcome.completed, "aborted": outcome.aborted, "restarted": outcome.restarted}
    counts["lost"] = len(outcome.lost)
    assert counts[counted] == 1
    assert counts["completed"] == (counted in ("completed", "restarted"))


# -- weights that a server rank holds --------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "owners"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4)])
def test_traffic_counts_every_element_that_a_rank_reads(folder: Path, tp: int, owners: int) -> None:
    served = served_tensors(folder, tp)
    expected: Counter[tuple[int, int]] = Counter()
    for tensor in served:
        owner = torch.empty(tensor.shape, dtype=torch.int8)
        for i, rows in enumerate(owner.chunk(owners)):  # FSDP2 cuts tensors in this way
            rows.fill_(i)
        for reader, pieces in enumerate(tensor.pieces):
            for index in pieces:
                for i, count in enumerate(owner[index].flatten().bincount(minlength=owners).tolist()):
                    expected[reader, i] += count
    assert traffic(served, owners) == +expected


class Reports:
    """An engine that reports the given checksums as those of its weights."""

    def __init__(self, ranks: list[dict[str, str]]) -> None:
        self._ranks = [{"checksums": checksums} for checksums in ranks]

    def weights_checker(self, skip_tensor_list: list[str] | None) -> dict[str, Any]:
        return {"ranks": self._ranks}


def test_a_lost_push_does_not_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(folder, "cpu", 1, 1, 2, torch.float32, torch.bfloat16, "named", "in_place", 1, 1, 1, 0.0, {})
    monkeypatch.setattr(torch.distributed, "new_group", lambda backend: None)
    rank: Any = _Rank(0, job, torch.device("cpu"), None)  # type: ignore[arg-type]
    tensors = [(name, parameter.detach()) for name, parameter in rank._model.named_parameters()]
    sums = expected_checksums(rank._served, tensors, torch.bfloat16)
    rank._check(Reports(sums))
    write_parameters(rank._model, 0)
    with pytest.raises(AssertionError, match="differ from the trainer's"):
        rank._check(Reports(sums))


# -- whole runs ------------------------------------------------------------------------------------------------


def figures(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["name"]: line for line in lines}


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_pushes_are_measured_and_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "_QUIET_SECONDS", 0.2)
    weight_sync.main(["--updates", "3", "--warmup", "2", "--generate", "2", "--interval", "0.05", "--leaks"])
    found = figures(capsys)
    push = found["push"]
    assert push["checked"] == push["updates"] == 3
    assert push["bytes"] == sum(p.numel() * 4 for p in _tiny_parameters())
    assert 0 < push["median_ms"] <= push["worst_ms"]
    assert push["ratio"] == pytest.approx(push["median_ms"] / push["limit_ms"], rel=0.05)
    assert found["token_gap"]["push"]["count"] > 0
    assert found["lost_requests"]["value"] == found["lost_requests"]["restarted"] == 0
    assert "leak" in found


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_two_engines_read_all_shards(capsys: pytest.CaptureFixture[str]) -> None:
    weight_sync.main(["--updates", "2", "--warmup", "1", "--trainer-ranks", "2", "--engines", "2"])
    push = figures(capsys)["push"]
    assert push["checked"] == push["updates"] == 2


def test_engines_that_do_not_divide_the_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        weight_sync.main(["--trainer-ranks", "3", "--engines", "2"])
    assert "--engines must divide" in capsys.readouterr().err


def _tiny_parameters() -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM, Qwen3Config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPES["tiny"], tie_word_embeddings=False))
    return list(model.parameters())


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("real_processes")  # with forks, the counted memory would be shared
@pytest.mark.parametrize(
    "more",
    [[], ["--tp", "2", "--keep-graphs"], ["--tp", "2", "--trainer-ranks", "2"]],
    ids=["plain", "tp2-keep-graphs", "fsdp2-tp2"],
)
def test_colocated_cycles_pass_and_are_measured(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    colocated.main(["--cycles", "2", *more])
    found = figures(capsys)
    assert found["colocated_push"]["cycles"] == 2
    assert all(found[f"colocated_{phase}"]["limit"] > 0 for phase in ("push", "train"))
    assert found["colocated_freed_bytes"]["value"] > 15e6


def test_memory_that_stays_taken_is_noticed() -> None:
    class Engine:
        def get_server_info(self) -> dict[str, Any]:
            return {"internal_states": [{"memory": {"weight_bytes": 10**9, "kv_cache_bytes": 0}}]}

        def release_memory_occupation(self, tags: list[str] | None) -> None: ...

    cycle: Any = colocated.Cycle(Engine(), torch.nn.Linear(1, 1), torch.device("cpu"), [])  # type: ignore[arg-type]
    cycle.resident_bytes = lambda: 2 * 10**9
    with pytest.raises(AssertionError, match="not free"):
        cycle.run()


@pytest.mark.parametrize("benchmark", [weight_sync, colocated])
def test_8b_on_cpu_is_refused(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--shape", "8b"])
    assert "--shape 8b needs a GPU" in capsys.readouterr().err
