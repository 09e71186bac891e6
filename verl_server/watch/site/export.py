"""`write_export`: a page as one file that opens without a server. `cli.watch` and the reports of others call it.

The file has the page's scripts and styles, and the answers of a choice of URLs, which the scripts find by their text. A
content security policy permits the one script by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import zip_longest
from pathlib import Path
from urllib.parse import quote, urlencode

import msgspec

from verl_server._version import __version__
from verl_server.errors import VerlServerError
from verl_server.files.durable import replace_file
from verl_server.watch.index.rows import EpisodeFilter, EpisodeRow, evaluated_step
from verl_server.watch.page import page
from verl_server.watch.site.answers.runs import Runs
from verl_server.watch.site.bundle import bundled
from verl_server.watch.site.episode import WINDOW
from verl_server.watch.site.overview import describe
from verl_server.watch.site.runs import OpenRuns, WatchedRun
from verl_server.watch.site.static_files import FOLDER
from verl_server.watch.site.views import Views

logger = logging.getLogger(__name__)

MEGABYTES = 20.0
"""Default of the size of all answers."""
_REPORT_MEGABYTES = 5.0
_ENTRY = "js/main.js"
_LINK = re.compile(r'[ \t]*<link rel="stylesheet" href="/static/([^"]+)">\n?')
_SCRIPT = re.compile(r'[ \t]*<script type="module" src="/static/js/main.js"></script>\n?')
_TOKEN_WINDOWS = 10
"""Most windows of tokens of an episode."""
_RUN_ORDER = (
    "",
    "/advisories",
    "/metrics",
    "/evaluations",
    "/lanes",
    "/steps",
    "/episodes",
    "/episodes?error=1",
    "/events",
)


def write_export(file: Path, runs: OpenRuns, *, megabytes: float = MEGABYTES, title: str = "", report: str = "") -> int:
    """Write the page to `file`, and return the number of answers that it left out.

    `megabytes` bounds the answers. `report` is HTML of our own, the first tab of the page. Raise OSError if the file
    cannot be written.
    """
    chosen = _Chosen(Views(runs), int(megabytes * 1e6))
    for run in runs.runs.values():
        run.index.progress()  # the list of runs has the number of episodes
        for view in _RUN_ORDER:
            chosen.add(f"/api/runs/{quote(run.id)}{view}")
    steps = list(_in_turns([_step_urls(run) for run in runs.runs.values()]))
    for url in steps:
        if chosen.is_half_full:  # what is left is for episodes
            break
        chosen.add(url)
    for url in _in_turns([_episode_urls(run, chosen) for run in runs.runs.values()]):
        chosen.add(url)
    for url in steps:
        chosen.add(url)
    head = Runs(
        runs=[describe(run) for run in runs.runs.values()],
        version=__version__,
        exported=round(time.time(), 3),
        notes=chosen.notes(),
    )
    chosen.found["/api/runs"] = msgspec.json.encode(head)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(_document(chosen, title or ", ".join(run.name for run in head.runs), report), encoding="utf-8")
    replace_file(partial, file)
    return chosen.left_out


def export_report(file: Path, run: Path, title: str, report: str) -> None:
    """Write the page of one run, with a report as its first tab. `report` is HTML of our own.

    A run whose files cannot be read has its report all the same. Raise OSError if the file cannot be written.
    """
    runs = OpenRuns([run], follow=False)
    try:
        runs.poll()
        write_export(file, runs, megabytes=_REPORT_MEGABYTES, title=title, report=report)
    except (VerlServerError, sqlite3.Error) as error:
        logger.warning("%s has the report only, because the run's files cannot be read: %s", file, error)
        file.write_text(page(title, report), encoding="utf-8")
    finally:
        runs.close()


class _Chosen:
    """The answers of an export, by URL, up to a number of bytes."""

    def __init__(self, views: Views, most: int) -> None:
        self._views, self._most = views, most
        self._bytes = 0
        self.found: dict[str, bytes] = {}
        self.left_out = 0
        self._missing: list[str] = []

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._most

    @property
    def is_half_full(self) -> bool:
        return 2 * self._bytes >= self._most

    def add(self, url: str) -> bytes | None:
        """Add the answer of a URL if it fits, and return it. An error is no answer: the page says what it lacks."""
        if url in self.found:
            return self.found[url]
        if self.is_full:
            self.left_out += 1
            return None
        try:
            body = self._views.of_url(url)
        except VerlServerError as error:
            self._missing.append(str(error)[:200])
            return None
        if self._bytes + len(body) > self._most:
            self.left_out += 1
            return None
        self._bytes += len(body)
        self.found[url] = body
        return body

    def notes(self) -> list[str]:
        notes = []
        if self.left_out:
            notes.append(
                f"{self.left_out} answers do not fit into {self._most / 1e6:g} MB and are left out, the oldest steps "
                "first. --export-megabytes permits more."
            )
        return notes + [f"Not in this page: {text}" for text in self._missing[:10]]


class _Next(msgspec.Struct):
    next: str | int | None = None
    total: int = 0


def _in_turns(urls: Sequence[Iterator[str]]) -> Iterator[str]:
    """Yield the first URL of each run, then the second ones: no run takes the room of another one."""
    for turn in zip_longest(*urls):
        yield from (url for url in turn if url is not None)


def _step_urls(run: WatchedRun) -> Iterator[str]:
    """Yield the URLs of the groups of a run's steps, the newest first."""
    yield from (f"/api/runs/{quote(run.id)}/steps/{quote(step, safe='')}" for step in _newest_first(run))


def _episode_urls(run: WatchedRun, chosen: _Chosen) -> Iterator[str]:
    """Yield the URLs of a run's episodes: those of the newest step and the worst ones before the others."""
    base = f"/api/runs/{quote(run.id)}"
    steps = _newest_first(run)
    shown: set[str] = set()
    for row in _chosen_rows(run, steps):
        if row.row in shown:
            continue
        shown.add(row.row)
        for branch in run.index.episode(row.row).branches:
            yield from _row_urls(f"{base}/episodes/{quote(branch.row, safe='')}", chosen)
        if chosen.is_full:
            return


def _newest_first(run: WatchedRun) -> list[str]:
    """Return the names of a run's steps and evaluations, the newest first, then those of its other places."""
    found = run.index.steps()
    places: dict[str, tuple[int, bool]] = {}
    for row in found:
        if row.step is not None:
            places[row.name] = row.step, True
        elif (evaluated := evaluated_step(row.name)) is not None:
            places[row.name] = evaluated - 1, False  # right after the step that made the weights
    others = [row.name for row in found if row.name not in places]
    return sorted(places, key=places.__getitem__, reverse=True) + others


def _chosen_rows(run: WatchedRun, steps: list[str]) -> Iterator[EpisodeRow]:
    index = run.index
    if steps:
        for group in index.groups(steps[0]):
            yield from group.members
    yield from index.episodes(EpisodeFilter(has_error=True), order="newest", limit=50).rows
    yield from index.episodes(EpisodeFilter(), order="reward", limit=50).rows
    yield from index.episodes(EpisodeFilter(), order="-reward", limit=50).rows
    for step in steps[1:]:
        for group in index.groups(step):
            yield from group.members


def _row_urls(url: str, chosen: _Chosen) -> Iterator[str]:
    """Yield the URLs of one branch: its turns and its tokens."""
    yield url
    body = chosen.found.get(url)
    if body is None:
        return
    after = msgspec.json.decode(body, type=_Next).next
    while after is not None:
        further = f"{url}?{urlencode({'after': after})}"
        yield further
        body = chosen.found.get(further)
        after = None if body is None else msgspec.json.decode(body, type=_Next).next
    first = f"{url}/tokens?start=0"
    yield first
    total = msgspec.json.decode(chosen.found[first], type=_Next).total if first in chosen.found else 0
    yield from (f"{url}/tokens?start={start}" for start in range(WINDOW, min(total, _TOKEN_WINDOWS * WINDOW), WINDOW))


def _document(chosen: _Chosen, title: str, report: str) -> str:
    """Return the page with everything inside."""
    document = (FOLDER / "index.html").read_text(encoding="utf-8")
    script = _for_script(bundled(_modules(), _ENTRY))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    # A bundle is a module, so that it runs when the document is complete, and has its names for itself.
    ends = (
        f'<script type="application/json" id="answers">{_answers(chosen)}</script>\n'
        f'<script type="module">{script}</script>\n'
    )
    body = f'<div id="report" hidden>{report}</div>\n' if report else ""
    document = _LINK.sub(lambda link: f"<style>\n{_style(link[1])}\n</style>\n", document)
    document = _SCRIPT.sub("", document)
    document = re.sub(r"<title>.*?</title>", lambda _: f"<title>{escape(title)}</title>", document, count=1)
    policy_tag = f'<meta http-equiv="content-security-policy" content="{policy}">\n'
    document = document.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{policy_tag}', 1)
    return document.replace("</body>", f"{body}{ends}</body>", 1)


def _modules() -> dict[str, str]:
    files = sorted(FOLDER.rglob("*.js"))
    return {file.relative_to(FOLDER).as_posix(): file.read_text(encoding="utf-8") for file in files}


def _style(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8").replace("</style", r"<\/style")


def _for_script(text: str) -> str:
    """Return a script that does not end the element in which it lies. In texts of a script, `\\/` is `/`."""
    return "\n" + text.replace("</script", r"<\/script").replace("<!--", r"<\!--") + "\n"


def _answers(chosen: _Chosen) -> str:
    """Return the answers as one JSON object, without "<", which could end the element."""
    pairs = (f"{msgspec.json.encode(url).decode()}:{body.decode()}" for url, body in chosen.found.items())
    return ("{" + ",\n".join(pairs) + "}").replace("<", "\\u003c")
