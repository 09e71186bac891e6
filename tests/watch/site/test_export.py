"""Exported pages: one file that loads nothing, with the answers that its scripts ask for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.watch.site.conftest import Site
from tests.watch.site.recorded_runs import write_agents_run, write_run
from verl_server.cli.main import main
from verl_server.watch.agents_report import write_run_report
from verl_server.watch.site import export
from verl_server.watch.site.runs import OpenRuns


def parts_of(file: Path) -> tuple[str, str, dict[str, Any]]:
    """Return the document, its script, and its answers."""
    page = file.read_text(encoding="utf-8")
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    found = re.findall(r'<script type="application/json" id="answers">(.*?)</script>', page, re.DOTALL)
    assert len(scripts) == len(found) == 1
    return page, scripts[0], json.loads(found[0])


def test_a_page_loads_nothing_and_its_policy_permits_its_script_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "run").close()
    assert main(["watch", str(tmp_path / "run"), "--export", str(tmp_path / "page.html")]) == 0
    page, script, _ = parts_of(tmp_path / "page.html")
    head = page.partition("</head>")[0]
    policy = re.search(r'http-equiv="content-security-policy" content="([^"]*)"', head)
    assert policy is not None and head.index(policy[0]) < head.index("<style")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy[1] and policy[1].startswith("default-src 'none';")
    outside = page.replace(script, "")
    assert not re.search(r"""<(script|link|img|iframe)\b[^>]*\s(src|href)=["'](?!data:)""", outside)
    raw = page.partition('id="answers">')[2].partition("</script>")[0]
    assert "<" not in raw and "alert(1)" in raw
    assert not re.search(r"^(import|export)\b", script, re.MULTILINE)


def test_answers_are_those_of_the_server(open_site: Callable[..., Site], tmp_path: Path) -> None:
    write_run(tmp_path / "run").close()
    runs = OpenRuns([tmp_path / "run"], follow=False)
    runs.poll()
    assert export.write_export(tmp_path / "page.html", runs) == 0
    runs.close()
    _, _, answers = parts_of(tmp_path / "page.html")
    site = open_site(tmp_path / "run")
    rows = site.get("/episodes")["rows"]
    head = answers.pop("/api/runs")
    assert head["exported"] > 0 and head["notes"] == [] and head["runs"][0]["episodes"] == 27
    for url, answer in answers.items():
        assert site.request(url).json() == answer, url
    for row in rows:
        assert f"/api/runs/{site.run}/episodes/{quote(row['row'], safe='')}" in answers
        assert f"/api/runs/{site.run}/episodes/{quote(row['row'], safe='')}/tokens?start=0" in answers


def test_a_page_that_is_full_has_the_newest_step_and_says_what_it_lacks(tmp_path: Path) -> None:
    write_run(tmp_path / "run").close()
    runs = OpenRuns([tmp_path / "run"], follow=False)
    runs.poll()
    left_out = export.write_export(tmp_path / "page.html", runs, megabytes=0.1)
    runs.close()
    _, _, answers = parts_of(tmp_path / "page.html")
    assert left_out > 0 and f"{left_out} answers do not fit" in answers["/api/runs"]["notes"][0]
    assert sum(len(json.dumps(answer)) for answer in answers.values()) < 150_000
    episodes = [answer for url, answer in answers.items() if "/episodes/" in url and "tokens" not in url]
    assert [episode["row"]["step"] for episode in episodes[:9]] == [2] * 9


def test_an_export_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "run", 1).close()
    assert main(["watch", str(tmp_path / "run"), "--export", str(tmp_path / "missing" / "page.html")]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("**/.*.partial"))


def test_the_report_of_an_agents_run_is_the_first_tab(tmp_path: Path) -> None:
    write_agents_run(tmp_path / "run")
    page, _, answers = parts_of(write_run_report(tmp_path / "run"))
    report = page.partition('<div id="report" hidden>')[2].partition('<script type="application/json"')[0]
    assert "mean reward" in report and "How attempts ended" in report and "trained once" in report
    assert answers["/api/runs"]["runs"][0]["kind"] == "agents"


def test_a_report_is_written_even_if_the_run_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise export.sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(export, "write_export", fail)
    write_agents_run(tmp_path / "run")
    assert "mean reward" in write_run_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "disk is full" in caplog.text
