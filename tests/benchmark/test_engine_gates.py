"""The gates run bounded parts, resume where they stopped, and are judged by the figures in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation, engine_gates, multi_turn, offline, serving, startup
from benchmarks.engine_gates import GATES, PARTS, Gate, Part, _figure, parts_to_run, read_figures, run_part

PARSERS: dict[str, Any] = {
    "offline": offline,
    "serving": serving,
    "multi_turn": multi_turn,
    "startup": startup,
    "ablation": ablation,
}


@pytest.mark.parametrize("part", [part for parts in PARTS.values() for part in parts], ids=lambda part: part.name)
def test_every_part_is_a_command_line_that_its_benchmark_takes(part: Part) -> None:
    module, *argv = part.command.split()
    PARSERS[module].parse_args([*argv, "--device", "cpu"])


@pytest.mark.parametrize("device", list(PARTS), ids=lambda device: f"on_{device}")
def test_every_gate_reads_figures_of_its_parts(device: str) -> None:
    """Each gate has a value when there is a line for every figure of every part."""
    fields = {"value": 1.0, "ratio": 1.0}
    names = ("output_tokens_per_s", "single_sequence_tokens_per_s", "seconds_to_first_token", "prefix_hit_rate")
    more = ("lock_step_ratio", "ideal_ratio", "http_json_tokens_per_s", "http_columnar_tokens_per_s")
    figures = {(part.name, name): fields for part in PARTS[device] for name in (*names, *more)}
    assert all(gate.judge(figures)["value"] is not None for gate in GATES[device])


def test_a_gate_says_what_it_lacks() -> None:
    gate = Gate("speed", _figure("a", "rate"), least=2.0)
    assert gate.judge({("a", "rate"): {"value": 2.5}})["ok"] is True
    assert gate.judge({("a", "rate"): {"value": 1.5}})["ok"] is False
    missing = gate.judge({})
    assert missing["ok"] is None and missing["missing"] == ("a", "rate")
    assert Gate("slowness", _figure("a", "rate"), most=2.0).judge({("a", "rate"): {"value": 2.5}})["ok"] is False


@pytest.fixture
def fake_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `python -m benchmarks.fake` in a temporary folder: it prints a figure, then acts on its argument."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fake.py").write_text(
        "import sys, time\n"
        "print('a library says hello')\n"
        'print(\'{"name": "rate", "value": 3.0}\', flush=True)\n'
        "if sys.argv[1] == 'hang': time.sleep(600)\n"
        "sys.exit(sys.argv[1] == 'fail')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path / "out.jsonl"


def test_parts_are_written_down_and_not_repeated(fake_benchmark: Path) -> None:
    good, bad = Part("good", "fake do", 30), Part("bad", "fake fail", 30)
    assert run_part(good, "cpu", fake_benchmark)
    assert not run_part(bad, "cpu", fake_benchmark)
    figures = read_figures(fake_benchmark)
    assert figures["good", "rate"]["value"] == figures["bad", "rate"]["value"] == 3.0
    assert parts_to_run([good, bad], None, figures) == [bad]
    assert parts_to_run([good, bad], ["good"], figures) == [good]


def test_a_part_that_hangs_is_killed_and_keeps_its_lines(fake_benchmark: Path) -> None:
    assert not run_part(Part("slow", "fake hang", 2), "cpu", fake_benchmark)
    figures = read_figures(fake_benchmark)
    assert figures["slow", "rate"]["value"] == 3.0
    assert figures["slow", "part_end"]["timed_out"] is True


def test_a_part_that_does_not_fit_is_left(
    fake_benchmark: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [Part("long", "fake do", 3000), Part("short", "fake do", 30)]
    monkeypatch.setitem(PARTS, "cpu", parts)
    monkeypatch.setitem(GATES, "cpu", [Gate("rate", _figure("short", "rate"), least=4.0)])
    assert engine_gates.main(["--out", str(fake_benchmark), "--seconds", "60"]) == 1, "the gate must be missed"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["name"], line.get("part")) for line in lines] == [
        ("part_left", "long"),
        ("note", "short"),
        ("rate", "short"),
        ("part_end", "short"),
        ("gate", None),
    ]
    assert engine_gates.main(["--out", str(fake_benchmark), "--judge"]) == 1
