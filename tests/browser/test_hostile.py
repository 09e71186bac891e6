"""Texts that try to become markup, scripts or requests are shown as texts, in every view."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit
from tests.browser.recorded_runs import LONG_LINE
from tests.browser.watching import Visit, Watch

SHOWN = '</script><script>window.stolen = 1; alert(1)</script><img src=x onerror="alert(2)">'


@pytest.fixture
def visit(visit_of: OpenVisit, hostile_watch: Watch) -> Visit:
    return visit_of(hostile_watch)


def check_no_markup(visit: Visit) -> None:
    page = visit.page
    assert page.evaluate("window.stolen") is None
    assert page.locator("main img, main svg, main script, main iframe, main [onerror], main [onload]").count() == 0
    assert page.locator("a[href^='javascript:']").count() == 0


def row_of(visit: Visit, name: str) -> tuple[str, str]:
    run = visit.watch.get("/runs")["runs"][0]["id"]
    rows = visit.watch.get(f"/runs/{quote(run, safe='')}/episodes")["rows"]
    return quote(run, safe=""), next(row["row"] for row in rows if row["name"] == name)


def test_overview_waits_steps_and_search(visit: Visit) -> None:
    run = quote(visit.watch.get("/runs")["runs"][0]["id"], safe="")
    visit.open()
    expect(visit.page.locator(".run-row a").first).to_contain_text("<img src=x onerror=alert(7)>")
    expect(visit.page.locator(".run-error")).to_contain_text(SHOWN)
    expect(visit.page.locator(".advisory.warn")).to_contain_text(SHOWN)
    expect(visit.page.locator('[data-chart="reward"] canvas')).to_be_visible()
    check_no_markup(visit)
    for place in ("waits", "steps", "settings"):
        visit.open(f"/{place}/{run}")
        expect(visit.page.locator(".view-head h1")).to_be_visible()
        check_no_markup(visit)
    visit.open(f"/step/{run}/0")
    visit.rows("Groups").first.get_by_role("button").click()
    expect(visit.page.locator(".episode-line").first).to_be_visible()
    expect(visit.page.locator(".group-line .name", has_text="</script>").first).to_contain_text("<script>")
    check_no_markup(visit)
    visit.open(f"/find/{run}?q={quote('<img src=x', safe='')}")
    expect(visit.page.locator(".excerpt").first).to_contain_text("<img src=x")
    check_no_markup(visit)


@pytest.mark.parametrize("name", ["0-0", "0-1", "0-3", "1-0", "2-0"])
def test_episodes(visit: Visit, name: str) -> None:
    visit.open_episode(*row_of(visit, name))
    expect(visit.page.locator(".part-text").first).to_be_visible()
    expect(visit.page.locator("canvas.token-canvas")).to_be_visible()
    if name == "2-0":
        expect(visit.page.locator(".part.call code")).to_contain_text("<script>")
    if name in ("0-0", "2-0"):
        expect(visit.page.locator(".part-text", has_text=SHOWN).first).to_be_visible()
        # Control characters and marks of the writing direction are visible characters.
        expect(visit.page.locator(".part-text", has_text=SHOWN).first).to_contain_text("\u241b[31mred")
        expect(visit.page.locator(".part-text", has_text=SHOWN).first).to_contain_text("\\u202egnp.exe")
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visit.page.evaluate(wide) <= 1, "a long word widens the page"
    check_no_markup(visit)


def test_a_text_of_5_megabytes_comes_in_pieces(visit: Visit) -> None:
    visit.open_episode(*row_of(visit, "0-2"))
    long = visit.page.locator(".part.policy").first
    if long.locator(".part-text").count() == 0:
        long.locator("button.part-head").click()
    more = long.get_by_role("button", name="Show more")
    expect(more).to_contain_text(f"{LONG_LINE:,}".replace(",", "\u202f"))
    for _ in range(3):
        before = more.inner_text()
        more.click()
        expect(more).not_to_have_text(before)
    check_no_markup(visit)
