"""The stream of live events, and a server that stops while somebody listens. Every wait has a bound."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.watch.site.conftest import Site
from tests.watch.site.recorded_runs import FIRST, step_metrics, write_run
from verl_server.watch.site import live
from verl_server.watch.site.live import LiveStreams

SECONDS = 30.0


async def next_event(events: AsyncIterator[bytes]) -> dict[str, Any] | None:
    """Return the data of the next event, None for a comment."""
    text = (await asyncio.wait_for(anext(events), SECONDS)).decode()
    assert text.endswith("\n\n")
    lines = text.strip().splitlines()
    if lines[0].startswith(":"):
        return None
    assert lines[0] == "event: run"
    found: dict[str, Any] = json.loads(lines[1].removeprefix("data: "))
    return found


def test_a_stream_tells_of_a_run_that_grows_and_ends_with_the_server(
    open_site: Callable[..., Site], tmp_path: Path
) -> None:
    files = write_run(tmp_path, 1, ends=False)
    runs = open_site(tmp_path).runs

    async def follow() -> None:
        streams = LiveStreams(runs)
        events = streams.events()
        assert await next_event(events) is None
        first = await next_event(events)
        assert first is not None and first["steps"] == 1 and streams.open == 1
        files.record(step_metrics(1, FIRST, 0.5))
        growing = asyncio.ensure_future(next_event(events))
        await asyncio.to_thread(runs.poll)
        grown = await growing
        assert grown is not None and grown["steps"] == 2 and grown["generation"] > first["generation"]
        streams.stop()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(anext(events), SECONDS)
        assert streams.open == 0

    asyncio.run(follow())
    files.close()


def test_a_quiet_stream_has_comments(
    open_site: Callable[..., Site], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.01)
    write_run(tmp_path, 1).close()
    runs = open_site(tmp_path).runs

    async def follow() -> None:
        events = LiveStreams(runs).events()
        found = [await next_event(events) for _ in range(4)]
        assert found[0] is None and found[1] is not None and found[2:] == [None, None]
        await events.aclose()

    asyncio.run(follow())


@pytest.mark.parametrize(("stop", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_the_command_serves_prints_its_url_and_ends_while_a_page_listens(
    tmp_path: Path, stop: signal.Signals, status: int
) -> None:
    write_run(tmp_path / "run", 1).close()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    command = [sys.executable, "-m", "verl_server", "watch", str(tmp_path / "run"), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), process.stderr.read()
            with httpx.Client(base_url=url, timeout=SECONDS) as client:
                runs = client.get("/api/runs").json()["runs"]
                assert [run["name"] for run in runs] == ["run"]
                with client.stream("GET", "/api/live") as stream:
                    lines = stream.iter_lines()
                    assert next(lines).startswith(":")
                    process.send_signal(stop)
                    list(lines)  # ends with the server, and not before the last event was whole
            assert process.wait(SECONDS) == status
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before, "it only reads"
