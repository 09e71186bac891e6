"""Fixtures of the engines' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.restartable_server import Server
from verl_server import Engine, EngineBase, HttpServerEngineAdapter


@pytest.fixture
def server(text_folder: Path) -> Iterator[Server]:
    """A server without a model, which the test may start again."""
    server = Server(text_folder)
    yield server
    server.stop()


def in_process(server: Server) -> Engine:
    """Return an engine of this process over the server's manager."""
    engine = Engine.__new__(Engine)
    engine._manager_or_none = server.stack.manager
    return engine


@pytest.fixture(params=["http", "in process"])
def engine(server: Server, request: pytest.FixtureRequest) -> Iterator[EngineBase]:
    """Two engines over the server without a model: an adapter, and one in this process."""
    if request.param == "in process":
        yield in_process(server)
        return
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        yield adapter
