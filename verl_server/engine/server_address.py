"""`server_address`: converts the URL that a user wrote into the base URL of a rollout server. Clients call it."""

from __future__ import annotations

from urllib.parse import urlsplit

from verl_server.errors import BadRequestError


def server_address(url: str) -> str:
    """Return `http://HOST:PORT` without a slash at its end. HOST:PORT without a scheme means http.

    A proxy's path is kept. Raise BadRequestError for any other text, and for the base URL of OpenAI's clients, which
    ends with `/v1`.
    """
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or a port that are none
        is_address = False
    if not is_address or parts.query or parts.fragment or any(letter.isspace() for letter in address):
        raise BadRequestError(f"{url!r} is not the URL of a rollout server; write it as http://HOST:PORT.")
    if parts.path.endswith("/v1"):
        raise BadRequestError(
            f"{url} is a base URL for OpenAI's clients. Leave its path out: {address.removesuffix('/v1')}."
        )
    return address


def path_remedy(address: str) -> str:
    """Return the hint that the URL's path may be wrong, for a server that lacks its own routes.

    "" if there is no path.
    """
    parts = urlsplit(address)
    return f" Leave the path out of the URL: {parts.scheme}://{parts.netloc}." if parts.path else ""
