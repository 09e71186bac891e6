"""`page_refusal`: recognizes requests that only a web page of another origin sends.

A browser on the server's host can reach a server that is bound to loopback, and any web page can make the browser send
requests: to a host name that the page's owner resolves to 127.0.0.1 (DNS rebinding), or through a form, an image, a
link or a WebSocket. Other programs send no such requests. `AccessRules` of the rollout server and the door of the
environment server ask before they serve what changes something.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from verl_server.web.addresses import is_loopback
from verl_server.web.first_headers import first_headers

_FORM_TYPES = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
"""Content types that a page of another origin can send without a CORS preflight request."""
_FOREIGN_SITES = ("cross-site", "same-site")
"""Values of the header Sec-Fetch-Site in requests from pages of another origin. Two ports of one host are one site."""


@dataclass(frozen=True, slots=True)
class PageRefusal:
    status: int
    message: str


def page_refusal(scope: Scope, own_host: str) -> PageRefusal | None:
    """Return the reason why a request is refused, or None. `own_host` is the host on which the server listens."""
    headers, path = first_headers(scope), scope["path"]
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1").lower()
    if site in _FOREIGN_SITES:
        return PageRefusal(403, f"{path} refuses requests from web pages of another origin (Sec-Fetch-Site: {site}).")
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
    if is_loopback(own_host):
        if host and not _is_own_name(host, own_host):
            return PageRefusal(
                403,
                f"{path} refuses the Host {host!r}: this server listens on {own_host}, and a web page may have sent "
                "the request. Use localhost or 127.0.0.1 in the URL. A proxy must send one of these names as Host.",
            )
        if origin is not None and not _is_origin_of(origin, host):
            return PageRefusal(403, f"{path} refuses requests from web pages of the origin {origin!r}.")
        media_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if media_type in _FORM_TYPES:
            return PageRefusal(
                415, f"{path} refuses {media_type}, which web forms send. Set Content-Type: application/json."
            )
    return None


def _is_origin_of(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:  # such as "http://["
        return False


@functools.lru_cache(maxsize=64)
def _is_own_name(host: str, own: str) -> bool:
    """Return True if the Host header `host` names loopback or `own`, the host on which the server listens."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return name == own.lower() or name.endswith(".localhost") or is_loopback(name)
