"""The pictures of docs/watch.md, made anew with `make test-browser ARGS=--screenshots`."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit
from tests.browser.test_episode import drawn, open_agent, open_trained
from tests.browser.watching import Visit, Watch

FOLDER = Path(__file__).parents[2] / "docs" / "watch"
MOST_BYTES = 150_000


@pytest.fixture
def picture(request: pytest.FixtureRequest, visit_of: OpenVisit, watch: Watch) -> Visit:
    if not request.config.getoption("--screenshots"):
        pytest.skip("only with --screenshots")
    return visit_of(watch)


def keep(visit: Visit, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}.png"
    visit.page.mouse.move(0, 0)
    visit.page.screenshot(path=str(file), animations="disabled")
    assert file.stat().st_size < MOST_BYTES


def test_overview(picture: Visit) -> None:
    picture.page.set_viewport_size({"width": 1200, "height": 700})
    runs = [picture.watch.run(name) for name in ("agents", "asynchronous", "resumed")]
    picture.open(f"/?off={','.join(runs)}")
    expect(picture.page.locator('[data-chart="reward"] canvas')).to_be_visible()
    keep(picture, "overview")


def test_evaluations(picture: Visit) -> None:
    picture.page.set_viewport_size({"width": 1200, "height": 560})
    picture.open("/")
    picture.page.locator(".evaluations summary").click()
    expect(picture.page.locator('[data-chart="held-out"] canvas')).to_be_visible()
    picture.page.locator(".evaluations").evaluate("(table) => table.scrollIntoView()")
    keep(picture, "evaluations")


def test_waits(picture: Visit) -> None:
    picture.page.set_viewport_size({"width": 1200, "height": 620})
    run = picture.watch.run("steady")
    picture.open(f"/waits/{run}?from=1790000192.0&to=1790000252.0")
    expect(picture.page.locator("canvas.lanes")).to_be_visible()
    keep(picture, "waits")


def test_step(picture: Visit) -> None:
    picture.page.set_viewport_size({"width": 1200, "height": 560})
    picture.open(f"/step/{picture.watch.run('steady')}/19")
    picture.rows("Groups").first.get_by_role("button").click()
    expect(picture.page.locator(".episode-line").first).to_be_visible()
    keep(picture, "step")


def test_compare(picture: Visit) -> None:
    picture.page.set_viewport_size({"width": 1200, "height": 420})
    picture.open(f"/compare/{picture.watch.run('steady')}?a=2&b=38")
    expect(picture.rows("Tasks").first).to_be_visible()
    keep(picture, "compare")


def test_episode(picture: Visit) -> None:
    open_trained(picture)
    drawn(picture)
    picture.page.get_by_role("radio", name="trainer \u2212 server").click()
    picture.page.locator("canvas.token-canvas").click(position={"x": 560, "y": 12})
    expect(picture.page.locator(".token-readout")).to_contain_text("difference")
    keep(picture, "episode")


def test_agent(picture: Visit) -> None:
    picture.page.set_viewport_size({"width": 1200, "height": 700})
    open_agent(picture, "2-0")
    expect(picture.page.locator(".part.call")).to_be_visible()
    drawn(picture)
    keep(picture, "agent")
