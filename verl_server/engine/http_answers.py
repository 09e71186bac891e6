"""Bodies of HTTP requests and answers: results, errors, event frames. `engine.http_transport` and `engine.http` use it.

An error answer names its class in the X-Verl-Error header, so the same one is raised here as in process.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import httpx
import msgspec
import orjson

from verl_server import errors
from verl_server.columns import MSGPACK, unpack
from verl_server.engine.base import Result
from verl_server.engine.http_connection import Answer
from verl_server.errors import BadRequestError, VerlServerError, error_for_status
from verl_server.io_struct import ControlReply
from verl_server.results import GenerateResult

_FAULTS = (
    "ServerDiedError",
    "ServerRestartedError",
    "ServerStoppingError",
    "ControlTimeoutError",
    "UnansweredError",
    "ServerUnavailableError",
)
"""Errors of a control call that raise; any other is the scheduler's refusal, which is a reply."""


def encode(body: Any) -> bytes:
    """JSON of a request; raises BadRequestError for what has none."""
    try:
        return orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError as error:
        raise BadRequestError(f"The request cannot be written as JSON: {error}") from None


def ask_for_columns(body: dict[str, Any]) -> dict[str, Any]:
    """The body of a `/generate` whose reply may hold columns, which are a fifth as long and give the same result."""
    return body if body.get("return_text_in_logprobs") else body | {"columnar": True}


def read_result(response: httpx.Response) -> Result:
    """What `/generate` returned, as JSON or msgpack (a server of another make does not know msgpack)."""
    is_msgpack = response.headers.get("content-type") == MSGPACK
    content: Any = msgspec.msgpack.decode(response.content) if is_msgpack else orjson.loads(response.content)
    for result in content if isinstance(content, list) else [content]:
        unpack(result)
    return cast(Result, content)


def read_frame(line: str) -> GenerateResult | None:
    """A result of an event-stream line, None for other lines; raises for an error frame."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    frame: dict[str, Any] = orjson.loads(line[6:])
    if "error" in frame:
        raise error_for_status(int(frame["error"].get("code") or 500), str(frame["error"].get("message")))
    return cast(GenerateResult, unpack(frame))


def raise_for(response: httpx.Response | Answer) -> None:
    """Raise what an error answer stands for; return for any other."""
    if response.status_code < 400:
        return
    message = _message(response)
    if response.status_code == 401:
        message = f"{message}: the server wants an api_key (or, for control calls, an admin_api_key)."
    kind = getattr(errors, response.headers.get("X-Verl-Error", ""), None)
    if inspect.isclass(kind) and issubclass(kind, VerlServerError) and kind is not VerlServerError:
        raise kind(message)
    raise error_for_status(response.status_code, message)


def _message(response: httpx.Response | Answer) -> str:
    """The human part of any of the error bodies."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return response.text.strip() or f"HTTP {response.status_code}"
    if not isinstance(body, dict):
        return str(body)
    error = body.get("error", body)
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def control_reply(response: Answer) -> ControlReply:
    """A control route's answer as the scheduler gave it. Refusals are replies; other faults raise."""
    if response.status_code != 200:
        kind = response.headers.get("X-Verl-Error", "")
        if kind in _FAULTS or not kind:
            if response.headers.get("content-type", "").startswith("text/plain") and response.status_code == 400:
                return ControlReply(id=0, success=False, message=response.text.strip(), status_code=400)
            raise_for(response)
        return ControlReply(id=0, success=False, message=_message(response), status_code=response.status_code)
    if not response.headers.get("content-type", "").startswith("application/json"):
        return ControlReply(id=0, success=True, message=response.text.strip())
    body = orjson.loads(response.content)
    message = str(body.get("message", "")) if isinstance(body, dict) else ""
    return ControlReply(id=0, success=True, message=message, payload=body)
