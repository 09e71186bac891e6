"""Two and four ranks over Gloo agree with transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.parity.harness import Reference, Sequence, spec_of
from verl_server.models.tiny import make_model_folder

ROOT = Path(__file__).parents[2]


def run_ranks(folder: Path, size: int, meet: Path) -> list[dict[str, Any]]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        fork_server.run_module(
            "tests.parity.tp_rank",
            str(rank),
            str(size),
            str(folder),
            f"file://{meet}",
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        results = [rank.communicate(timeout=90) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, errors) in zip(ranks, results, strict=True):
        assert rank.returncode == 0, errors
    printed: list[dict[str, Any]] = json.loads(results[0][0].splitlines()[-1])
    return printed


@pytest.mark.parametrize(
    ("arch", "size", "shape"),
    [
        ("qwen3", 2, {"vocab_size": 321}),  # vocabulary padding
        # Two KV heads on four ranks, biases of row-sharded layers that are added once, and a tied head.
        ("llama", 4, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_ranks_agree_with_the_reference(arch: Any, size: int, shape: dict[str, Any], tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", arch, **shape)
    reference = Reference(folder)
    for result in run_ranks(folder, size, tmp_path / "meet"):
        sequence = Sequence(0, spec_of(result["prompt"]))
        sequence.spec.output_ids, sequence.logprobs = result["output"], result["logprobs"]
        assert len(sequence.spec.output_ids) >= 12
        reference.check(sequence)
