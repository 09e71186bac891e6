"""If the power fails at any time of a save, the folder has the old or the new state, whole, and the run can go on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.support.power_loss import Disk, Recording, recorded
from tests.train.conftest import make_writer
from tests.train.test_checkpoint_writer import Run
from tests.train.test_checkpoints import load, make_trainer, save, train
from tests.train.test_evaluations import evaluated
from tests.train.test_kept_checkpoints import with_checkpoints
from verl_server.errors import BadRequestError
from verl_server.files import durable
from verl_server.files.durable import discard, write_file
from verl_server.files.run_output import store_settings, stored_settings
from verl_server.models.tiny import make_model_folder
from verl_server.train import checkpoints, kept_checkpoints, run_folder
from verl_server.train.checkpoints import check_checkpoint, checkpoints_of, latest_checkpoint, step_of
from verl_server.train.demo import make_policy_folder
from verl_server.train.forks import fork_checkpoint
from verl_server.train.kept_checkpoints import remove_old_checkpoints
from verl_server.train.policy import save_policy
from verl_server.train.run_end import Progressing
from verl_server.train.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_rank")

SETTINGS = {"command": "train.grpo", "seed": 1}
RUN = Path("new/folders/run")


@pytest.fixture(scope="module")
def small_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy of few bytes, because they are written to hundreds of disks."""
    folder = make_policy_folder(tmp_path_factory.mktemp("small"), seed=0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 1}
    return make_model_folder(folder, "qwen3", vocab_size=40, num_attention_heads=1, **shape)


def train_and_save(policy: Path, disk: Path, *, keep: int = 1, in_background: bool = False) -> Recording:
    """Train three steps with a checkpoint after each, of which the first is the best.

    With `in_background`, each checkpoint is written while the next step trains.
    """
    disk.mkdir()
    out = disk / RUN
    trainer = make_trainer(policy)
    with recorded(disk) as recording:
        folder = RunFolder(out, lambda: SETTINGS)
        folder.open(resume=False)
        folder.begin()
        recording.mark("begun")
        writer = make_writer(Run(trainer, []), out, keep=keep, note=lambda event: recording.mark(event.name[11:]))
        for step in (1, 2, 3):
            train(trainer, step - 1, step)
            if in_background:
                writer.begin(Progressing(step, step))
                writer.when_saved(functools.partial(evaluated, out, step, 1 / step))
            else:
                save(trainer, out, step)
                recording.mark(str(step))
                evaluated(out, step, 1 / step)
                remove_old_checkpoints(out, keep)
        writer.close()
        folder.close()
    return recording


def check(disk: Disk, out: Path) -> None:
    """Check that no checkpoint with a name is broken, and that the newest that was saved is there."""
    if "begun" in disk.marks:
        assert stored_settings(out / "run.json") == SETTINGS
    saved = max((int(mark) for mark in disk.marks if mark.isdecimal()), default=0)
    found = sorted(step_of(folder) for folder in checkpoints_of(out))
    for step in found:
        assert check_checkpoint(out / f"checkpoint-{step}").next_step == step
    assert max(found, default=0) in (saved, saved + 1)
    assert saved < 2 or 1 in found, "the best one"
    if found:
        assert RunFolder(out, lambda: SETTINGS).resume() == latest_checkpoint(out)


def failures(recording: Recording, there: Path) -> list[str]:
    """Return what is wrong with the disks of a run: what, and which disk."""
    found, count = [], 0
    for disk in recording.disks():
        count += 1
        disk.write_to(there)
        try:
            check(disk, there / RUN)
        except (AssertionError, BadRequestError) as error:
            found.append(f"{error}: {disk}")
    assert count > 60, "too few disks"
    return found


def test_a_checkpoint_is_whole_or_has_no_name(small_policy: Path, tmp_path: Path) -> None:
    recording = train_and_save(small_policy, tmp_path / "disk")
    assert failures(recording, tmp_path / "then") == []


def test_a_checkpoint_that_is_written_beside_the_steps_is_whole_or_has_no_name(
    small_policy: Path, tmp_path: Path
) -> None:
    recording = train_and_save(small_policy, tmp_path / "disk", in_background=True)
    assert failures(recording, tmp_path / "then") == []


def test_a_run_goes_on_from_what_is_left(small_policy: Path, tmp_path: Path) -> None:
    """It saves its next step and removes what the interruption left. One disk of each tenth operation is tried."""
    recording = train_and_save(small_policy, tmp_path / "disk")
    then, trainer = tmp_path / "then", make_trainer(small_policy)
    tried = dict[str, Disk]()
    for disk in recording.disks(samples=1):
        tried.setdefault(disk.operation, disk)
    for disk in list(tried.values())[::10]:
        disk.write_to(then)
        if (checkpoint := latest_checkpoint(then / RUN)) is None:
            continue
        step = load(trainer, checkpoint).next_step
        train(trainer, step, step + 1)
        save(trainer, then / RUN, step + 1)
        remove_old_checkpoints(then / RUN, 1)
        assert check_checkpoint(then / RUN / f"checkpoint-{step + 1}").next_step == step + 1
        assert not list((then / RUN).glob(".checkpoint*")), disk


@pytest.mark.parametrize("lacks", ["files", "folders", "the folder above", "names before removals"])
def test_a_flush_that_is_missing_is_found(
    small_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    flush = durable.flush
    lacking: dict[str, Callable[[Path], bool]] = {
        "files": lambda path: path.is_file(),
        "folders": lambda path: path.name.endswith(".partial"),
        "the folder above": lambda path: path.name == "run",
        "names before removals": lambda path: path.name == "run",
    }

    def partly(path: Path) -> None:
        if not lacking[lacks](path):
            flush(path)

    for module in (kept_checkpoints,) if lacks == "names before removals" else (durable, checkpoints, run_folder):
        monkeypatch.setattr(module, "flush", partly)
    assert failures(train_and_save(small_policy, tmp_path / "disk"), tmp_path / "then")


def test_the_copy_of_a_fork_is_whole_or_has_no_name(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with_checkpoints(tmp_path / "source", 7)
    (tmp_path / "disk").mkdir()
    with recorded(tmp_path / "disk") as recording:
        fork_checkpoint(tmp_path / "source", None, tmp_path / "disk", "train.grpo")
        recording.mark("forked")
    found = set()
    for disk in recording.disks():
        disk.write_to(tmp_path / "then")
        copies = checkpoints_of(tmp_path / "then")
        assert copies or not disk.marks, disk
        found.add(len(copies))
        assert [check_checkpoint(copy).next_step for copy in copies] in ([], [7]), disk
    assert found == {0, 1}


def test_a_model_is_the_old_one_or_the_new_one(small_policy: Path, tmp_path: Path) -> None:
    """A start restores the old one if the power failed between two renames."""
    disk_folder, there = tmp_path / "disk", tmp_path / "then"
    disk_folder.mkdir()
    trainer = make_trainer(small_policy)
    tokenizer = AutoTokenizer.from_pretrained(small_policy)
    weights = []
    with recorded(disk_folder) as recording:
        for step in range(2):
            train(trainer, step, step + 1)
            save_policy(trainer.policy, disk_folder / "model", tokenizer)
            recording.mark(str(step))
            weights.append(load_file(disk_folder / "model/model.safetensors"))
    for disk in recording.disks():
        disk.write_to(there)
        discard(there / "model")
        if not (there / "model").exists():
            assert not disk.marks, disk
            continue
        found = load_file(there / "model/model.safetensors")
        equal = [all(torch.equal(found[name], value) for name, value in known.items()) for known in weights]
        assert any(equal[len(disk.marks) - 1 :] if disk.marks else equal), disk
        assert AutoTokenizer.from_pretrained(there / "model").vocab_size == tokenizer.vocab_size, disk


def test_settings_are_the_old_ones_or_the_new_ones(tmp_path: Path) -> None:
    disk_folder, there = tmp_path / "disk", tmp_path / "then"
    disk_folder.mkdir()
    write_file(disk_folder / "run.json", b'{"old": 1}')
    with recorded(disk_folder) as recording:
        store_settings(disk_folder / "run.json", {"new": list(range(100))})
        recording.mark("stored")
    found = set()
    for disk in recording.disks():
        disk.write_to(there)
        (key,) = stored_settings(there / "run.json")
        found.add(key)
        assert key == "new" or not disk.marks, disk
    assert found == {"old", "new"}
