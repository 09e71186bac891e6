"""Releases the shared memory of the trainers that a test made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.weight_sync import described


@pytest.fixture(autouse=True)
def end_trainers() -> Iterator[None]:
    yield
    described.opened.clear()
