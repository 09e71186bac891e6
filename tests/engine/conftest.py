"""Fixtures of the engines' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.restartable_server import Server


@pytest.fixture
def server(text_folder: Path) -> Iterator[Server]:
    """A server without a model, which the test may start again."""
    server = Server(text_folder)
    yield server
    server.stop()
