"""Evaluations on held-out tasks: their charts beside the reward, their table, and their episodes."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit
from tests.browser.recorded_runs import EVALUATED, HELD_OUT_TASKS, STEPS
from tests.browser.test_overview import box_of, plot
from tests.browser.watching import Visit, Watch

OTHERS = ("agents", "asynchronous", "hasty", "resumed")


def open_steady(visit: Visit) -> None:
    visit.open(f"/?off={','.join(visit.watch.run(name) for name in OTHERS)}")


def test_held_out_figures_are_charts_of_all_runs(visit: Visit) -> None:
    visit.open()
    expect(visit.page.locator("[aria-busy=false]")).to_have_count(1)  # charts are drawn whenever a run has arrived
    titles = visit.page.locator(".chart:visible h3")
    for place, title in enumerate(["Reward", "Held-out reward", "Held-out success"]):
        expect(titles.nth(place)).to_have_text(title)
    values = visit.page.locator('[data-chart="held-out"] .chart-value')
    for name in ("steady", "hasty"):
        evaluations = visit.watch.get(f"/runs/{visit.watch.run(name)}/evaluations")["evaluations"]
        newest = [each["reward"] for each in evaluations if each["incomplete"] is None][-1]
        shown = values.and_(visit.page.locator(f'[title="{name}: reward"]')).locator("b")
        expect(shown).to_have_text(f"{newest + 1e-9:.3g}")  # a script rounds halves up
    expect(values).to_have_count(2)
    over = plot(visit, "held-out")
    over.hover(position={"x": box_of(over)["width"] - 2, "y": 20})
    expect(values).to_have_text(["0.813reward", "0.813best"])


def test_a_point_tells_its_checkpoint_and_opens_its_episodes(visit: Visit) -> None:
    open_steady(visit)
    over = plot(visit, "held-out")
    box = box_of(over)
    here = visit.page.locator('[data-chart="held-out"] .chart-at')
    for step, told in ((10, "step 10 \u00b7 checkpoint removed"), (30, "step 30 \u00b7 checkpoint kept")):
        over.hover(position={"x": box["width"] * step / STEPS, "y": box["height"] / 2})
        expect(here).to_have_text(told)
    over.click(position={"x": box["width"] * 30 / STEPS, "y": box["height"] / 2})
    expect(visit.page.get_by_role("heading", name="Held-out at step 30", exact=True)).to_be_visible()
    assert visit.place() == f"#/step/{visit.watch.run('steady')}/held-out-30"
    facts = {"checkpoint": "kept", "push held": "12 s", "episodes": str(HELD_OUT_TASKS), "reward": "0.75"}
    for name, value in facts.items():
        expect(visit.page.locator(".fact", has_text=name).locator("b")).to_have_text(value)
    visit.rows("Groups").first.get_by_role("button").click()
    visit.page.locator(".episode-line").first.click()
    expect(visit.page.locator(".part-text").first).to_be_visible()
    visit.page.get_by_role("link", name="Held-out at step 30").click()
    expect(visit.rows("Groups").first).to_be_visible()
    visit.page.keyboard.press("n")
    expect(visit.page.get_by_role("heading", name=f"Held-out at step {STEPS}", exact=True)).to_be_visible()


def test_an_incomplete_evaluation_is_told_apart(visit: Visit) -> None:
    visit.open(f"/?off={visit.watch.run('steady')}")
    plot(visit, "held-out")
    visit.page.locator('[data-chart="held-out"] .chart-body').press("ArrowRight")  # the cursor is on the last one
    value = visit.page.locator('[data-chart="held-out"] .chart-value')
    expect(value).to_have_count(1)
    expect(value).to_contain_text("incomplete")


def test_the_table_has_each_evaluation(visit: Visit) -> None:
    open_steady(visit)
    summary = visit.page.locator(".evaluations summary")
    expect(summary).to_contain_text("steady: best 0.813 at step 40, checkpoint kept")
    summary.click()
    rows = visit.page.locator(".evaluations tbody tr")
    expect(rows).to_have_count(len(EVALUATED) + 3)
    expect(rows.filter(has_text="incomplete: timeout")).to_contain_text(f"8 of {HELD_OUT_TASKS}")
    best = rows.filter(has_text="steady").first
    expect(best).to_contain_text("best")
    best.get_by_role("link").click()
    expect(visit.page.get_by_role("heading", name=f"Held-out at step {STEPS}", exact=True)).to_be_visible()


def test_evaluations_lie_between_the_steps_and_are_compared_with_each_other(visit: Visit) -> None:
    run = visit.watch.run("steady")
    visit.open(f"/steps/{run}")
    expect(visit.rows("Steps").nth(0)).to_contain_text(f"held-out {STEPS}")
    expect(visit.rows("Steps").nth(1).locator(".number").first).to_have_text(str(STEPS - 1))
    visit.rows("Steps").first.locator("a").click()
    expect(visit.page.locator(".compare-form")).to_contain_text("the evaluation at step")
    visit.page.get_by_label("Step to compare with").fill("0")
    visit.page.get_by_role("button", name="Compare").click()
    expect(visit.page.locator(".view-head")).to_contain_text(f"{HELD_OUT_TASKS} tasks in common")
    assert visit.place() == f"#/compare/{run}?a=held-out-0&b=held-out-{STEPS}"


def test_a_narrow_page_has_room_for_the_table(visit_of: OpenVisit, watch: Watch) -> None:
    visit = visit_of(watch, viewport={"width": 1000, "height": 900})
    visit.open()
    visit.page.locator(".evaluations summary").click()
    wide = "() => [...document.querySelectorAll('.evaluations, main')].some((e) => e.scrollWidth > e.clientWidth + 1)"
    expect(visit.page.locator(".evaluations tbody tr").first).to_be_visible()
    assert not visit.page.evaluate(wide)
