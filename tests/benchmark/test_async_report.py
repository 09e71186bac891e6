"""The page that compares synchronous and asynchronous runs, from lines as `benchmarks.async_waits` writes them."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from benchmarks import async_waits
from benchmarks.async_report import report
from benchmarks.async_tables import by_setting, median_seconds

SVG = "{http://www.w3.org/2000/svg}"


def line(age: int, seed: int, reached: float | None, **settings: Any) -> dict[str, Any]:
    """Return the line of a run of the largest age `age`, 0 for the synchronous trainer."""
    grpo = {"loss": "tis" if age else "clip_behaviour", "seed": seed, "groups": 32, "group_size": 8}
    grpo |= {"clip_low": 0.2, "clip_high": 0.28, "tis_bound": 2.0, "token_mask": None, "sequence_mask": None}
    trainer = "async_grpo" if age else "grpo"
    return {
        "settings": {
            "trainer": trainer,
            "max_staleness": age or 1,
            "latency": 0.5,
            "steps": 140,
            "max_concurrency": 256,
            "cpus": 2,
            "grpo": grpo | {"epochs": 2, "minibatches": 4} | settings.pop("grpo", {}),
        }
        | settings,
        "seconds_to_target": reached,
        "final_success": 0.9,
        "seconds": 400.0,
        "steps": 40,
        "episodes_per_s": 5.0 + age,
        "ages": {str(number): 10 for number in range(age + 1)},
        "spans": {"1": 30, "2": 9, "3": 1},
        "span_2": 0.25,
        "span_3": 0.025,
        "waits": {"deadline": 100.0, "episodes": 60.0} if age else {"episodes": 360.0},
        "idle": {"trainer": 0.5 if age else 0.9, "server": 0.1},
        "groups": {"started": 1300, "trained": 1280, "undone": 20, "lost": 0} if age else {"started": 1280},
        "slowest": {"trained": 3, "undone": 0, "episodes": 3, "in_loss": 3, "all_in_loss": 9, "all_trained": 9},
        "losses": {},
        "curve": [[0.0, 0, 0.1], [100.0, 10, 0.5], [200.0, 20, 0.9], [300.0, 30, 0.9], [400.0, 40, 1.0]],
    }


LINES = [line(0, 0, 400.0), line(0, 1, 300.0), line(2, 0, 200.0), line(2, 1, 300.0), line(4, 0, None)]


def drawings(html: str) -> dict[str, ElementTree.Element]:
    """Return the drawings of the page by their labels. Each is well-formed XML."""
    found = (ElementTree.fromstring(drawing) for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    return {drawing.attrib["aria-label"]: drawing for drawing in found}


def hints(drawing: ElementTree.Element, tag: str) -> list[str]:
    return [str(title.text) for part in drawing.iter(f"{SVG}{tag}") for title in part.iter(f"{SVG}title")]


def test_each_run_is_a_line_over_the_clock_and_over_the_steps() -> None:
    html = report(LINES, 0.9, 3)
    assert "5 runs, on 2 CPU cores" in html and "waits 0.5 s in the median" in html
    for label in ("held-out success over seconds of training", "held-out success over training steps"):
        drawing = drawings(html)[label]
        means = [each for each in drawing.iter(f"{SVG}polyline") if each.get("stroke-width") == "2"]
        assert len(means) == 5 and all(len(each.attrib["points"].split()) == 5 for each in means)
        assert len({each.get("stroke") for each in means}) == 3
        assert [each.get("stroke-dasharray") is not None for each in means] == [False, True, False, True, False]
        shown = hints(drawing, "circle")
        assert "K = 2, tis, seed 1: 0.9 after 300 s and 30 steps" in shown
        assert sum("0.9 after" in hint for hint in shown) == 4  # a ring for each run that reached the target
        assert "K = 4, tis, seed 0: 0.93 at the end" in shown


def test_the_figures_at_the_top_are_medians_and_their_ratios() -> None:
    html = report(LINES, 0.9, 3)
    tiles = re.findall(r'<div class="tile"><b>(.*?)</b><span>(.*?)</span><i>(.*?)</i>', html)
    assert tiles == [
        ("350 s", "synchronous, clip_behaviour", "to 0.9 held out, by seed: 400 / 300"),
        ("250 s", "K = 2, tis", "1.4 times as fast, to 0.9 held out, by seed: 200 / 300"),
        ("-", "K = 4, tis", "to 0.9 held out, by seed: - (no median)"),
    ]


def test_ages_waits_and_idle_shares_are_those_of_each_setting() -> None:
    html = report(LINES, 0.9, 3)
    ages = hints(drawings(html)["age of the trained episodes, in weight pushes"], "rect")
    assert [hint for hint in ages if "K = 2" in hint] == [f"K = 2, tis: 33.3% have {age}" for age in range(3)]
    assert [hint for hint in ages if "K = 4" in hint] == [f"K = 4, tis: 20.0% have {age}" for age in range(5)]
    waits = hints(drawings(html)["where the trainer's time went"], "rect")
    assert waits == [
        *("training and weight sync: 10.0%", "episodes: 90.0%"),
        *("training and weight sync: 50.0%", "episodes: 15.0%", "deadline: 25.0%", "other work: 10.0%") * 2,
    ]
    assert "K = 2, tis, seed 1: 50%" in hints(drawings(html)["trainer idle"], "circle")
    assert "synchronous, clip_behaviour, seed 0: 10%" in hints(drawings(html)["server idle"], "circle")
    assert "Of 3,900 groups that began, 3,840 were trained" in html


def test_synchronous_runs_alone_have_no_ages() -> None:
    html = report(LINES[:2], 0.9, 3)
    assert "How old" not in html and "Held-out success" in html and "Where the time went" in html


def test_settings_that_differ_in_other_options_are_told_apart() -> None:
    lines = [line(2, 0, 200.0), line(2, 0, 200.0, latency=0.1), line(2, 0, 200.0, grpo={"loss": "decoupled"})]
    html = report(lines, 0.9, 3)
    names = re.findall("<b>200 s</b><span>(.*?)</span>", html)
    assert names == ["K = 2, tis, waits 0.1 s", "K = 2, decoupled, waits 0.5 s", "K = 2, tis, waits 0.5 s"]
    means = drawings(html)["held-out success over training steps"].iter(f"{SVG}polyline")
    assert len({each.get("stroke") for each in means}) == 3


def test_a_run_that_was_cut_and_more_settings_than_colors_are_drawn() -> None:
    cut = line(3, 7, None) | {"curve": [[0.0, 0, 0.1]], "waits": {"<wait>": 1.0}}
    many = [line(age, 0, None, grpo={"loss": "<b>" if age % 2 else "tis"}) for age in range(16)]
    html = report([cut, *many], 0.9, 3)
    assert len(drawings(html)) == 8 and "<wait>" not in html and "<b>," not in html


def test_the_command_writes_the_page_beside_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, page = tmp_path / "waits.jsonl", tmp_path / "new" / "waits.html"
    file.write_text("".join(json.dumps(each) + "\n" for each in LINES))
    monkeypatch.setattr(sys, "argv", ["async_waits", "table", str(file), "--report", str(page)])
    async_waits.main()
    assert "| K = 2, 0.5 s | tis | 200, 300 | 250 | 1.40 x |" in capsys.readouterr().out
    assert page.read_text() == report(LINES, async_waits.TARGET, async_waits.IN_A_ROW)
    file.write_text("")
    with pytest.raises(SystemExit, match="no lines in"):
        async_waits.main()


def test_a_median_counts_a_run_that_did_not_arrive_as_endless() -> None:
    runs = by_setting([line(2, 0, None), line(2, 1, 10.0), line(2, 2, 30.0)])
    assert [median_seconds(each) for each in runs] == [30.0]
    assert median_seconds(LINES[-1:]) is None
