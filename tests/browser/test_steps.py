"""Steps, groups, filters, the search, the comparison of two steps, and the keys."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.recorded_runs import ENV_ERROR, EVALUATED, GROUPS, HELD_OUT_TASKS, MEMBERS, STEPS
from tests.browser.watching import Visit


def test_steps_are_listed_with_what_they_learned_from(visit: Visit) -> None:
    run = visit.watch.run("steady")
    visit.open(f"/steps/{run}")
    first = visit.rows("Steps").nth(1)  # behind the last evaluation
    expect(first.locator(".number").first).to_have_text(str(STEPS - 1))
    step = visit.watch.get(f"/runs/{run}/steps")["steps"][STEPS - 1]
    expect(first.locator(".reward")).to_have_text(f"{step['reward']:.3g}")
    visit.page.get_by_role("group", name="Steps").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    expect(visit.rows("Steps").last.locator(".number").first).to_have_text("held-out 0")
    last = visit.rows("Steps").nth(-2)
    expect(last.locator(".number").first).to_have_text("0")
    last.get_by_role("link").click()
    expect(visit.page.get_by_role("heading", name="Step 0", exact=True)).to_be_visible()


def test_groups_are_sorted_by_spread_and_open_their_episodes(visit: Visit) -> None:
    run = visit.watch.run("steady")
    visit.open(f"/step/{run}/20")
    groups = visit.rows("Groups")
    expect(groups).to_have_count(GROUPS)
    spreads = [float(text) for text in groups.locator(".number:nth-of-type(5)").all_inner_texts()]
    assert spreads == sorted(spreads, reverse=True) and spreads[0] > 0
    groups.first.get_by_role("button").click()
    expect(visit.page.locator(".episode-line")).to_have_count(MEMBERS)
    rewards = visit.page.locator(".episode-line .reward").all_inner_texts()
    answer = visit.watch.get(f"/runs/{run}/steps/20")["groups"][0]
    assert rewards == [f"{row['reward']:g}" for row in answer["episodes"]]
    visit.page.locator(".episode-line").nth(2).click()
    expect(visit.page.get_by_role("heading", name=f"Episode {answer['number']}-2")).to_be_visible()


def test_filters_leave_what_fits(visit: Visit) -> None:
    visit.open(f"/step/{visit.watch.run('steady')}/5")
    expect(visit.rows("Groups")).to_have_count(GROUPS)
    visit.page.get_by_label("fault").select_option("infrastructure")
    expect(visit.rows("Groups")).to_have_count(1)
    assert "fault=infrastructure" in visit.place()
    visit.rows("Groups").first.get_by_role("button").click()
    expect(visit.page.locator(".episode-line")).to_have_count(1)
    expect(visit.page.locator(".episode-line .error-text")).to_have_text(ENV_ERROR)
    visit.page.get_by_label("reward from").fill("0.5")
    visit.page.get_by_label("reward from").press("Enter")
    expect(visit.page.get_by_text("No episode passes the filters")).to_be_visible()
    visit.page.get_by_role("button", name="reset").click()
    expect(visit.rows("Groups")).to_have_count(GROUPS + MEMBERS)


def test_a_search_finds_the_texts_of_a_run(visit: Visit) -> None:
    run = visit.watch.run("agents")
    visit.open(f"/find/{run}")
    field = visit.page.get_by_role("searchbox")
    field.fill("NESTED brackets")
    field.press("Enter")
    found = visit.rows("Episodes")
    expect(found).to_have_count(1)
    expect(found.locator(".excerpt")).to_contain_text("nested brackets")
    expect(visit.page.locator(".search-status")).to_contain_text("100")
    found.get_by_role("link").click()
    expect(visit.page.get_by_role("heading", name="Episode 2-0")).to_be_visible()
    visit.page.go_back()
    field.fill("no such text")
    field.press("Enter")
    expect(visit.page.get_by_text("No text of the run has these words")).to_be_visible()


def test_failed_episodes_of_a_whole_run_are_found(visit: Visit) -> None:
    run = visit.watch.run("steady")
    total = len(visit.watch.get(f"/runs/{run}/episodes?error=1")["rows"])
    visit.open(f"/find/{run}")
    visit.page.get_by_label("with an error").check()
    expect(visit.page.locator(".search-status")).to_have_text(f"{total} episodes")
    expect(visit.rows("Episodes").first).to_contain_text("did not answer for 30 s")


def test_the_number_of_all_episodes_is_told(visit: Visit) -> None:
    run = visit.watch.run("steady")
    total = visit.watch.get(f"/runs/{run}/episodes")["total"]
    held_out = len(EVALUATED) * HELD_OUT_TASKS
    assert total == STEPS * GROUPS * MEMBERS + 8 + held_out, "with those that were replaced"
    every = f"{total:,}".replace(",", "\u2009")
    visit.open(f"/find/{run}")
    status = visit.page.locator(".search-status")
    expect(status).to_have_text(f"100 of {every} episodes")
    visit.page.get_by_role("group", name="Episodes").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
    expect(status).to_have_text(f"200 of {every} episodes")
    visit.open(f"/find/{run}?step=3")
    expect(status).to_have_text(f"{GROUPS * MEMBERS + 1} episodes")


def test_two_steps_are_compared_task_by_task(visit: Visit) -> None:
    run = visit.watch.run("steady")
    visit.open(f"/step/{run}/38")
    visit.page.get_by_label("Step to compare with").fill("2")
    visit.page.get_by_role("button", name="Compare").click()
    expect(visit.page.get_by_text("3 tasks in common")).to_be_visible()
    answer = visit.watch.get(f"/runs/{run}/compare?a=2&b=38")["pairs"][0]
    first = visit.rows("Tasks").first
    change = answer["b"]["mean"] - answer["a"]["mean"]
    expect(first.locator(".change")).to_have_text(f"{change:+.2f}".replace("-", "\u2212"))
    first.get_by_role("button").click()
    expect(visit.page.locator(".two-sides").first.locator(".episode-line")).to_have_count(2)
    visit.page.get_by_role("link", name="Swap the sides").click()
    expect(first.locator(".change")).to_have_text(f"{-change:+.2f}".replace("-", "\u2212"))


def test_a_step_is_compared_with_the_same_one_of_another_run(visit: Visit) -> None:
    steady, hasty = visit.watch.run("steady"), visit.watch.run("hasty")
    visit.open(f"/step/{steady}/20")
    visit.page.get_by_label("Run to compare with").select_option(hasty)
    visit.page.get_by_role("button", name="Compare").click()
    expect(visit.page.get_by_text("6 tasks in common")).to_be_visible()
    assert visit.place() == f"#/compare/{hasty}?a=20&b=20&with={steady}"
    expect(visit.page.locator(".view-head")).to_contain_text("hasty, step 20")
    expect(visit.page.locator(".view-head")).to_contain_text("steady, step 20")
    answer = visit.watch.get(f"/runs/{hasty}/compare?a=20&b=20&with={steady}")["pairs"][0]
    first = visit.rows("Tasks").filter(has=visit.page.get_by_text(f"seed {answer['seed']}", exact=True))
    change = answer["b"]["mean"] - answer["a"]["mean"]
    expect(first.locator(".change")).to_have_text(f"{change:+.2f}".replace("-", "\u2212"))
    first.get_by_role("button").click()
    sides = visit.page.locator(".two-sides").first.locator(".episode-line")
    links = [sides.nth(side).get_attribute("href") for side in range(2)]
    assert [str(link).split("/")[2] for link in links] == [hasty, steady]
    visit.page.get_by_role("link", name="Swap the sides").click()
    expect(first.locator(".change")).to_have_text(f"{-change:+.2f}".replace("-", "\u2212"))
    visit.open(f"/compare/{hasty}?a=20&b=39&with={steady}")
    expect(visit.page.get_by_text("3 tasks in common")).to_be_visible()
    visit.guard.allow("404 (Not Found)")
    visit.open(f"/compare/{hasty}?a=39&b=39&with={steady}")
    expect(visit.page.get_by_text("It has the steps 0 to 24.")).to_be_visible()


def test_the_lost_steps_of_a_resumed_run_are_left_out(visit: Visit) -> None:
    run = visit.watch.run("resumed")
    visit.open(f"/steps/{run}")
    expect(visit.rows("Steps")).to_have_count(5)
    visit.open(f"/find/{run}")
    status = visit.page.locator(".search-status")
    kept = len(visit.watch.get(f"/runs/{run}/episodes")["rows"])
    expect(status).to_have_text(f"{kept} episodes")
    visit.page.get_by_label("lost ones, too").check()
    every = len(visit.watch.get(f"/runs/{run}/episodes?lost=1")["rows"])
    assert every > kept
    expect(status).to_have_text(f"{every} episodes")


def test_an_asynchronous_run_has_the_groups_that_no_step_used(visit: Visit) -> None:
    run = visit.watch.run("asynchronous")
    visit.open(f"/steps/{run}")
    names = visit.rows("Steps").locator(".number:first-child")
    expect(names.first).to_be_visible()
    assert set(names.all_inner_texts()) >= {"1", "dropped", "playing"}
    visit.go(f"/step/{run}/dropped")
    expect(visit.page.get_by_role("heading", name="Groups: dropped")).to_be_visible()


def test_a_slash_goes_into_the_search_field(visit: Visit) -> None:
    run = visit.watch.run("steady")
    field = visit.page.get_by_role("searchbox")
    visit.open(f"/find/{run}?q=smaller")
    expect(visit.page.locator(".excerpt").first).to_be_visible()
    visit.page.keyboard.press("/")
    expect(field).to_be_focused()
    visit.page.keyboard.type("larger")  # in the place of the text, which is selected
    expect(field).to_have_value("larger")
    visit.page.get_by_label("with an error").focus()
    visit.page.keyboard.press("/")
    expect(field).to_be_focused()
    for place in ("/", f"/waits/{run}", f"/steps/{run}", f"/compare/{run}?a=1&b=2"):
        visit.open(place)
        expect(visit.page.get_by_role("link", name="Find")).to_be_visible()
        visit.page.keyboard.press("/")
        expect(field).to_be_focused()
        expect(field).to_have_value("")


def test_everything_is_within_reach_of_the_keys(visit: Visit) -> None:
    run = visit.watch.run("steady")
    page = visit.open(f"/waits/{run}").page
    expect(page.get_by_role("heading", name="Who waits")).to_be_visible()
    page.keyboard.press("?")
    help_list = page.get_by_role("dialog", name="Keys")
    expect(help_list).to_contain_text("next episode of the group")
    page.keyboard.press("Escape")
    expect(help_list).to_be_hidden()
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(visit.rows("Steps").first).to_be_visible()
    for _ in range(3):
        page.keyboard.press("j")
    expect(visit.rows("Steps").nth(2)).to_have_attribute("aria-current", "true")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=f"Step {STEPS - 1}", exact=True)).to_be_visible()
    expect(visit.rows("Groups").first).to_be_visible()
    page.keyboard.press("p")
    expect(page.get_by_role("heading", name=f"Step {STEPS - 2}", exact=True)).to_be_visible()
    page.keyboard.press("n")
    expect(page.get_by_role("heading", name=f"Step {STEPS - 1}", exact=True)).to_be_visible()
    expect(visit.rows("Groups").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.locator(".episode-line")).to_have_count(MEMBERS)
    page.keyboard.press("/")
    search = page.get_by_role("searchbox")
    expect(search).to_be_focused()
    page.keyboard.type("go")
    expect(search).to_have_value("go")  # keys in a field belong to the field
    search.clear()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name=f"Step {STEPS - 1}", exact=True)).to_be_visible()
    page.keyboard.press("g")
    page.keyboard.press("o")
    expect(page.locator(".run-row", has_text="steady")).to_be_visible()
