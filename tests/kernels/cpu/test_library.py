"""Compiling the CPU's kernels: once, for what they are made of, and with a reason where it cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.kernels.cpu import library
from verl_server.kernels.cpu.library import KernelsUnavailableError, load_library


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that counts its calls, and copies a library that was compiled before."""
    try:
        load_library()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    made = max(library._cache_folder().glob("cpu-kernels-*.so"), key=lambda path: path.stat().st_mtime)
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f'for last; do :; done\ncase "$*" in *-shared*) cp {made} "$last";; *) echo "#define __VERSION__ 1";; esac\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return script


def compilations(compiler: Path) -> int:
    return sum("-shared" in line for line in (compiler.parent / "calls").read_text().splitlines())


def test_compiled_once_for_a_machine(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_library()
    assert load_library().linear is not None
    assert compilations(compiler) == 1
    assert [path.suffix for path in (tmp_path / "cache" / "verl-server").iterdir()] == [".so"]
    # Another compiler, or processor: its predefined macros say so.
    compiler.write_text(compiler.read_text().replace("__VERSION__ 1", "__AVX2__ 1"))
    load_library()
    assert compilations(compiler) == 2
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-O1"))
    load_library()
    assert compilations(compiler) == 3


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(KernelsUnavailableError, match=r"CXX='/nowhere/g\+\+' was not found; install one"):
        load_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelsUnavailableError, match=r"no C\+\+ compiler was found; install one"):
        load_library()


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text('#!/bin/sh\ncase "$*" in *-shared*) echo "omp.h: no such file" >&2; exit 1;; esac\n')
    with pytest.raises(KernelsUnavailableError, match=r"C\+\+17 and OpenMP\. It said:\nomp\.h: no such file"):
        load_library()
    assert not list((tmp_path / "cache" / "verl-server").iterdir())


def test_a_library_that_cannot_be_loaded_is_named(compiler: Path, tmp_path: Path) -> None:
    compiler.write_text('#!/bin/sh\nfor last; do :; done\ncase "$*" in *-shared*) echo broken > "$last";; esac\n')
    with pytest.raises(KernelsUnavailableError, match=r"cpu-kernels-.*could not be loaded .* remove it"):
        load_library()


def test_a_home_that_cannot_be_written(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_library().linear is not None
