"""The benchmark of smaller cards holds memory, takes turns, resumes, and says what a smaller memory costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import held_memory, offline, smaller_cards
from benchmarks.gates.parts import Part
from benchmarks.gates.running import write_line
from benchmarks.held_memory import smaller_card
from benchmarks.smaller_cards import all_cases

GIB = 2**30


def test_all_but_the_wanted_bytes_are_held() -> None:
    held: list[int] = []
    held_memory.hold(16 * GIB, lambda: 79 * GIB + 12345 - sum(held), lambda nbytes: held.append(nbytes))
    left = 79 * GIB + 12345 - sum(held)
    assert 16 * GIB <= left < 16 * GIB + 2**21 and max(held) == 4 * GIB


def test_a_card_that_is_full_already_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"8\.00 GiB of the GPU are free, less than the 16\.00 wanted"):
        held_memory.hold(16 * GIB, lambda: 8 * GIB, lambda _: None)


def test_the_process_that_holds_memory_ends_with_the_context(tmp_path: Path) -> None:
    """It ends because its stdin is closed, as it does when its parent ends."""
    ended = tmp_path / "ended"
    code = f"import sys; print('{{\"free_gib\": 16}}', flush=True); sys.stdin.read(); open({str(ended)!r}, 'w').close()"
    with smaller_card(16, [sys.executable, "-c", code]) as held:
        assert held == {"free_gib": 16} and not ended.exists()
    assert ended.exists()


def test_a_process_that_cannot_hold_the_memory_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="did not hold it"), smaller_card(16, [sys.executable, "-c", ""]):
        raise AssertionError("unreachable")


def test_every_case_is_a_command_line_that_offline_takes() -> None:
    for case in all_cases(["0.6b", "8b"], 1):
        module, *argv = case.part.command.split()
        assert module == "offline"
        args = offline.parse_args([*argv, "--device", "cuda"])
        assert [work.name for work in args.works] == ["few", "many"] and args.all_graphs and not args.ceilings


def test_the_whole_card_takes_turns_with_the_smaller_ones() -> None:
    cards = [(case.card, case.round) for case in all_cases(["8b"], 2)]
    assert cards[:4] == [("full", 1), ("24 GiB", 1), ("40 GiB", 1), ("48 GiB", 1)]
    assert cards[4:] == [("48 GiB", 2), ("40 GiB", 2), ("24 GiB", 2), ("full", 2)]


# -- a run with a stand-in for the engine ---------------------------------------------------------------------------


class FakeParts:
    """Writes the lines of a part as `run_part` does. 24 GiB hold a third of the requests, and 16 GiB do not start."""

    def __init__(self) -> None:
        self.run: list[str] = []

    def __call__(self, part: Part, device: str, out: Path) -> bool:
        self.run.append(part.name)
        if part.name == "ceilings":
            lines: list[dict[str, Any]] = [
                {"name": "gemm_ceiling", "value": 600_000.0},
                {"name": "copy_ceiling", "value": 3000.0},
            ]
        elif " 16 GiB " in part.name:
            lines = []
        else:
            is_small = " 24 GiB " in part.name
            lines = [
                {"name": "few", "value": 960.0 if is_small else 1000.0},
                {"name": "many", "value": 4000.0 if is_small else 10_000.0},
                {"name": "kv_cache_tokens", "value": 64_000 if is_small else 10**6},
                {"name": "cuda_graphs", "value": 100, "cuda_graphs_without_memory": 3 if is_small else 0},
                {"name": "decode_cuda_graphs", "value": 44 if is_small else 45, "in_all": 45},
            ]
        code = int(not lines)
        end = {"name": "part_end", "code": code, **({"stderr": "Traceback\nThe model does not fit.\n"} if code else {})}
        for line in [*lines, end]:
            write_line(out, {"part": part.name} | line)
        return not code


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> FakeParts:
    fake = FakeParts()
    monkeypatch.setattr(smaller_cards, "run_part", fake)
    return fake


def main(capsys: pytest.CaptureFixture[str], out: Path, *options: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Return (line by card, table) of a run on the CPU, where no memory is held."""
    smaller_cards.main(["--device", "cpu", "--shapes", "0.6b", "--rounds", "1", "--out", str(out), *options])
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {line["card"]: line for line in lines}, printed.partition("\n\n")[2]


def test_shares_are_compared_with_the_whole_card_and_losses_named(
    parts: FakeParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, table = main(capsys, tmp_path / "out.jsonl")
    assert list(rows) == ["full", "16 GiB", "24 GiB", "40 GiB", "48 GiB"]
    small, full = rows["24 GiB"], rows["full"]
    assert small["few_of_full"] == 0.96 and full["lost"] == "nothing"
    pages = "the KV cache holds 83 of 256 requests at their full length"
    assert small["lost"] == f"{pages}; 1 decode graphs; 3 graphs do not fit"
    assert small["limit"] < full["limit"], "fewer requests at once read the weights more often"
    assert small["share_of_full"] == pytest.approx(small["share"] / full["share"], rel=1e-2)
    assert rows["16 GiB"]["lost"] == "it did not start: The model does not fit."
    assert "| 0.6b | 24 GiB | 64,000 | 44 of 45 | 960 | 0.960 | 4,000 |" in table


def test_cases_that_succeeded_are_not_repeated(
    parts: FakeParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    rows, _ = main(capsys, out)
    parts.run.clear()
    assert main(capsys, out)[0] == rows
    assert parts.run == ["0.6b 16 GiB 1"], "only the one that failed"
    parts.run.clear()
    assert main(capsys, out, "--judge")[0] == rows and not parts.run


def test_no_case_starts_that_could_end_too_late(
    parts: FakeParts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, _ = main(capsys, tmp_path / "out.jsonl", "--minutes", "1.75")
    assert parts.run == ["ceilings"] and not rows


def test_memory_is_held_while_a_case_of_a_gpu_runs(
    parts: FakeParts, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        now: ClassVar[list[float]] = []

        def __init__(self, size: float) -> None:
            self._size = size

        def __enter__(self) -> dict[str, float]:
            self.now.append(self._size)
            return {"free_gib": self._size}

        def __exit__(self, *_: object) -> None:
            self.now.remove(self._size)

    def run(part: Part, device: str, out: Path) -> bool:
        sizes = [float(word) for word in part.name.split() if word in ("16", "24", "40", "48")]
        assert Held.now == sizes and device == "cuda"
        return parts(part, device, out)

    monkeypatch.setattr(smaller_cards, "smaller_card", Held)
    monkeypatch.setattr(smaller_cards, "run_part", run)
    main(capsys, tmp_path / "out.jsonl", "--device", "cuda")
    assert not Held.now and len(parts.run) == 6
