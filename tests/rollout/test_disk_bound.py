"""A program whose files take too much of the disk is ended, with an error that names the bound."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from verl_server.rollout import disk_bound
from verl_server.rollout.disk_bound import disk_use, launch_within
from verl_server.rollout.launched import Exit, Program


def launched(script: str, folder: Path, most: int) -> Exit:
    files = folder / "files"
    files.mkdir()
    program = Program(
        argv=["/bin/sh", "-c", script],
        env={"PATH": os.environ["PATH"]},
        cwd=str(files),
        limits={},
        log=folder / "log",
        log_bytes=1000,
        grace=0.1,
    )
    return asyncio.run(asyncio.wait_for(launch_within(program, [files], most, "AgentLimits.x"), 60))


@pytest.mark.parametrize(
    "work", ["head -c 3000000 /dev/zero > big", "for i in $(seq 40); do head -c 90000 /dev/zero > $i; done"]
)
def test_a_program_that_fills_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    monkeypatch.setattr(disk_bound, "_PERIOD", 0.05)
    exit = launched(f"echo begins; {work}; exec sleep 600", tmp_path, 2_000_000)
    assert exit.code == -9 and exit.output == "begins\n"
    assert exit.exceeded == "The files of the program take more than 2,000,000 bytes (AgentLimits.x)."


def test_a_program_with_too_many_files_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_bound, "_PERIOD", 0.05)
    monkeypatch.setattr(disk_bound, "_MOST_ENTRIES", 20)
    exit = launched("mkdir -p $(seq -f 'a/%g' 30); exec sleep 600", tmp_path, 2**30)
    assert "more than 20 files and folders" in exit.exceeded


def test_a_program_within_its_bound_ends_by_itself(tmp_path: Path) -> None:
    exit = launched("echo x > small; exit 3", tmp_path, 2_000_000)
    assert (exit.code, exit.exceeded) == (3, "")


def test_links_and_holes_take_no_space(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    for folder in (outside, inside / "deep"):
        folder.mkdir(parents=True)
    (outside / "big").write_bytes(b"x" * 500_000)
    (inside / "link").symlink_to(outside)
    with open(inside / "hole", "wb") as file:
        file.truncate(2**40)
    (inside / "deep/file").write_bytes(b"x" * 100_000)
    entries, used = disk_use([inside, tmp_path / "none"], 2**40)
    assert entries == 4 and 100_000 <= used < 300_000
