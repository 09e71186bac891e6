"""The command line answers quickly, and reports commands, flags and names that it does not know."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys

import pytest

import verl_server
from verl_server.cli.main import main
from verl_server.server import launch
from verl_server.server_args import ServerArgs


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "verl-server serve" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert importlib.metadata.version("verl-server") in capsys.readouterr().out
    assert main([]) == 2


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert (
        "unknown command 'sevre'; commands: serve, warm-up, router, rollout, watch, trajectories, env, demo, bench"
        in capsys.readouterr().err
    )


def test_serve_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for name in ("--model-path", "--tp-size", "--dist-init-addr", "--admin-api-key", "--kv-cache-gib"):
        assert name in text


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerArgs]:
    """Record the settings of servers instead of starting them."""
    started: list[ServerArgs] = []
    monkeypatch.setattr(launch, "run_server", lambda server_args, on_ready: started.append(server_args))
    monkeypatch.setattr(launch, "configure_logging", lambda server_args: None)
    return started


def test_keys_come_from_the_environment(served: list[ServerArgs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_SERVER_API_KEY", "--key one")
    assert main(["serve", "--model-path", "m"]) == 1
    monkeypatch.setenv("VERL_SERVER_API_KEY", "-key-1")
    monkeypatch.setenv("VERL_SERVER_ADMIN_API_KEY", "key-2")
    assert main(["serve", "--model-path", "m", "--host", "0.0.0.0"]) == 0
    assert (served[0].api_key, served[0].admin_api_key) == ("-key-1", "key-2")
    assert "VERL_SERVER_ADMIN_API_KEY" not in os.environ, "child processes do not need the key"


def test_a_key_on_the_command_line_is_warned_of(served: list[ServerArgs], caplog: pytest.LogCaptureFixture) -> None:
    assert main(["serve", "--model-path", "m", "--admin-api-key", "key-2"]) == 0
    assert served[0].admin_api_key == "key-2"
    (text,) = (record.getMessage() for record in caplog.records)
    assert "--admin-api-key" in text and "VERL_SERVER_ADMIN_API_KEY" in text and "key-2" not in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tp-size", "0"], "--tp-size must be at least 1, not 0."),
        (["--tp-size", "3", "--nnodes", "2"], "--tp-size 3 must be a multiple of --nnodes 2."),
        (["--port", "70000"], "--port must be in 0..65535, not 70000."),
        (["--host", "0.0.0.0"], "or --allow-unauthenticated if you trust the network."),
        (["--admin-api-key-file", "/no/such"], "--admin-api-key-file '/no/such' cannot be read"),
        ([], "--model-path '/no/api_key/model_path' does not exist."),
    ],
)
def test_errors_name_flags(options: list[str], text: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model-path", "/no/api_key/model_path", *options]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("verl-server serve: ") and text in line


def test_a_port_in_use_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--model-path", "m", "--port", str(port)]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("it is in use by another process. Choose another port, or --port 0 for a free one.")


def test_bench_needs_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "usage: verl-server bench NAME" in capsys.readouterr().err


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, verl_server, verl_server.cli.main; verl_server.cli.main.main(['--help']); verl_server.ServerArgs; "
        "sys.exit(bool({'torch', 'transformers', 'uvicorn'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30).returncode == 0


@pytest.mark.parametrize("name", verl_server.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(verl_server, name).__name__ == name


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        verl_server.no_such  # noqa: B018
