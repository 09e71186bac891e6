"""`FleetStatus`: what the router answers itself: `/health`, `/ready`, `/metrics`, `/fleet` and the routes below it.

`GET /fleet` is JSON for programs, and a page for people (`Accept: text/html`, without `?format=json`). Everybody may
read it. `POST /fleet/commit` declares that a push is over, `POST /fleet/retire` and `/fleet/admit` take a server out
and back.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from verl_server._version import __version__
from verl_server.errors import BadRequestError
from verl_server.fleet import page
from verl_server.fleet.keys import RouterKeys
from verl_server.fleet.members import Fleet, Member
from verl_server.fleet.metrics import RouterMetrics
from verl_server.fleet.placement import Placement
from verl_server.fleet.requests import read_body
from verl_server.fleet.sessions import SessionPlaces
from verl_server.fleet.upstream import Headers
from verl_server.web.first_headers import first_headers

_GET = ("/health", "/ping", "/ready", "/liveness", "/metrics", "/fleet")
_POST = ("/fleet/commit", "/fleet/retire", "/fleet/admit")
_MOST_BODY = 64 * 1024
_METRICS = b"text/plain; version=0.0.4; charset=utf-8"
_JSON = b"application/json"
_HTML = b"text/html; charset=utf-8"


class CommitBody(msgspec.Struct):
    """Body of `POST /fleet/commit`."""

    weight_version: str
    """Label of the push that is over. Servers that do not have it get no new requests until they have."""


class MemberBody(msgspec.Struct):
    """Body of `POST /fleet/retire` and `POST /fleet/admit`."""

    url: str


class FleetStatus:
    def __init__(
        self,
        fleet: Fleet,
        placement: Placement,
        sessions: SessionPlaces,
        metrics: RouterMetrics,
        own_headers: Headers,
    ) -> None:
        self._fleet, self._placement, self._sessions, self._metrics = fleet, placement, sessions, metrics
        self._own_headers = own_headers

    @staticmethod
    def serves(scope: Scope) -> bool:
        """Return True if the router answers a request itself."""
        return scope["path"] in (
            _POST if scope["method"] == "POST" else _GET if scope["method"] in ("GET", "HEAD") else ()
        )

    async def answer(self, scope: Scope, receive: Receive, send: Send, keys: RouterKeys) -> None:
        path = scope["path"]
        if path in _POST:
            keys.check_own_control(scope)
            body = await read_body(receive, scope, _MOST_BODY)
            if body is None:
                return
            await self._act(path, body)
            status, kind, content = 200, _JSON, orjson.dumps(self.as_dict())
        else:
            wants_page = b"text/html" in first_headers(scope).get(b"accept", b"")
            status, kind, content = self._read(path, wants_page and b"format=json" not in scope["query_string"])
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode()), *self._own_headers]
        headers += page.HEADERS if kind is _HTML else []
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content, "more_body": False}
        )

    def _read(self, path: str, wants_page: bool) -> tuple[int, bytes, bytes]:
        """Return (status, content type, content)."""
        match path:
            case "/metrics":
                return 200, _METRICS, self._metrics.text()
            case "/fleet":
                if wants_page:
                    return 200, _HTML, page.fleet_page(self.as_dict())
                return 200, _JSON, orjson.dumps(self.as_dict(), option=orjson.OPT_INDENT_2)
            case "/ready":
                return (200 if self._fleet.healthy else 503), _JSON, b""
            case "/liveness":
                return 200, _JSON, b'{"status":"ok"}'
            case _:
                return 200, _JSON, b""

    async def _act(self, path: str, body: bytes) -> None:
        """Carry out a request to the router. Raise BadRequestError."""
        if path == "/fleet/commit":
            label = _decoded(body, CommitBody).weight_version
            await self._fleet.look_now()
            if not self._fleet.commit(label):
                raise BadRequestError(f"No server of the fleet serves version {label!r}, so it cannot be committed.")
            return
        url = _decoded(body, MemberBody).url.rstrip("/")
        member = self._fleet.member(url)
        if member is None:
            known = ", ".join(each.url for each in self._fleet.members)
            raise BadRequestError(f"{url!r} is no server of this router. Its servers are {known}.")
        self._fleet.retire(member, is_retired=path == "/fleet/retire")

    def as_dict(self) -> dict[str, Any]:
        """Return the state of the fleet."""
        versions = self._fleet.versions
        spread = versions.last_spread
        return {
            "fleet": self._fleet.args.name,
            "version": __version__,
            "committed": versions.committed,
            "newest": versions.newest,
            "spread": None if spread is None else {"weight_version": spread[0], "seconds": round(spread[1], 3)},
            "sessions": len(self._sessions),
            "placements": dict(self._placement.counts),
            "servers": [self._member(member) for member in self._fleet.members],
        }

    def _member(self, member: Member) -> dict[str, Any]:
        return {
            "url": member.url,
            "state": member.state.value,
            "reason": member.reason or None,
            "instance_id": member.instance,
            "weight_version": member.version,
            "weights_confirmed": member.is_confirmed,
            "lag": self._fleet.versions.lag(member.url),
            "requests": member.requests,
            "load": round(member.load, 4),
            "tokens_in_flight": max(member.tokens, member.reported_tokens),
            "capacity": member.capacity,
            "paused": member.is_paused,
            "model": str(member.info.get("model_path") or "").rstrip("/").rpartition("/")[2] or None,
            "context_length": member.info.get("context_length"),
            "engine": member.info.get("engine"),
        }


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(
            f"The body must be a JSON object with {', '.join(kind.__struct_fields__)}: {error}"
        ) from None
