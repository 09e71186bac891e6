"""Answers of the page's server as responses, errors among them."""

from __future__ import annotations

from starlette.responses import Response

from verl_server.watch.site.answers.values import ErrorAnswer
from verl_server.watch.site.encoding import MOST_BYTES, encoded
from verl_server.watch.site.texts import head

_JSON = "application/json"


def json_response(body: bytes) -> Response:
    """Return an answer. One that is too large is an error: nothing is cut in silence."""
    if len(body) > MOST_BYTES:
        message = f"The answer has {len(body):,} bytes, more than {MOST_BYTES:,}."
        return error_response(500, message, "Ask for less: a smaller range, or fewer points.")
    return Response(body, media_type=_JSON)


def error_response(status: int, message: str, remedy: str = "", headers: dict[str, str] | None = None) -> Response:
    body = encoded(ErrorAnswer(error=head(message, 4000), remedy=head(remedy, 2000)))
    return Response(body, status, headers, media_type=_JSON)
