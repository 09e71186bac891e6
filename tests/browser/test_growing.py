"""A run that grows while the page is open."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit, StartWatch
from tests.browser.recorded_runs import TrainingRun
from verl_server.files.run_output import claim_folder


def test_new_steps_appear_without_a_reload(visit_of: OpenVisit, start_watch: StartWatch, tmp_path: Path) -> None:
    folder = tmp_path / "growing"
    claim = claim_folder(folder)
    training = TrainingRun(folder)
    training.write(0, 2)
    watch = start_watch(folder)
    overview, steps, step = visit_of(watch), visit_of(watch), visit_of(watch)
    overview.open()
    row = overview.page.locator(".run-row", has_text="growing")
    expect(row.locator(".badge")).to_have_text("running")
    expect(row.locator(".number").first).to_have_text("2")
    steps.open(f"/steps/{watch.run('growing')}")
    expect(steps.rows("Steps")).to_have_count(2)
    step.open(f"/step/{watch.run('growing')}/1")
    expect(step.page.get_by_label("Next step (n)")).to_have_count(0)
    for each in (overview, steps, step):
        expect(each.page.locator(".live")).to_have_text("live")
        each.page.evaluate("window.isTheSame = true")

    training.write(2, 3)
    expect(row.locator(".number").first).to_have_text("3")
    values = watch.get(f"/runs/{watch.run('growing')}/metrics?names=reward")["values"]["reward"]
    shown = overview.page.locator('[data-chart="reward"] .chart-value b')
    expect(shown).to_have_text(f"{values[-1]:.3g}")
    expect(steps.rows("Steps")).to_have_count(3)
    expect(steps.rows("Steps").first.locator(".number").first).to_have_text("2")
    expect(step.page.get_by_label("Next step (n)")).to_be_visible()

    training.end()
    claim.release()
    expect(row.locator(".badge")).to_have_text("ended")
    for each in (overview, steps, step):
        assert each.page.evaluate("window.isTheSame") is True


def test_a_run_that_has_not_begun_says_what_to_expect(
    visit_of: OpenVisit, start_watch: StartWatch, tmp_path: Path
) -> None:
    folder = tmp_path / "fresh"
    folder.mkdir()
    watch = start_watch(folder)
    visit = visit_of(watch).open()
    expect(visit.page.get_by_text("No figures yet")).to_be_visible()
    training = TrainingRun(folder)
    training.write(0, 1)
    training.close()
    expect(visit.page.locator('[data-chart="reward"] canvas')).to_be_visible()
    visit.go(f"/steps/{watch.run('fresh')}")
    expect(visit.rows("Steps")).to_have_count(1)
