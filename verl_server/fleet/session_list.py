"""`listed_sessions`: one page of the sessions of all servers, for `GET /sessions` at the router.

The page has the sessions of the first server, oldest first, then those of the next one. `after` names a session, so the
page goes on with the server that has it.
"""

from __future__ import annotations

import asyncio
from urllib.parse import parse_qsl, urlencode

import msgspec

from verl_server.errors import ServerDiedError
from verl_server.fleet.members import Fleet, Member
from verl_server.fleet.requests import RoutedRequest, decoded
from verl_server.fleet.sessions import SessionPlaces
from verl_server.fleet.upstream import Headers
from verl_server.web.numbers import whole_number

_LIMIT = 100
"""Sessions of a page, as at a server."""
_SECONDS = 30.0
_MOST_ANSWER = 64 * 2**20


class _Page(msgspec.Struct):
    sessions: list[msgspec.Raw]
    next: str | None = None


async def listed_sessions(
    fleet: Fleet, places: SessionPlaces, request: RoutedRequest, headers: Headers
) -> tuple[int, Headers, bytes]:
    """Return (status, headers, body). A server's refusal is returned as it is.

    Raise ServerDiedError if a server does not answer, because the list would lack its sessions.
    """
    query = dict(parse_qsl(request.target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True))
    limit = whole_number(query.get("limit", "")) or _LIMIT  # the first server refuses a limit that is none
    members = [member for member in fleet.members if not (member.is_retired and member.report is None)]
    after = query.get("after")
    if after is not None:
        url = await places.of_name(after, headers, may_be_hint=True)
        start = next((at for at, member in enumerate(members) if member.url == url), 0)
        members = members[start:]
    found: list[msgspec.Raw] = []
    next_id: str | None = None
    for place, member in enumerate(members):
        given = query
        if place:
            given = query | {"limit": str(limit - len(found))}
            given.pop("after", None)
        status, page = await _page(member, given, headers)
        if isinstance(page, bytes):
            return status, [(b"content-type", b"application/json"), (b"content-length", str(len(page)).encode())], page
        found += page.sessions
        if len(found) >= limit:
            is_last = page.next is None and place == len(members) - 1
            next_id = None if is_last else page.next or _id(found[-1])
            break
    body = msgspec.json.encode({"sessions": found, "next": next_id})
    return 200, [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())], body


async def _page(member: Member, query: dict[str, str], headers: Headers) -> tuple[int, _Page | bytes]:
    exchange = None
    try:
        async with asyncio.timeout(_SECONDS):
            target = b"/sessions?" + urlencode(query).encode()
            exchange = await member.upstream.send("GET", target, headers, b"")
            await exchange.started()
            body = await exchange.whole(_MOST_ANSWER)
    except TimeoutError:
        raise ServerDiedError(f"{member.url} did not list its sessions within {_SECONDS:g} s.") from None
    finally:
        if exchange is not None:
            exchange.close()
    if exchange.status != 200:
        return exchange.status, body
    page = decoded(body, _Page)
    if page is None:
        raise ServerDiedError(f"{member.url} did not list its sessions as a verl-server does.")
    return 200, page


def _id(session: msgspec.Raw) -> str:
    return str(msgspec.json.decode(session)["id"])
