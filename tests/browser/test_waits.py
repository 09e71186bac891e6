"""The view "Who waits" draws the lanes of trainer, pushes, servers and episodes over time."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.recorded_runs import BEGAN, EVALUATED, EVALUATION_SECONDS, STEP_SECONDS, STEPS
from tests.browser.test_overview import box_of
from tests.browser.watching import Visit

TRAINER, EVALUATIONS, EPISODES = 38, 76, 233
"""Distances of the lanes of the trainer, of the evaluations and of the first episode from the top of the canvas."""
GUTTER, RIGHT = 124, 10
"""Room beside the lanes."""


def open_lanes(visit: Visit) -> None:
    visit.open(f"/waits/{visit.watch.run('steady')}")
    expect(visit.page.locator("canvas.lanes")).to_be_visible()
    expect(visit.page.locator(".idle").first).to_be_visible()


def x_of(visit: Visit, seconds: float) -> float:
    """Return the distance from the left of the canvas of a time since the begin of the run."""
    lanes = visit.watch.get(f"/runs/{visit.watch.run('steady')}/lanes")
    width = box_of(visit.page.locator("canvas.lanes"))["width"] - GUTTER - RIGHT
    return GUTTER + (BEGAN + seconds - lanes["begin"]) / (lanes["end"] - lanes["begin"]) * width


def test_the_idle_shares_are_told(visit: Visit) -> None:
    open_lanes(visit)
    idle = visit.watch.get(f"/runs/{visit.watch.run('steady')}/lanes")["idle"]
    trainer = visit.page.locator(".idle", has_text="trainer idle").locator("b")
    expect(trainer).to_contain_text(str(round(100 * idle["trainer"])))
    expect(visit.page.locator(".legend")).to_contain_text("waiting for the environment")
    expect(visit.page.locator(".note")).to_contain_text("60 of")


def test_a_lane_tells_what_it_shows_and_how_long(visit: Visit) -> None:
    open_lanes(visit)
    canvas = visit.page.locator("canvas.lanes")
    tip = visit.page.locator(".tip")
    canvas.hover(position={"x": x_of(visit, EVALUATION_SECONDS + 6), "y": TRAINER})
    expect(tip).to_contain_text("step 0")
    expect(tip).to_contain_text("13 s")


def test_an_evaluation_has_its_span_and_opens_its_episodes(visit: Visit) -> None:
    open_lanes(visit)
    expect(visit.page.locator(".legend")).to_contain_text("evaluation")
    canvas, tip = visit.page.locator("canvas.lanes"), visit.page.locator(".tip")
    second = EVALUATED[1] * STEP_SECONDS + 1.5 * EVALUATION_SECONDS
    for lane in (TRAINER, EVALUATIONS):
        canvas.hover(position={"x": x_of(visit, second), "y": lane})
        expect(tip).to_contain_text("evaluation at step 10: reward 0.188")
        expect(tip).to_contain_text("push held 12 s by the evaluation at step 10")
    canvas.click(position={"x": x_of(visit, second), "y": EVALUATIONS})
    expect(visit.page.get_by_role("heading", name="Held-out at step 10", exact=True)).to_be_visible()


def test_dragging_zooms_and_a_double_click_shows_everything(visit: Visit) -> None:
    open_lanes(visit)
    canvas = visit.page.locator("canvas.lanes")
    box = box_of(canvas)
    visit.page.mouse.move(box["x"] + 130, box["y"] + TRAINER)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 230, box["y"] + TRAINER, steps=5)
    visit.page.mouse.up()
    whole = visit.page.get_by_role("button", name="Show everything")
    expect(whole).to_be_visible()
    bounds = dict(entry.split("=") for entry in visit.place().partition("?")[2].split("&"))
    assert BEGAN - 1 <= float(bounds["from"]) < float(bounds["to"]) < BEGAN + STEPS * STEP_SECONDS / 4
    canvas.dblclick(position={"x": 600, "y": 10})
    expect(whole).to_have_count(0)


def test_keys_zoom_and_choose_an_episode(visit: Visit) -> None:
    open_lanes(visit)
    visit.page.keyboard.press("+")
    visit.until("() => location.hash.includes('from=')")
    visit.page.keyboard.press("0")
    visit.until("() => !location.hash.includes('from=')")
    visit.page.keyboard.press("j")
    visit.page.keyboard.press("Enter")
    expect(visit.page.get_by_role("heading", name="Episode")).to_be_visible()


def test_a_click_on_an_episode_opens_it(visit: Visit) -> None:
    open_lanes(visit)
    lane = visit.watch.get(f"/runs/{visit.watch.run('steady')}/lanes")["episodes"][0]
    canvas = visit.page.locator("canvas.lanes")
    canvas.click(position={"x": x_of(visit, lane["begin"] - BEGAN) + 1, "y": EPISODES})
    expect(visit.page.get_by_role("heading", name=f"Episode {lane['label']}")).to_be_visible()
