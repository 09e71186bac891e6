"""Full collections wait for idle time; young objects are collected as usual."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from verl_server.scheduler import garbage
from verl_server.scheduler.garbage import Garbage


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_python_starts_no_full_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_ENOUGH", 20)
    collector = Garbage()
    collector.defer()
    gc.collect()
    full = gc.get_stats()[2]["collections"]
    kept = []
    while not collector.is_due and len(kept) < 1_000_000:
        kept.append([[]])  # without the setting, the growth by a quarter starts full collections
    assert gc.get_stats()[2]["collections"] == full
    assert len(kept) > 20 * gc.get_threshold()[1]
    collector.collect()
    assert gc.get_stats()[2]["collections"] == full + 1 and not collector.is_due
