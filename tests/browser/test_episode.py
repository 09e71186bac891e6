"""An episode: its conversation, its branches, and its tokens in each colour."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from tests.browser.conftest import OpenVisit
from tests.browser.guessing import RULES
from tests.browser.recorded_runs import LONG_TOKENS
from tests.browser.watching import Visit, Watch

COLOURS = ("who wrote it", "log-probability", "trainer \u2212 server", "entropy", "version")


def open_trained(visit: Visit) -> dict[str, str]:
    """Open the first episode of step 30 that was trained, and return its row."""
    run = visit.watch.run("steady")
    groups = visit.watch.get(f"/runs/{run}/steps/30")["groups"]
    row = next(row for row in groups[0]["episodes"] if row["advantage"] is not None)
    visit.open_episode(run, row["row"])
    return dict(row)


def open_agent(visit: Visit, name: str) -> None:
    run = visit.watch.run("agents")
    rows = visit.watch.get(f"/runs/{run}/episodes")["rows"]
    visit.open_episode(run, next(row["row"] for row in rows if row["name"] == name))


def part(visit: Visit, kind: str) -> Locator:
    return visit.page.locator(f".part.{kind}")


def pixels(visit: Visit) -> str:
    """Return what the canvas of the tokens shows."""
    return str(visit.page.locator("canvas.token-canvas").evaluate("(canvas) => canvas.toDataURL()"))


def drawn(visit: Visit) -> None:
    """Wait until the tokens in sight are drawn: pointing at the first one tells its figures."""
    visit.page.locator("canvas.token-canvas").scroll_into_view_if_needed()
    visit.until(
        """() => {
          const canvas = document.querySelector("canvas.token-canvas");
          const box = canvas.getBoundingClientRect();
          const at = { clientX: box.left + 70, clientY: box.top + 12, bubbles: true };
          canvas.dispatchEvent(new MouseEvent("mouseleave", at));
          canvas.dispatchEvent(new MouseEvent("mousemove", at));
          return document.querySelector(".token-readout .token-quote") !== null;
        }"""
    )


def test_the_conversation_has_texts_times_and_figures(visit: Visit) -> None:
    row = open_trained(visit)
    page = visit.page
    expect(page.get_by_role("heading", name=f"Episode {row['name']}")).to_be_visible()
    expect(page.locator(".part-text").first).to_have_text(RULES)
    expect(page.locator(".part.policy .part-text").first).to_contain_text("I try")
    expect(page.locator(".turn-head").first).to_contain_text("13 read, 5 sampled")
    head = page.locator(".episode-head")
    expect(head).to_contain_text(f"reward{row['reward']:g}")
    expect(head).to_contain_text("gap")
    expect(head).to_contain_text("http://games:8000")


def test_tokens_tell_their_figures_in_each_colour(visit: Visit) -> None:
    open_trained(visit)
    drawn(visit)
    canvas = visit.page.locator("canvas.token-canvas")
    readout = visit.page.locator(".token-readout")
    seen = set()
    for colour in COLOURS:
        visit.page.get_by_role("radio", name=colour).click()
        expect(visit.page.get_by_role("radio", name=colour)).to_be_checked()
        expect(visit.page.locator(".tokens .legend-entry").first).to_be_visible()
        canvas.hover(position={"x": 68, "y": 12})
        expect(readout).to_contain_text('"Guess"')
        expect(readout).to_contain_text("read")
        # The first sampled token stands behind the 13 that were read: step on until its figures are told.
        canvas.hover(position={"x": 530, "y": 12})
        for name in ("server", "trainer", "difference", "entropy", "version30@5f2c9a1e", "turn0"):
            expect(readout).to_contain_text(name)
        seen.add(pixels(visit))
    assert len(seen) == len(COLOURS)


def test_a_turn_and_its_tokens_lead_to_each_other(visit: Visit) -> None:
    open_trained(visit)
    drawn(visit)
    visit.page.locator("canvas.token-canvas").click(position={"x": 68, "y": 12 + 21})
    expect(visit.page.locator('.row[aria-current="true"]')).to_contain_text("Turn 1")
    visit.page.get_by_role("button", name="13 read, 5 sampled").click()
    visit.until("() => location.hash.includes('turn=0')")


def test_keys_go_through_the_group_the_turns_and_the_colours(visit: Visit) -> None:
    row = open_trained(visit)
    run, page = visit.watch.run("steady"), visit.page
    names = [each["name"] for each in visit.watch.get(f"/runs/{run}/steps/30")["groups"][0]["episodes"]]
    place = names.index(row["name"])
    page.keyboard.press("j")
    expect(page.get_by_role("heading", name=f"Episode {names[place + 1]}")).to_be_visible()
    page.keyboard.press("k")
    expect(page.get_by_role("heading", name=f"Episode {names[place]}")).to_be_visible()
    page.keyboard.press("n")
    page.keyboard.press("n")
    expect(page.locator('.row[aria-current="true"]')).to_contain_text("Turn 1")
    page.keyboard.press("c")
    expect(page.get_by_role("radio", name="log-probability")).to_be_checked()
    assert "colour=" in visit.place()
    page.keyboard.press("t")
    expect(page.locator(".token-place.folded")).to_have_count(1)
    page.keyboard.press("u")
    expect(page.get_by_role("heading", name="Step 30", exact=True)).to_be_visible()


def test_an_agents_calls_and_reasoning_are_folded(visit: Visit) -> None:
    open_agent(visit, "2-0")
    expect(part(visit, "call")).to_contain_text("run_tests")
    expect(part(visit, "call")).to_contain_text('"path": "tests/test_parser.py"')
    thinks = part(visit, "reasoning")
    expect(thinks.locator(".part-text")).to_have_count(0)
    thinks.get_by_role("button").click()
    expect(thinks.locator(".part-text")).to_contain_text("The failing test tells which rule is wrong.")
    result = part(visit, "result")
    result.locator("button.part-head").click()
    rest = result.get_by_role("button", name="Show more")
    expect(result.locator(".part-text")).not_to_contain_text("1 failed: test_nested")
    for _ in range(10):
        if rest.count():
            rest.click()
            visit.until("() => !document.querySelector('.part.result .more:disabled')")
    expect(result.locator(".part-text")).to_contain_text("1 failed: test_nested")


def test_branches_and_sub_agents_are_a_tree(visit: Visit) -> None:
    open_agent(visit, "0-0")
    tree = visit.page.locator(".branches")
    expect(tree.get_by_role("heading")).to_have_text("3 branches")
    branches = tree.locator(".row")
    expect(branches).to_have_count(3)
    expect(tree).to_contain_text("sub-agent")
    before = visit.place()
    branches.filter(has_text="5 shared").get_by_role("link").click()
    visit.until("(before) => location.hash !== before", before)
    expect(tree.locator(".row")).to_have_count(3)


def test_an_episode_without_messages_is_decoded_from_its_tokens(visit: Visit) -> None:
    open_agent(visit, "1-0")
    expect(visit.page.get_by_text("Decoded from the tokens")).to_be_visible()
    expect(visit.page.locator(".part-text").first).to_have_text("guessanumber")


def test_128000_tokens_scroll(visit_of: OpenVisit, long_watch: Watch) -> None:
    visit = visit_of(long_watch)
    run = long_watch.get("/runs")["runs"][0]["id"]
    row = long_watch.get(f"/runs/{run}/episodes")["rows"][0]
    assert row["tokens"] == LONG_TOKENS
    visit.open_episode(run, row["row"])
    drawn(visit)
    scroller = visit.page.locator(".token-scroll")
    scroller.evaluate("(area) => { area.scrollTop = area.scrollHeight; }")
    visit.until(
        """(last) => {
          const area = document.querySelector(".token-scroll");
          const canvas = document.querySelector("canvas.token-canvas");
          area.scrollTop = area.scrollHeight;
          const box = canvas.getBoundingClientRect();
          const at = { clientX: box.left + 80, clientY: box.top + 40, bubbles: true };
          canvas.dispatchEvent(new MouseEvent("mouseleave", at));
          canvas.dispatchEvent(new MouseEvent("mousemove", at));
          const readout = document.querySelector(".token-readout").textContent;
          const found = /position([\\d\\s\\u00a0\\u202f,]+)id/.exec(readout);
          return found && Number(found[1].replace(/\\D/g, "")) > last;
        }""",
        LONG_TOKENS - 2500,
    )
    expect(visit.page.locator(".token-readout")).to_contain_text("turn63")
    # The last turn of the conversation is within reach, too, and only what is in sight is in the document.
    visit.go(f"{visit.place().removeprefix('#').partition('?')[0]}?turn=63")
    expect(visit.page.locator('.row[aria-current="true"]')).to_contain_text("Turn 63")
