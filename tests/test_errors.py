"""The messages of errors."""

from __future__ import annotations

import pytest

from verl_server.errors import BadRequestError, ContextLengthError, error_for_status


def test_a_message_has_a_bound() -> None:
    assert str(BadRequestError("what")) == "what"
    message = str(BadRequestError("x" * 10**7))
    assert len(message) < 40_000 and message.endswith("... (10,000,000 characters)")


@pytest.mark.parametrize("status", [400, 403, 413, 500])
def test_the_code_of_a_class_wins_over_the_status(status: int) -> None:
    """A server of another project, or a proxy, may have another status."""
    error = error_for_status(status, "no", code="context_length_exceeded")
    assert type(error) is ContextLengthError and error.status_code == 400


@pytest.mark.parametrize(
    ("code", "kept"), [("thread_unsupported_request", True), ("400", False), (400, False), (None, False)]
)
def test_an_error_keeps_the_name_of_its_code(code: object, kept: bool) -> None:
    error = error_for_status(400, "no", code=code)
    assert type(error) is BadRequestError and error.code == (code if kept else None)
    assert BadRequestError.code is None


def test_the_texts_of_a_length_are_those_that_clients_look_for() -> None:
    alone = str(ContextLengthError.of(70, 5, 64, "the reason"))
    assert alone.startswith("prompt is too long: 70 tokens > 63 maximum. ")
    assert "This model's maximum context length is 64 tokens (the reason). However, " in alone
    both = str(ContextLengthError.of(60, 5, 64))
    assert both.startswith("This model's maximum context length is 64 tokens. However, you requested 65 tokens: 60 in")
