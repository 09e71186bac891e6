"""The place of a run's output is checked, locked and compared before the run begins."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from verl_server.cli.agents import main as agents_main
from verl_server.cli.rollout import main as rollout_main
from verl_server.errors import BadRequestError
from verl_server.files.run_output import (
    RECORDS,
    check_settings,
    claim_file,
    claim_folder,
    location,
    recorded,
    settings_of,
    store_settings,
    without_host,
)
from verl_server.server.launch import check_output_folders
from verl_server.server_args import ServerArgs
from verl_server.train.demo import main as demo_main
from verl_server.train.grpo import main as train_main


def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which no file can be made. (Permissions do not bind root.)"""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    return tmp_path


def test_missing_folders_are_created(tmp_path: Path) -> None:
    claim_folder(tmp_path / "a/b").release()
    claim = claim_file(tmp_path / "c/d/x.jsonl")
    assert (tmp_path / "a/b").is_dir() and (tmp_path / "c/d/x.jsonl").exists()
    claim.release()
    assert not any((tmp_path / "a/b").iterdir()), "the trial leaves nothing"
    assert not (tmp_path / "c/d/x.jsonl").exists(), "a file to which nothing was written is removed"
    (tmp_path / "mine").touch()
    claim_file(tmp_path / "mine").release()
    assert (tmp_path / "mine").exists(), "unless it was there before"


@pytest.mark.parametrize("claim", [claim_folder, claim_file])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, claim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("text")
    for place in (
        tmp_path / "file/below",
        tmp_path / ("a" * 300) / "x",
        Path("/proc/no/run"),
        tmp_path / "n\0ul" / "x",
    ):
        with pytest.raises(BadRequestError, match="cannot be"):
            claim(place)
    with pytest.raises(BadRequestError, match=r"The folder .* cannot be written: No space left on device\."):
        claim(unwritable(tmp_path, monkeypatch) / "x")


def test_a_file_and_a_folder_are_not_mistaken(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(BadRequestError, match="it or one above it is a file"):
        claim_folder(tmp_path / "file")
    with pytest.raises(BadRequestError, match=r"is a folder\. Name a file"):
        claim_file(tmp_path)
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize("claim", [claim_folder, claim_file])
def test_two_runs_at_once_do_not_share_a_place(tmp_path: Path, claim: Any) -> None:
    first = claim(tmp_path / "x")
    with pytest.raises(BadRequestError, match="Another process writes a run"):
        claim(tmp_path / "x")
    first.release()
    first.release()  # a second call does nothing
    claim(tmp_path / "x").release()


def test_a_replaced_file_is_still_locked(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    claim = claim_file(file)
    claim.replace([b"1\n", b"2\n"])
    with pytest.raises(BadRequestError, match="Another process writes a run"):
        claim_file(file)
    claim.release()
    assert file.read_bytes() == b"1\n2\n"


def test_a_file_system_without_locks_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    claim_folder(tmp_path / "x").release()


def test_empty_files_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    for name in ("run.json", "tasks.jsonl", "episodes.jsonl", "summary.json"):
        (tmp_path / name).write_text("{}" if name != "episodes.jsonl" else "")
    assert recorded(tmp_path) == []
    for pattern in RECORDS:
        file = tmp_path / pattern.replace("*", "1")
        file.write_text("x")
        assert recorded(tmp_path) == [str(file.relative_to(tmp_path))]
        file.unlink()


@dataclass(frozen=True)
class Inner:
    timeout: float = 1.0
    turns: int = 8


@dataclass(frozen=True)
class Options:
    out: Path = Path("x")
    names: tuple[str, ...] = ("a",)
    extra: dict[str, Any] = field(default_factory=dict)
    inner: Inner = Inner()


def test_settings_are_flat_and_json(tmp_path: Path) -> None:
    found = settings_of("c", Options(), without=("out",))
    assert found == {"command": "c", "names": ["a"], "extra": {}, "inner.timeout": 1.0, "inner.turns": 8}
    file = tmp_path / "run.json"
    store_settings(file, found)
    assert check_settings(tmp_path, file, found, {}) == found


def test_all_that_differs_is_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run.json"
    store_settings(file, {"command": "c", "a": 1, "b": "x", "gone": 2, "o.t": 1, "o.u.v": 1, "steps": 3})
    now = {"command": "c", "a": 2, "b": "y", "new": 3, "o.t": 2, "o.u.v": 2, "steps": 4}
    allowed = {"steps": "", "o.u.*": "", "o.t": ""}
    with pytest.raises(BadRequestError) as caught:
        check_settings(tmp_path, file, now, allowed)
    text = f"{tmp_path} is a run with other settings (a: was 1, is 2; b: was 'x', is 'y'; gone: was 2, is absent). "
    assert str(caught.value).startswith(text + "Repeat its settings")
    assert "These settings are not compared: new." in caplog.text  # the run is older than the setting
    with pytest.raises(BadRequestError, match=r"\(o\.t: was 1, is 2; o\.u\.v: was 1, is 2\)"):
        check_settings(tmp_path, file, now, {name: "" for name in ("a", "b", "gone", "new", "steps")})


def test_a_run_of_an_earlier_version_is_compared_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "run.json"
    store_settings(file, {"a": 1, "old": 2})
    check_settings(tmp_path, file, {"command": "c", "a": 1, "new": 3}, {})
    assert "These settings are not compared: command, new, old." in caplog.text
    with pytest.raises(BadRequestError, match=r"\(a: was 1, is 2\)"):
        check_settings(tmp_path, file, {"command": "c", "a": 2}, {})


def test_settings_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(BadRequestError, match=r"run\.json cannot be written: Is a directory"):
        store_settings(tmp_path / "run.json", {})


def test_paths_and_hosts_have_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("")
    os.symlink(tmp_path, tmp_path / "link")
    assert location("agent.py:play") == location("link/agent.py:play") == f"{tmp_path}/agent.py:play"
    assert location("link") == str(tmp_path)
    for text in ("Qwen/Qwen3-0.6B", "my_agent:play", "python agent.py", "absent.py:play", "a" * 5000, "n\0ul"):
        assert location(text) == text
    assert without_host("mcp:http://host:1/mcp") == without_host("mcp:http://10.0.0.1:2/mcp") == "mcp:http://*/mcp"
    assert without_host("reasoning-gym:chain_sum") == "reasoning-gym:chain_sum"


@pytest.mark.parametrize("name", ["session_store", "profile_folder"])
def test_the_folders_of_a_server_are_tried_before_it_loads(tmp_path: Path, name: str) -> None:
    check_output_folders(ServerArgs(model_path="m", **{name: str(tmp_path / "a/b")}))
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequestError, match=rf"ServerArgs\.{name}: .*file cannot be a folder"):
        check_output_folders(ServerArgs(model_path="m", **{name: str(tmp_path / "file")}))


_TRAIN = ["--model-path", "x", "--env-url", "y"]


@pytest.mark.parametrize("empty", ["", " "])
@pytest.mark.parametrize(
    ("command", "options"),
    [
        (rollout_main, ["--server", "http://127.0.0.1:9", "--environment", "http://127.0.0.1:9"]),
        (agents_main, ["--agent", "a:b", "--tasks", "t.jsonl"]),
        (train_main, _TRAIN),
        (demo_main, []),
    ],
)
def test_an_empty_place_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: Callable[[list[str]], int],
    options: list[str],
    empty: str,
) -> None:
    """It would be the current folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        command([*options, "--out", empty])
    assert end.value.code == 2 and "the path is empty: name a place" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["session_store", "profile_folder"])
def test_an_empty_folder_of_a_server_is_refused(name: str) -> None:
    with pytest.raises(BadRequestError, match=rf"ServerArgs\.{name} is empty: name a folder"):
        check_output_folders(ServerArgs(model_path="m", **{name: ""}))
