"""`raise_descriptor_limit` raises the soft limit of open files, and warns if it stays too low. The limit is a fake."""

from __future__ import annotations

import resource

import pytest

from verl_server.ipc.descriptors import DESCRIPTOR_SLACK, raise_descriptor_limit


class FakeLimit:
    def __init__(self, soft: int, hard: int, most: int | None = None) -> None:
        self.soft, self.hard, self._most = soft, hard, most

    def get(self, kind: int) -> tuple[int, int]:
        assert kind == resource.RLIMIT_NOFILE
        return self.soft, self.hard

    def set(self, kind: int, limits: tuple[int, int]) -> None:
        soft, hard = limits
        if hard != self.hard or (self._most is not None and soft > self._most):
            raise ValueError("current limit exceeds maximum limit")
        self.soft = soft


INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limit", "connections", "expected"),
    [
        (FakeLimit(256, 4096), None, 4096),
        (FakeLimit(256, INFINITY), None, 65_536),
        (FakeLimit(256, INFINITY), 100_000, 100_000 + DESCRIPTOR_SLACK),
        (FakeLimit(100_000, INFINITY), None, 100_000),
        (FakeLimit(INFINITY, INFINITY), None, INFINITY),
        (FakeLimit(1024, 1024), 896, 1024),
    ],
)
def test_the_soft_limit_is_raised(
    limit: FakeLimit,
    connections: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", limit.get)
    monkeypatch.setattr(resource, "setrlimit", limit.set)
    assert raise_descriptor_limit(connections) == limit.soft == expected
    assert not caplog.records


@pytest.mark.parametrize("limit", [FakeLimit(1024, 1024), FakeLimit(1024, INFINITY, most=1024)])
def test_a_limit_that_stays_too_low_is_named(
    limit: FakeLimit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", limit.get)
    monkeypatch.setattr(resource, "setrlimit", limit.set)
    assert raise_descriptor_limit(4000, "max_queued_requests=4000") == 1024
    (text,) = (record.getMessage() for record in caplog.records)
    assert "1024 files" in text and "4000 connections (max_queued_requests=4000) need 4128" in text
