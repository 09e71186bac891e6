"""`attach_server`, `check_server`, `routed_servers`: servers that a command line names, before anything else starts.

`verl-server rollout` and the trainer call them, so that a wrong URL is reported at once, with its option.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.router_client import RouterClient
from verl_server.engine.server_address import server_address
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
        raise _unanswered(error, f"{option} {url}", "rollout server") from error


def check_server(
    url: str, api_key: str | None = None, admin_api_key: str | None = None, *, option: str = "--server"
) -> None:
    """Raise as `attach_server` does if no server answers at `url`. The connection is closed again."""
    attach_server(url, api_key, admin_api_key, option=option).shutdown()


def routed_servers(router: str, servers: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the URLs of the servers behind the router at `--router ROUTER`.

    Raise BadRequestError if `servers`, the URLs at `--server`, are given and are others, if no router answers, or if it
    has no server.
    """
    try:
        with contextlib.closing(RouterClient.at(router)) as client:
            urls = tuple(client.fleet().urls)
    except ServerDiedError as error:
        raise _unanswered(error, f"--router {router}", "router") from error
    if not urls:
        raise BadRequestError(f"The router at --router {router} has no server: start it with --server URL.")
    given = {server_address(url) for url in servers}
    if servers and given != set(urls):
        only_given, only_routed = sorted(given - set(urls)), sorted(set(urls) - given)
        differences = [f"--server only: {', '.join(only_given)}"] if only_given else []
        differences += [f"the router only: {', '.join(only_routed)}"] if only_routed else []
        raise BadRequestError(
            f"The servers at --server are not those of the router at {router} ({'; '.join(differences)}). Leave "
            "--server out, or name the servers of the router as it names them."
        )
    return urls


def _unanswered(error: ServerDiedError, place: str, what: str) -> BadRequestError:
    reason = str(error).removesuffix(" Is the server still running?")
    return BadRequestError(f"No {what} answers at {place}: {reason} Start the {what.split()[-1]}, or correct the URL.")
