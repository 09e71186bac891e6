"""The gates run bounded parts, resume where they stopped, and compare the figures with committed shares."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import (
    ablation,
    colocated,
    constrained,
    engine_deaths,
    front_cost,
    multi_turn,
    offline,
    replicas,
    serving,
    soak,
    startup,
    training_runs,
    weight_sync,
)
from benchmarks.gates import __main__ as gates
from benchmarks.gates import running, shares
from benchmarks.gates.figures import FIGURES, Figure, Lines, _of_limit, _read, _time
from benchmarks.gates.parts import PARTS, Part
from benchmarks.gates.running import is_installed, parts_to_run, read_lines, run_part
from benchmarks.gates.shares import Row, judge, read_shares, record_shares
from benchmarks.gates.table import make_table
from benchmarks.peers import sglang_push

PARSERS: dict[str, Any] = {
    "ablation": ablation,
    "colocated": colocated,
    "constrained": constrained,
    "engine_deaths": engine_deaths,
    "front_cost": front_cost,
    "multi_turn": multi_turn,
    "offline": offline,
    "replicas": replicas,
    "peers.sglang_push": sglang_push,
    "serving": serving,
    "soak": soak,
    "startup": startup,
    "training_runs": training_runs,
    "weight_sync": weight_sync,
}


@pytest.mark.parametrize(
    ("gpus", "part"),
    [pytest.param(gpus, part, id=f"{gpus}-{part.name}") for gpus, parts in PARTS.items() for part in parts],
)
def test_every_part_is_a_command_line_that_its_benchmark_takes(
    gpus: int, part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    module, *argv = part.command.split()
    PARSERS[module].parse_args([*argv, "--device", "cuda" if gpus else "cpu"])


@pytest.mark.parametrize("gpus", list(PARTS))
def test_every_figure_has_a_part_and_a_name_of_its_own(gpus: int) -> None:
    names = [figure.name for figure in FIGURES[gpus]]
    assert len(set(names)) == len(names)
    assert {figure.part for figure in FIGURES[gpus]} <= {part.name for part in PARTS[gpus]}


# -- the verdict -------------------------------------------------------------------------------------------------

RATE = _of_limit("speed", "a", "rate")
DONE: Lines = {("a", "part_end"): {"code": 0, "timed_out": False, "seconds": 1.0}}


def lines(**fields: float) -> Lines:
    return DONE | {("a", "rate"): fields}


@pytest.mark.parametrize(
    ("value", "committed", "verdict", "is_ok"),
    [
        (46.0, {"speed": 0.5}, "ok", True),
        (45.0, {"speed": 0.5}, "ok", True),  # 0.9 of it
        (44.0, {"speed": 0.5}, "below 0.9 of it", False),
        (44.0, {}, "not recorded", None),
        (44.0, None, "unknown card", None),
    ],
)
def test_a_share_is_compared_with_the_committed_one(
    value: float, committed: dict[str, float] | None, verdict: str, is_ok: bool | None
) -> None:
    row = judge(RATE, lines(value=value, limit=100.0), committed)
    assert (row.share, row.verdict, row.is_ok) == (value / 100, verdict, is_ok)


def test_the_share_of_a_time_is_the_limit_to_the_time() -> None:
    row = judge(_time("push", "a", "rate", "ms"), lines(value=20.0, limit=10.0), {"push": 0.6})
    assert (row.share, row.is_ok) == (0.5, False)


def test_fixed_bounds_hold_on_every_card() -> None:
    figure = Figure("graphs", "a", "graphs", _read("a", "rate"), least=1)
    assert judge(figure, lines(value=3.0), None).is_ok is True
    none = judge(figure, lines(value=0.0), None)
    assert (none.verdict, none.is_ok) == ("below 1", False)
    most = Figure("slowness", "a", "x", _read("a", "rate"), most=1.1)
    assert judge(most, lines(value=1.2), None).verdict == "above 1.1"


@pytest.mark.parametrize(
    ("found", "verdict", "is_ok"),
    [
        ({}, "not run", None),
        (DONE, "missing in the output", False),
        ({("a", "part_end"): {"code": 3, "timed_out": False}}, "failed, exit status 3", False),
        ({("a", "part_end"): {"code": -9, "timed_out": True}}, "timed out", False),
        ({("a", "part_left"): {"reason": "vllm is not installed", "failure": False}}, "vllm is not installed", None),
        ({("a", "part_left"): {"reason": "left: 480 s are over", "failure": True}}, "left: 480 s are over", False),
    ],
)
def test_a_row_without_a_figure_says_why(found: Lines, verdict: str, is_ok: bool | None) -> None:
    row = judge(RATE, found, {"speed": 0.5})
    assert (row.verdict, row.is_ok, row.value) == (verdict, is_ok, None)


def test_recorded_shares_are_read_for_the_same_cards_only(tmp_path: Path) -> None:
    path = tmp_path / "shares.json"
    path.write_text("{}")
    assert read_shares("card", 1, path) is None
    broken = judge(_of_limit("other", "b", "rate"), {("b", "part_end"): {"code": 1, "timed_out": False}}, None)
    for value in (50.0, 40.0):  # a lower share replaces a higher one
        assert record_shares("card", 1, [judge(RATE, lines(value=value, limit=100.0), None), broken], path) == 1
    assert read_shares("card", 1, path) == {"speed": 0.4}
    assert read_shares("card", 2, path) is None and read_shares("other card", 1, path) is None


def test_the_table_has_a_row_for_each_figure() -> None:
    rows = [
        Row(RATE, 12345.6, 20000.0, 0.61728, 0.6, "ok", True),
        Row(_time("push", "a", "rate", "ms"), None, None, None, None, "timed out", False),
    ]
    head, rule, first, second = make_table(rows).splitlines()
    assert head.split() == ["figure", "value", "unit", "limit", "share", "committed", "verdict"]
    assert len(rule) == max(len(head), len(first), len(second))
    assert first.split() == ["speed", "12,346", "tokens/s", "20,000", "0.617", "0.600", "ok"]
    assert second.split() == ["push", "-", "ms", "-", "-", "-", "timed", "out"]


# -- the run -----------------------------------------------------------------------------------------------------


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `python -m benchmarks.fake` in a temporary folder: it prints a figure, then acts on its argument."""
    package = tmp_path / "benchmarks"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "fake.py").write_text(
        "import subprocess, sys, time\n"
        "def waits(): time.sleep(600)\n"
        "if sys.argv[1] == 'wait': waits()\n"
        "print('a library says hello')\n"
        'print(\'{"name": "rate", "value": 3.0, "limit": 4.0}\', flush=True)\n'
        "if sys.argv[1] == 'hang':\n"
        "    child = subprocess.Popen([sys.executable, __file__, 'wait'])\n"  # it holds the output open
        "    child.wait()\n"
        "if sys.argv[1] == 'fail': sys.exit('it went wrong')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "shares.json").write_text("{}")
    monkeypatch.setattr(shares, "SHARES", tmp_path / "shares.json")
    for function in (read_shares, record_shares):  # their default is the file of the repository
        monkeypatch.setattr(function, "__defaults__", (tmp_path / "shares.json",))
    monkeypatch.setattr(gates, "find_card", lambda gpus: "a card")
    return tmp_path / "out.jsonl"


def set_up(monkeypatch: pytest.MonkeyPatch, parts: list[Part], figures: list[Figure]) -> None:
    monkeypatch.setitem(PARTS, 0, parts)
    monkeypatch.setitem(FIGURES, 0, figures)


def test_programs_beside_the_parts_are_waited_for_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"a": iter(["busy", ""]), "b": iter(["", "busy"])}
    monkeypatch.setattr(running, "holders_sentence", lambda uuid: next(held[uuid]))
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    assert running.held_by_others(["a"]) == "", "it ended meanwhile"
    assert running.held_by_others(["b"]) == ""
    assert running.held_by_others(["b"], patience=0.0) == "GPU b: busy"
    assert running.held_by_others([]) == ""


def test_parts_are_written_down_and_not_repeated(out: Path) -> None:
    good, bad, slow = (
        Part("good", "fake do", 30),
        Part("bad", "fake fail", 30),
        Part("slow", "fake do", 9, is_long=True),
    )
    assert run_part(good, "cpu", out)
    assert not run_part(bad, "cpu", out)
    found = read_lines(out)
    assert found["good", "rate"]["value"] == found["bad", "rate"]["value"] == 3.0
    assert "stderr" not in found["good", "part_end"] and "it went wrong" in found["bad", "part_end"]["stderr"]
    assert parts_to_run([good, bad, slow], None, False, found) == [bad]
    assert parts_to_run([good, bad, slow], None, True, found) == [bad, slow]
    assert parts_to_run([good, bad, slow], ["good", "slow"], False, found) == [good, slow]
    other = Part("other", "offline", 1, needs="sglang", is_long=True)
    assert parts_to_run([good, bad, other], None, False, found, "sglang") == [other]


def test_a_part_that_hangs_is_killed_with_its_children(out: Path) -> None:
    assert not run_part(Part("slow", "fake hang", 60), "cpu", out, bound=2.0)
    found = read_lines(out)
    assert found["slow", "rate"]["value"] == 3.0
    end = found["slow", "part_end"]
    assert end["timed_out"] is True and end["seconds"] < 30
    assert "in _wait" in end["stderr"] and "in waits" in end["stderr"], "its stack and its child's say where it hung"
    assert "Extension modules:" not in end["stderr"]


def test_a_run_prints_the_table_and_its_failures(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = _of_limit("speed", "good", "rate")
    set_up(monkeypatch, [Part("good", "fake do", 30)], [rate])
    assert gates.main(["--gpus", "0", "--out", str(out)]) == 0, "an unknown card has no verdict"
    printed = capsys.readouterr()
    assert "unknown card" in printed.out and "0.750" in printed.out
    assert "part 1 of 1, good" in printed.err
    assert gates.main(["--gpus", "0", "--out", str(out), "--judge", "--record"]) == 0
    assert json.loads((out.parent / "shares.json").read_text()) == {"a card": {"0": {"speed": 0.75}}}
    (out.parent / "shares.json").write_text('{"a card": {"0": {"speed": 0.85}}}')
    assert gates.main(["--gpus", "0", "--out", str(out), "--judge"]) == 1
    assert "below 0.9 of it" in capsys.readouterr().out
    gate = read_lines(out)["good", "gate"]
    assert (gate["figure"], gate["share"], gate["committed"], gate["ok"]) == ("speed", 0.75, 0.85, False)
    set_up(monkeypatch, [Part("bad", "fake fail", 30)], [])
    assert gates.main(["--gpus", "0", "--out", str(out)]) == 1, "a part without figures failed"
    assert "bad (exit status 1): python -m benchmarks.fake fail\n    it went wrong" in capsys.readouterr().out


def test_parts_that_cannot_run_are_left(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [Part("long", "fake do", 3000), Part("short", "fake do", 30), Part("other", "fake do", 9, needs="no_such")]
    set_up(monkeypatch, parts, [_of_limit(part.name, part.name, "rate") for part in parts])
    assert gates.main(["--gpus", "0", "--out", str(out), "--seconds", "60"]) == 0
    printed = capsys.readouterr().out
    assert "left: no time for its bound" in printed and "no_such is not installed" in printed
    assert [part for part, name in read_lines(out) if name == "part_end"] == ["short"]


def test_a_folder_without_a_module_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_module").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_installed("json") and not is_installed("no_module") and not is_installed("no_such")


def test_a_set_on_gpus_ends_in_time(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, bounds = [0.0], []

    def run(part: Part, device: str, out: Path, bound: float) -> bool:
        bounds.append((part.name, device, bound))
        clock[0] += 200.0
        return True

    monkeypatch.setattr(gates, "run_part", run)
    monkeypatch.setattr(gates, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    args = gates.make_parser().parse_args(["--gpus", "1", "--out", str(out)])
    names = ("one", "apart", "two", "three", "four")
    parts = [Part(name, "fake do", 250, needs="json" if name == "apart" else "") for name in names]
    gates.run_parts(args, parts)
    # "apart" does not count. Then 400 s are over, and "three" has the rest of the 480 s.
    assert bounds == [("one", "cuda", 250), ("apart", "cuda", 250), ("two", "cuda", 250), ("three", "cuda", 80.0)]
    left = read_lines(out)["four", "part_left"]
    assert (left["reason"], left["failure"]) == ("left: 480 s are over", True)


def test_a_file_of_another_card_is_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up(monkeypatch, [], [])
    assert gates.main(["--gpus", "0", "--out", str(out)]) == 0
    monkeypatch.setattr(gates, "find_card", lambda gpus: "another card")
    with pytest.raises(SystemExit):
        gates.main(["--gpus", "0", "--out", str(out)])
    assert "on a card, this one is --gpus 0 on another card" in capsys.readouterr().err


def test_what_cannot_run_is_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, reason in (
        (["--gpus", "0", "--only", "no_such"], "has no part no_such"),
        (["--gpus", "0", "--judge"], "--judge needs --out"),
        (["--gpus", "0", "--judge", "--out", str(out)], "has no run"),
    ):
        with pytest.raises(SystemExit):
            gates.main(argv)
        assert reason in capsys.readouterr().err
