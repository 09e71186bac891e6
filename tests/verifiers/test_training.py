"""GRPO on environments that verifiers plays: two steps, and an evaluation on rows of another split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from test_rollouts import SEAT, WALKS, name

from verl_server.errors import BadRequestError
from verl_server.train import async_grpo, grpo
from verl_server.train.options import TrainArgs
from verl_server.train.players import prepare

FAST = ["--device", "cpu", "--steps", "2", "--grpo.groups", "2", "--grpo.group-size", "3", "--grpo.minibatches", "1"]
FAST += ["--grpo.epochs", "1", "--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1", "--retry-pause", "0"]
FAST += ["--server.dtype", "float32", "--server.cpu-threads", "1", "--server.kv-cache-gib", "0.1"]


@pytest.mark.parametrize("trainer", [grpo, async_grpo])
def test_two_steps_of_one_turn_with_an_evaluation(trainer: Any, model: Path, tmp_path: Path) -> None:
    text = name("verl-words", {"eval": {"taskset": {"split": "test"}}})
    out = tmp_path / "run"
    evaluated = ["--eval-every", "2", "--eval-tasks", "2"]
    trainer.main(
        ["--model-path", str(model), "--tasks", text, "--out", str(out), "--max-new-tokens", "24", *FAST, *evaluated]
    )
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(step["step"], step["trajectories"], step["failed"]) for step in steps] == [(0, 6, 0), (1, 6, 0)]
    assert all(step["reward"] > 0.0 and step["logprob_gap"] < 1e-4 for step in steps)
    evaluations = [json.loads(line) for line in (out / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in evaluations] == [0, 2] and all(line["incomplete"] is None for line in evaluations)
    for line in (*steps, *evaluations):
        found = line["episode_metrics"]
        assert found.keys() == {"amount", "characters", "form"}
        assert line["reward"] == pytest.approx(found["amount"] + 0.25 * found["form"])
    assert all(line["reward"] < 0.3 for line in evaluations)  # nobody writes 100 letters with 24 tokens
    before, after = load_file(model / "model.safetensors"), load_file(out / "model" / "model.safetensors")
    assert any(not before[key].equal(after[key]) for key in before)


def test_two_steps_of_several_turns(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ["--max-new-tokens", "100", "--max-turns", "3"]
    grpo.main(["--model-path", str(model), "--tasks", name("verl-walk", WALKS), "--out", str(out), *more, *FAST])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(step["step"], step["trajectories"], step["failed"]) for step in steps] == [(0, 6, 0), (1, 6, 0)]
    assert steps[0]["stop_reasons"] == {"max_turns": 6} and steps[0]["turns"] == 3.0
    assert all(step["logprob_gap"] < 1e-4 for step in steps)  # of all sampled tokens of all turns


def test_an_evaluation_needs_rows_of_its_own(model: Path) -> None:
    args = TrainArgs(model_path=str(model), tasks=f"verifiers:verl-words?{json.dumps({'agent': SEAT})}", eval_every=1)
    with pytest.raises(BadRequestError, match="name them with `eval`"):
        prepare(args)
