"""`attach_server` and `check_server`: a rollout server that a command line names, before anything else starts.

`verl-server rollout` and the trainer call them, so that a wrong URL is reported at once, with its option.
"""

from __future__ import annotations

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerDiedError


def attach_server(
    url: str, api_key: str | None = None, admin_api_key: str | None = None, *, option: str = "--server"
) -> HttpServerEngineAdapter:
    """Return an engine for the running server at `url`. `option` is the option of the URL, which errors name.

    Raise BadRequestError, with the remedy, if `url` is no URL or if no server answers there.
    """
    try:
        return HttpServerEngineAdapter.attach(url, api_key, admin_api_key)
    except ServerDiedError as error:
        reason = str(error).removesuffix(" Is the server still running?")
        raise BadRequestError(
            f"No rollout server answers at {option} {url}: {reason} Start the server, or correct the URL."
        ) from error


def check_server(
    url: str, api_key: str | None = None, admin_api_key: str | None = None, *, option: str = "--server"
) -> None:
    """Raise as `attach_server` does if no server answers at `url`. The connection is closed again."""
    attach_server(url, api_key, admin_api_key, option=option).shutdown()
