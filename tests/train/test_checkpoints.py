"""A resumed run ends with exactly the weights of a run that was not interrupted, and no run is overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.train.batches import Sample
from verl_server.train.checkpoints import (
    Progress,
    _checksum,
    latest_checkpoint,
    save_checkpoint,
    write_progress,
)
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.metrics import describe_rollout
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.rollout_report import RolloutReport
from verl_server.train.run_end import Progressing
from verl_server.train.run_folder import RunFolder
from verl_server.train.run_writer import RunWriter

CPU = torch.device("cpu")
CONFIG = GRPOConfig(epochs=2, minibatches=3, learning_rate=1e-2, warmup_steps=3, seed=7)

pytestmark = pytest.mark.usefixtures("one_rank")


def make_trainer(policy_folder: Path, dtype: torch.dtype = torch.float32) -> PolicyTrainer:
    return PolicyTrainer(load_policy(str(policy_folder), CPU, compute_dtype=dtype), CONFIG, 4, CPU)


def train(trainer: PolicyTrainer, first: int, last: int) -> None:
    for step in range(first, last):
        samples = [
            Sample(make_trajectory(0, 1.0, 2 + i % 4, seed=10 * step + i), 0.5 if i % 2 else -0.5) for i in range(8)
        ]
        trainer.update(samples, step)


def save(trainer: PolicyTrainer, out: Path, step: int) -> Path:
    return save_checkpoint(out, trainer.state.models, trainer.state.progress(Progressing(step, step)))


def load(trainer: PolicyTrainer, folder: Path) -> Progress:
    return trainer.state.load(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_resumed_run_is_the_run(policy_folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    straight, interrupted, resumed = (make_trainer(policy_folder, dtype) for _ in range(3))
    for trainer in (straight, interrupted):
        if dtype == torch.float16:  # the scale is another one than that of a new run, and it grows in step 1
            state = trainer.scaling.state_dict() or {}
            trainer.scaling.load_state_dict(state | {"scale": 64.0, "growth_interval": 9})
    train(straight, 0, 2)
    train(interrupted, 0, 1)
    save(interrupted, tmp_path, 1)
    folder = latest_checkpoint(tmp_path)
    assert folder is not None
    progress = load(resumed, folder)
    assert (progress.next_step, progress.version) == (1, 1)
    assert resumed.scaling.scale == (64.0 if dtype == torch.float16 else None)
    train(resumed, 1, 2)
    assert resumed.scaling.scale == straight.scaling.scale == (128.0 if dtype == torch.float16 else None)
    for (name, ours), (_, theirs) in zip(resumed.policy.named_weights(), straight.policy.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_before_the_first_update(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    folder = save(trainer, tmp_path, 3)
    resumed = make_trainer(policy_folder)
    assert load(resumed, folder).next_step == 3
    train(trainer, 3, 4)
    train(resumed, 3, 4)
    pairs = zip(trainer.policy.parameters(), resumed.policy.parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_checkpoint_without_a_loss_scale_starts_with_the_first_one(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    train(trainer, 0, 1)
    folder = save(trainer, tmp_path, 1)
    stored = json.loads((folder / "run.json").read_text()).keys()
    assert stored == {"next_step", "version", "has_optimizer_state", "files", "checksum"}
    resumed = make_trainer(policy_folder, torch.float16)
    load(resumed, folder)
    train(resumed, 1, 2)
    assert (resumed.scaling.scale, resumed.steps.applied) == (2.0**16, 6)
    with_scale = save(resumed, tmp_path, 2)
    plain = make_trainer(policy_folder)
    load(plain, with_scale)
    train(plain, 2, 3)
    assert plain.scaling.scale is None and plain.steps.applied == 6


def test_an_interrupted_save_does_not_count(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    first = save(trainer, tmp_path, 9)
    (tmp_path / ".checkpoint-10.partial").mkdir()  # as a save that was interrupted leaves it
    assert latest_checkpoint(tmp_path) == first
    second = save(trainer, tmp_path, 10)
    assert latest_checkpoint(tmp_path) == second
    assert sorted(tmp_path.glob("*checkpoint-*")) == [second, first]


def empty(file: Path) -> None:
    file.write_bytes(b"")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def flip_a_digit(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b'"version": 5', b'"version": 4'))


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("run.json", Path.unlink, "Cannot read .*run.json"),
        ("run.json", empty, "run.json is not valid JSON"),
        ("run.json", cut, "run.json is not valid JSON"),
        ("run.json", flip_a_digit, "the checksum of .*run.json is wrong"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("__0_0.distcp", cut, r"__0_0.distcp has [\d,]+ bytes instead of [\d,]+"),
        ("__0_0.distcp", flip, "the checksum of .*__0_0.distcp is wrong"),
        (".metadata", flip, "the checksum of .*.metadata is wrong"),
        (".metadata", empty, r".metadata has 0 bytes instead of [\d,]+"),
    ],
)
def test_a_file_that_was_lost_or_damaged_is_named(
    policy_folder: Path, tmp_path: Path, file: str, damage: Callable[[Path], None], says: str
) -> None:
    trainer = make_trainer(policy_folder)
    folder = save(trainer, tmp_path, 5)
    damage(folder / file)
    with pytest.raises(BadRequestError, match=f"checkpoint-5 cannot be continued: .*{says}.* there is no earlier one"):
        RunFolder(tmp_path).resume()
    (tmp_path / "checkpoint-4").mkdir()
    with pytest.raises(BadRequestError, match="remove the folder to continue from checkpoint-4"):
        RunFolder(tmp_path).resume()
    assert save(trainer, tmp_path, 5) == folder
    assert load(trainer, folder).next_step == 5


def test_a_checkpoint_gets_its_name_when_it_is_on_the_disk(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(policy_folder)
    save(trainer, tmp_path, 1)
    calls: list[str] = []
    fsync, rename = os.fsync, os.replace

    def note_fsync(fd: int) -> None:
        calls.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def note_rename(old: Path, new: Path) -> None:
        calls.append(f"rename {Path(new).name}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_rename)
    save(trainer, tmp_path, 2)
    renamed = calls.index("rename checkpoint-2")
    assert {"fsync run.json", "fsync __0_0.distcp", "fsync .checkpoint-2.partial"} <= set(calls[:renamed])
    assert calls[renamed + 1 :] == [f"fsync {tmp_path.name}"]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.start()
    folder.start()  # accepted, because the folder is still empty
    record(tmp_path / "run", 1)
    with pytest.raises(BadRequestError, match=r"run already holds a run \(metrics.jsonl.*\)\. Name another folder"):
        folder.start()
    with pytest.raises(BadRequestError, match=r"nothing to resume in .*run: it contains no finished checkpoint"):
        folder.resume()
    (tmp_path / "run/checkpoint-1").mkdir()
    with pytest.raises(BadRequestError, match="Continue it with --resume, or name another folder with --out"):
        folder.start()


def record(path: Path, steps: int) -> None:
    files = RunWriter(path, "00000001")
    for step in range(steps):
        files.record(describe_rollout(RolloutReport(), step=step, version="0", ranks=1, gap=None))


def recorded(path: Path, steps: int) -> RunFolder:
    """Return a folder with steps and a checkpoint behind them."""
    folder = RunFolder(path)
    folder.start()
    record(path, steps)
    (path / f"checkpoint-{steps}").mkdir()
    write_progress(path / f"checkpoint-{steps}", Progress(steps, steps))
    return folder


def test_steps_that_the_metrics_lost_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = recorded(tmp_path, 4)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + lines[3][:20])
    folder.resume()
    assert "metrics.jsonl lacks 3 of the 4 steps before checkpoint-4: 1, 2, 3" in caplog.text
    (tmp_path / "metrics.jsonl").unlink()
    folder.resume()
    assert "lacks 4 of the 4 steps" in caplog.text


def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_removed(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 2)
    file = tmp_path / "metrics.jsonl"
    damaged = b"{broken}\n" + file.read_bytes()
    file.write_bytes(damaged)
    with pytest.raises(BadRequestError, match=r"metrics\.jsonl:1: .*damaged"):
        folder.resume()
    assert file.read_bytes() == damaged


@pytest.mark.parametrize("line", [b'{"step": 1e999}', b'{"step": -1}', b"[" * 100_000, b"[]", b"\xff", b"{}"])
def test_a_line_without_a_step_is_named(tmp_path: Path, line: bytes) -> None:
    folder = recorded(tmp_path, 1)
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n")
    with pytest.raises(BadRequestError, match=r"metrics\.jsonl:1: .*damaged"):
        folder.resume()


def test_a_folder_in_place_of_the_metrics_is_named(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 1)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(BadRequestError, match=r"Cannot read .*metrics\.jsonl"):
        folder.resume()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"unknown": 1}, "does not know: unknown"),
        ({"files": []}, "files of .*run.json: Expected `object`"),
        ({"files": {"a": [1]}}, "files of .*run.json: Expected `array`"),
        ({"next_step": "3"}, "run.json: Expected `int`"),
        ({"next_step": None}, "run.json: .*next_step"),
        ({"next_step": 2}, "next_step=2: the folder was renamed"),
    ],
)
def test_a_checkpoint_with_other_values_and_a_valid_checksum_is_refused(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = recorded(tmp_path, 1)
    file = tmp_path / "checkpoint-1" / "run.json"
    values = {k: v for k, v in (json.loads(file.read_text()) | changes).items() if k != "checksum"}
    file.write_text(json.dumps(values | {"checksum": _checksum(values)}))
    with pytest.raises(BadRequestError, match=f"checkpoint-1 cannot be continued: .*{says}"):
        folder.resume()


def test_an_out_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(BadRequestError, match=f"{out} cannot be a folder"):
            RunFolder(out).start()


def test_a_model_that_was_replaced_when_the_power_failed_is_there_again(tmp_path: Path) -> None:
    folder = recorded(tmp_path, 1)
    (tmp_path / ".model.before").mkdir()
    folder.resume()
    assert (tmp_path / "model").is_dir()
