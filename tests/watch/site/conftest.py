"""`Site`: the page's server on folders of runs, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from verl_server.watch.site.app import create_watch_app
from verl_server.watch.site.doors import WatchDoor
from verl_server.watch.site.encoding import MOST_BYTES
from verl_server.watch.site.live import LiveStreams
from verl_server.watch.site.runs import OpenRuns

URL = "http://127.0.0.1:8090"


class Site:
    """Answers requests to the page's server. The runs are read when it begins."""

    def __init__(self, *paths: Path, host: str = "127.0.0.1", key: str | None = None, **options: Any) -> None:
        self.runs = OpenRuns(paths, follow=False, **options)
        self.runs.poll()
        self._host, self._key = host, key

    @property
    def run(self) -> str:
        """The id of the first run."""
        return next(iter(self.runs.runs))

    def request(self, url: str, method: str = "GET", **headers: str) -> httpx.Response:
        async def answered() -> httpx.Response:
            app = WatchDoor(create_watch_app(self.runs, LiveStreams(self.runs)), self._host, self._key)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
                named = {name.replace("_", "-"): value for name, value in headers.items()}
                return await client.request(method, url, headers=named)

        return asyncio.run(answered())

    def get(self, path: str) -> Any:
        """Return the answer of a path below the first run: "" or "/metrics"."""
        response = self.request(f"/api/runs/{self.run}{path}")
        assert response.status_code == 200, response.text
        assert len(response.content) <= MOST_BYTES
        return response.json()


@pytest.fixture
def open_site() -> Iterator[Callable[..., Site]]:
    """Return a function that makes a `Site`, which is closed after the test."""
    sites: list[Site] = []

    def make(*paths: Path, **options: Any) -> Site:
        sites.append(Site(*paths, **options))
        return sites[-1]

    yield make
    for site in sites:
        site.runs.close()
