"""Unknown body fields and query parameters of an operation: misspelled names are refused, other names are reported.

Clients may be newer than the server's tables, so a name that resembles no known name is accepted. It is counted by name
in /metrics, and the header `X-Verl-Unknown-Fields` of the answer lists it. A name that resembles a known name
(`near_name`) is answered 400, unless it is a field of another operation: clients send one body to several dialects.
With `unknown_fields="refuse"` each unknown name is answered 400.

Readers list the names with `json_body.names_of_unknown`, in a text worker if they run there. Handlers pass them to
`judge_unknown`, before anything is generated or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, quote

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.errors import BadRequestError
from verl_server.sampling_params import SamplingParams
from verl_server.server.http.near_names import near_name
from verl_server.server.http.operation import Operation
from verl_server.server.http.responses import read_json
from verl_server.server.http.routing import error_answer, route_of
from verl_server.server.metrics import Metrics
from verl_server.web.json_body import LONGEST_NAME, MOST_NAMES, names_of_unknown
from verl_server.web.json_convert import read_struct
from verl_server.web.resolver import Found

T = TypeVar("T", bound=msgspec.Struct)

HEADER = "X-Verl-Unknown-Fields"
_LONGEST_HEADER = 2048
"""The most bytes of names in the header. aiohttp's clients refuse a line of more than 8,190 bytes."""
_STATE = "unknown_fields"
"""Name in `scope["state"]` of the `_Judge` of a request."""


class ReadBody(Protocol):
    """The result of a job that reads a body."""

    unknown_fields: list[str]
    """`json_body.names_of_unknown`."""


def judge_unknown(request: Request, names: Collection[str]) -> None:
    """Accept the unknown names of a request's body, or raise BadRequestError."""
    if names:
        request.scope["state"][_STATE].judge(names)


def refuse_unknown(request: Request, names: Collection[str]) -> None:
    """Raise BadRequestError for unknown names of a body that only clients of this project write."""
    judge_unknown(request, names)
    if names:
        raise BadRequestError(f"{request.url.path}: unknown field `{_shown(next(iter(names)))}`.")


async def read_object(
    request: Request, kind: type[T], limit: int, judge: Callable[[Request, Collection[str]], None] = judge_unknown
) -> T:
    """Return a small JSON body as a struct. `limit` is `max_request_bytes`. Raise BadRequestError for another body."""
    given = await read_json(request, limit)
    read = read_struct(given, kind, f"{request.url.path}: ")
    judge(request, names_of_unknown(given, read))
    return read


class UnknownFieldsMiddleware:
    """Gives each request its `_Judge`, judges its query, and names accepted fields in the header of the answer."""

    def __init__(self, app: ASGIApp, operations: Iterable[Operation], metrics: Metrics, refuse: bool) -> None:
        self._app, self.metrics, self.refuse = app, metrics, refuse
        self.known = {(operation.path, operation.methods): _known_names(operation) for operation in operations}
        """(path, methods) of an operation -> its `_known_names`."""
        self.anywhere = frozenset(SamplingParams.__struct_fields__).union(
            *(names.get("", ()) for names in self.known.values())
        )
        """Fields of all bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if not isinstance(route, Found):
            await self._app(scope, receive, send)
            return
        judge = scope["state"][_STATE] = _Judge(self, route.operation)
        try:
            judge.judge_query(scope["query_string"])
        except BadRequestError as error:
            await error_answer(scope, error)(scope, receive, send)
            return

        async def send_with_names(message: Message) -> None:
            if message["type"] == "http.response.start" and judge.accepted:
                message["headers"] = [*message["headers"], (HEADER.lower().encode(), judge.header())]
            await send(message)

        await self._app(scope, receive, send_with_names)


class _Judge:
    """The unknown names of one request."""

    def __init__(self, rules: UnknownFieldsMiddleware, operation: Operation) -> None:
        self._rules, self._operation = rules, operation
        self.accepted: list[str] = []

    def judge(self, names: Collection[str]) -> None:
        """Accept the names of the body's unknown fields, or raise BadRequestError."""
        known = self._rules.known[self._operation.path, self._operation.methods]
        names = [name for name in names if not _is_known(name, known)]
        for name in names:
            inside, _, own = name.rpartition(".")
            if own in self._rules.anywhere:
                continue
            if (meant := near_name(own, known.get(inside, ()))) is not None:
                place = f"{inside}." if inside else ""
                raise BadRequestError(f"Unknown field `{_shown(name)}`. Did you mean `{place}{meant}`?")
        self._accept(names, "field")

    def judge_query(self, query: bytes) -> None:
        """Accept the unknown names of the query. Raise BadRequestError for a misspelled or refused name."""
        known = self._operation.query
        if not query:
            return
        given = [name for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True, max_num_fields=None)]
        names = [name for name in dict.fromkeys(given[:MOST_NAMES]) if name not in known]
        for name in names:
            if (meant := near_name(name, known)) is not None:
                raise BadRequestError(f"Unknown query parameter `{_shown(name)}`. Did you mean `{meant}`?")
        self._accept([f"?{name}" for name in names], "query parameter")

    def _accept(self, names: Collection[str], what: str) -> None:
        if names and self._rules.refuse:
            shown = ", ".join(f"`{_shown(name.removeprefix('?'))}`" for name in names)
            raise BadRequestError(
                f"Unknown {what}{'s' if len(names) > 1 else ''} {shown}: the server was started with "
                f"unknown_fields=refuse. {self._operation.path} has the fields of docs/reference/fields.md."
            )
        for name in names:
            self._rules.metrics.field_ignored(self._operation.path, name)
        self.accepted += names

    def header(self) -> bytes:
        """Return the names, escaped.

        Names that do not fit are omitted, because clients bound the length of a header.
        """
        names = ", ".join(quote(_shown(name), safe="?.-_[]") for name in self.accepted)
        return (names if len(names) <= _LONGEST_HEADER else names[:_LONGEST_HEADER] + "...").encode()


def _is_known(name: str, known: Mapping[str, Collection[str]]) -> bool:
    inside, _, own = name.rpartition(".")
    return own in known.get(inside, ())


def _shown(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "..."


def _known_names(operation: Operation) -> dict[str, tuple[str, ...]]:
    """Path of an object in the body ("" is the body) -> the fields that the object may have."""
    if operation.body is None:
        return {}
    found = _struct_names(msgspec.inspect.type_info(operation.body), "")
    found[""] = (*operation.fields, *operation.refused, *operation.without_effect)
    return found | {place: tuple(names) for place, names in operation.inside.items()}


def _struct_names(kind: Any, path: str, depth: int = 3) -> dict[str, tuple[str, ...]]:
    """Path -> field names, for a struct and the structs in it."""
    found: dict[str, tuple[str, ...]] = {}
    for option in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        if isinstance(option, msgspec.inspect.StructType) and depth:
            found[path] = found.get(path, ()) + tuple(field.encode_name for field in option.fields)
            for field in option.fields:
                inner = f"{path}.{field.encode_name}" if path else field.encode_name
                found |= _struct_names(field.type, inner, depth - 1)
    return found
