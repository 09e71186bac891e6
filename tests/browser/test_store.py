"""A server's session store, which `--store` opens: its sessions are the episodes of a run without steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import OpenVisit, StartWatch
from tests.browser.watching import SECONDS, Visit, Watch
from tests.server.sessions import test_reading as reading
from tests.server.sessions.test_reading import ASK, CALL, Talk
from tests.server.sessions.test_turn_texts import Store as MemoryStore
from tests.server.sessions.test_turn_texts import said, session_of
from tests.watch.index.test_session_store import Server, session, turn
from verl_server.server.sessions.records import FinishRecord

tools = reading.tools
CREATED = 1_790_000_000.0


@pytest.fixture
def talk(tools: Any) -> Talk:
    """A session with a tool call, and a reply to a history that the client edited."""

    def talked() -> Talk:
        talk = Talk(tools)
        talk.ledger.store = MemoryStore()
        talk.ledger.store.put(session_of(talk).record)
        called = said(talk, CALL, ASK)
        said(talk, "Another.", ASK, called, {"role": "user", "content": "never mind"})
        said(talk, "Two.", ASK)
        return talk

    with ThreadPoolExecutor() as threads:  # Playwright has an event loop in this thread
        return threads.submit(talked).result(SECONDS)


@pytest.fixture
def store(tmp_path: Path, talk: Talk) -> Path:
    """Write a session with texts, a tool call and a branch, two without texts in a group, and a sub-agent."""
    server = Server(tmp_path / "sessions")
    server.files.append(b"".join(talk.ledger.store.records))  # type: ignore[attr-defined]
    times = {"times": (CREATED + 1.0, CREATED + 1.5, CREATED + 2.0)}
    server.write(
        session("one", CREATED, group="g"), turn("one", 0, **times),
        turn("one", 1, prompt=(1, 2, 3, 4), parent=0, shared=3, **times),
        FinishRecord("one", "finished", "done", CREATED + 5.0),
    )  # fmt: skip
    server.write(session("one.helper", CREATED + 1, parent="one", group="g"), turn("one.helper", **times))
    server.write(session("two", CREATED + 5, group="g"), turn("two", 0, output=(7, 8), **times))
    server.kill()
    return tmp_path / "sessions"


@pytest.fixture
def visit(visit_of: OpenVisit, start_watch: StartWatch, store: Path) -> Visit:
    return visit_of(start_watch("--store", store))


def run_of(watch: Watch) -> str:
    return str(watch.get("/runs")["runs"][0]["id"])


def test_the_sessions_of_a_store_are_listed(visit: Visit) -> None:
    visit.open()
    row = visit.page.locator(".run-row", has_text="sessions")
    expect(row).to_contain_text("store")
    expect(visit.page.get_by_text("No figures yet")).to_be_visible()
    visit.page.get_by_role("link", name="See its episodes").click()
    expect(visit.rows("Steps")).to_have_count(1)
    visit.rows("Steps").first.get_by_role("link").click()
    expect(visit.page.get_by_role("heading", name="Episodes")).to_be_visible()
    expect(visit.rows("Groups")).to_have_count(2)
    expect(visit.rows("Groups").filter(has_text="2")).not_to_have_count(0)


def test_a_session_has_its_conversation_its_branches_and_its_tokens(visit: Visit, talk: Talk) -> None:
    run = run_of(visit.watch)
    visit.open_episode(run, f"{talk.caller.session_id}:0")
    expect(visit.page.locator(".part-text", has_text=str(ASK["content"])).first).to_be_visible()
    expect(visit.page.locator(".part.call").first).to_be_visible()
    expect(visit.page.locator(".branches .row")).to_have_count(2)
    expect(visit.page.locator("canvas.token-canvas")).to_be_visible()
    visit.open_episode(run, "one:0")
    expect(visit.page.locator(".branches")).to_contain_text("sub-agent")


def test_sessions_are_found_and_have_lanes(visit: Visit) -> None:
    run = run_of(visit.watch)
    visit.open(f"/find/{run}")
    expect(visit.rows("Episodes")).to_have_count(3)
    field = visit.page.get_by_role("searchbox")
    field.fill("never mind")
    field.press("Enter")
    expect(visit.page.locator(".excerpt").first).to_contain_text("never mind")
    visit.open(f"/waits/{run}")
    expect(visit.page.locator("canvas.lanes")).to_be_visible()
