"""Bodies of HTTP requests and answers: results, errors, event frames.

`engine.http_transport` and `engine.http` call these functions. The X-Verl-Error header of an error answer names the
class of the error, so that the HTTP adapter raises the same class as the in-process engine.
"""

from __future__ import annotations

import inspect
import struct
from typing import Any, cast

import httpx
import msgspec
import orjson

from verl_server import errors
from verl_server.engine.base import Result
from verl_server.engine.http_connection import Answer
from verl_server.errors import BadRequestError, VerlServerError, error_for_status
from verl_server.files.json_values import dumps
from verl_server.messages.columns import MSGPACK, unpack
from verl_server.messages.io_struct import PROMPT_HEADER, PROMPT_JSON_BYTES, ControlReply
from verl_server.messages.packed import pack_ids

_FAULTS = (
    "ServerDiedError",
    "ServerRestartedError",
    "ServerStoppingError",
    "ControlTimeoutError",
    "UnansweredError",
    "ServerUnavailableError",
    "ForbiddenError",
    "UnauthorizedError",
)
"""Error classes that `control_reply` raises. Any other class is a refusal by the scheduler and becomes a reply."""
_LONG_PROMPT = 1024
"""Fewest ids, in all prompts of a request, that are sent as int32."""


Request = tuple[bytes | None, dict[str, str]]
"""(content, headers) of a request."""


def json_request(body: Any) -> Request:
    """Return a request with `body` as JSON, without content for None."""
    return None if body is None else encode(body), {}


def encode(body: Any) -> bytes:
    """Return `body` as JSON. Raise BadRequestError for a value that JSON cannot represent."""
    try:
        return dumps(body)
    except orjson.JSONEncodeError as error:
        raise BadRequestError(f"The request cannot be written as JSON: {error}") from None


def ask_for_columns(body: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the `body` of a `/generate` request, with `columnar` set if columns can express the reply.

    A columnar reply is a fifth as long. `read_result` converts it into the same result.
    """
    if body.get("return_text_in_logprobs") or body.get("return_sampling_mask"):
        return dict(body)
    return body | {"columnar": True}


def generate_content(body: dict[str, Any]) -> Request:
    """Return a `/generate` request to verl-server: JSON, after int32 if the prompts are long."""
    packed, rest = pack_prompts(body)
    if packed and len(content := encode(rest)) <= PROMPT_JSON_BYTES:
        return packed + content, {PROMPT_HEADER: str(len(packed))}
    return json_request(body)


def pack_prompts(body: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """Return (ids of the prompts as int32 bytes, rest of the body) if there are many ids, else (b"", body).

    The ids are of one prompt or of a batch. A long list of ids takes milliseconds to write and to read as JSON.
    """
    ids, params = body.get("input_ids"), body.get("sampling_params")
    each = params if isinstance(params, list) else [params]
    if any(isinstance(one, dict) and one.get("stop_regex") for one in each):
        return b"", body  # long patterns are compiled in other processes
    if not isinstance(ids, list) or not ids:
        return b"", body
    rest = {name: value for name, value in body.items() if name != "input_ids"}
    try:
        if isinstance(ids[0], int):
            return (pack_ids(ids), rest) if len(ids) >= _LONG_PROMPT else (b"", body)
        if not all(isinstance(prompt, list) and prompt for prompt in ids):
            return b"", body
        lengths = [len(prompt) for prompt in ids]
        if sum(lengths) < _LONG_PROMPT:
            return b"", body
        return b"".join(map(pack_ids, ids)), rest | {"prompt_lengths": lengths}
    except struct.error:  # not all are ids: the server says which
        return b"", body


def read_result(response: httpx.Response | Answer) -> Result:
    """Return the result in an answer of `/generate`: JSON or msgpack. Servers of other projects answer in JSON."""
    is_msgpack = response.headers.get("content-type") == MSGPACK
    content: Any = msgspec.msgpack.decode(response.content) if is_msgpack else orjson.loads(response.content)
    for result in content if isinstance(content, list) else [content]:
        unpack(result)
    return cast(Result, content)


class FrameReader:
    """Reads the results in the bytes of an event stream.

    Only a newline ends a line. The text in a frame may have other separators, such as U+2028, which JSON does not
    escape and which httpx's own reader of lines would split.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Any]:
        """Return the objects of the events that are complete. Raise the error of an error event."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_event(line[6:]) for line in lines if line.startswith(b"data: ") and line.strip() != b"data: [DONE]"]


def _event(data: bytes) -> Any:
    event: dict[str, Any] = orjson.loads(data)
    if error := event.get("error"):
        fields = error if isinstance(error, dict) else {"message": error}
        code = fields.get("code") or 500
        status = 400 if isinstance(code, str) and not code.isdecimal() else int(code)
        raise error_for_status(status, str(fields.get("message")), code=code)
    return event


def raise_for(response: httpx.Response | Answer) -> None:
    """Raise the error of an error answer (status 400 and above). Return for any other answer."""
    if response.status_code < 400:
        return
    message, code = _message(response)
    if response.status_code == 401 and not response.headers.get("X-Verl-Error"):  # SGLang says "Unauthorized" only
        message = f"{message}: the server needs an api_key (for control calls: an admin_api_key)."
    kind = getattr(errors, response.headers.get("X-Verl-Error", ""), None)
    if inspect.isclass(kind) and issubclass(kind, VerlServerError) and kind is not VerlServerError:
        raise kind(message)
    raise error_for_status(response.status_code, message, code=code)


def _message(response: httpx.Response | Answer) -> tuple[str, object]:
    """Return (message, code) of an error body of any of the known forms. The code is None if there is none."""
    try:
        body = orjson.loads(response.content)
    except orjson.JSONDecodeError:
        return response.text.strip() or f"HTTP {response.status_code}", None
    if not isinstance(body, dict):
        return str(body), None
    error = body.get("error", body)
    return (str(error.get("message", error)), error.get("code")) if isinstance(error, dict) else (str(error), None)


def control_reply(response: Answer) -> ControlReply:
    """Return the scheduler's reply, with `success` False for a refusal. Raise any other error as `raise_for` does."""
    if response.status_code != 200:
        kind = response.headers.get("X-Verl-Error", "")
        if kind in _FAULTS or not kind:
            if response.headers.get("content-type", "").startswith("text/plain") and response.status_code == 400:
                return ControlReply(id=0, success=False, message=response.text.strip(), status_code=400)
            raise_for(response)
        return ControlReply(id=0, success=False, message=_message(response)[0], status_code=response.status_code)
    if not response.headers.get("content-type", "").startswith("application/json"):
        return ControlReply(id=0, success=True, message=response.text.strip())
    body = orjson.loads(response.content)
    message = str(body.get("message", "")) if isinstance(body, dict) else ""
    return ControlReply(id=0, success=True, message=message, payload=body)
