"""Fake servers that end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.attached.fake_server import Answers, FakeServer

Start = Callable[..., FakeServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[FakeServer] = []

    def start(answers: Answers, headers: dict[str, str] | None = None) -> FakeServer:
        servers.append(FakeServer(answers, headers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
