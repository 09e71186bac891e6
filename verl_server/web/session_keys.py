"""Where a request names its session: the headers, and the key in the path `/s/KEY/v1/...`.

The rollout server reads them (`sessions/access`), and the router, which finds the server of the session.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from starlette.types import Scope

SESSION_HEADER = "X-Session-ID"
CHILD_HEADER = "X-Session-Child"
ROUTING_HEADER = "X-SMG-Routing-Key"
"""Name of a conversation for routers. It has no effect at a server."""
KEY_PREFIX = "vs-"
"""First characters of the keys of sessions."""
_KEY = re.compile(re.escape(KEY_PREFIX) + r"[A-Za-z0-9_-]{43}")
_IN_PATH = re.compile(r"/+s(/+)([^/]*)(.*)", re.DOTALL)
_HIDDEN = f"{KEY_PREFIX}..."


def take_session_key(scope: Scope) -> bytes | None:
    """Remove `/s/KEY` from the path in place, and hide other session keys in it. Return the key.

    `/s/KEY` alone, the base URL of Anthropic's clients, becomes `/`. The key is removed from a malformed path, too. The
    returned key then belongs to no session.
    """
    path: str = scope["path"]
    found = _IN_PATH.fullmatch(path)
    key: bytes | None = None
    if found is not None:
        slashes, text, rest = found.groups()
        is_well_formed = path.startswith("/s/") and slashes == "/" and _KEY.fullmatch(text)
        key = text.encode("utf-8", "surrogateescape") if is_well_formed else b""
        path = rest or "/"
    path = _KEY.sub(_HIDDEN, path)
    if path != scope["path"]:
        scope["path"] = path
        scope["raw_path"] = quote(path, safe="/:@!$&'()*+,;=~-._").encode()
    query: bytes = scope.get("query_string", b"")
    if KEY_PREFIX.encode() in query:
        scope["query_string"] = _KEY.sub(_HIDDEN, query.decode("latin-1")).encode("latin-1")
    return key
