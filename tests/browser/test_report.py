"""The tab Report of an exported page: what the demo and an agents' run write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit
from tests.browser.contrast import faint_texts, note_canvas_texts
from tests.browser.guard import PageGuard
from tests.browser.recorded_runs import write_agents_run
from tests.browser.watching import Visit, Watch
from tests.watch.test_report import report
from verl_server.watch.agents_report import write_run_report
from verl_server.watch.report import write_report

WriteReport = Callable[[Path], Path]


def write_demo(folder: Path) -> Path:
    write_report(folder / "report.html", report())
    return folder / "report.html"


def write_agents(folder: Path) -> Path:
    write_agents_run(folder / "agents")
    return write_run_report(folder / "agents")


@pytest.fixture(params=["dark", "light"])
def exported(request: pytest.FixtureRequest, visit_of: OpenVisit, watch: Watch) -> Visit:
    visit = visit_of(watch, color_scheme=request.param, viewport={"width": 1000, "height": 900})
    visit.guard = PageGuard(visit.page, "file://")
    note_canvas_texts(visit.page)
    return visit


@pytest.mark.parametrize("write", [write_demo, write_agents])
def test_a_report_opens_first_and_is_legible(exported: Visit, tmp_path: Path, write: WriteReport) -> None:
    page = exported.page
    page.goto(write(tmp_path).as_uri())
    expect(page.get_by_role("link", name="Report")).to_have_attribute("aria-current", "page")
    expect(page.locator(".report h1")).to_be_visible()
    expect(page.locator(".report section").first).to_be_visible()
    assert not faint_texts(page)
    wide = "[document.documentElement, document.querySelector('main')].some((e) => e.scrollWidth > e.clientWidth + 1)"
    assert not page.evaluate(wide), "the report is wider than its page"


def test_the_report_and_the_run_are_tabs_of_one_page(exported: Visit, tmp_path: Path) -> None:
    page = exported.page
    page.goto(write_agents(tmp_path).as_uri())
    report_head = page.get_by_role("heading", name="How attempts ended")
    expect(report_head).to_be_visible()
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".run-row", has_text="agents")).to_be_visible()
    expect(report_head).to_have_count(0)
    page.keyboard.press("g")
    page.keyboard.press("r")
    expect(report_head).to_be_visible()
    page.get_by_role("link", name="Steps").click()
    page.locator("a.step-line").first.click()
    page.locator(".group-line[aria-expanded]").first.click()
    page.locator(".episode-line").first.click()
    expect(page.locator(".part-text").first).to_be_visible()
    assert not faint_texts(page)
