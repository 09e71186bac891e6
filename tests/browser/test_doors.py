"""The key of a server that others can reach, and a page that was exported to a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, expect

from tests.browser.conftest import OpenVisit, StartWatch
from tests.browser.guard import PageGuard
from tests.browser.watching import SECONDS, Visit, Watch

KEY = "a-key-of-the-tests"
REFUSED = "401 (Unauthorized)"
NO_TLS = "Cross-Origin-Opener-Policy header has been ignored"
"""Said of every page off loopback without TLS."""


def keyed_visit(visit_of: OpenVisit, watch: Watch, *allowed: str) -> Visit:
    visit = visit_of(watch)
    for part in (NO_TLS, *allowed):
        visit.guard.allow(part)
    return visit


def test_a_server_off_loopback_wants_its_key(visit_of: OpenVisit, start_watch: StartWatch, runs_folder: Path) -> None:
    watch = start_watch(runs_folder / "steady", host="0.0.0.0", key=KEY)
    # The key in the link is taken out of the address, and kept for this tab.
    page = keyed_visit(visit_of, watch).page
    page.goto(f"{watch.url}/#key={KEY}&/steps/{watch.run('steady')}")
    expect(page.locator(".step-line").nth(1)).to_be_visible()
    assert KEY not in page.url
    page.reload()
    expect(page.locator(".step-line").nth(1)).to_be_visible()
    # Another tab has no key: it asks for it, also after a wrong one.
    other = keyed_visit(visit_of, watch, REFUSED).open()
    field = other.page.get_by_label("Key", exact=True)
    field.fill("wrong")
    field.press("Enter")
    expect(field).to_have_value("")
    field.fill(KEY)
    field.press("Enter")
    expect(other.page.locator(".run-row", has_text="steady")).to_be_visible()
    expect(other.page.locator(".live")).to_have_text("live")


def open_export(visit: Visit, file: Path, *runs: Path, **options: str) -> Page:
    command = [sys.executable, "-m", "verl_server", "watch", *map(str, runs), "--export", str(file)]
    command += [part for name, value in options.items() for part in (f"--export-{name}", value)]
    subprocess.run(command, check=True, timeout=4 * SECONDS, stdout=subprocess.DEVNULL)
    visit.guard = PageGuard(visit.page, "file://")
    visit.page.goto(file.as_uri())
    return visit.page


def test_steps_of_an_exported_page_are_compared(
    visit_of: OpenVisit, watch: Watch, runs_folder: Path, tmp_path: Path
) -> None:
    steady, hasty = watch.run("steady"), watch.run("hasty")
    page = open_export(visit_of(watch), tmp_path / "page.html", runs_folder / "steady", runs_folder / "hasty")
    expect(page.locator(".live.export")).to_contain_text("exported")
    for runs, query, common in (((steady, steady), "a=2&b=38", 3), ((hasty, steady), "a=20&b=20", 6)):
        other = "" if runs[0] == runs[1] else f"&with={runs[1]}"
        page.evaluate("(place) => { location.hash = place; }", f"/compare/{runs[0]}?{query}{other}")
        expect(page.get_by_text(f"{common} tasks in common")).to_be_visible()
        pairs = watch.get(f"/runs/{runs[0]}/compare?{query}{other}")["pairs"]
        expect(page.locator(".pair-line .change")).to_have_count(len(pairs))
        shown = [text.replace("\u2212", "-") for text in page.locator(".pair-line .change").all_inner_texts()]
        changes = [pair["b"]["mean"] - pair["a"]["mean"] if pair["a"] and pair["b"] else None for pair in pairs]
        assert sorted(shown) == sorted("" if change is None else f"{change:+.2f}" for change in changes)
        sizes = [abs(float(text)) if text else -1.0 for text in shown]
        assert sizes == sorted(sizes, reverse=True), "the largest change comes first"
    page.evaluate("(place) => { location.hash = place; }", f"/step/{steady}/20")
    page.get_by_label("Step to compare with").select_option("5")
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    expect(page.get_by_role("link", name="Step 5")).to_be_visible()


def test_an_export_without_room_says_which_steps_it_lacks(
    visit_of: OpenVisit, watch: Watch, runs_folder: Path, tmp_path: Path
) -> None:
    steady = watch.run("steady")
    page = open_export(visit_of(watch), tmp_path / "page.html", runs_folder / "steady", megabytes="0.6")
    expect(page.locator(".live.export")).to_contain_text("exported")
    page.evaluate("(place) => { location.hash = place; }", f"/step/{steady}/39")
    held = page.get_by_label("Step to compare with").locator("option").all_inner_texts()
    assert "38" in held and "0" not in held
    page.evaluate("(place) => { location.hash = place; }", f"/compare/{steady}?a=0&b=39")
    expect(page.get_by_text("The groups of step 0 of steady are not in this export.")).to_be_visible()
    expect(page.get_by_text("--export-megabytes permits more")).to_be_visible()


def test_an_exported_page_opens_without_a_server(
    visit_of: OpenVisit, watch: Watch, runs_folder: Path, tmp_path: Path
) -> None:
    page = open_export(visit_of(watch), tmp_path / "page.html", runs_folder / "steady")
    expect(page.locator(".live.export")).to_contain_text("exported")
    expect(page.locator('[data-chart="reward"] canvas')).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("w")
    expect(page.locator("canvas.lanes")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.locator(".step-line .number >> text=39").click()
    expect(page.get_by_role("heading", name="Step 39", exact=True)).to_be_visible()
    page.get_by_label("order").select_option("number")
    expect(page.locator(".group-line b").first).to_have_text("234")
    page.locator(".group-line[aria-expanded]").first.click()
    page.locator(".episode-line").first.click()
    expect(page.locator(".part-text").first).to_be_visible()
    expect(page.locator("canvas.token-canvas")).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("f")
    status = page.locator(".search-status")
    expect(status).to_have_text("100 of 1\u2009528 episodes; this export lists these")
    page.get_by_role("group", name="Episodes").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    page.locator(".episode-line").last.click()
    page.go_back()
    expect(status).to_have_text("100 of 1\u2009528 episodes; this export lists these")
    page.go_back()
    expect(page.locator("canvas.token-canvas")).to_be_visible()
    # The page names what the file lacks.
    page.evaluate("location.hash = `${location.hash.split('/').slice(0, 3).join('/')}/nothing:0:000000`")
    expect(page.get_by_text("This is not in this export")).to_be_visible()
