"""The table of a card runs every engine by turns, resumes what is missing, and renders what it has."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card_table, offline, weight_sync
from benchmarks.card_rows import OURS, Table, works_of
from benchmarks.gates.parts import Part
from benchmarks.gates.running import write_line
from benchmarks.peers import peer_offline, sglang_push
from benchmarks.workload import Workload
from tests.benchmark.lines import figures

SPEED = {"offline": 1000.0, "peers.vllm_offline": 800.0, "peers.sglang_offline": 900.0}
PUSHES = {"weight_sync": 10.0, "peers.sglang_push": 40.0}


class FakeEngines:
    """Writes lines as the processes of the cells do, after the real parsers have read their command lines."""

    def __init__(self) -> None:
        self.run: list[str] = []
        """Module and shape of each process, with the workloads that it ran."""
        self.pythons: list[str] = []
        self.dies_after = 99
        """Number of workloads after which a process ends with an error."""

    def __call__(self, part: Part, device: str, out: Path, bound: float | None = None, python: str = "") -> bool:
        module, *argv = part.command.split()
        argv += ["--device", device]
        self.pythons.append(python)
        if module == "ceilings":
            lines = [("gemm_ceiling", 600_000.0, {}), ("memory_bandwidth", 3000.0, {})]
        elif module in PUSHES:
            args = (weight_sync if module == "weight_sync" else sglang_push).parse_args(argv)
            lines = [("push", PUSHES[module], {"limit_ms": 8.0, "unit": "ms"})]
        else:
            args = offline.parse_args(argv) if module == "offline" else peer_offline.parse_args("", argv)
            assert args.logprobs is False and args.prefix_cache is False and all(work.work for work in args.works)
            lines = [
                (work.name, SPEED[module] + len(self.run), {"unit": work.work.counted[1], "limit": 2000.0})
                for work in args.works
            ]
        name = f"{module} {args.shape}" if module != "ceilings" else module
        self.run.append(" ".join([name, *(work[0] for work in lines if module not in ("ceilings", *PUSHES))]))
        for figure, value, more in lines[: self.dies_after]:
            write_line(out, {"part": part.name, "name": figure, "value": value} | more)
        code = int(len(lines) > self.dies_after)
        end = {"code": code, "seconds": 9.0, "timed_out": False, "stderr": "Traceback\nCUDA out of memory.\n"}
        write_line(out, {"part": part.name, "name": "part_end"} | end)
        return not code


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> FakeEngines:
    fake = FakeEngines()
    monkeypatch.setattr(card_table, "run_part", fake)
    monkeypatch.setattr(card_table, "find_card", lambda gpus: "NVIDIA H100")
    monkeypatch.setattr(card_table, "find_uuids", lambda gpus: ["8a3a"] * gpus)
    monkeypatch.setattr(card_table, "held_by_others", lambda uuids: "")
    monkeypatch.setattr(weight_sync.torch.cuda, "device_count", lambda: 1)
    versions = {"vllm": "0.26.0", "sglang": "0.5.16"}
    monkeypatch.setattr(card_table, "find_version", lambda python, name: versions[name])
    return fake


def run(out: Path, *options: str) -> None:
    card_table.main(["--out", str(out), "--shapes", "0.6b", *options])


def processes(engines: FakeEngines) -> list[str]:
    """Return what ran, without the workloads."""
    return [" ".join(text.split()[:2]) for text in engines.run]


def test_engines_take_turns_and_pushes_come_after_the_first_round(engines: FakeEngines, tmp_path: Path) -> None:
    run(tmp_path / "out.jsonl", "--vllm-python", "/vllm/python")
    ours, vllm, sglang = (f"{module} 0.6b" for module in SPEED)
    pushes = ["weight_sync 0.6b", "peers.sglang_push 0.6b"]
    assert processes(engines) == ["ceilings", ours, vllm, sglang, *pushes, sglang, vllm, ours]
    assert engines.pythons[2] == "/vllm/python" and set(engines.pythons) == {"/vllm/python", sys.executable}


def test_what_is_there_is_not_run_again(engines: FakeEngines, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(out)
    first = out.read_text()
    engines.run.clear()
    run(out)
    assert not engines.run and out.read_text() == first


def test_a_process_that_died_leaves_its_figures_and_only_the_rest_is_repeated(
    engines: FakeEngines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    engines.dies_after = 2
    run(out, "--rounds", "1", "--engines", OURS)
    page = capsys.readouterr().out
    assert (
        "no figure for prefill, decode_64, decode_8, rl (CUDA out of memory.)" in page and "256 x (128 + 512)" in page
    )
    engines.dies_after, engines.run = 99, []
    run(out, "--rounds", "1", "--engines", OURS)
    assert engines.run == ["offline 0.6b prefill decode_64 decode_8 rl"]
    assert "no figure for" not in capsys.readouterr().out


def test_the_shape_of_rl_alone_is_run_after_another_that_warms_the_engine(engines: FakeEngines, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    engines.dies_after = 5
    run(out, "--rounds", "1", "--engines", "vllm")
    engines.run.clear()
    run(out, "--rounds", "1", "--engines", "vllm")
    assert engines.run == ["peers.vllm_offline 0.6b decode_256 rl"]


@pytest.mark.parametrize("change", ["card", "version"])
def test_another_card_or_version_has_rows_of_its_own(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    out = tmp_path / "out.jsonl"
    run(out, "--rounds", "1", "--engines", "vllm")
    if change == "card":
        monkeypatch.setattr(card_table, "find_card", lambda gpus: "NVIDIA H200")
    else:
        monkeypatch.setattr(card_table, "find_version", lambda python, name: "0.27.0")
    run(out, "--rounds", "1", "--engines", "vllm")
    assert processes(engines) == ["peers.vllm_offline 0.6b"] * 2


def test_a_cell_beside_other_programs_is_named(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = iter(["", "GPU 8a3a: Other processes hold 20 GiB.", ""])
    monkeypatch.setattr(card_table, "held_by_others", lambda uuids: next(held) if uuids == ["8a3a"] else "wrong GPU")
    run(tmp_path / "out.jsonl", "--rounds", "1", "--engines", "vllm", "sglang")
    printed = capsys.readouterr()
    assert "2 of 3, sglang 0.6b works, round 1: its figures cannot be compared. GPU 8a3a: Other" in printed.err
    assert "sglang 0.5.16, 0.6b, round 1, ran beside other programs: GPU 8a3a: Other processes hold" in printed.out
    assert "vllm 0.26.0, 0.6b, round 1, ran beside" not in printed.out


def test_no_engine_starts_with_too_little_time(engines: FakeEngines, tmp_path: Path) -> None:
    run(tmp_path / "out.jsonl", "--minutes", "2", "--rounds", "1")
    assert processes(engines) == ["ceilings", "offline 0.6b", "weight_sync 0.6b"], "the others need 150 s"


def test_an_engine_that_cannot_be_imported_is_left_out(
    engines: FakeEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(card_table, "run_part", engines)
    monkeypatch.setattr(card_table, "find_card", lambda gpus: "a CPU")
    empty = tmp_path / "python"
    empty.write_text("#!/bin/sh\nexit 1\n")
    empty.chmod(0o700)
    argv = ["--out", str(tmp_path / "out"), "--device", "cpu", "--shapes", "tiny", "--rounds", "1"]
    card_table.main([*argv, "--vllm-python", str(empty), "--sglang-python", str(empty)])
    assert processes(engines) == ["ceilings", "offline tiny", "weight_sync tiny"]
    printed = capsys.readouterr()
    assert "vllm: " in printed.err and "cannot import it" in printed.err
    assert "### a CPU" in printed.out and "| TINY, decode, 1 x (16 + 64), tokens/s |" in printed.out


def test_the_version_of_a_package_is_found_without_its_import() -> None:
    import pytest as package

    assert card_table.find_version(sys.executable, "pytest") == package.__version__
    assert card_table.find_version(sys.executable, "no_such_package") == ""


def test_the_table_has_medians_limits_and_the_best_other_engine(engines: FakeEngines, tmp_path: Path) -> None:
    out, page = tmp_path / "out.jsonl", tmp_path / "page.md"
    run(out)
    run(out, "--render", str(page))
    text = page.read_text()
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("|"):
            title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            rows[title] = cells
    assert rows[""][1:] == ["vllm 0.26.0", "sglang 0.5.16", "limit", "of the limit", "to the best other"]
    # Each process is faster by 1 than the one before: ours ran second and last, SGLang fourth and seventh.
    single = rows["0.6B, decode, 1 x (128 + 512), tokens/s"]
    assert single[0] == "1,004 (1,001 to 1,008)" and single[2] == "904 (903 to 906)"
    assert single[3:] == ["2,000", "0.50", "1.11"]
    assert rows["0.6B, prefill, 256 x (1024 + 1), prompt tokens/s"][3] == "2,000"
    assert rows["0.6B, weight push, ms"] == ["10", "-", "40", "8", "0.80", "4.00"], (
        "a time: the limit and others by ours"
    )
    assert list(rows)[2:] == [
        *(f"0.6B, decode, {n} x (128 + 512), tokens/s" for n in (1, 8, 64, 256)),
        "0.6B, prefill, 256 x (1024 + 1), prompt tokens/s",
        "0.6B, RL shape, 256 x (1024 + 1024), tokens/s",
        "0.6B, weight push, ms",
    ]
    assert "A plain copy moves 3,000 GB/s" in text and "600,000 GFLOP/s" in text


def test_a_line_that_was_cut_is_left_out(engines: FakeEngines, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    run(out, "--rounds", "1", "--engines", OURS)
    whole = Table.read(out)
    with out.open("a") as file:
        file.write('{"part": "a", "na')
    assert Table.read(out) == whole


def test_a_peer_measures_the_works_in_one_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts, sizes = [], []

    @contextlib.contextmanager
    def start(folder: Path, args: argparse.Namespace) -> Iterator[peer_offline.Generate]:
        starts.append(folder)

        def generate(work: Workload) -> list[int]:
            sizes.append(len(work.prompts))
            return work.output_lens

        yield generate

    works = ["decode_4=4x16x8", "prefill=3x16x1", "rl=2x16x8x1"]
    monkeypatch.setattr(sys, "argv", ["peer", "--device", "cpu", "--shape", "tiny", "--works", *works])
    peer_offline.run_peer("msgspec", "", start)
    found = figures(capsys)
    assert len(starts) == 1 and sizes == [4, 4, 3, 3, 2], "two runs of each, and one of `rl`"
    assert [found[name]["unit"] for name in ("decode_4", "prefill", "rl")] == [
        "tokens/s",
        "prompt tokens/s",
        "tokens/s",
    ]
    assert "output_tokens_per_s" not in found


@pytest.mark.parametrize("argv", [["--render", "page.md"], ["--rounds", "0"], ["--device", "cpu"]])
def test_what_cannot_work_is_refused(tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        card_table.parse_args(["--out", str(tmp_path / "missing"), *argv])
    assert "error: --" in capsys.readouterr().err


def test_every_workload_fits_the_context_of_its_shape() -> None:
    from benchmarks.shapes import SHAPES
    from benchmarks.workload import parse_work

    for shape in card_table.SHAPES:
        for text in works_of(shape).values():
            work: Any = parse_work(text).work
            assert len(work.prompts[0]) + work.output_lens[0] <= SHAPES[shape]["max_position_embeddings"]
