"""`FleetStatus`: what the router answers itself: `/health`, `/ready`, `/metrics`, `/fleet` and the routes below it.

`GET /fleet` is JSON for programs, and a page for people (`Accept: text/html`). `POST /fleet/commit` declares that a
push is over, `POST /fleet/retire` and `/fleet/admit` take a server out and back.
"""

from __future__ import annotations

import html
from typing import Any

import msgspec
import orjson
from starlette.types import Receive, Scope, Send

from verl_server._version import __version__
from verl_server.errors import BadRequestError
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
            status, kind, content = self._read(path, first_headers(scope).get(b"accept", b""))
        headers = [(b"content-type", kind), (b"content-length", str(len(content)).encode()), *self._own_headers]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else content, "more_body": False}
        )

    def _read(self, path: str, accept: bytes) -> tuple[int, bytes, bytes]:
        """Return (status, content type, content)."""
        match path:
            case "/metrics":
                return 200, _METRICS, self._metrics.text()
            case "/fleet":
                if b"text/html" in accept:
                    return 200, b"text/html; charset=utf-8", self._page()
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
            **{name: member.info.get(name) for name in ("model_path", "context_length", "engine")},
        }

    def _page(self) -> bytes:
        state = self.as_dict()
        columns = ("url", "state", "weight_version", "lag", "requests", "load", "reason")
        rows = "".join(
            f"<tr class={server['state']}>"
            + "".join(f"<td>{html.escape(str('' if server[name] is None else server[name]))}" for name in columns)
            for server in state["servers"]
        )
        head = "".join(f"<th>{name.replace('_', ' ')}" for name in columns)
        placed = ", ".join(f"{count} {reason}" for reason, count in sorted(state["placements"].items())) or "none yet"
        text = _PAGE.format(
            name=html.escape(state["fleet"]),
            committed=html.escape(str(state["committed"])),
            newest=html.escape(str(state["newest"])),
            sessions=state["sessions"],
            placed=html.escape(placed),
            head=head,
            rows=rows,
        )
        return text.encode()


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequestError(
            f"The body must be a JSON object with {', '.join(kind.__struct_fields__)}: {error}"
        ) from None


_PAGE = """<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=2>
<title>{name}: servers</title><style>
body{{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#1c2430}}
table{{border-collapse:collapse;width:100%}} th{{text-align:left;font-weight:600;color:#5a6573}}
td,th{{padding:.4rem .7rem;border-bottom:1px solid #e3e7ec;vertical-align:top}}
td:last-child{{color:#5a6573;max-width:28rem}} td:nth-child(2){{font-weight:600;color:#a36200}}
.healthy td:nth-child(2){{color:#1a7f4b}} .dead td:nth-child(2){{color:#b3261e}}
.retired td:nth-child(2){{color:#5a6573}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem}} dt{{color:#5a6573}} dd{{margin:0}}
@media (prefers-color-scheme:dark){{body{{background:#14181d;color:#e3e7ec}} td,th{{border-color:#2b323b}}}}
</style><h1>{name}</h1><dl><dt>version of the fleet<dd>{committed}<dt>newest version<dd>{newest}
<dt>sessions known<dd>{sessions}<dt>requests placed by<dd>{placed}</dl><table><tr>{head}{rows}</table></html>
"""
