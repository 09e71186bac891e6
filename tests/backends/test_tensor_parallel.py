"""A trainer of two FSDP2 ranks pushes shard by shard to an engine of two tensor-parallel ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.backends import tensor_parallel_ranks
from tests.backends.conftest import OTHERS
from tests.backends.served import TOLERANCE
from tests.torchrun import torchrun

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("engine", OTHERS)
def test_the_engine_serves_what_the_ranks_trained(
    folders: dict[str, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, model: str
) -> None:
    cores = sorted(os.sched_getaffinity(0))
    # SGLang allows as many ranks as a machine has NUMA nodes, unless the cores of each rank are named.
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
    torchrun(2, "tests.backends.tensor_parallel_ranks", engine, folders[model][0], results=tmp_path, timeout=240)
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 2, (tmp_path / "log").read_text()[-4000:]
    ranks = [json.loads(file.read_text()) for file in files]
    assert ranks[0] == ranks[1], "generate returns the same on every rank"
    for update, found in enumerate(ranks[0]):
        assert found["tokens"] == found["expected"], f"after update {update}"
        assert found["difference"] < TOLERANCE[engine]
    assert [found["version"] for found in ranks[0]][1:] == ["v1", "v2", "v3"]
    assert len({tuple(found["tokens"]) for found in ranks[0]}) == tensor_parallel_ranks.UPDATES + 1
