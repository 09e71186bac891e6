"""The settings of a training run are stored, compared when it is resumed, and its folder is checked first."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from verl_server.cli.rollout import MAY_DIFFER as ROLLOUT_MAY_DIFFER
from verl_server.errors import BadRequestError
from verl_server.files.run_output import RECORDS, claim_folder, store_settings
from verl_server.rollout.agents.run import MAY_DIFFER as AGENTS_MAY_DIFFER
from verl_server.train.checkpoints import Progress, write_progress
from verl_server.train.demo import DemoArgs, _claimed_folder
from verl_server.train.grpo import main
from verl_server.train.options import TrainArgs
from verl_server.train.run_folder import RunFolder
from verl_server.train.run_settings import _COMPARED_OF_SERVER, MAY_DIFFER, run_settings

ARGS = TrainArgs(model_path="m", env_url="http://env:1")
ROOT = Path(__file__).parents[2]
WHERE = ["--model-path", "absent/model", "--env-url", "http://127.0.0.1:9", "--device", "cpu"]


def folder_of(path: Path, args: TrainArgs = ARGS) -> RunFolder:
    return RunFolder(path, functools.partial(run_settings, args))


def begun(path: Path, args: TrainArgs = ARGS, steps: int = 1) -> None:
    """A run that saved a checkpoint after `steps`."""
    folder = folder_of(path, args)
    assert folder.open(resume=False) is None
    folder.begin()
    folder.close()
    (path / f"checkpoint-{steps}").mkdir()
    write_progress(path / f"checkpoint-{steps}", Progress(steps, steps))
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(steps)))


def changed(settings: dict[str, Any], name: str) -> dict[str, Any]:
    return settings | {name: ["another"] if settings[name] != ["another"] else None}


@pytest.mark.parametrize("name", sorted(run_settings(ARGS).keys() - {"command"}))
def test_each_setting_is_compared_or_may_differ(tmp_path: Path, name: str) -> None:
    begun(tmp_path)
    other = RunFolder(tmp_path, lambda: changed(run_settings(ARGS), name))
    may = name in MAY_DIFFER or any(name.startswith(p[:-1]) for p in MAY_DIFFER if p.endswith(".*"))
    if may:
        assert other.open(resume=True) == str(tmp_path / "checkpoint-1")
        other.begin()
        other.close()
        assert json.loads((tmp_path / "run.json").read_text()) == run_settings(ARGS), "those of its beginning stay"
    else:
        with pytest.raises(BadRequestError, match=rf"\({re.escape(name)}: was .*, is \['another'\]\)\. Repeat"):
            other.open(resume=True)


def test_a_run_of_an_earlier_version_had_settings_that_are_gone(tmp_path: Path) -> None:
    begun(tmp_path)
    stored = {name: value for name, value in run_settings(ARGS).items() if name != "stop_on"}
    store_settings(tmp_path / "run.json", stored | {"gap_alarm": "warn"})
    folder = folder_of(tmp_path)
    assert folder.open(resume=True) == str(tmp_path / "checkpoint-1")
    folder.close()


def test_what_may_differ_is_an_option_and_documented() -> None:
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    settings = run_settings(ARGS)
    for pattern in MAY_DIFFER:
        assert any(name.startswith(pattern.removesuffix("*")) for name in settings), pattern
    flags = [name.removeprefix("limits.") for name in MAY_DIFFER if not name.startswith("server")] + [
        "server",
        "server.*",
    ]
    flags += [f"server.{name}" for name in _COMPARED_OF_SERVER]
    flags += [name.removeprefix("limits.") for name in ROLLOUT_MAY_DIFFER]
    for name in (*flags, *AGENTS_MAY_DIFFER):
        assert f"`--{name.replace('_', '-')}`" in page, name


def test_no_key_is_stored(tmp_path: Path) -> None:
    server = dataclasses.replace(ARGS.server, api_key="secret-key", admin_api_key="secret-admin")
    begun(tmp_path, dataclasses.replace(ARGS, server=server, server_urls=("http://name:secret-password@host:1",)))
    assert "secret" not in (tmp_path / "run.json").read_text()


def test_the_tasks_are_compared_by_content(tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    args = TrainArgs(model_path="m", agent="m:f", tasks=str(tasks), reward="m:r")
    with pytest.raises(BadRequestError, match=r"Cannot read .*tasks\.jsonl"):
        run_settings(args)
    tasks.write_text("1\n")
    begun(out, args)
    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved/tasks.jsonl"
    moved.write_text("1\n")
    folder = folder_of(out, dataclasses.replace(args, tasks=str(moved)))
    folder.open(resume=True)
    folder.close()
    tasks.write_text("2\n")
    with pytest.raises(BadRequestError, match="tasks_digest: was"):
        folder_of(out, args).open(resume=True)


def test_a_run_of_an_earlier_version_goes_on_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begun(tmp_path)
    (tmp_path / "run.json").unlink()
    folder = folder_of(tmp_path)
    with caplog.at_level(logging.WARNING):
        folder.open(resume=True)
    folder.begin()
    folder.close()
    assert "run.json is missing, so the settings of the run are not compared" in caplog.text
    assert json.loads((tmp_path / "run.json").read_text()) == run_settings(ARGS)


@pytest.mark.parametrize("name", [*(pattern.replace("*", "1") for pattern in RECORDS), "model"])
def test_another_runs_files_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(BadRequestError, match=f"already holds a run .*{name}"):
        folder_of(tmp_path).open(resume=False)
    if name != "model":
        store_settings(tmp_path / "run.json", {"command": "run_agents"})
        with pytest.raises(BadRequestError, match="already holds a run"):
            folder_of(tmp_path).open(resume=False)


def test_a_model_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    """Only checkpoint-0 and model of a training run that had no step are."""
    (tmp_path / "model").mkdir()
    for command in ("run_agents", "train.grpo"):
        store_settings(tmp_path / "run.json", {"command": command})
        with pytest.raises(BadRequestError, match=r"already holds a run \(model\)"):
            folder_of(tmp_path).open(resume=False)
    (tmp_path / "checkpoint-0").mkdir()
    store_settings(tmp_path / "run.json", {"command": "run_agents"})
    with pytest.raises(BadRequestError, match="already holds a run"):
        folder_of(tmp_path).open(resume=False)
    store_settings(tmp_path / "run.json", {"command": "train.grpo"})
    folder = folder_of(tmp_path)
    assert folder.open(resume=False) is None
    assert (tmp_path / "model").exists(), "it stays until the server is up"
    folder.begin()
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_folder_is_checked_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last command has a wrong model. It leaves nothing that blocks the corrected one."""
    (tmp_path / "file").write_text("")
    assert main([*WHERE, "--out", str(tmp_path / "file")]) == 1
    assert "cannot be a folder" in capsys.readouterr().err
    claim = claim_folder(tmp_path / "used")
    assert main([*WHERE, "--out", str(tmp_path / "used")]) == 1
    assert "Another process writes a run" in capsys.readouterr().err
    claim.release()
    begun(tmp_path / "run")
    assert main([*WHERE, "--out", str(tmp_path / "run"), "--resume"]) == 1
    assert "model_path: was 'm', is 'absent/model'" in capsys.readouterr().err
    out = tmp_path / "a/b"
    for _ in range(2):
        assert main([*WHERE, "--out", str(out)]) == 1
        assert "absent/model" in capsys.readouterr().err
        assert out.is_dir() and not any(out.iterdir())
    begun(out)


# -- the demo ---------------------------------------------------------------------------------------------------


def test_a_demo_replaces_a_demo_and_nothing_else(tmp_path: Path) -> None:
    demo, other = tmp_path / "demo", tmp_path / "other"
    for _ in range(2):
        claim = _claimed_folder(DemoArgs(out=demo))
        with pytest.raises(BadRequestError, match="Another process writes a run"):
            _claimed_folder(DemoArgs(out=demo))
        (demo / "model").mkdir()
        (demo / "metrics.jsonl").write_text("x")
        claim.release()
    begun(other)
    for name in ("metrics.jsonl", "model", "report.html", "summary.json"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("x")
        with pytest.raises(BadRequestError, match=rf"files that are of no demo \({name}\)"):
            _claimed_folder(DemoArgs(out=folder))
        assert [file.name for file in folder.iterdir()] == [name]
    with pytest.raises(BadRequestError, match=r"no demo \(metrics\.jsonl, checkpoint-1\)"):
        _claimed_folder(DemoArgs(out=other))
    with pytest.raises(BadRequestError, match="already holds a run"):
        folder_of(demo).open(resume=False)
