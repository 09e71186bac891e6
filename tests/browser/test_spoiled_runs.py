"""A new user and a run that was spoiled on purpose: at most three clicks from the first page to the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from tests.browser.conftest import OpenVisit, StartWatch
from tests.browser.spoiled_runs import DISK_FULL, MEMBERS, RATE, write_failing_run, write_rate_run, write_zero_run
from tests.browser.watching import Visit

OpenRun = Callable[[Callable[[Path], None]], Visit]


@pytest.fixture
def first_page(start_watch: StartWatch, visit_of: OpenVisit, tmp_path: Path) -> OpenRun:
    """Return a function that writes a run, and opens the first page of a server for it alone."""

    def opened(write: Callable[[Path], None]) -> Visit:
        write(tmp_path / "run")
        return visit_of(start_watch(tmp_path / "run")).open()

    return opened


def first_advisory(visit: Visit) -> Locator:
    """Return the advisory at the top, which a reader takes for the most important one. It is in sight."""
    found = visit.page.locator(".advisory").first
    expect(found).to_be_in_viewport(ratio=1)
    return found


def test_episodes_that_fail_are_one_click_away_with_their_error(first_page: OpenRun) -> None:
    visit = first_page(write_failing_run)
    advisory = first_advisory(visit)
    expect(advisory).to_contain_text("failed")
    advisory.click()
    failed = visit.rows("Episodes")
    expect(failed.first).to_contain_text(DISK_FULL)
    error = failed.first.locator(".error-text")
    assert error.evaluate("(text) => text.scrollWidth <= text.parentElement.clientWidth"), "no part is cut"
    failed.first.get_by_role("link").click()
    expect(visit.page.get_by_role("note")).to_have_text(DISK_FULL)


def test_a_reward_that_is_always_0_shows_what_the_environment_said(first_page: OpenRun) -> None:
    visit = first_page(write_zero_run)
    advisory = first_advisory(visit)
    expect(advisory).to_contain_text("has the reward 0, so nothing is learned")
    advisory.click()
    visit.rows("Groups").first.get_by_role("button").click()
    episodes = visit.page.locator(".episode-line")
    expect(episodes).to_have_count(MEMBERS)
    assert set(episodes.locator(".reward").all_inner_texts()) == {"0"}
    episodes.filter(has_text="Correct!").filter(has_text="1 turn").first.click()
    expect(visit.page.locator(".fact").first).to_have_text("reward0")
    expect(visit.page.locator(".part.other").last).to_contain_text("Correct!")


def test_a_learning_rate_that_is_too_high_is_two_clicks_away(first_page: OpenRun) -> None:
    visit = first_page(write_rate_run)
    advisory = first_advisory(visit)
    expect(advisory).to_contain_text(f"the learning rate ({RATE}) is too high")
    advisory.click()
    charts = visit.page.locator(".chart")
    marked = visit.page.locator(".chart.marked")
    expect(marked).to_have_attribute("data-chart", "kl")
    expect(marked).to_be_in_viewport(ratio=1)
    top = min(box["y"] for chart in charts.all() if (box := chart.bounding_box()))
    assert (marked.bounding_box() or {})["y"] == top, "the chart of the advisory comes first"
    assert visit.place() == "#/?chart=kl"
    advisory.get_by_role("link", name="the settings").click()
    first = visit.page.locator(".settings tr").first
    expect(first).to_have_class("named")
    expect(first).to_have_text(f"grpo.learning_rate{RATE}")


def test_the_chart_of_an_advisory_has_its_bound(first_page: OpenRun) -> None:
    """The dashed line is drawn in the colour of errors, from the left to the right end of the chart."""
    visit = first_page(write_rate_run)
    expect(visit.page.locator("[aria-busy=false]")).to_have_count(1)
    reds = """(chart) => {
        const canvas = document.querySelector(`[data-chart="${chart}"] canvas`);
        const { width, height } = canvas;
        const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
        const rows = new Array(height).fill(0);
        for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] > 100 && data[at] > 150 && data[at + 2] < 90) rows[Math.floor(at / 4 / width)] += 1;
        return Math.max(...rows) / width;
    }"""
    visit.until(f"(chart) => ({reds})(chart) > 0.3", "kl")
    assert visit.page.evaluate(reds, "reward") == 0


def test_settings_are_searched(first_page: OpenRun) -> None:
    visit = first_page(write_rate_run)
    visit.page.get_by_role("link", name="Settings", exact=True).click()
    rows = visit.page.locator(".settings tr")
    expect(rows).to_have_count(len(visit.watch.get(f"/runs/{visit.watch.run('run')}")["settings"]))
    field = visit.page.get_by_label("Search the settings")
    field.fill("LEARNING")
    expect(rows).to_have_count(1)
    assert "q=LEARNING" in visit.place()
    field.fill("no such setting")
    expect(visit.page.get_by_text("No setting has these words")).to_be_visible()
