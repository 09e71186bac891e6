"""Every wrong value of an option is refused, by the option's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.cli.main import main
from verl_server.files.command_options import OptionError, parse_options
from verl_server.fleet.options import RouterArgs

SERVER = ["--server", "http://127.0.0.1:30000"]

WRONG = [
    (["--server", "http://127.0.0.1:30000/v1"], "/v1"),
    (["--server", "ftp://h:1"], "ftp://h:1"),
    (["--server", "http://user:secret@h:1"], "--server"),
    ([*SERVER, "--server", "127.0.0.1:30000/"], "--server names http://127.0.0.1:30000 more than once"),
    ([*SERVER, "--port", "70000"], "--port"),
    ([*SERVER, "--port", "-1"], "--port"),
    ([*SERVER, "--host", "0.0.0.0"], "--allow-unauthenticated"),
    ([*SERVER, "--host", "::"], "--api-key-file"),
    ([*SERVER, "--host", "gateway", "--admin-api-key-file", "f"], "--host"),
    ([*SERVER, "--name", ""], "--name"),
    ([*SERVER, "--name", "a b"], "--name"),
    ([*SERVER, "--name", "ü"], "--name"),
    ([*SERVER, "--log-level", "loud"], "--log-level"),
    *(
        ([*SERVER, f"--{option}", value], f"--{option}")
        for option in ("hold-seconds", "stale-after", "probe-interval", "probe-timeout", "spill-margin")
        for value in ("0", "-1", "nan", "inf")
    ),
    *(
        ([*SERVER, f"--{option}", "0"], f"--{option}")
        for option in ("dead-after", "healthy-after", "max-request-bytes", "max-held-bytes")
    ),
]


@pytest.mark.parametrize(("argv", "text"), WRONG)
def test_a_wrong_value_is_refused_by_its_name(argv: list[str], text: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_options(RouterArgs, argv, "verl-server router")
    assert text in str(raised.value) and "secret" not in str(raised.value)
    assert "RouterArgs" not in str(raised.value)


def test_a_router_needs_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router"]) == 2
    assert "--server http://HOST:PORT" in capsys.readouterr().err


def test_addresses_are_written_in_one_form() -> None:
    args = parse_options(RouterArgs, ["--server", "h:1", "--server", "https://proxy/servers/2/"], "router")
    assert args.server == ("http://h:1", "https://proxy/servers/2")


@pytest.mark.parametrize("extra", [["--allow-unauthenticated"], ["--api-key-file", "f"]])
def test_a_router_beyond_loopback(extra: list[str]) -> None:
    args = parse_options(RouterArgs, [*SERVER, "--host", "0.0.0.0", *extra], "router")
    assert args.host == "0.0.0.0"


def test_a_key_file_that_cannot_be_read_ends_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *SERVER, "--api-key-file", str(tmp_path / "none")]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("verl-server router: --api-key-file") and "cannot be read" in line


def test_wrong_options_have_the_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *SERVER, "--dead-after", "0"]) == 2
    assert "--dead-after" in capfd.readouterr().err


def test_help_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["router", "--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    for name in RouterArgs.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text
