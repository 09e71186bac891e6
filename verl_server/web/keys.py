"""Keys of a request: which ones it has, whether one of them is a key of the server, and what a refusal says."""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.types import Scope

from verl_server.web.first_headers import first_headers


def sent_keys(scope: Scope) -> list[bytes]:
    """Return the keys of the headers `Authorization: Bearer KEY` and `x-api-key: KEY`, which have the same rights.

    They are bytes: a header is latin-1 text, and compare_digest accepts only ASCII text.
    """
    scheme, _, bearer = first_headers(scope).get(b"authorization", b"").partition(b" ")
    given = [bearer] if scheme.lower() == b"bearer" else []
    given += [value for name, value in scope["headers"] if name == b"x-api-key"]
    return [key.strip() for key in given]


def is_one_of(sent: list[bytes], keys: Collection[str]) -> bool:
    """Return True if one of the sent keys is one of `keys`. The time does not depend on how alike they are."""
    return any(hmac.compare_digest(each, key.encode()) for each in sent for key in keys)


def key_needed(route: str, names: Collection[str], sent: Collection[bytes]) -> str:
    """Return the message for a request to `route` without one of the keys that `names` describe."""
    fault = "The request's key is another one." if sent else "The request has no key."
    return (
        f"Unauthorized: {route} needs this server's {' or '.join(names)}, in the header `Authorization: Bearer KEY` or "
        f"`x-api-key: KEY`. {fault}"
    )
