"""`ServerPool`: the servers of an agent run. Each session belongs to one of them.

A new session goes to the server that answers and has the fewest sessions of this run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerUnavailableError,
    VerlServerError,
    VersionBehindError,
)
from verl_server.files.run_output import location
from verl_server.messages.session_types import CreatedSession, CreateSession
from verl_server.rollout.agents.sessions_client import SessionsClient
from verl_server.rollout.agents.types import Served, Server
from verl_server.version_demand import demand_fields
from verl_server.weight_version import satisfies

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Seconds between two probes of a server that is away."""


class ServerPool:
    """The servers of a run. Use it on one event loop, with `async with`."""

    def __init__(self, servers: Sequence[Server], version: str | None = None) -> None:
        """With `version`, sessions begin only on servers whose weights satisfy it (`weight_version.satisfies`).

        Their requests demand it, too, so that no turn is sampled by other weights.
        """
        if not servers:
            raise BadRequestError("servers is empty: name at least one Server(url, api_key).")
        self.clients = [SessionsClient(server.url, server.api_key) for server in servers]
        self._version = version
        self._open = dict.fromkeys(self.clients, 0)
        self._away: set[SessionsClient] = set()
        """Servers that create no session now: they do not answer, refuse (503), or have another version."""
        self._unchecked: set[SessionsClient] = set()
        """Servers that were away when the run began, so that `check_closed` has not checked them."""

    async def __aenter__(self) -> ServerPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()

    async def models(self) -> list[str]:
        """Return the models of the servers that answer, sorted and without repetitions."""
        found = await asyncio.gather(*(client.model() for client in self.clients))
        return sorted({location(model) for model in found if model})

    async def served(self) -> Served:
        """Return the served model, with the smallest context of the servers that answer.

        Raise BadRequestError if none of them names its model and its context.
        """
        found = await asyncio.gather(*(client.served() for client in self.clients), return_exceptions=True)
        named = [served for served in found if isinstance(served, Served)]
        if not named:
            raise BadRequestError(f"No server names its model and its context length: {found[0]}")
        return Served(named[0].model, min(served.context for served in named))

    async def check_closed(self) -> None:
        """Raise BadRequestError if one of the servers generates for callers without a key.

        A server that is away is checked when it comes back. Raise ServerDiedError if all of them are away.
        """
        for client in self.clients:
            try:
                await self._check_closed(client)
            except ServerDiedError as error:
                self._away.add(client)
                self._unchecked.add(client)
                if len(self._away) == len(self.clients):
                    raise ServerDiedError(f"{error} Start a server, or correct its URL.") from None
                logger.warning("%s The run begins without it.", error)

    @staticmethod
    async def _check_closed(client: SessionsClient) -> None:
        if await client.is_open():
            raise BadRequestError(
                f"The server at {client.url} generates for anybody: an agent could sample outside its session. "
                "Start it with --api-key-file (an admin key alone leaves generation open), or accept this with "
                "allow_open_server=True (--allow-open-server)."
            )

    @contextlib.asynccontextmanager
    async def session(
        self, request: CreateSession, seconds: float
    ) -> AsyncIterator[tuple[SessionsClient, CreatedSession]]:
        """Create a session on the server with the fewest sessions. Inside the block the session counts as open.

        Raise ServerDiedError, ServerUnavailableError or VersionBehindError if no server creates it within `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            client = min(self._candidates(), key=lambda c: self._open[c])
            self._open[client] += 1
            try:
                try:
                    created = await self._created(client, request)
                    self._away.discard(client)
                except (ServerDiedError, ServerUnavailableError, VersionBehindError):
                    self._away.add(client)  # so that the next attempt goes to another server, if there is one
                    if time.monotonic() > deadline:
                        raise
                    if len(self._away) == len(self.clients):
                        await asyncio.sleep(min(PROBE_SECONDS, max(0.0, deadline - time.monotonic())))
                        await self._probe()
                    continue
                yield client, created
                return
            finally:
                self._open[client] -= 1

    async def _created(self, client: SessionsClient, request: CreateSession) -> CreatedSession:
        """Create a session. Raise ServerUnavailableError if the server's weights have another version."""
        created = await client.create(msgspec.structs.replace(request, **demand_fields(self._version)))
        if self._version is None or satisfies(created.weight_version, self._version):
            return created
        with contextlib.suppress(VerlServerError):
            await client.delete(created.id)
        raise ServerUnavailableError(
            f"The server at {client.url} serves version {created.weight_version!r}, not {self._version!r}."
        )

    async def watch(self) -> None:
        """Probe the servers that are away every `PROBE_SECONDS`, until the task is cancelled."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            await self._probe()

    async def serves(self, client: SessionsClient) -> bool:
        """Return True if a server answers, with the version of this run if there is one."""
        if not await client.is_alive():
            return False
        return self._version is None or satisfies(await client.weight_version(), self._version)

    def lost(self, client: SessionsClient) -> None:
        """Send no new session to a server until it answers again, with the version of this run if there is one."""
        self._away.add(client)

    def _candidates(self) -> list[SessionsClient]:
        checked = [client for client in self.clients if client not in self._unchecked]
        return [client for client in checked if client not in self._away] or checked

    async def _probe(self) -> None:
        for client in list(self._away):
            if not await self.serves(client):
                continue
            if client in self._unchecked:
                try:
                    await self._check_closed(client)
                except (BadRequestError, ServerDiedError) as error:
                    logger.warning("No session goes to this server. %s", error)
                    continue
                self._unchecked.discard(client)
            self._away.discard(client)


@contextlib.asynccontextmanager
async def opened_servers(
    servers: Sequence[Server] | None, model_path: str | None, version: str | None
) -> AsyncIterator[ServerPool]:
    """Yield the pool of running servers, or of one that is launched for `model_path` with a random key.

    Raise BadRequestError unless one of both is given.
    """
    if servers is not None:
        if model_path is not None:
            raise BadRequestError("Pass servers or model_path, not both: a running server has its model.")
        async with ServerPool(servers, version) as pool:
            yield pool
        return
    if model_path is None:
        raise BadRequestError("Pass servers=[Server(url, api_key)], or model_path to launch a server.")
    from verl_server.engine.http import HttpServerEngineAdapter  # a run on running servers needs no engine

    key = secrets.token_urlsafe(32)
    engine = await asyncio.to_thread(HttpServerEngineAdapter, model_path=model_path, port=0, api_key=key)
    try:
        assert engine.url is not None
        async with ServerPool([Server(engine.url, key)], version) as pool:
            yield pool
    finally:
        await asyncio.to_thread(engine.shutdown)
