"""The page in a dark system, and in a narrow window."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit
from tests.browser.contrast import faint_texts, note_canvas_texts
from tests.browser.test_episode import COLOURS, drawn, open_agent, open_trained
from tests.browser.test_overview import plot
from tests.browser.watching import Visit, Watch

NARROW = 1000
WIDER = """() => [document.documentElement, document.getElementById("main"), ...document.querySelectorAll(".list")]
  .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.id || each.className || each.tagName)"""
CUT = """() => [...document.querySelectorAll(".row .number, .row .badge, .fact, .view-head a")]
  .filter((each) => each.getBoundingClientRect().right > document.documentElement.clientWidth - 4
    || each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== "inline")
  .map((each) => each.textContent)"""


def open_overview(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_text("Settings that differ").click()
    expect(visit.page.locator(".advisory").first).to_be_visible()
    plot(visit, "reward")


def open_waits(visit: Visit) -> None:
    visit.open(f"/waits/{visit.watch.run('steady')}?from=1790000100.0&to=1790000160.0")
    expect(visit.page.locator("canvas.lanes")).to_be_visible()
    expect(visit.page.locator(".idle").first).to_be_visible()


def open_steps(visit: Visit) -> None:
    visit.open(f"/steps/{visit.watch.run('steady')}")
    expect(visit.rows("Steps").first).to_be_visible()


def open_step(visit: Visit) -> None:
    visit.open(f"/step/{visit.watch.run('steady')}/33")
    for place in range(2):
        visit.page.locator(".group-line[aria-expanded=false]").nth(place).click()
    expect(visit.page.locator(".episode-line").first).to_be_visible()


def open_compare(visit: Visit) -> None:
    visit.open(f"/compare/{visit.watch.run('steady')}?a=2&b=38")
    visit.rows("Tasks").first.get_by_role("button").click()
    expect(visit.page.locator(".two-sides .episode-line").first).to_be_visible()


def open_find(visit: Visit) -> None:
    visit.open(f"/find/{visit.watch.run('agents')}?q={quote('nested brackets')}")
    expect(visit.page.locator(".excerpt").first).to_be_visible()


def open_failed(visit: Visit) -> None:
    run = visit.watch.run("steady")
    visit.open_episode(run, visit.watch.get(f"/runs/{run}/episodes?error=1")["rows"][0]["row"])
    drawn(visit)


def open_conversation(visit: Visit) -> None:
    open_agent(visit, "2-0")
    expect(visit.page.locator(".part.call")).to_be_visible()


def open_tree(visit: Visit) -> None:
    open_agent(visit, "0-0")
    expect(visit.page.locator(".branches .row").first).to_be_visible()


VIEWS = (
    open_overview, open_waits, open_steps, open_step, open_compare, open_find, open_failed, open_conversation, open_tree
)  # fmt: skip
each_view = pytest.mark.parametrize("show", VIEWS, ids=lambda show: show.__name__.removeprefix("open_"))


@pytest.fixture(params=["dark", "light"])
def coloured(request: pytest.FixtureRequest, visit_of: OpenVisit, watch: Watch) -> Visit:
    visit = visit_of(watch, color_scheme=request.param)
    note_canvas_texts(visit.page)
    return visit


@each_view
def test_texts_stand_out_from_their_grounds(coloured: Visit, show: Callable[[Visit], None]) -> None:
    show(coloured)
    assert not faint_texts(coloured.page)


def test_tokens_stand_out_from_their_colours(coloured: Visit) -> None:
    open_trained(coloured)
    drawn(coloured)
    for colour in COLOURS:
        coloured.page.get_by_role("radio", name=colour).click()
        drawn(coloured)
        assert not faint_texts(coloured.page)


def test_the_strongest_colours_of_tokens_leave_them_legible(coloured: Visit) -> None:
    open_trained(coloured)
    texts = coloured.page.evaluate(
        """async () => {
          const { TOKEN_COLOURS, tokenColour } = await import("/static/js/colours.js");
          const canvas = document.createElement("canvas");
          canvas.width = canvas.height = 10;
          document.querySelector(".tokens").append(canvas);
          const context = canvas.getContext("2d");
          const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
          let count = 0;
          const write = (name, value) => {
            context.fillStyle = style("--panel");
            context.fillRect(0, 0, 10, 10);
            context.fillStyle = tokenColour(name, value, matchMedia("(prefers-color-scheme: dark)").matches) ?? "#0000";
            context.fillRect(0, 0, 10, 10);
            context.fillStyle = style("--ink");
            context.fillText(`${name} ${value}`, 5, 5, 1);
            count += 1;
          };
          for (const { name } of TOKEN_COLOURS) {
            const counted = { mask: [0, 1, 2], version: [0, 1, 2, 3, 4, 5, 6] };
            for (const value of [...(counted[name] ?? [-20, -1, 0, 1, 20]), NaN]) write(name, value);
          }
          return count;
        }"""
    )
    assert texts > 25
    assert not faint_texts(coloured.page)


@each_view
def test_a_narrow_window_needs_no_scrolling_to_the_side(
    visit_of: OpenVisit, watch: Watch, show: Callable[[Visit], None]
) -> None:
    visit = visit_of(watch, viewport={"width": NARROW, "height": 900})
    show(visit)
    assert visit.page.evaluate(WIDER) == []
    assert visit.page.evaluate(CUT) == []
