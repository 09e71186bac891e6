"""The trace of a constrained step, and the comparison of two checkouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import checkouts, constrained
from benchmarks.step_trace import Idle, PartTimes, idle_time
from tests.benchmark.lines import figures

SMALL = ["--requests", "6", "--prompt", "4", "--output", "12", "--runs", "1"]


def test_a_part_within_another_counts_for_itself_alone() -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 10.5])
    parts = PartTimes(lambda: next(times))
    with parts.part("outer"), parts.part("inner"):
        parts.rename("renamed")
    assert parts.seconds == {"outer": 1.5, "inner": 2.0, "renamed": 7.0}


def test_gaps_between_operations_of_a_device_are_idle_time() -> None:
    operations = [
        (0.0, 10.0, "forward"),
        (4.0, 12.0, "copy beside it"),
        (15.0, 16.0, "Memcpy HtoD"),  # 3 us after the forward pass, followed by the masks
        (16.0, 17.0, "_mask_tile"),
        (17.0, 18.0, "draw"),
        (18.0, 19.0, "Memcpy DtoH"),
        (19.0, 20.0, "done"),
        (27.0, 30.0, "forward"),
        *((30.0 + i, 31.0 + i, "forward") for i in range(4)),
    ]
    assert idle_time(list(reversed(operations))) == Idle(before_sampling=3.0, elsewhere=7.0)


def test_the_trace_has_the_parts_of_free_and_of_constrained_steps(capsys: pytest.CaptureFixture[str]) -> None:
    constrained.main([*SMALL, "--trace"])
    found = figures(capsys)
    for kind in ("free", "constrained"):
        parts = {name: line["value"] for name, line in found.items() if name.startswith(kind)}
        total = parts.pop(f"{kind}_step_us")
        assert total == pytest.approx(sum(parts.values()), rel=1e-3)
        assert {f"{kind}_{part}_us" for part in ("plan", "process", "emit", "collect")} <= set(parts)
        constrains = {f"{kind}_{part}_us" for part in ("masks", "consume", "launch_of_sampling")} <= set(parts)
        assert constrains == (kind == "constrained")


@pytest.mark.parametrize("wrong", [["--tp", "2"], ["--any-object"]])
def test_a_trace_that_cannot_be_made_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        constrained.main(["--trace", *wrong])
    assert "--trace needs" in capsys.readouterr().err


def test_a_comparison_prints_the_ratio_of_each_common_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "verl_server").mkdir()
    (tmp_path / "verl_server" / "__init__.py").touch()
    packages: list[Path] = []

    def run(module: str, argv: list[str], package: Path) -> checkouts.Figures:
        assert (module, argv) == ("benchmarks.constrained", ["--output", "8"])
        packages.append(package)
        value = 3.0 * len(packages) if package == checkouts.HERE else 2.0
        figure = {"rate": {"value": value, "unit": "tokens/s"}, "run": {"command": "x"}}
        return figure if package != checkouts.HERE else figure | {"new": {"value": 1.0, "unit": "s"}}

    monkeypatch.setattr(checkouts, "run", run)
    constrained.main(["--output", "8", "--against", str(tmp_path), "--turns=3"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert packages == [tmp_path, checkouts.HERE] * 3, "the packages take turns"
    assert [line["name"] for line in lines] == ["run", "rate"] and lines[1]["value"] == 6.0


def test_a_folder_without_the_package_is_no_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        constrained.main(["--against", str(tmp_path)])
    assert "is no checkout: it has no verl_server/__init__.py" in capsys.readouterr().err


def test_the_ratio_is_of_the_medians_and_the_options_of_the_comparison_are_not_handed_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = [{"t": {"value": value, "unit": "us"}} for value in (1.0, 9.0, 3.0)]
    there = [{"t": {"value": value, "unit": "us"}} for value in (6.0, 2.0, 7.0)]
    checkouts.print_ratios(here, there, Path("/somewhere/before"))
    line = figures(capsys)["t"]
    assert (line["value"], line["unit"], line["here"], line["there"]) == (0.5, "of before", 3.0, 6.0)
    argv = ["--trace", "--against", "x", "--output", "8", "--turns=2", "--against=y", "--turns", "4"]
    assert checkouts.without_options(argv) == ["--trace", "--output", "8"]


def test_the_other_package_runs_with_the_benchmarks_of_this_checkout(tmp_path: Path) -> None:
    (tmp_path / "verl_server").mkdir()
    (tmp_path / "verl_server" / "__init__.py").write_text('print(\'{"name": "other", "value": 1.0, "unit": "s"}\')\n')
    (tmp_path / "verl_server" / "__main__.py").write_text("")
    assert checkouts.run("verl_server", [], tmp_path)["other"]["value"] == 1.0
    with pytest.raises(Exception, match="returned non-zero"):
        checkouts.run("benchmarks.constrained", ["--no-such-option"], checkouts.HERE)
