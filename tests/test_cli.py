"""The command line answers fast, and says what it does not know."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import verl_server
from verl_server.cli import main


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "verl-server serve" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert importlib.metadata.version("verl-server") in capsys.readouterr().out
    assert main([]) == 2


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert "unknown command 'sevre'; commands: serve, rollout, demo, bench" in capsys.readouterr().err


def test_serve_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("--model-path", "--tp-size", "--dist-init-addr", "--admin-api-key", "--kv-cache-gib"):
        assert name in text


def test_bench_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "usage: verl-server bench NAME" in capsys.readouterr().err


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, verl_server, verl_server.cli; verl_server.cli.main(['--help']); verl_server.ServerArgs; "
        "sys.exit(bool({'torch', 'transformers', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 0


@pytest.mark.parametrize("name", verl_server.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(verl_server, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        verl_server.no_such  # noqa: B018
