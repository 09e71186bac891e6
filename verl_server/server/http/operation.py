"""`Operation`: one route of a dialect, with all fields of its request and its answer.

The API class of each dialect returns its operations. `app.create_app` serves them. `/openapi.json`, the access rules,
the reference in docs/ and the test that sends every field read the same table. A known field of a body is in exactly
one of three places: in the struct (implemented), in `refused`, or in `without_effect`. `unknown_fields` judges other
fields.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server.errors import VerlServerError
from verl_server.server.http.responses import error_response

Handler = Callable[[Request], Awaitable[Response]]
AnswerError = Callable[[VerlServerError], Response]

JSON = "application/json"
TEXT = "text/plain"
EVENTS = "text/event-stream"
GET, POST, BOTH = ("GET",), ("POST",), ("GET", "POST")

Access = Literal["open", "key", "control", "owner", "local_owner"]
"""The callers that an operation admits. open: everybody. key: who has a key, or everybody if `api_key` is not set.
control: the operation affects the whole server, and needs the admin key if one is set. owner: a session route, which
needs a key of the server, also where ordinary routes are open. local_owner: like owner, but everybody on a server
without keys that listens on loopback, as in SGLang."""


@dataclass(frozen=True)
class Operation:
    """A handler, the paths and methods that it serves, and the description of its requests and answers."""

    path: str
    handler: Handler
    """The docstring of the handler describes the answer."""
    methods: tuple[str, ...] = GET
    aliases: tuple[str, ...] = ()
    """Other paths of the same handler, for example names of older versions."""
    access: Access = "key"
    in_session: bool = False
    """True if a session key permits the operation in its own session."""
    generates: bool = False
    """True if the operation samples tokens. It takes a demand on the weight version, and its answers name the
    version."""
    replayed: bool = False
    """True for a generation whose answer is kept for a request that comes again (`replay`)."""
    body: type[msgspec.Struct] | None = None
    """Struct of the JSON body. Its fields are implemented, except for `id` of a control request, which is internal."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Known field that is not implemented -> what to do instead. A request that sets the field is answered 400."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Known field that is accepted and has no effect -> the reason."""
    inside: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Field of the body whose object the handler decodes by itself -> all known fields of the object."""
    query: Mapping[str, str] = field(default_factory=dict)
    """Name of a query parameter -> its meaning."""
    answer: Any = None
    """Type of the JSON answer with status 200. None: the docstring of the handler describes the answer."""
    media_types: tuple[str, ...] = (JSON,)
    """Content types of the answer with status 200."""
    answer_error: AnswerError = error_response
    """Returns the answer to an error of the route, in the shape of the dialect. Not only the handler raises errors:
    access rules, headers and queries are checked before it."""
    shared_with: Mapping[str, AnswerError] = field(default_factory=dict)
    """Header that the clients of another dialect send, in lower case -> its shape of errors. For routes that dialects
    share, and for paths that nobody serves."""

    @property
    def dialect(self) -> str:
        """Name of the dialect that defines the operation; "server" for the description of all dialects."""
        parts = self.handler.__module__.split(".")
        return parts[parts.index("dialects") + 1] if "dialects" in parts else "server"

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the implemented fields of the body. A message between processes has an `id` that is internal."""
        if self.body is None:
            return ()
        is_internal = self.body.__struct_config__.tag is not None
        return tuple(name for name in self.body.__struct_fields__ if name != "id" or not is_internal)
