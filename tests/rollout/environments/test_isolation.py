"""The commands of bubblewrap: refusals with their remedy, links, and the installations of programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl_server.errors import BadRequestError
from verl_server.rollout.environments import isolation
from verl_server.rollout.environments.installation import installation_of, visible_path
from verl_server.rollout.environments.isolation import check_isolation, isolated, isolated_program


def _script(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ('echo "bwrap: setting up uid map: Permission denied" >&2; exit 1', "uid map: Permission denied"),
        ("exit 3", "exit status 3"),
        ("sleep 60", "no answer within"),
    ],
)
def test_a_bubblewrap_that_cannot_isolate_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str
) -> None:
    _script(tmp_path / "bwrap", f"#!/bin/sh\n{script}\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(isolation, "_TRIAL_SECONDS", 0.5 if "sleep" in script else 20.0)
    with pytest.raises(BadRequestError, match=rf"{says}.*AppArmor.*--isolation none"):
        check_isolation("bubblewrap")
    _script(tmp_path / "bwrap")  # the machine was repaired
    check_isolation("bubblewrap")


@pytest.mark.parametrize("name", ["home", "home/..", "/", "/tmp", "/etc", "/root"])
def test_folders_of_the_user_are_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(isolation, "_bwrap", lambda: "bwrap")
    path = Path(name) if name.startswith("/") else home.parent / name
    with pytest.raises(BadRequestError, match="must not see"):
        isolated_program(["true"], cwd=Path("/tmp"), readable=[path])


def test_links_and_folders_within_folders(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_bwrap", lambda: "bwrap")
    outer = tmp_path / "outer"
    (outer / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to("outer/inner")
    command = isolated_program(
        ["true"], cwd=outer, readable=[outer, outer / "inner", tmp_path / "link"], writable=[], hidden=[outer / "inner"]
    )
    text = " ".join(command)
    assert text.count(f"--ro-bind {outer} {outer}") == 1 and f"--ro-bind {outer / 'inner'} " not in text
    assert f"--symlink outer/inner {tmp_path / 'link'}" in text and f"--tmpfs {outer / 'inner'}" in text
    assert text.index("--tmpfs /tmp ") < text.index(f"--ro-bind {outer}")
    with pytest.raises(BadRequestError, match="no file or folder"):
        isolated_program(["true"], cwd=outer, readable=[tmp_path / "none"])


def test_the_code_tool_works_with_an_environment_below_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "check_isolation", lambda isolation: None)
    monkeypatch.setattr(isolation, "_bwrap", lambda: "bwrap")
    monkeypatch.setattr(sys, "prefix", "/tmp")
    text = " ".join(isolated(["true"], "bubblewrap"))
    assert text.index("--tmpfs /tmp") < text.index("--ro-bind /tmp /tmp")


def test_an_npm_package_needs_its_outermost_node_modules(tmp_path: Path, home: Path) -> None:
    modules = tmp_path / "app/node_modules"
    script = _script(modules / "tool/node_modules/cli/cli.js", "#!/bin/sh\n")
    link = modules / ".bin/tool"
    link.parent.mkdir()
    link.symlink_to("../tool/node_modules/cli/cli.js")
    assert set(installation_of(link)) >= {link, modules}
    assert script not in installation_of(link)


def test_a_console_script_needs_its_environment_and_the_base_of_it(tmp_path: Path, home: Path) -> None:
    base = tmp_path / "python"
    _script(base / "bin/python3")
    (base / "lib/python3.11/encodings").mkdir(parents=True)
    venv = home / ".local/share/uv/tools/tool"
    script = _script(venv / "bin/tool", f"#!{venv}/bin/python\n")
    (venv / "pyvenv.cfg").write_text(f"home = {base}/bin\n")
    (venv / "bin/python").symlink_to(base / "bin/python3")
    link = home / ".local/bin/tool"
    link.parent.mkdir()
    link.symlink_to(script)
    needed = installation_of(link)
    assert {link, venv, base} <= set(needed)
    assert not any(home.is_relative_to(path) for path in needed)
    long = _script(venv / "bin/long", f"#!/bin/sh\n'''exec' {venv}/bin/python \"$0\" \"$@\"\n' '''\n")
    assert {venv, base} <= set(installation_of(long))
    assert {venv, base} <= set(installation_of(venv / "bin/python"))


def test_a_binary_needs_itself_within_home_and_its_prefix_elsewhere(tmp_path: Path, home: Path) -> None:
    inside, outside = _script(home / "bin/tool", "\x7fELF"), _script(tmp_path / "opt/bin/tool", "\x7fELF")
    assert set(installation_of(inside)) == {inside}
    assert set(installation_of(outside)) == {outside, tmp_path / "opt"}
    assert installation_of(Path("/bin/sh"))  # nothing but the system


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (".pyenv/shims/python", "#!/usr/bin/env bash\n", "pyenv which"),
        (".local/bin/tool", "#!/usr/bin/python3\n", "pip install --user"),
        ("tool", "#!/usr/bin/env no-such-interpreter\n", "not on PATH"),
        ("tool2", "#!/no/such\n", "no file or folder /no/such"),
    ],
)
def test_what_cannot_be_determined_is_refused_with_the_remedy(home: Path, name: str, text: str, says: str) -> None:
    (home / ".local/lib/python3.11/site-packages").mkdir(parents=True)
    with pytest.raises(BadRequestError, match=says):
        installation_of(_script(home / name, text))


def test_path_keeps_what_is_visible(tmp_path: Path) -> None:
    (tmp_path / "a/bin").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    path = f"{tmp_path / 'a/bin'}:{tmp_path / 'b'}:/usr/bin:relative"
    assert visible_path(path, [tmp_path / "a"]) == f"{tmp_path / 'a/bin'}:/usr/bin:/usr/local/bin:/bin"
