"""The overview: the runs, what is wrong with them, and the charts."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Locator, expect

from tests.browser.recorded_runs import STEPS
from tests.browser.watching import Visit


def plot(visit: Visit, chart: str) -> Locator:
    """Return the area of a chart that reacts to the pointer, in sight. All runs have been drawn."""
    expect(visit.page.locator("[aria-busy=false]")).to_have_count(1)
    found = visit.page.locator(f'[data-chart="{chart}"] .u-over')
    found.scroll_into_view_if_needed()
    return found


def box_of(found: Locator) -> dict[str, float]:
    box: Any = found.bounding_box()
    assert box is not None
    return dict(box)


def test_the_runs_are_listed_with_their_states_and_errors(visit: Visit) -> None:
    visit.open()
    row = visit.page.locator(".run-row", has_text="steady")
    expect(row.locator(".badge")).to_have_text("ended")
    expect(row.locator(".number").nth(0)).to_have_text(str(STEPS))
    failed = visit.page.locator(".run-row", has_text="hasty")
    expect(failed.locator(".badge")).to_have_text("failed")
    expect(failed.locator(".run-error")).to_contain_text("CUDA out of memory")
    expect(visit.page.locator(".run-row", has_text="resumed").locator(".badge")).to_have_text("unknown")


def test_charts_show_the_newest_figures_of_each_run(visit: Visit) -> None:
    visit.open()
    for name in ("steady", "hasty"):
        values = visit.watch.get(f"/runs/{visit.watch.run(name)}/metrics?names=reward")["values"]["reward"]
        shown = visit.page.locator(f'[data-chart="reward"] .chart-value[title="{name}: reward"] b')
        expect(shown).to_have_text(f"{values[-1]:.3g}")
    for chart in ("entropy", "gap", "length", "turns"):
        expect(visit.page.locator(f'[data-chart="{chart}"] canvas')).to_be_visible()


def test_one_cursor_is_on_all_charts_and_a_click_opens_the_step(visit: Visit) -> None:
    visit.open()
    for other in ("agents", "asynchronous", "hasty", "resumed"):
        visit.page.get_by_role("button", name=f"Show {other} in the charts").click()
    expect(visit.page.locator('[data-chart="reward"] .chart-value')).to_have_count(1)
    over = plot(visit, "reward")
    box = box_of(over)
    middle = {"x": box["width"] * 20.1 / STEPS, "y": box["height"] / 2}
    over.hover(position=middle)
    here = visit.page.locator('[data-chart="reward"] .chart-at')
    expect(here).to_have_text("step 20")
    expect(visit.page.locator('[data-chart="entropy"] .chart-at')).to_have_text("step 20")
    over.click(position=middle)
    expect(visit.page.get_by_role("heading", name="Step 20", exact=True)).to_be_visible()
    assert visit.place() == f"#/step/{visit.watch.run('steady')}/20"


def test_dragging_zooms_all_charts_and_a_double_click_shows_everything(visit: Visit) -> None:
    visit.open()
    over = plot(visit, "reward")
    box = box_of(over)
    middle = box["y"] + box["height"] / 2
    visit.page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=5)
    visit.page.mouse.up()
    zoomed = visit.page.locator(".chart-tools button")
    expect(zoomed).to_have_text("steps 10\u201319 \u00d7")
    assert "from=9." in visit.place() and "to=19." in visit.place()
    plot(visit, "entropy").dblclick()
    expect(zoomed).to_have_count(0)
    assert "from" not in visit.place()
    visit.go("/?from=5&to=15")
    expect(zoomed).to_have_text("steps 5\u201315 \u00d7")


def test_a_run_is_hidden_and_shown_again(visit: Visit) -> None:
    visit.open()
    values = visit.page.locator('[data-chart="reward"] .chart-value')
    expect(values.nth(3)).to_be_visible()
    every = values.count()
    visit.page.get_by_role("button", name="Show hasty in the charts").click()
    expect(values).to_have_count(every - 1)
    assert f"off={visit.watch.run('hasty')}" in visit.place()
    visit.page.reload()
    expect(values).to_have_count(every - 1)
    visit.page.get_by_role("button", name="Show hasty in the charts").click()
    expect(values).to_have_count(every)


def test_an_advisory_leads_to_its_step(visit: Visit) -> None:
    visit.open()
    advisory = visit.page.locator(".advisory", has_text="In 5 of 6 groups all rewards are alike")
    expect(advisory).to_contain_text("warning")
    advisory.click()
    expect(visit.page.get_by_role("heading", name="Step 24", exact=True)).to_be_visible()


def test_settings_that_differ_are_a_table(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_text("Settings that differ").click()
    row = visit.page.locator("tr", has=visit.page.get_by_role("rowheader", name="learning_rate"))
    expect(row).to_contain_text("0.0001")
    expect(row).to_contain_text("0.00001")


def test_any_figure_becomes_a_chart(visit: Visit) -> None:
    visit.open()
    visit.page.get_by_label("Add a chart").select_option("losses.grad_norm")
    expect(visit.page.locator(".chart", has_text="losses grad norm").locator("canvas")).to_be_visible()
    assert "more=losses.grad_norm" in visit.place()
