"""`RouterClient`: what a router says about its servers (`GET /fleet`), and what a trainer tells it.

Engines use it to find the servers that they push to, and to learn whether one can generate. A router answers `/fleet`
at once, also while no server is healthy. A server that is no router answers 404.
"""

from __future__ import annotations

import logging

import msgspec

from verl_server.engine.http_answers import raise_for
from verl_server.engine.http_transport import INFO_TIMEOUT, HttpTransport
from verl_server.engine.server_address import server_address
from verl_server.engine.server_instance import ServerInstance
from verl_server.errors import BadRequestError, ServerDiedError, ServerUnavailableError, VerlServerError
from verl_server.weight_version import satisfies

logger = logging.getLogger(__name__)

FLEET_HEADER = "X-Verl-Fleet"
"""Header of every answer of a router: the id of its fleet, which survives a restart of the router."""
FLEET_PATH = "/fleet"


class ServerReport(msgspec.Struct, frozen=True):
    """One server of a fleet, as the router saw it last (about a second ago)."""

    url: str
    state: str
    """starting, healthy, stale, suspect, dead or retired (docs/router.md)."""
    reason: str | None = None
    """Why it is not healthy."""
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
        states = " ".join(
            f"{server.url} is {server.state} with version {server.weight_version!r}. {server.reason or ''}".strip()
            for server in self.servers
        )
        return f"The router has no server for {'requests' if version is None else f'version {version!r}'}. {states}"


class RouterClient:
    """The routes of a router about its fleet. Any thread may call the methods."""

    def __init__(self, transport: HttpTransport, url: str) -> None:
        self._transport, self.url = transport, url

    @classmethod
    def at(cls, url: str, admin_api_key: str | None = None) -> RouterClient:
        """Return a client with a connection of its own, which `close` closes."""
        url = server_address(url)
        return cls(HttpTransport(url, None, admin_api_key, None, ServerInstance(url)), url)

    def fleet(self) -> FleetReport:
        """Return what the router reports.

        Raise BadRequestError if a server answers that is no router, and ServerDiedError if nobody answers.
        """
        answer = self._transport.probe(FLEET_PATH)
        if answer.headers.get(FLEET_HEADER) is None:
            raise BadRequestError(f"The server at {self.url} is no router of verl-server: it has no GET {FLEET_PATH}.")
        raise_for(answer)
        try:
            return msgspec.json.decode(answer.content, type=FleetReport)
        except msgspec.DecodeError as error:
            raise ServerUnavailableError(f"{self.url} answered GET {FLEET_PATH} with other data: {error}") from None

    def lost(self, version: str | None = None) -> str | None:
        """Return why no server can generate through the router now, or None if one can; see `FleetReport.lost`.

        A router that is slow to answer is not lost.
        """
        try:
            return self.fleet().lost(version)
        except (ServerDiedError, ServerUnavailableError) as error:
            return str(error)
        except VerlServerError:
            return None

    def commit(self, version: str) -> None:
        """Declare that the push of `version` is over. Servers without it then get no new requests.

        A router that does not answer finds the version on the servers later, so that is only logged. So is a refusal.
        """
        try:
            raise_for(self._transport.post("/fleet/commit", {"weight_version": version}, INFO_TIMEOUT))
        except VerlServerError as error:
            level = logging.WARNING if isinstance(error, BadRequestError) else logging.INFO
            logger.log(level, "The router at %s did not take version %s: %s", self.url, version, error)

    def close(self) -> None:
        self._transport.close()
