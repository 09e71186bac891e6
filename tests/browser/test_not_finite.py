"""Figures that are not finite: the charts mark them, and an advisory names them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit, StartWatch
from tests.browser.contrast import faint_texts, note_canvas_texts
from tests.browser.test_overview import plot
from tests.watch.site.recorded_runs import FIRST, step_metrics
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import RunEnded, RunStarted

TEXTS = """(chart) => [...window.canvasNotes].filter(([canvas]) => canvas.closest(`[data-chart="${chart}"]`))
  .flatMap(([, { texts }]) => texts.map(({ text }) => text))"""


def write_diverged_run(folder: Path) -> None:
    files = RunWriter(folder, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    for step in range(12):
        losses = {"kl_reference": 0.1, "grad_norm": 0.5, "entropy": 1.0}
        fields: dict[str, Any] = {"logprob_gap": 0.01, "losses": losses}
        if step == 4:
            fields["logprob_gap"] = math.nan
        if step == 11:
            fields["losses"] = {"kl_reference": math.inf, "grad_norm": math.nan, "entropy": 1.0}
        files.record(step_metrics(step, FIRST, math.nan if step in (7, 8) else 0.1 * step, **fields))
    files.note(RunEnded(exit_status=1, error="NonFiniteError: the gradients are not finite"))
    files.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_charts_mark_the_steps_and_an_advisory_names_the_figures(
    visit_of: OpenVisit, start_watch: StartWatch, tmp_path: Path, scheme: str
) -> None:
    write_diverged_run(tmp_path / "diverged")
    visit = visit_of(start_watch(tmp_path / "diverged"), color_scheme=scheme)
    note_canvas_texts(visit.page)
    visit.open()
    plot(visit, "reward")
    # One text for the two steps side by side, one for each other step, and none for figures that are only absent.
    texts = {name: visit.page.evaluate(TEXTS, name) for name in ("reward", "gap", "kl", "gradient", "entropy")}
    marks = {name: found.count("not finite") for name, found in texts.items()}
    assert marks == {"reward": 1, "gap": 1, "kl": 1, "gradient": 1, "entropy": 0}
    assert "0.01" in texts["gap"], "a logarithmic axis of a value that stays the same"
    expect(visit.page.locator('[data-chart="reward"] .chart-body')).to_have_attribute(
        "aria-label", re.compile(r"2 not finite")
    )
    advisory = visit.page.locator(".advisory", has_text="non finite")
    expect(advisory).to_contain_text("error")
    expect(advisory).to_contain_text("not finite: losses.kl_reference, losses.grad_norm")
    expect(advisory).to_contain_text("learning rate")
    assert not faint_texts(visit.page)
