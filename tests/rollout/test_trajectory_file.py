"""The file of `verl-server rollout`: one run in one file, whose settings are compared when it goes on."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollout.fakes import WordRenderer
from verl_server.cli import main
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.rollout import cli
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.cli import MAY_DIFFER, RolloutArgs, run_settings
from verl_server.rollout.environment_check import check_environment
from verl_server.rollout.trajectory import StopReason, Task, Trajectory, append_jsonl, read_jsonl
from verl_server.rollout.trajectory_file import TrajectoryFile

ARGS = RolloutArgs(server="http://one:1", environment="http://env:2")
WHERE = ["rollout", "--server", "http://127.0.0.1:9", "--environment", "http://127.0.0.1:9"]  # nothing listens there


def opened(file: Path, args: RolloutArgs = ARGS, resume: bool = False) -> TrajectoryFile:
    return TrajectoryFile(file, run_settings(args), MAY_DIFFER, resume=resume)


def ended(seed: int, reason: StopReason = StopReason.DONE) -> Trajectory:
    trajectory = Trajectory(task=Task(seed=seed, group=seed))
    trajectory.append_observation({}, [1])
    trajectory.append_output([2], [-1.0], ["0"])
    trajectory.turns[0].reward = 1.0
    trajectory.finish(reason)
    return trajectory


def written(file: Path, *trajectories: Trajectory, args: RolloutArgs = ARGS) -> None:
    output = opened(file, args)
    output.begin("the model")
    for trajectory in trajectories:
        output.add(trajectory)
    output.close()


def seeds(file: Path) -> list[int]:
    return [t.task.seed for t in read_jsonl(file)]


def test_another_runs_file_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_early(*_: Any, **__: Any) -> None:
        raise AssertionError("the server was called before the file was checked")

    monkeypatch.setattr(cli.HttpServerEngineAdapter, "attach", too_early)
    file = tmp_path / "x.jsonl"
    append_jsonl(file, [ended(0)])  # as an earlier version wrote it
    before = file.read_bytes()
    assert main([*WHERE, "--out", str(file)]) == 1
    assert "Continue that run with --resume, name another file with --out, or remove" in capsys.readouterr().err
    assert main([*WHERE, "--out", str(file), "--resume"]) == 1
    assert "x.jsonl.run.json with the settings of their run is missing" in capsys.readouterr().err
    assert main([*WHERE, "--out", str(tmp_path)]) == 1
    assert "is a folder. Name a file" in capsys.readouterr().err
    assert main([*WHERE, "--out", str(file / "below")]) == 1
    assert "cannot be a folder" in capsys.readouterr().err
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_a_refused_run_leaves_nothing_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server answers. Afterwards the same place is free, and its folders are there."""
    file = tmp_path / "a/b/x.jsonl"
    assert main([*WHERE, "--out", str(file)]) == 1
    assert capsys.readouterr().err
    assert not any(file.parent.iterdir())
    written(file, ended(0), args=dataclasses.replace(ARGS, max_turns=1))
    assert seeds(file) == [0]


def test_a_run_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    written(file, ended(0), ended(1, StopReason.ENV_ERROR), ended(2, StopReason.MAX_TURNS))
    with file.open("ab") as torn:
        torn.write(b'{"task": {"se')
    longer = dataclasses.replace(ARGS, server="http://two:1", environment="http://other:9", episodes=99)
    output = opened(file, longer, resume=True)
    assert output.finished == {0, 2}
    assert file.read_bytes().endswith(b'{"task": {"se'), "nothing is changed before the server answers"
    output.begin("the model")
    output.add(ended(1))
    assert [t.task.seed for t in output.trajectories()] == seeds(file) == [0, 2, 1]
    output.close()
    stored = json.loads((tmp_path / "x.jsonl.run.json").read_text())
    assert (stored["episodes"], stored["model"], stored["environment"]) == (64, "the model", "http://*")


def changed(name: str, value: Any) -> Any:
    """Another value of the type of an option."""
    if name == "action_format":
        return "json"
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else 5 if value is None else f"{value}-else"


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(RolloutArgs)])
def test_each_option_is_compared_or_may_differ(tmp_path: Path, name: str) -> None:
    if name in ("out", "resume", "api_key", "env_timeouts"):
        assert name not in run_settings(ARGS) and name not in MAY_DIFFER
        return
    file = tmp_path / "x.jsonl"
    written(file, ended(0))
    other = "http://env:2/another" if name == "environment" else changed(name, getattr(ARGS, name))
    other = "http://else:3" if name == "server" else str(other) if name == "tokenizer" else other
    other = 0.5 if name == "straggler_fraction" else other
    args = dataclasses.replace(ARGS, **{name: other})
    if name in MAY_DIFFER:
        opened(file, args, resume=True).close()
    else:
        with pytest.raises(BadRequestError, match=rf"\({name}: was .*, is .*\)\. Repeat its settings"):
            opened(file, args, resume=True)


def test_what_may_differ_is_an_option() -> None:
    names = run_settings(ARGS)
    for pattern in MAY_DIFFER:
        assert any(name == pattern or name.startswith(pattern.removesuffix("*")) for name in names), pattern


def test_another_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    written(file, ended(0))
    before = file.read_bytes()
    output = opened(file, resume=True)
    with pytest.raises(BadRequestError, match="model: was 'the model', is 'another'"):
        output.begin("another")
    output.close()
    assert file.read_bytes() == before


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    written(file, ended(0))
    file.write_bytes(b"{broken}\n" + file.read_bytes())
    with pytest.raises(BadRequestError, match=r"A line is damaged: .*x\.jsonl:1"):
        opened(file, resume=True)


def test_damage_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    written(file, ended(0))
    whole = file.read_bytes()
    for line in (b"{broken}\n", whole.replace(b'"tokens":[1,2]', b'"tokens":[1]')):
        file.write_bytes(line + whole)
        with pytest.raises(BadRequestError, match=r"Remove the line, and --resume plays its episode again") as error:
            opened(file, resume=True)
        assert str(error.value).count("Remove the line") == 1
    file.write_bytes(whole)
    for content in ("{", "[]"):
        (tmp_path / "x.jsonl.run.json").write_text(content)
        with pytest.raises(BadRequestError, match=r"x\.jsonl\.run\.json .*: restore it, or begin another run"):
            opened(file, resume=True)


def failed(seed: int) -> Trajectory:
    trajectory = Trajectory(task=Task(seed=seed, group=seed))
    trajectory.append_observation({}, [1])
    trajectory.finish(StopReason.GENERATION_ERROR, "sampling_params.temperature must be finite")
    return trajectory


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_that_failed_altogether_is_replaced(
    tmp_path: Path, resume: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "x.jsonl"
    written(file, failed(0), failed(1))
    before = file.read_bytes()
    corrected = dataclasses.replace(ARGS, temperature=0.5)
    output = opened(file, corrected, resume=resume)
    assert file.read_bytes() == before and not output.finished
    output.begin("another model")
    output.add(ended(0))
    output.close()
    assert "every episode failed. It is replaced" in caplog.text
    assert seeds(file) == [0]
    stored = json.loads((tmp_path / "x.jsonl.run.json").read_text())
    assert (stored["temperature"], stored["model"]) == (0.5, "another model")
    with pytest.raises(BadRequestError, match="has the trajectories of another run"):
        opened(file)


def test_what_is_of_use_or_unknown_is_not_replaced(tmp_path: Path) -> None:
    """One episode has sampled tokens; the settings are of nobody knows whom; a line is damaged."""
    cut = ended(1, StopReason.ENV_ERROR)
    assert cut.reward is None and any(cut.loss_mask)
    written(tmp_path / "a", failed(0), cut)
    append_jsonl(tmp_path / "b", [failed(0)])
    written(tmp_path / "c", failed(0))
    (tmp_path / "c.run.json").write_text('{"command": "another"}')
    written(tmp_path / "d", failed(0))
    (tmp_path / "d").write_bytes((tmp_path / "d").read_bytes() + b"{broken}\n")
    for name in "abcd":
        before = (tmp_path / name).read_bytes()
        with pytest.raises(BadRequestError, match="has the trajectories of another run"):
            opened(tmp_path / name)
        assert (tmp_path / name).read_bytes() == before


def test_an_episode_that_is_there_twice_is_kept_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "x.jsonl"
    better = ended(1, StopReason.MAX_TURNS)
    written(file, ended(0), ended(1), ended(2), better, failed(1))
    output = opened(file, resume=True)
    assert output.finished == {0, 1, 2} and "1 lines of episodes that have another line" in caplog.text
    output.begin("the model")
    kept = output.trajectories()
    output.close()
    assert [(t.task.seed, str(t.stop_reason)) for t in kept] == [(0, "done"), (2, "done"), (1, "max_turns")]


@pytest.mark.timeout(60)
def test_a_named_pipe_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("verl_server.rollout.pipe_output._READER_SECONDS", 0.1)
    with pytest.raises(BadRequestError, match="Nobody reads the pipe"):
        opened(pipe)
    monkeypatch.setattr("verl_server.rollout.pipe_output._READER_SECONDS", 50.0)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        output = opened(pipe)
        output.begin("m")
        for seed in range(20):
            output.add(ended(seed))
        output.close()
        assert reader.stdout is not None
        assert [json.loads(line)["task"]["seed"] for line in reader.stdout] == list(range(20))
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.timeout(60)
def test_a_reader_that_ends_ends_the_run(tmp_path: Path) -> None:
    """The shell's pipes have a name in /dev/fd, whose target is the name of no file."""
    source, target = os.pipe()
    output = opened(Path(f"/dev/fd/{target}"))
    os.close(target)
    output.begin("m")
    output.add(ended(0))
    with open(source, "rb") as reader:
        assert json.loads(reader.readline())["task"]["seed"] == 0
    with pytest.raises(VerlServerError, match=r"The reader of /dev/fd/\d+ has ended before the run"):
        output.add(ended(1))
    output.close()


@pytest.mark.timeout(60)
def test_the_standard_output_has_trajectories_only(tmp_path: Path) -> None:
    """A pipe, or a file to which the shell redirects it."""
    code = (
        "import sys; from pathlib import Path; from tests.rollout.test_trajectory_file import *\n"
        "file = opened(Path('/dev/stdout')); file.begin('m'); file.add(ended(0)); file.add(ended(1))\n"
        "print('summary', file=cli._report_of(file)); file.close()"
    )
    run = [sys.executable, "-c", code]
    piped = subprocess.run(run, stdout=subprocess.PIPE, check=True)
    with (tmp_path / "x").open("wb") as file:
        subprocess.run(run, stdout=file, check=True)
    for lines in (piped.stdout.splitlines(), (tmp_path / "x").read_bytes().splitlines()):
        assert [json.loads(line)["task"]["seed"] for line in lines] == [0, 1]


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    output = opened(tmp_path / "x.jsonl")
    output.begin("m")
    monkeypatch.setattr("verl_server.rollout.trajectory_file.append_jsonl", full)
    with pytest.raises(VerlServerError, match=r"No space left on device\. The same command with --resume continues"):
        output.add(ended(0))
    output.close()


@pytest.mark.parametrize("name", ["", ".", "/", "x" * 5000])
def test_a_place_that_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=r"is a folder\. Name a file|cannot be written"):
        opened(Path(name))


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    output = opened(Path("/dev/null"))
    output.begin("m")
    output.add(ended(0))
    assert output.trajectories() == []
    output.close()
    assert Path("/dev/null").exists() and not Path("/dev/null.run.json").exists()
    with pytest.raises(BadRequestError, match="no regular file"):
        opened(Path("/dev/null"), resume=True)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "x.jsonl")
    written(tmp_path / "link", ended(0))
    output = opened(tmp_path / "link", resume=True)
    output.begin("the model")
    output.close()
    assert (tmp_path / "link").is_symlink() and seeds(tmp_path / "x.jsonl") == [0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--temperature", "-1"], "--temperature must be finite, >= 0, not -1.0"),
        (["--temperature", "nan"], "--temperature must be finite, >= 0, not nan"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, not 0"),
        (["--max-new-tokens", "3000000000"], "--max-new-tokens must be below 2147483648"),
        (["--episodes", "0"], "--episodes must be at least 1, not 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, not 0"),
        (["--max-turns", "0"], "--max-turns must be at least 1, not 0"),
        (["--agent", "x:y", "--tasks", "t", "--temperature", "nan"], "--temperature must be finite, >= 0, not nan"),
        (["--agent", "x:y", "--tasks", "t", "--groups", "0"], "--groups must be at least 1, not 0"),
    ],
)
def test_wrong_options_end_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main([*WHERE, "--out", str(tmp_path / "runs/x.jsonl"), *options])
    assert end.value.code == 2 and not any(tmp_path.iterdir())
    assert says in " ".join(capsys.readouterr().err.replace("│", " ").split())


# -- the command, with an engine and an environment of this process ---------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line of a rollout whose episodes end at once; those with seed 1 fail until `fixed` is there."""

    class Engine:
        server_args = SimpleNamespace(model_path="m")

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

    class Loop(Engine):
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self, tasks: list[Task], on_finish: Any) -> Rollout:
            played = []
            for task in tasks:
                is_broken = task.seed == 1 and not (tmp_path / "fixed").exists()
                played.append(ended(task.seed, StopReason.ENV_ERROR if is_broken else StopReason.DONE))
                on_finish(played[-1])
            return Rollout(trajectories=played, seconds=1.0)

    monkeypatch.setattr(cli.HttpServerEngineAdapter, "attach", lambda *_, **__: Engine())
    monkeypatch.setattr(cli, "load_pretrained", lambda *_: None)
    monkeypatch.setattr(cli, "environment_schema", lambda *_: None)
    monkeypatch.setattr(cli, "check_environment", lambda *_, **__: None)
    monkeypatch.setattr(cli, "ChatRenderer", lambda *_, **__: WordRenderer())
    monkeypatch.setattr(cli, "AgentLoop", Loop)
    return [*WHERE, "--out", str(tmp_path / "runs/x.jsonl"), "--episodes", "3"]


def test_an_environment_that_is_away_leaves_nothing(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "check_environment", check_environment)
    assert main(command) == 1
    error = capsys.readouterr().err
    assert "The environment at --environment http://127.0.0.1:9 cannot be played" in error
    assert "raise --env-timeouts.connect" in error
    assert not any((tmp_path / "runs").iterdir())


def test_a_rollout_without_a_sampled_token_ends_with_a_status(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No first prompt fits; then one does, after the run went on."""
    fits = set[int]()

    def played(_: Any, tasks: list[Task], on_finish: Any) -> Rollout:
        trajectories = [ended(task.seed) if task.seed in fits else Trajectory(task=task) for task in tasks]
        for trajectory in trajectories:
            trajectory.finish(StopReason.CONTEXT_FULL)
            on_finish(trajectory)
        return Rollout(trajectories=trajectories, seconds=1.0)

    monkeypatch.setattr(cli.AgentLoop, "run", played)
    assert main(command) == 1
    assert "mean reward none, 3 without a sampled token, ends" in capsys.readouterr().out
    fits.add(1)
    assert main([*command, "--resume"]) == 0
    assert "mean reward 1.000, 2 without a sampled token, ends" in capsys.readouterr().out
    assert sorted(seeds(tmp_path / "runs/x.jsonl")) == [0, 1, 2]


def test_the_command_resumes(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert main(command) == 1
    assert main([*command, "--resume", "--temperature", "0.5"]) == 1
    assert "temperature: was 1.0, is 0.5" in capsys.readouterr().err
    (tmp_path / "fixed").touch()
    assert main([*command, "--resume", "--episodes", "4"]) == 0
    assert "4 episodes" in capsys.readouterr().out
    assert seeds(tmp_path / "runs/x.jsonl") == [0, 2, 1, 3]
    assert main([*command, "--resume", "--episodes", "4"]) == 0, "nothing is left to play"
