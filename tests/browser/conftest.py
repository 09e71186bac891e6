"""The browser, the runs, and the pages that the tests open. `make test-browser` runs these tests.

The browser is the distribution's Chromium. With `--screenshots`, the pictures of docs/watch.md are made anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.browser.recorded_runs import write_hostile_run, write_long_rollout, write_runs
from tests.browser.watching import SECONDS, Visit, Watch

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
OpenVisit = Callable[..., Visit]
StartWatch = Callable[..., Watch]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", action="store_true", help="write the pictures of docs/watch.md")
    parser.addoption("--large", metavar="FOLDER", help="folder of a run of 10 GB, which is written if it is not there")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found is not None, f"None of {', '.join(BROWSERS)} is installed: apt-get install chromium."
    expect.set_options(timeout=1000 * SECONDS)
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def start_watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartWatch]:
    """Return a function that starts `verl-server watch`, which ends with the tests."""
    started: list[Watch] = []

    def start(*paths: str | Path, **options: str) -> Watch:
        started.append(Watch(*paths, log=tmp_path_factory.mktemp("watch") / "log", **options))
        return started[-1]

    yield start
    for watch in started:
        watch.close()


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "runs"
    write_runs(folder)
    return folder


@pytest.fixture(scope="session")
def watch(start_watch: StartWatch, runs_folder: Path) -> Watch:
    """Return the server of the runs that most tests share."""
    return start_watch(runs_folder)


@pytest.fixture(scope="session")
def hostile_watch(start_watch: StartWatch, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    folder = tmp_path_factory.mktemp("hostile") / '<img src=x onerror=alert(7)> & "quoted"'
    write_hostile_run(folder)
    return start_watch(folder)


@pytest.fixture(scope="session")
def long_watch(start_watch: StartWatch, tmp_path_factory: pytest.TempPathFactory) -> Watch:
    file = tmp_path_factory.mktemp("long") / "rollout.jsonl"
    write_long_rollout(file)
    return start_watch(file)


@pytest.fixture
def visit_of(browser: Browser) -> Iterator[OpenVisit]:
    """Return a function that opens a page of a server in a context of its own. All pages are checked at the end."""
    visits: list[Visit] = []

    def make(watch: Watch, **options: object) -> Visit:
        context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})  # type: ignore[arg-type]
        context.set_default_timeout(1000 * SECONDS)
        visits.append(Visit(context.new_page(), watch))
        return visits[-1]

    yield make
    try:
        for visit in visits:
            visit.guard.check()
    finally:
        for visit in visits:
            visit.page.context.close()


@pytest.fixture
def visit(visit_of: OpenVisit, watch: Watch) -> Visit:
    return visit_of(watch)
