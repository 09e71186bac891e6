"""Error answers in vLLM's shape: {"error": {"message", "type", "param", "code"}}. `code` is the status or a name."""

from __future__ import annotations

from starlette.responses import Response

from verl_server.errors import VerlServerError
from verl_server.server.http.responses import error_headers, json_response
from verl_server.web.error_bodies import vllm_error_body


class ModelNotFoundError(VerlServerError):
    """The server does not serve a model of this name."""

    status_code = 404


def vllm_error(error: VerlServerError) -> Response:
    """Return the response to an error."""
    return json_response(vllm_error_body(error), error.status_code, error_headers(error))
