"""`RoutedRequest`: a request as the router sees it, with what its placement depends on.

`read_body` reads the whole body, because a request that got no answer is sent to another server. Of the body only
the few fields that placement needs are decoded. What the router does not read, it does not need: the servers check
every field themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.types import Receive, Scope

from verl_server.errors import BadRequestError
from verl_server.fleet.operations import RoutedOperation
from verl_server.fleet.prefixes import prompt_blocks
from verl_server.fleet.upstream import Headers
from verl_server.version_demand import EXACT_HEADER, MIN_HEADER
from verl_server.web.bodies import Body
from verl_server.web.first_headers import first_headers
from verl_server.web.numbers import whole_number
from verl_server.web.session_keys import CHILD_HEADER, KEY_PREFIX, ROUTING_HEADER, SESSION_HEADER

T = TypeVar("T")

_IDEMPOTENCY_HEADER = b"idempotency-key"
_PACKED_HEADER = b"x-verl-prompt-bytes"
_MOST_DECODED = 2 * 2**20
"""Bytes of a JSON body that are decoded on the event loop, which takes some 3 ms."""
_ENDS = 64 * 1024
"""Bytes at the beginning and the end of a larger body in which its fields are looked for."""
_NAMED = re.compile(
    rb'"(session_id|conversation_id|min_weight_version|exact_weight_version)"\s*:\s*("(?:[^"\\]|\\.){0,300}")'
)
_DISCARD_SECONDS = 1.0
_PARAMS = b'"session_params"'
_PARAMS_VALUE = re.compile(rb"\s*:\s*(\{[^{}]{0,4096}\})")
_BYTES_OF_A_TOKEN, _BYTES_OF_AN_ID = 4, 6
"""Bytes of a prompt for each token, roughly: 3 to 5 in English text, and 4 as packed ids; 5 to 8 as decimal ids."""
_DECIMAL_IDS = re.compile(rb'"(?:input_ids|token_ids|prompt_token_ids|prompt)"\s*:\s*\[+\s*[0-9]')
_OUTPUT_TOKENS = 256
"""Tokens of an output, of which nothing is known in advance."""


class RoutedFields(msgspec.Struct):
    """The fields of a body that placement depends on, as any JSON values. A server checks them."""

    session_id: Any = None
    conversation_id: Any = None
    session_params: Any = None
    min_weight_version: Any = None
    exact_weight_version: Any = None
    id: Any = None
    """Of `POST /sessions`: the name of the session."""


class _RawFields(msgspec.Struct):
    """`RoutedFields` before each of them is decoded, so that one that cannot be decoded does not hide the others."""

    session_id: msgspec.Raw = msgspec.Raw()
    conversation_id: msgspec.Raw = msgspec.Raw()
    session_params: msgspec.Raw = msgspec.Raw()
    min_weight_version: msgspec.Raw = msgspec.Raw()
    exact_weight_version: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()


@dataclass
class RoutedRequest:
    operation: RoutedOperation
    method: str
    target: bytes
    """Path and query as they are sent to a server."""
    headers: Headers
    """Headers of the caller, in their order."""
    body: bytes
    parameters: dict[str, str] = field(default_factory=dict)
    """Parameters of the path."""
    path_key: bytes | None = None
    """Key of a session in the path."""
    keys: list[bytes] = field(default_factory=list)
    """Keys in the headers."""
    attached: bytes | None = None
    """Key that replaces the caller's keys, which the router has checked (`keys.Caller`)."""
    is_foreign: bool = False
    """True if the request owns no session without a key (`keys.Caller`)."""

    @cached_property
    def first(self) -> dict[bytes, bytes]:
        """Lower-case name -> first value."""
        return dict(reversed(self.headers))

    @cached_property
    def fields(self) -> RoutedFields:
        packed = self.packed
        return read_fields(self.body[packed:] if packed else self.body)

    @property
    def packed(self) -> int:
        """Number of bytes of packed token ids before the JSON."""
        size = whole_number(self.first.get(_PACKED_HEADER, b"").decode("latin-1"), most_digits=15) or 0
        return min(size, len(self.body))

    @cached_property
    def blocks(self) -> list[int]:
        """Hashes of the blocks of the prompt (`prefixes`)."""
        return prompt_blocks(self.body, self.packed)

    @property
    def session_key(self) -> bytes | None:
        """The key of the session in the path or the headers, or None. A request with two of them is no session's."""
        found = {key for key in self.keys if key.startswith(KEY_PREFIX.encode())}
        if self.path_key is not None:
            found.add(self.path_key)
        return found.pop() if len(found) == 1 else None

    @property
    def new_session(self) -> str | None:
        """Id that the request wants for a session that it creates."""
        named = self.fields.session_id if self.operation.name == "/open_session" else self.fields.id
        return named if isinstance(named, str) and named else None

    @property
    def session_name(self) -> str | None:
        """Id of a recorded session that the request may name: in the path, in the body, or in X-Session-ID."""
        if (named := self.parameters.get("session_id")) is not None:
            return named
        if self.operation.name == "/close_session":
            return self.fields.session_id if isinstance(self.fields.session_id, str) else None
        params = self.fields.session_params
        if isinstance(params, dict) and isinstance(params.get("id"), str):
            return str(params["id"])
        header = self.first.get(SESSION_HEADER.lower().encode())
        return None if header is None else header.decode("latin-1")

    @property
    def must_be_session(self) -> bool:
        """True if a request that names a session which no server has cannot be served as another one."""
        return (
            "session_id" in self.parameters
            or isinstance(self.fields.session_params, dict)
            or CHILD_HEADER.lower().encode() in self.first
        )

    @property
    def may_be_elsewhere(self) -> bool:
        """True if a server that answers 404 lacks the session, and another one may have it: a session of SGLang on
        servers without keys, which answer no question about sessions."""
        return isinstance(self.fields.session_params, dict)

    @property
    def hint(self) -> str | None:
        """Name of the conversation, which should stay with one server."""
        fields = self.fields
        named = [fields.session_id, fields.conversation_id]
        if isinstance(fields.session_params, dict):
            named.append(fields.session_params.get("id"))
        named += [self._text(name) for name in (ROUTING_HEADER, SESSION_HEADER)]
        return next((each for each in named if isinstance(each, str) and each), None)

    @property
    def idempotency(self) -> bytes | None:
        """Hash of the caller's keys and the Idempotency-Key, or None."""
        given = self.first.get(_IDEMPOTENCY_HEADER)
        if given is None:
            return None
        return hashlib.blake2b(b"\0".join([*sorted(self.keys), given]), digest_size=16).digest()

    @property
    def continues_stream(self) -> bool:
        return b"last-event-id" in self.first

    @cached_property
    def demand(self) -> str:
        """The demand on the weight version as `version_demand` writes it, or "" if the request has none."""
        body = self.fields.min_weight_version, self.fields.exact_weight_version
        headers = self._text(MIN_HEADER), self._text(EXACT_HEADER)
        for minimum, exact in (body, headers):
            if isinstance(minimum, str | int):
                return f">={minimum}"
            if isinstance(exact, str | int):
                return str(exact)
        return ""

    @cached_property
    def tokens(self) -> int:
        """Estimate of the tokens that the request takes."""
        is_ids = not self.packed and _DECIMAL_IDS.search(self.body, 0, _ENDS) is not None
        size = _BYTES_OF_AN_ID if is_ids else _BYTES_OF_A_TOKEN
        return (self.packed or len(self.body)) // size + _OUTPUT_TOKENS

    def _text(self, header: str) -> str | None:
        """Return the value of a header. Labels in headers are percent-encoded."""
        value = self.first.get(header.lower().encode())
        return None if value is None else unquote(value.decode("latin-1"))


def read_fields(body: bytes) -> RoutedFields:
    """Return the fields of a JSON body. A body that is no JSON object has none: the server refuses it.

    The fields of a large body are looked for at both ends, where callers have them. `session_params` is looked for in
    all of it, because another server does not know the session.
    """
    if len(body) <= _MOST_DECODED:
        raw = decoded(body, _RawFields) if body else None
        found = {} if raw is None else {name: getattr(raw, name) for name in _RawFields.__struct_fields__}
        return RoutedFields(**{name: decoded(value, Any) for name, value in found.items() if value})
    named = dict(_NAMED.findall(body[:_ENDS]) + _NAMED.findall(body[-_ENDS:]))
    fields = RoutedFields(**{name.decode(): decoded(value, Any) for name, value in named.items()})
    at = body.find(_PARAMS)
    while at >= 0 and fields.session_params is None:
        if (value := _PARAMS_VALUE.match(body, at + len(_PARAMS))) is not None:
            fields.session_params = decoded(value[1], Any)
        at = body.find(_PARAMS, at + 1)
    return fields


def decoded(data: bytes | msgspec.Raw, kind: type[T]) -> T | None:
    """Return a JSON text as `kind`, or None if it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


class BodyTooLargeError(BadRequestError):
    """The body has more bytes than the router takes."""

    status_code = 413


async def read_body(receive: Receive, scope: Scope, most: int) -> bytes | None:
    """Return the whole body, or None if the client has left. Raise BodyTooLargeError."""
    declared = whole_number(first_headers(scope).get(b"content-length", b"").decode("latin-1"), most_digits=20)
    body, more = Body(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body.add(message.get("body", b""))
        more = message.get("more_body", False)
        if max(body.size, declared or 0) > most:
            if more and b"expect" not in first_headers(scope):
                await _discard(receive)
            raise BodyTooLargeError(f"The body has more than {most} bytes (the router's --max-request-bytes).")
    return body.whole()


async def _discard(receive: Receive) -> None:
    """Read the rest of a body for a moment: a client that cannot send it does not read the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (message := await receive())["type"] == "http.request" and message.get("more_body", False):
                pass
