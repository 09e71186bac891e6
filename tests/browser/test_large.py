"""100,000 episodes, and what the page costs: JSON lines with times, frames and memory, which decide nothing.

Without `--large` the episodes are short. `--large FOLDER` uses the run of `benchmarks.watch_scale` in FOLDER, 10 GB,
and writes it first if it is not there.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from benchmarks.watch_scale import NEEDLE, write_run
from tests.browser.conftest import OpenVisit, StartWatch
from tests.browser.test_episode import drawn
from tests.browser.watching import Visit, Watch

EPISODES = 100_000
TOKENS, SHORT_TOKENS = 2_700, 20
WANTED_GIB = 20
MOST_MEGABYTES = 200
FRAMES = """
(distance) => new Promise((resolve) => {
  const area = document.querySelector(".token-scroll");
  const times = [];
  let left = 120;
  const step = (now) => {
    times.push(now);
    area.scrollTop += distance;
    if (left-- > 0) requestAnimationFrame(step);
    else resolve(times.slice(1).map((time, index) => time - times[index]).sort((a, b) => a - b));
  };
  requestAnimationFrame(step);
})
"""


@pytest.fixture(scope="module")
def large_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--large")
    folder = tmp_path_factory.mktemp("large") if given is None else Path(given)
    if (folder / "metrics.jsonl").exists():
        return folder
    free = shutil.disk_usage(folder.parent).free / 2**30
    if given is not None and free < WANTED_GIB:
        pytest.skip(f"A run of 10 GB wants a disk with {WANTED_GIB} GiB free, and {folder.parent} has {free:.0f}.")
    write_run(folder, episodes=EPISODES, tokens=SHORT_TOKENS if given is None else TOKENS)
    return folder


@pytest.mark.timeout(3600)
def test_100000_episodes_are_within_reach(
    visit_of: OpenVisit, start_watch: StartWatch, large_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    watch = start_watch(large_run)
    visit = visit_of(watch).open()
    indexed = visit.page.locator(".run-row:not(.run-head) .number").nth(1)
    expect(indexed).to_have_text("100\u202f096", timeout=600_000)
    expect(visit.page.locator('[data-chart="reward"] canvas')).to_be_visible()
    seconds = {"indexed": round(time.monotonic() - began, 1)}
    run = watch.get("/runs")["runs"][0]["id"]

    seconds["steps"] = _until_shown(visit, f"/steps/{run}", ".step-line .number >> text=390")
    seconds["step"] = _until_shown(visit, f"/step/{run}/200", ".group-line[aria-expanded]")
    assert watch.get(f"/runs/{run}/steps/200")["step"]["episodes"] == 256
    seconds["find"] = _until_shown(visit, f"/find/{run}?order=-tokens", ".episode-line")
    seconds["waits"] = _until_shown(visit, f"/waits/{run}", "canvas.lanes")
    seconds["search"] = _until_shown(visit, f"/find/{run}?q={NEEDLE.replace(' ', '%20')}", ".episode-line .excerpt")
    rows = visit.page.get_by_role("group", name="Episodes")
    rows.evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    visit.page.locator(".episode-line").last.click()
    expect(visit.page.locator(".part-text").first).to_be_visible()
    drawn(visit)

    memory = watch.megabytes()
    _report(capsys, {"run": "100,000 episodes", "bytes": _bytes(large_run), "seconds": seconds, "megabytes": memory})
    assert memory["peak"] <= MOST_MEGABYTES


def test_what_a_page_costs_is_reported(
    visit_of: OpenVisit, watch: Watch, long_watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    visit = visit_of(watch).open()
    expect(visit.page.locator('[data-chart="reward"] canvas')).to_be_visible()
    figures = visit.page.evaluate(
        """() => ({
          first_paint_ms: Math.round(performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? 0),
          charts_drawn_ms: Math.round(performance.now()),
        })"""
    )
    long = visit_of(long_watch)
    run = long_watch.get("/runs")["runs"][0]["id"]
    long.open_episode(run, long_watch.get(f"/runs/{run}/episodes")["rows"][0]["row"])
    drawn(long)
    for distance in (60, 600):
        times = long.page.evaluate(FRAMES, distance)
        figures[f"frame_ms_at_{distance}_px"] = {
            "median": round(times[len(times) // 2], 1),
            "worst_of_100": round(times[-2], 1),
            "per_second": round(1000 * len(times) / sum(times), 1),
        }
    long.guard.collect()
    figures["most_nodes"], figures["megabytes"] = long.guard.most_nodes, long_watch.megabytes()
    _report(capsys, {"page": "overview, and 128,000 tokens", **figures})


def _until_shown(visit: Visit, place: str, selector: str) -> float:
    """Go to a place and return the seconds until something is shown there."""
    began = time.monotonic()
    visit.go(place)
    expect(visit.page.locator(selector).first).to_be_visible(timeout=120_000)
    return round(time.monotonic() - began, 2)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.jsonl"))


def _report(capsys: pytest.CaptureFixture[str], figures: object) -> None:
    with capsys.disabled():
        print(f"\n{json.dumps(figures)}")
