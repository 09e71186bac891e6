"""`FleetReport`: what a router reports about its servers, in the answer to `GET /fleet`.

Engines read it to recognize a router, to find the servers that they push to, and to learn whether one can generate. The
route is open, and a router answers it at once, also while no server is healthy. A server that is no router answers 404.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_server.engine.http_answers import raise_for
from verl_server.engine.http_connection import Answer
from verl_server.engine.http_transport import HttpTransport
from verl_server.engine.server_address import server_address
from verl_server.engine.server_instance import ServerInstance
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.weight_version import satisfies

FLEET_HEADER = "X-Verl-Fleet"
"""Header of every answer of a router: the id of its fleet, which survives a restart of the router."""
FLEET_PATH = "/fleet?format=json"


class ServerReport(msgspec.Struct, frozen=True):
    """One server of a fleet, as the router saw it last (about a second ago)."""

    url: str
    state: Literal["starting", "stale", "healthy", "suspect", "dead", "retired"]
    instance_id: str | None = None
    weight_version: str | None = None
    weights_confirmed: bool = False


class FleetReport(msgspec.Struct, frozen=True):
    """The answer to `GET /fleet`."""

    fleet: str
    """Id of the fleet."""
    servers: list[ServerReport]
    committed: str | None = None
    """The version that all servers have which are not left out. None: no weights are confirmed yet."""

    @property
    def urls(self) -> list[str]:
        """URLs of the servers that take part: all that were not retired."""
        return [server_address(server.url) for server in self.servers if server.state != "retired"]

    def lost(self, version: str | None = None) -> str | None:
        """Return why no server can generate, or None if one is healthy and its weights satisfy `version`."""
        healthy = [server for server in self.servers if server.state == "healthy"]
        if any(version is None or satisfies(server.weight_version, version) for server in healthy):
            return None
        states = ", ".join(f"{server.url} is {server.state} ({server.weight_version})" for server in self.servers)
        return (
            f"No server of the router can serve {'requests' if version is None else f'version {version!r}'}: {states}."
        )


def fleet_in(answer: Answer) -> FleetReport | None:
    """Return the report in an answer to `FLEET_PATH`; None if no router sent it.

    Raise ServerUnavailableError if a router answered something else.
    """
    if answer.headers.get(FLEET_HEADER) is None:
        return None
    raise_for(answer)
    try:
        return msgspec.json.decode(answer.content, type=FleetReport)
    except msgspec.DecodeError as error:
        raise ServerUnavailableError(f"The router answered GET /fleet with other data: {error}") from None


def read_fleet(url: str) -> FleetReport:
    """Return the report of the router at `url`.

    Raise BadRequestError if a server answers that is no router, and ServerDiedError if nobody answers.
    """
    url = server_address(url)
    transport = HttpTransport(url, None, None, None, ServerInstance(url))
    try:
        report = fleet_in(transport.probe(FLEET_PATH))
    finally:
        transport.close()
    if report is None:
        raise BadRequestError(f"The server at {url} is no router of verl-server: it does not answer GET /fleet.")
    return report
