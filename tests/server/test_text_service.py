"""`TextService` remembers a bounded number of names that callers choose."""

from __future__ import annotations

import pytest

from verl_server.server.text_service import TextService


def test_names_of_unused_variables_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    service = TextService.__new__(TextService)
    service._warned = set()
    for k in range(1000):
        service.warn_of_unused([f"{k}" + "x" * 1000])
    assert len(service._warned) <= 100 and max(map(len, service._warned)) <= 100
    assert len(caplog.records) <= 100
