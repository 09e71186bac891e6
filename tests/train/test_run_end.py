"""Whatever ends a run, on one rank or on two: its result is saved, every rank ends, and `--resume` continues it.

The runs are those of `faulty_run`, without servers. A resumed run must have exactly the weights of the run without a
fault, unless the fault came between two optimizer steps of one step.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.depth import at_depth
from tests.torchrun import run_ranks
from tests.train import faulty_run
from verl_server.models.tiny import make_model_folder
from verl_server.train.checkpoints import latest_checkpoint
from verl_server.train.demo import make_policy_folder
from verl_server.train.stopping import SIGNALS
from verl_server.watch.advisories import advisories_of
from verl_server.watch.run_files import read_events
from verl_server.watch.run_records import Alarm, CheckpointSaved, RunEnded

STEPS = 4
ENDS_THE_PROCESS = ("SIGTERM, but the rollout goes on", "SIGKILL in rollout", "SIGKILL in training", "two signals")
ENDS_THE_PROCESS += ("SIGKILL in a save",)
SETTINGS = ["--env-url", "http://nowhere", "--no-chat", "--device", "cpu", "--retry-pause", "0", "--steps", str(STEPS)]
SETTINGS += ["--grpo.groups", "2", "--grpo.group-size", "4", "--grpo.minibatches", "2", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1", "--save-every", "1", "--save-timeout", "20"]
SETTINGS += ["--stop-on", "none"]  # the player makes log-probabilities up


@pytest.fixture(autouse=True)
def _heeded_signals() -> Iterator[None]:
    """Heed the signals of this file's runs. Tests that were started in the background or by nohup ignore some."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


def play(
    fault: str, rank: int | str, ranks: int, model: Path, out: Path, *more: str, settings: list[str] = SETTINGS
) -> list[int | None]:
    """Run until it ends; the exit status of each rank. A run on one rank that ends in order needs no process."""
    arguments = [fault, str(rank), "--model-path", str(model), "--out", str(out), *settings, *more]
    out.mkdir(parents=True, exist_ok=True)
    if ranks == 1 and fault not in ENDS_THE_PROCESS:
        with log_of(out).open("w") as log, contextlib.redirect_stderr(log):
            return [faulty_run.main(arguments)]
    return run_ranks(ranks, "tests.train.faulty_run", arguments, log_of(out), timeout=60)


def log_of(out: Path) -> Path:
    return out.with_suffix(".log")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model/model.safetensors")


def next_step(out: Path) -> int:
    checkpoint = latest_checkpoint(out)
    assert checkpoint is not None
    return int(json.loads((checkpoint / "run.json").read_text())["next_step"])


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


class Reference:
    """The weights of runs without a fault, played once for each setting."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._played: dict[Any, dict[str, torch.Tensor]] = {}

    def model(self, tied: bool) -> Path:
        path = self._folder / f"model-{tied}"
        if not path.exists():
            make_policy_folder(path, seed=0)
            make_model_folder(path, "qwen3", tie_word_embeddings=tied, vocab_size=40, init_std=0.2)
        return path

    def weights(self, ranks: int, dtype: str, tied: bool) -> dict[str, torch.Tensor]:
        key = (ranks, dtype, tied)
        if key not in self._played:
            out = self._folder / f"straight-{ranks}-{dtype}-{tied}"
            codes = play("none", 0, ranks, self.model(tied), out, "--compute-dtype", dtype)
            assert codes == [0] * ranks, log_of(out).read_text()[-6000:]
            self._played[key] = weights(out)
        return self._played[key]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


ENDS: dict[str, int] = {
    "error": 1,
    "memory": 1,
    "keyboard": 130,
    "late error": 1,
    "SIGTERM in rollout": 143,
    "SIGINT in rollout": 130,
    "SIGHUP in rollout": 129,
    "SIGTERM in push": 143,
    "SIGINT in push": 130,
    "SIGTERM, but the rollout goes on": 143,
    "record": 1,
}
"""Fault -> exit status."""

BOTH = ("late error", "SIGTERM in rollout", "SIGTERM, but the rollout goes on")
"""Faults that are tried with one rank and with two; the others with one of them."""

CASES = [("error", 1, "bfloat16", True), ("SIGTERM in rollout", 2, "float32", True)]
"""Cases that `make test` runs. The first one could not save its result once: FSDP2 over a mesh of one."""
CASES += [
    ("error", ranks, dtype, tied)
    for ranks in (1, 2)
    for dtype in ("float32", "bfloat16")
    for tied in (True, False)
    if (ranks, dtype, tied) != (1, "bfloat16", True)
]
CASES += [(end, ranks, "float32", True) for end in BOTH for ranks in (1, 2) if (end, ranks) != (BOTH[1], 2)]
CASES += [("keyboard", 1, "float32", True), ("SIGINT in rollout", 1, "float32", True)]
CASES += [("SIGHUP in rollout", 1, "float32", True), ("SIGINT in push", 1, "float32", True)]
CASES += [("memory", 2, "float32", True), ("SIGTERM in push", 2, "float32", True), ("record", 2, "float32", True)]


@pytest.mark.parametrize(("end", "ranks", "dtype", "tied"), at_depth(CASES, quick=2))
def test_whatever_ends_a_run_saves_it(
    reference: Reference, tmp_path: Path, end: str, ranks: int, dtype: str, tied: bool
) -> None:
    """The fault is on the last rank only, so with two ranks the first one must learn of it. (Only the first rank
    records.)"""
    out, model = tmp_path / "run", reference.model(tied)
    passes = ("--compute-dtype", dtype)
    rank = 0 if end == "record" else ranks - 1
    codes = play(end, rank, ranks, model, out, *passes)
    log = log_of(out).read_text()
    assert codes == [ENDS[end]] * ranks, log[-6000:]
    assert "--resume continues the run" in log
    assert next_step(out) == (3 if end in ("late error", "record") else 2)
    saved = weights(out)
    codes = play("none", 0, ranks, model, out, *passes, "--resume")
    assert codes == [0] * ranks, log_of(out).read_text()[-6000:]
    straight, resumed = reference.weights(ranks, dtype, tied), weights(out)
    assert straight.keys() == resumed.keys() == saved.keys()
    if end != "late error":
        assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    assert steps_of(out) == [step for step in range(STEPS) if step != 2 or end not in ("late error", "record")]


@pytest.mark.parametrize("ranks", at_depth([1, 2]))
def test_an_error_before_the_first_step(reference: Reference, tmp_path: Path, ranks: int) -> None:
    out, model = tmp_path / "run", reference.model(True)
    assert play("first push", "all", ranks, model, out) == [1] * ranks
    assert next_step(out) == 0
    assert play("none", 0, ranks, model, out, "--resume") == [0] * ranks, log_of(out).read_text()[-6000:]
    straight, resumed = reference.weights(ranks, "float32", True), weights(out)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_run_without_a_step_is_not_in_the_way(reference: Reference, tmp_path: Path) -> None:
    """The first push failed. The corrected command has another seed, and begins a new run in the same folder."""
    out, model = tmp_path / "run", reference.model(True)
    assert play("first push", "all", 1, model, out) == [1]
    assert play("none", 0, 1, model, out, "--resume", "--grpo.seed", "5") == [1]
    assert "grpo.seed: was 0, is 5" in log_of(out).read_text()
    assert play("none", 0, 1, model, out, "--grpo.seed", "5") == [0], log_of(out).read_text()[-6000:]
    assert json.loads((out / "run.json").read_text())["grpo.seed"] == 5
    assert play("none", 0, 1, model, out) == [1]
    assert "already holds a run" in log_of(out).read_text()


def test_a_step_without_a_sampled_token_says_so(reference: Reference, tmp_path: Path) -> None:
    out, model = tmp_path / "run", reference.model(True)
    assert play("unsampled", "all", 1, model, out, "--max-skipped-steps", "2") == [3]
    log = log_of(out).read_text()
    assert "2 step(s) in a row had nothing to train on. Step 1: no episode has both a reward and a token" in log
    assert "in 8 of 8 episodes the policy sampled no token. No request of the agent was answered in its session" in log
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(m["unsampled"], m["reward"], m["trainable"]) for m in metrics] == [(8, None, 0)] * 2


@pytest.mark.parametrize(("ranks", "later"), at_depth([(1, 1), (2, 2), (2, 1)], quick=2))
def test_the_groups_of_a_step_that_was_killed_are_not_played_again(
    reference: Reference, tmp_path: Path, ranks: int, later: int
) -> None:
    """Rank 0 is killed between two optimizer steps. Another rank may be killed before its groups are on the disk."""
    out, model = tmp_path / "run", reference.model(True)
    codes = play("SIGKILL in training", 0, ranks, model, out)
    assert codes[0] == -signal.SIGKILL, log_of(out).read_text()[-6000:]
    assert next_step(out) == 2
    assert play("none", 0, later, model, out, "--resume") == [0] * later, log_of(out).read_text()[-6000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = {line["step"]: line["kept_groups"] for line in lines}
    assert kept[3] == 0 and kept[2] in ((2,) if ranks == 1 else (1, 2))
    straight, resumed = reference.weights(ranks, "float32", True), weights(out)
    assert ranks != later or all(torch.equal(resumed[name], straight[name]) for name in straight)


SAVE_ENDS = {"SIGTERM in a save": 143, "SIGKILL in a save": -signal.SIGKILL, "full disk in a save": 1}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("end", SAVE_ENDS)
def test_a_run_that_ends_while_a_checkpoint_is_written(
    reference: Reference, tmp_path: Path, end: str, ranks: int
) -> None:
    """Steps go on beside the save, and its end is waited for. If it has none, the checkpoint before is the result."""
    out, model = tmp_path / "run", reference.model(True)
    codes = play(end, ranks - 1 if "disk" in end else 0, ranks, model, out)
    log = log_of(out).read_text()
    assert codes[0] == SAVE_ENDS[end] and None not in codes, (codes, log[-6000:])
    names = [event.name for event in read_events(out) if isinstance(event, CheckpointSaved)]
    if end == "SIGKILL in a save":
        assert next_step(out) == 1 and names == ["checkpoint-1"] and list(out.glob(".checkpoint-2.partial"))
    elif end == "SIGTERM in a save":
        assert codes == [143] * ranks and next_step(out) == 2 and "--resume continues the run" in log
        assert names == ["checkpoint-1", "checkpoint-2"]
    else:
        assert codes == [1] * ranks and next_step(out) in (2, 3) and "--resume continues the run" in log
        assert "checkpoint-2 could not be written (OSError: [Errno 28] No space left on device)" in log
        assert "checkpoint-1 is still valid" in log and "Traceback" not in log
        assert names == ["checkpoint-1", f"checkpoint-{next_step(out)}"]
    assert play("none", 0, ranks, model, out, "--resume") == [0] * ranks, log_of(out).read_text()[-6000:]
    straight, resumed = reference.weights(ranks, "float32", True), weights(out)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)
    if end == "SIGKILL in a save":  # rank 0 had played the groups of the step with which the run continues
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        kept = [line["kept_groups"] for line in lines if line["incarnation"] == lines[-1]["incarnation"]]
        assert kept[0] >= (2 if ranks == 1 else 1) and sum(kept[1:]) == 0, kept


def test_ppo_keeps_the_groups_of_a_step_that_was_killed(reference: Reference, tmp_path: Path) -> None:
    settings = [setting.replace("--grpo.", "--ppo.") for setting in SETTINGS] + ["--ppo.critic-warmup-steps", "0"]
    model = reference.model(True)
    straight, out = tmp_path / "straight", tmp_path / "run"
    assert play("none", 0, 1, model, straight, settings=settings) == [0], log_of(straight).read_text()[-6000:]
    codes = play("SIGKILL in training", 0, 1, model, out, settings=settings)
    assert codes == [-signal.SIGKILL] and next_step(out) == 2, log_of(out).read_text()[-6000:]
    assert play("none", 0, 1, model, out, "--resume", settings=settings) == [0], log_of(out).read_text()[-6000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["kept_groups"] for line in lines if line["step"] >= 2] == [2, 0]
    expected, resumed = weights(straight), weights(out)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


KEPT = {"torn": 1, "disk": 1, "SIGKILL in rollout": -signal.SIGKILL, "two signals": -signal.SIGTERM}
"""Faults after which the last checkpoint is the result, with the exit status of the rank that has it."""


@pytest.mark.parametrize(
    ("end", "ranks"), at_depth([("disk", 1), *((e, r) for e in KEPT for r in (1, 2) if (e, r) != ("disk", 1))])
)
def test_the_last_checkpoint_stays(reference: Reference, tmp_path: Path, end: str, ranks: int) -> None:
    """A rank is gone, an optimizer step failed halfway, the disk is full, or the user sent a second signal."""
    out, model = tmp_path / "run", reference.model(True)
    rank = 0 if end == "two signals" else ranks - 1
    codes = play(end, rank, ranks, model, out)
    log = log_of(out).read_text()
    assert codes[rank] == KEPT[end] and None not in codes, (codes, log[-6000:])
    assert all(code for code in codes)
    if end in ("torn", "disk"):
        assert "so the last checkpoint is the result" in log
    assert next_step(out) == 2
    assert not list(out.glob(".checkpoint-3*")) and not list(out.glob(".model*"))
    assert play("none", 0, ranks, model, out, "--resume") == [0] * ranks, log_of(out).read_text()[-6000:]
    straight, resumed = reference.weights(ranks, "float32", True), weights(out)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize("ranks", at_depth([1, 2]))
def test_a_gap_ends_the_run_before_it_trains(reference: Reference, tmp_path: Path, ranks: int) -> None:
    """The player's log-probabilities are not those of the policy. The run ends with a status of its own."""
    out, model = tmp_path / "run", reference.model(True)
    assert play("none", 0, ranks, model, out, "--stop-on", "logprob_gap") == [4] * ranks
    log = log_of(out).read_text()
    assert "Step 0: log-probabilities of server and trainer differ: mean" in log
    assert "Likely causes: server and trainer compute in different dtypes" in log
    assert "--resume continues the run" in log and "Traceback" not in log
    assert next_step(out) == 0
    assert play("none", 0, ranks, model, out, "--resume") == [0] * ranks
    straight, resumed = reference.weights(ranks, "float32", True), weights(out)
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize("ranks", at_depth([1, 2], quick=2))
def test_an_advisory_ends_the_run_and_saves_it(reference: Reference, tmp_path: Path, ranks: int) -> None:
    """All rewards are equal, which is sure after three steps. Rank 0 judges, and all ranks end alike."""
    out, model = tmp_path / "run", reference.model(True)
    stop = ("--stop-on", "groups_without_spread", "failed", "--save-every", "0")
    assert play("equal", "all", ranks, model, out, *stop) == [5] * ranks, log_of(out).read_text()[-6000:]
    log = log_of(out).read_text()
    assert "Step 2: every episode of the last 3 steps has the reward 0" in log and "Traceback" not in log
    assert "Remedy: Play one episode by hand" in log and "--resume continues the run" in log
    assert next_step(out) == 3 and steps_of(out) == [0, 1, 2]
    *_, alarm, saved, ended = read_events(out)
    assert isinstance(alarm, Alarm) and (alarm.name, alarm.step, alarm.stops) == ("groups_without_spread", 2, True)
    assert (alarm.figure, alarm.bound, alarm.severity) == (1.0, 0.5, "error") and alarm.cause and alarm.remedy
    assert isinstance(saved, CheckpointSaved) and isinstance(ended, RunEnded) and ended.exit_status == 5
    assert ("groups_without_spread", 2) in [(advisory.name, advisory.step) for advisory in advisories_of(out)]
    assert play("none", 0, ranks, model, out, "--resume") == [0] * ranks, log_of(out).read_text()[-6000:]


def test_an_advisory_that_is_not_named_only_warns(reference: Reference, tmp_path: Path) -> None:
    out, model = tmp_path / "run", reference.model(True)
    assert play("equal", "all", 1, model, out, "--stop-on", "failed") == [0]
    alarms = [event for event in read_events(out) if isinstance(event, Alarm) and event.name != "logprob_gap"]
    assert [(alarm.step, alarm.stops) for alarm in alarms] == [(2, False)]
