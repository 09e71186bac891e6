"""`verl-server watch`: its options, and what it says where it cannot open a run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.watch.site.recorded_runs import write_run
from verl_server.cli import watch
from verl_server.cli.main import main
from verl_server.watch.site.runs import MOST_RUNS, find_runs
from verl_server.watch.site.server import bind_free


def test_help_names_what_it_opens(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Exit status" in shown and "--export-megabytes" in shown and "--store" in shown


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ([], 2, "Name the folder of a run"),
        (["nothing-here"], 1, "There is no nothing-here"),
        (["other"], 1, "neither a run"),
        (["run", "--port", "70000"], 2, "--port=70000"),
        (["run", "--host", "0.0.0.0"], 1, "without a key"),
        (["run", "--export-megabytes", "0"], 2, "--export-megabytes"),
    ],
)
def test_what_cannot_be_opened_is_named(
    options: list[str],
    status: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_SERVER_API_KEY", raising=False)
    write_run(tmp_path / "run", 1).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    assert main(["watch", *options]) == status
    assert message in capsys.readouterr().err


def test_a_folder_of_runs_opens_the_newest(tmp_path: Path) -> None:
    for number in range(MOST_RUNS + 2):
        (tmp_path / f"run{number:03}").mkdir()
        (tmp_path / f"run{number:03}" / "metrics.jsonl").touch()
    (tmp_path / "notes").mkdir()
    found = find_runs(tmp_path)
    assert len(found) == MOST_RUNS and all(path.name.startswith("run") for path in found)


def test_the_next_free_port_is_taken() -> None:
    with bind_free("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with bind_free("127.0.0.1", port) as other:
            assert port < other.getsockname()[1] <= port + 20
    assert isinstance(taken, socket.socket)


def test_a_key_of_the_environment_is_for_other_addresses_than_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    for host, key in (("127.0.0.1", None), ("0.0.0.0", "secret")):
        monkeypatch.setenv("VERL_SERVER_API_KEY", "secret")
        assert watch.key_of(watch.WatchArgs(runs=(Path("run"),), host=host)) == key
