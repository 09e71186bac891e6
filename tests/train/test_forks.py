"""A run that begins from another run's checkpoint goes on as that run would, and only reads its folder."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train import async_ranks, faulty_run
from tests.train.test_evaluations import evaluated
from tests.train.test_kept_checkpoints import steps, with_checkpoints
from tests.train.test_run_end import SETTINGS, play, weights
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.train import forks
from verl_server.train.checkpoints import Progress, _checksum, check_checkpoint, latest_checkpoint, write_progress
from verl_server.train.demo import make_policy_folder
from verl_server.train.forks import find_checkpoint, fork_checkpoint
from verl_server.train.options import TrainArgs
from verl_server.train.run_folder import RunFolder
from verl_server.watch.run_files import read_events, read_metrics
from verl_server.watch.run_records import GroupDone, RunResumed, RunStarted

SYNC, ASYNC = "train.grpo", "train.async_grpo"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return with_checkpoints(tmp_path / "source", 10, 20, 30)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def listed(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_copy_is_the_checkpoint_and_the_source_is_only_read(source: Path, out: Path) -> None:
    before = listed(source)
    forked = fork_checkpoint(source, 20, out, SYNC)
    assert (forked.source, forked.checkpoint, forked.version) == (source / "checkpoint-20", out / "checkpoint-20", "20")
    assert check_checkpoint(out / "checkpoint-20").next_step == 20
    assert listed(source) == before and [path.name for path in out.iterdir()] == ["checkpoint-20"]


def test_the_newest_or_the_best_checkpoint(source: Path, out: Path) -> None:
    assert find_checkpoint(source, None, out).name == "checkpoint-30"
    with pytest.raises(BadRequestError, match=r"no checkpoint that was evaluated\. Steps to name .* 10, 20, 30"):
        find_checkpoint(source, "best", out)
    for step, reward in ((10, 0.5), (30, 0.25), (40, 1.0)):
        evaluated(source, step, reward)
    assert find_checkpoint(source, "best", out).name == "checkpoint-10"


def test_what_does_not_exist_is_named(source: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"no checkpoint of step 15\. Steps to name with --fork-step: 10, 20, 30"):
        find_checkpoint(source, 15, out)
    with pytest.raises(BadRequestError, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere", None, out)
    with pytest.raises(BadRequestError, match=f"has no checkpoint. Name its run: --fork {source} --fork-step 20"):
        find_checkpoint(source / "checkpoint-20", None, out)
    with pytest.raises(BadRequestError, match=r"has no checkpoint\. Name another run"):
        find_checkpoint(tmp_path, None, out)
    with pytest.raises(BadRequestError, match="is the folder of --out"):
        find_checkpoint(source, None, source)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "shard").write_text("other weights"), "the checksum of .*shard is wrong"),
        (lambda folder: (folder / "shard").unlink(), "No such file .*shard"),
        (lambda folder: (folder / "run.json").write_text("{"), "run.json is not valid JSON"),
        (lambda folder: (folder / "run.json").unlink(), "Cannot read .*run.json"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(source: Path, out: Path, damage: Any, says: str) -> None:
    damage(source / "checkpoint-20")
    with pytest.raises(BadRequestError, match=f"checkpoint-20 cannot be forked: .*{says}"):
        fork_checkpoint(source, 20, out, SYNC)
    assert list(out.iterdir()) == []


def test_a_file_outside_of_the_checkpoint_is_not_copied(source: Path, out: Path) -> None:
    folder = source / "checkpoint-20"
    (source / "secret").write_text("a file of the run")
    values = json.loads((folder / "run.json").read_text())
    del values["checksum"]
    values["files"]["../secret"] = [1, "00000000"]
    (folder / "run.json").write_text(json.dumps(values | {"checksum": _checksum(values)}))
    with pytest.raises(BadRequestError, match=r"lists \.\./secret, which is not in its folder"):
        fork_checkpoint(source, 20, out, SYNC)


def test_a_checkpoint_that_its_run_removes_meanwhile_is_named(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed_first(folder: Path, *_: Any) -> None:
        shutil.rmtree(folder)
        raise FileNotFoundError("shard")

    monkeypatch.setattr(forks, "_copy", removed_first)
    with pytest.raises(BadRequestError, match=r"checkpoint-10 was removed while it was read.*fork-step: 20, 30"):
        fork_checkpoint(source, 10, out, SYNC)
    assert list(out.iterdir()) == []


def test_an_asynchronous_run_is_not_forked_by_the_synchronous_trainer(source: Path, out: Path) -> None:
    (source / "checkpoint-30/run.json").unlink()
    write_progress(source / "checkpoint-30", Progress(30, 30, next_group=99, undone_groups=[88]))
    with pytest.raises(BadRequestError, match=r"asynchronous run.*verl_server\.train\.async_grpo: --max-staleness 0"):
        fork_checkpoint(source, 30, out, SYNC)
    assert fork_checkpoint(source, 30, out, ASYNC).checkpoint.exists()


def test_a_synchronous_run_with_a_refill_is_forked_by_both_trainers(source: Path, tmp_path: Path) -> None:
    """It has a position, too, but its groups are trained in their order."""
    (source / "checkpoint-30/run.json").unlink()
    write_progress(source / "checkpoint-30", Progress(30, 30, next_group=99))
    for command in (SYNC, ASYNC):
        out = tmp_path / command
        out.mkdir()
        assert check_checkpoint(fork_checkpoint(source, 30, out, command).checkpoint).first_group(2) == 99


def test_a_command_that_did_not_begin_leaves_nothing_that_blocks_the_next_one(source: Path, out: Path) -> None:
    def folder() -> RunFolder:
        return RunFolder(out, lambda: {"command": SYNC}, lambda: fork_checkpoint(source, 20, out, SYNC))

    refused = folder()
    assert refused.open(resume=False) == str(out / "checkpoint-20")
    refused.close()
    assert steps(out) == []
    begun = folder()
    begun.open(resume=False)
    begun.begin()
    begun.close()
    assert steps(out) == [20] and json.loads((out / "run.json").read_text())["fork_step"] == 20
    (out / "model").mkdir()  # the first push has failed
    again = folder()
    again.open(resume=False)
    again.close()
    assert steps(out) == [20]
    again.open(resume=False)
    again.begin()
    again.close()
    assert steps(out) == [20] and not (out / "model").exists()


def test_options_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(BadRequestError, match=r"--resume continues the run in --out.*remove --fork"):
        TrainArgs("m", env_url="http://e", fork=Path("run"), resume=True)
    with pytest.raises(BadRequestError, match="--fork-step is a step of another run"):
        TrainArgs("m", env_url="http://e", fork_step=3)


# -- whole runs, without servers ----------------------------------------------------------------------------------


def train(kind: Any, model: Path, out: Path, *more: str) -> int:
    fault = ("none", "0") if kind is faulty_run else ("none",)
    status: int = kind.main([*fault, "--model-path", str(model), "--out", str(out), *SETTINGS, *more])
    return status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy_folder(tmp_path_factory.mktemp("model"), seed=0)


def test_a_fork_goes_on_as_the_run_would_and_can_be_resumed(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight, forked = tmp_path / "straight", tmp_path / "forked"
    assert train(faulty_run, model, straight, "--keep-checkpoints", "9") == 0
    assert steps(straight) == [1, 2, 3, 4]
    before = listed(straight)
    fork = ["--fork", str(straight), "--fork-step", "2"]
    assert train(faulty_run, model, forked, *fork, "--steps", "3", "--grpo.learning-rate", "0.5") == 0
    assert steps(forked) == [2, 3] and latest_checkpoint(forked) == forked / "checkpoint-3"
    shutil.rmtree(forked / "checkpoint-3")  # the run goes on from the copy, and with the settings of the fork
    assert train(faulty_run, model, forked, "--resume", "--grpo.learning-rate", "0.5") == 0
    assert "lacks" not in caplog.text
    assert any(not torch.equal(a, b) for a, b in zip(*(weights(o).values() for o in (forked, straight)), strict=True))
    shutil.rmtree(forked)
    assert train(faulty_run, model, forked, *fork) == 0
    for name, value in weights(straight).items():
        assert torch.equal(weights(forked)[name], value), name
    assert [line["step"] for line in read_metrics(forked)] == [2, 3]
    assert listed(straight) == before
    (start,) = (event for event in read_events(forked) if isinstance(event, RunStarted | RunResumed))
    assert isinstance(start, RunStarted) and start.next_step == 2
    assert start.forked_from == str(straight / "checkpoint-2")
    source = next(read_events(straight)).incarnation
    assert start.forked_version == f"2@{source}" and start.incarnation != source


def test_a_model_of_another_shape_is_refused_and_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    assert train(faulty_run, model, out, "--steps", "1") == 0
    make_policy_folder(other, seed=0)
    make_model_folder(other, "qwen3", vocab_size=40, hidden_size=32)
    assert train(faulty_run, other, tmp_path / "forked", "--fork", str(out)) == 1
    error = capsys.readouterr().err
    assert "checkpoint-1 is of another model than --model-path: " in error and "Traceback" not in error
    assert steps(tmp_path / "forked") == []
    assert train(faulty_run, model, tmp_path / "forked", "--fork", str(out)) == 0


def test_a_fork_plays_what_a_copy_of_the_run_keeps(model: Path, tmp_path: Path) -> None:
    """The run was killed in step 2, whose two groups had finished. A fork begins as the checkpoint says, whenever."""
    out, forked, copied = tmp_path / "run", tmp_path / "forked", tmp_path / "copied"
    assert play("SIGKILL in training", 0, 1, model, out) == [-signal.SIGKILL]
    shutil.copytree(out, copied)
    assert train(faulty_run, model, forked, "--fork", str(out), "--steps", "3") == 0
    assert train(faulty_run, model, copied, "--resume", "--steps", "3") == 0
    for folder, kept in ((forked, 0), (copied, 2)):
        assert [line["kept_groups"] for line in read_metrics(folder) if line["step"] == 2] == [kept]
    assert all(torch.equal(weights(forked)[name], value) for name, value in weights(copied).items())


def fates(out: Path) -> list[int]:
    return sorted(event.group for event in read_events(out) if isinstance(event, GroupDone))


@pytest.mark.parametrize("first", [faulty_run, async_ranks])
def test_an_asynchronous_fork_trains_the_groups_that_were_not_trained(model: Path, tmp_path: Path, first: Any) -> None:
    """Each group has one fate: in the source before the checkpoint, or in the fork. A step has two groups."""
    source, forked = tmp_path / "source", tmp_path / "forked"
    assert train(first, model, source, "--steps", "4") == 0
    checkpoint = source / "checkpoint-3"
    progress = check_checkpoint(checkpoint)
    assert train(async_ranks, model, forked, "--fork", str(source), "--fork-step", "3", "--steps", "6") == 0
    if first is async_ranks:
        assert progress.next_group is not None
        rest = [*(progress.undone_groups or []), *range(progress.next_group, progress.next_group + 99)]
    else:
        rest = list(range(6, 99))
    assert fates(forked) == rest[:6]
    assert train(faulty_run, model, tmp_path / "back", "--fork", str(forked)) == 1
