"""Compiling the CPU kernels: once for each compiler and processor, and with a reason where it fails."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from verl_server.kernels.cpu import library
from verl_server.kernels.cpu.library import KernelsUnavailableError, load_library


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake compiler that records its calls, and copies a library that was compiled before."""
    try:
        made = load_library().code._name
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f'for last; do :; done\ncase "$*" in *-shared*) cp {made} "$last";; *) echo "#define __VERSION__ 1";; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"{script} -m64")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def compilations(compiler: Path) -> int:
    return sum("-shared" in line for line in (compiler.parent / "calls").read_text().splitlines())


def test_compiled_once_for_a_machine(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()
    assert load_library().code.linear is not None
    assert compilations(compiler) == 1
    assert [path.suffix for path in (tmp_path / "cache" / "verl-server").iterdir()] == [".so"]
    # Another compiler or processor has other predefined macros.
    compiler.write_text(compiler.read_text().replace("__VERSION__ 1", "__AVX2__ 1"))
    load_library()
    assert compilations(compiler) == 2
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-O1"))
    load_library()
    assert compilations(compiler) == 3


def test_a_library_for_another_processor_has_a_name_of_its_own(compiler: Path, tmp_path: Path) -> None:
    names = {load_library(arch).name for arch in ("native", "x86-64-v2", "native")}
    assert names == {path.stem for path in (tmp_path / "cache" / "verl-server").iterdir()} and len(names) == 2


def test_the_macros_are_those_of_an_empty_source(compiler: Path, tmp_path: Path) -> None:
    # Not of a file that others may write to, as they do to /dev/null in containers where it is a regular file.
    script = compiler.read_text()
    compiler.write_text(script.replace("*) echo", f"*) wc -c > {tmp_path}/read; echo"))
    load_library()
    assert (tmp_path / "calls").read_text().splitlines()[0].endswith(" -x c++ -")
    assert (tmp_path / "read").read_text().strip() == "0"


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(KernelsUnavailableError, match=r"CXX='/nowhere/g\+\+' was not found\. Install one"):
        load_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailableError, match=r"no C\+\+ compiler was found\. Install one"):
        load_library()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text('#!/bin/sh\ncase "$*" in *-shared*) echo "omp.h: no such file" >&2; exit 1;; esac\n')
    with pytest.raises(KernelsUnavailableError, match=r"C\+\+17 and OpenMP\. Its output:\nomp\.h: no such file"):
        load_library()
    assert not list((tmp_path / "cache" / "verl-server").iterdir())


def test_a_broken_file_in_the_cache_is_passed_over(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_library()
    (made,) = (tmp_path / "cache" / "verl-server").iterdir()
    broken = tmp_path / "other" / "verl-server" / made.name
    broken.parent.mkdir(parents=True)
    broken.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert load_library().code.linear is not None
    assert compilations(compiler) == 2


def test_a_compiler_that_makes_nothing_of_use(compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\nfor last; do :; done\ncase "$*" in *-shared*) echo broken > "$last";; esac\n')
    with pytest.raises(KernelsUnavailableError, match="could not be written or loaded"):
        load_library()


def test_a_home_that_cannot_be_written(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are compiled at each start, and nothing is left behind."""
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert load_library().code.linear is not None
    assert load_library().folder is None
    assert not list((tmp_path / "temporary").iterdir())


def test_nobody_has_a_home(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert load_library().code.linear is not None
