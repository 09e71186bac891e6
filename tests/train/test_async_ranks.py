"""Two ranks train the groups that rank 0 plays, and end together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.torchrun import run_ranks
from tests.train import async_ranks
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.watch.run_files import read_evaluations, read_events, read_metrics
from verl_server.watch.run_records import GroupDone

STEPS = 4
SETTINGS = ["--env-url", "http://nowhere", "--no-chat", "--device", "cpu", "--steps", str(STEPS), "--retry-pause", "0"]
SETTINGS += ["--grpo.groups", "3", "--grpo.group-size", "4", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1", "--save-timeout", "20", "--stop-on", "none"]
SETTINGS += ["--max-staleness", "1"]


def play(fault: str, ranks: int, model: Path, out: Path, *more: str) -> tuple[list[int | None], str]:
    """Return (exit status of each rank, log)."""
    arguments = [fault, "--model-path", str(model), "--out", str(out), *SETTINGS, *more]
    if ranks == 1:
        return [async_ranks.main(arguments)], ""
    log = out.with_suffix(".log")
    return run_ranks(ranks, "tests.train.async_ranks", arguments, log, timeout=60), log.read_text()


def fates(out: Path) -> list[int]:
    return sorted(event.group for event in read_events(out) if isinstance(event, GroupDone))


def trained(out: Path, rank: int) -> list[tuple[int, int, int]]:
    """Return (step, group, member) of what a rank trained."""
    records = [json.loads(line) for line in (out / f"trained-rank{rank}.jsonl").read_text().splitlines()]
    return [(record["step"], record["group"], record["member"]) for record in records]


def test_the_samples_are_divided_over_the_ranks(policy_folder: Path, tmp_path: Path) -> None:
    """Two ranks train the same samples with the same result as one."""
    for ranks in (1, 2):
        codes, log = play("none", ranks, policy_folder, tmp_path / str(ranks))
        assert codes == [0] * ranks, log[-6000:]
        assert fates(tmp_path / str(ranks)) == list(range(3 * STEPS))
    one, (first, second) = trained(tmp_path / "1", 0), (trained(tmp_path / "2", rank) for rank in (0, 1))
    assert sorted(first + second) == sorted(one) and len(one) == 4 * 3 * STEPS
    for step in range(STEPS):
        assert abs(sum(s == step for s, _, _ in first) - sum(s == step for s, _, _ in second)) <= 2
    straight, divided = (load_file(tmp_path / ranks / "model/model.safetensors") for ranks in ("1", "2"))
    for name, weight in straight.items():
        torch.testing.assert_close(divided[name], weight, rtol=0, atol=2e-3)  # Adam's first steps magnify rounding


def test_groups_without_spread_are_replaced_for_both_ranks(policy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    codes, log = play("equal rewards", 2, policy_folder, out, "--grpo.refill", "3")
    assert codes == [0, 0], log[-6000:]
    metrics = list(read_metrics(out))
    assert all(line["kept"] == 12 and line["groups"] == 3 + line["refilled_groups"] for line in metrics)
    used = [group for rank in (0, 1) for _, group, _ in trained(out, rank)]
    assert (
        len(used) == 4 * 3 * STEPS and all(group % 2 for group in used) and all(trained(out, rank) for rank in (0, 1))
    )
    replaced = sum(line["refilled_groups"] for line in metrics)
    assert replaced > 0 and fates(out) == list(range(3 * STEPS + replaced))


ENDS = {
    "SIGTERM in a wait": (143, "The run was stopped by SIGTERM"),
    "SIGTERM, but a batch is ready": (143, "The run was stopped by SIGTERM"),
    "error": (1, "The episodes cannot be played."),
}


@pytest.mark.parametrize("fault", ENDS)
def test_what_ends_one_rank_ends_both_and_saves(policy_folder: Path, tmp_path: Path, fault: str) -> None:
    """The signal reaches the last rank, the error comes from the rollouts of the first one."""
    status, text = ENDS[fault]
    out = tmp_path / "run"
    codes, log = play(fault, 2, policy_folder, out)
    assert codes == [status] * 2, log[-6000:]
    assert text in log and "--resume continues the run" in log and "Traceback" not in log, log[-6000:]
    checkpoint = latest_checkpoint(out)
    assert checkpoint is not None
    progress = check_checkpoint(checkpoint)
    assert (progress.next_step, progress.version) == (2, 2)
    assert sorted([*fates(out), *(progress.undone_groups or [])]) == list(range(progress.next_group or 0))
    codes, log = play("none", 2, policy_folder, out, "--resume")
    assert codes == [0, 0], log[-6000:]
    assert fates(out) == list(range(3 * STEPS))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_wait_for_an_evaluation_together(policy_folder: Path, tmp_path: Path, ranks: int) -> None:
    out = tmp_path / "run"
    codes, log = play("none", ranks, policy_folder, out, "--eval-every", "2", "--eval-tasks", "5")
    assert codes == [0] * ranks, log[-6000:]
    found = [(e.step, e.version.partition("@")[0], e.episodes, e.incomplete) for e in read_evaluations(out)]
    assert found == [(step, str(step), 5, None) for step in (0, 2, 4)]
    assert fates(out) == list(range(3 * STEPS))


def test_rollouts_that_cannot_start_end_both_ranks_with_their_error(policy_folder: Path, tmp_path: Path) -> None:
    codes, log = play("launch", 2, policy_folder, tmp_path / "run")
    assert codes == [1, 1] and "The agent is wrong." in log and "Traceback" not in log, log[-6000:]
    assert "another rank of this VerlEngine ended" not in log
