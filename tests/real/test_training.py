"""GRPO trains the real model on the CPU for two minutes: server and trainer agree, rewarded tokens become likelier."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KEY, load
from reference import Reference
from test_weights import check

from verl_server import HttpServerEngineAdapter
from verl_server.rollout.environments.env_server import EnvServer

STEPS = 5
MOST_SECONDS = 400
"""Bound of the training, which takes a minute on two idle cores."""
OPTIONS = {
    "--steps": STEPS,
    "--save-every": 0,
    "--device": "cpu",
    "--max-turns": 1,
    "--max-new-tokens": 12,
    "--grpo.groups": 2,
    "--grpo.group-size": 8,
    "--grpo.epochs": 1,
    "--grpo.minibatches": 1,
    "--grpo.micro-batch-tokens": 1024,
    "--grpo.learning-rate": 5e-5,
    "--grpo.warmup-steps": 1,
    "--grpo.final-learning-rate": 1.0,
}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def digit_probability(reference: Reference, trajectory: dict[str, Any], digits: torch.Tensor) -> float:
    """Return the mean probability of a digit over the places of the sampled tokens."""
    places = [at for at, mask in enumerate(trajectory["loss_mask"]) if mask]
    logprobs = reference.logprobs(trajectory["tokens"])[torch.tensor(places) - 1]
    return float(logprobs[:, digits].exp().sum(-1).mean())


@pytest.mark.timeout(600)
def test_grpo(
    pushable: HttpServerEngineAdapter, folder: Path, reference: Reference, tokenizer: Any, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    keys = []
    for name, key in (("api-key", KEY), ("admin-api-key", str(pushable.admin_api_key))):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(key)
        keys += [f"--server.{name}-file", tmp_path / name]
    with EnvServer(f"{Path(__file__).with_name('digits.py')}:Digits") as environment:
        command = [sys.executable, "-m", "verl_server.train.grpo", "--model-path", folder, "--out", out]
        command += ["--env-url", environment.url, "--server", pushable.url, *keys]
        command += [part for option in OPTIONS.items() for part in option]
        run = subprocess.run(
            list(map(str, command)),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MOST_SECONDS,
        )
    print(run.stdout)
    assert run.returncode == 0, run.stdout

    metrics = lines(out / "metrics.jsonl")
    assert [step["skipped"] for step in metrics] == [None] * STEPS
    gaps = [step["logprob_gap"] for step in metrics]
    print("log-probability gap of each step:", gaps)
    assert max(gaps) < 1e-3

    trained = Reference(load(out / "model"))
    digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
    trajectories = lines(out / "trajectories-rank0.jsonl")[:8]
    before = sum(digit_probability(reference, each, digits) for each in trajectories) / len(trajectories)
    after = sum(digit_probability(trained, each, digits) for each in trajectories) / len(trajectories)
    print(f"probability of a digit: {before:.3f} before, {after:.3f} after the training")
    assert after > 1.2 * before

    # The server has the trained weights by the last push, and has them again from the saved folder.
    incarnation = metrics[-1]["weight_version"].partition("@")[2]
    pushed = check(pushable, trained, tokenizer, f"{STEPS}@{incarnation}")
    pushable.update_weights_from_disk(str(out / "model"), weight_version="saved")
    assert check(pushable, trained, tokenizer, "saved") == pushed
