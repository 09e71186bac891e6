"""The messages of errors."""

from __future__ import annotations

from verl_server.errors import BadRequestError


def test_a_message_has_a_bound() -> None:
    assert str(BadRequestError("what")) == "what"
    message = str(BadRequestError("x" * 10**7))
    assert len(message) < 40_000 and message.endswith("... (10,000,000 characters)")
