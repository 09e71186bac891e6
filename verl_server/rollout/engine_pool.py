"""`EnginePool`: the engines of an `AgentLoop`, whose episodes continue when a server dies or is started again.

An episode stays with one engine, whose cache has its tokens. When the server of this engine is lost, the episode
continues from its own tokens on another engine. A server that is started again serves the weights that it loads, so it
gets no episode until the engine that pushes weights has pushed them again (`heal`), or until the server's owner has
accepted the loaded weights. If all servers are lost, the episodes wait for the first that is healed.

`close_session` reports to the server, in the background, which episodes have ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from verl_server.engine.base import EngineBase
from verl_server.engine.http import HttpServerEngineAdapter, RoutedEngine
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerRestartedError,
    ServerStoppingError,
    ServerUnavailableError,
    SessionError,
    VerlServerError,
    VersionBehindError,
)
from verl_server.files.run_output import location
from verl_server.version_demand import demand_fields

logger = logging.getLogger(__name__)

_RETRY_PAUSE = 0.5
"""Seconds before a generation is sent again to a server that answers, but broke its connection."""
_CLOSE_TIMEOUT = 5.0
"""Seconds to wait until the server has noted the end of a session."""
_LAST_CLOSES = 1.0
"""Seconds for which the end of a batch waits until the server has noted the ends of its sessions."""


class _Member:
    """One engine of the pool."""

    def __init__(self, engine: EngineBase) -> None:
        self.engine = engine
        self.open = 0
        """Episodes that play on this engine."""
        self.back: asyncio.Task[None] | None = None
        """Ends when the engine can generate again, with an error if it never will. None if it was never lost."""

    @property
    def is_away(self) -> bool:
        """True from the loss of the engine until the very moment at which `back` ends without an error."""
        if self.back is None:
            return False
        return not self.back.done() or self.back.cancelled() or self.back.exception() is not None

    @property
    def run(self) -> str | None:
        """Id of the server's run that the engine works with. None: it would not notice a restart, or has no server."""
        return self.engine.instance_id if isinstance(self.engine, HttpServerEngineAdapter) else None


class EnginePool:
    """A `Generator` for the episodes of one batch. Use it on one event loop, as an asynchronous context manager."""

    def __init__(self, engines: Sequence[EngineBase], restart_timeout: float, version: str | None = None) -> None:
        """`restart_timeout`: seconds for which an episode waits for an engine when all of them are lost.

        With `version`, a label or `at_least` a version, every request demands it, so that a server refuses a request
        until it has these weights. It is a trainer's, who brings lost servers back and decides when to give up.
        """
        self._version = version
        self._members = [_Member(engine) for engine in engines]
        self._restart_timeout = restart_timeout
        self._sessions: dict[str, _Member] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._refuses_closes = False

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        return_logprob: Any = False,
        session_id: Any = None,
        timeout: float | None = None,
    ) -> Any:
        """Generate as `EngineBase.async_generate` does. If the server is lost, call another one, or wait for one.

        A server that does not have the version yet is lost, too. Raise ServerRestartedError if no engine is back
        `restart_timeout` seconds after the first failure. Raise at once if none can come back, because they were
        launched here and have ended, or run in this process, and VersionSupersededError if the version will not come
        back. A list of session ids is one batch, which the first engine generates.
        """
        deadline = None
        while True:
            member = self._member_of(session_id)
            knew = member.run
            demand: dict[str, Any] = {} if knew is None else dict(demand_fields(self._version))
            try:
                return await member.engine.async_generate(
                    prompt,
                    sampling_params,
                    input_ids,
                    return_logprob=return_logprob,
                    session_id=session_id,
                    timeout=timeout,
                    **demand,
                )
            except (ServerRestartedError, ServerDiedError, ServerUnavailableError, VersionBehindError) as error:
                if not await self._is_lost(member, error):
                    raise
                self._lost(member, knew, error)
                deadline = deadline or time.monotonic() + self._restart_timeout
                await self._until_one_is_back(deadline, error)
                if self._member_of(session_id).run != knew:
                    deadline = None  # another run, or another server: its next failure is a failure of its own

    def close_session(self, session_id: str) -> None:
        """Report to the server, in the background, that the session has ended. Return at once, without an error.

        The server's cache keeps its pages better with this hint. A server that refuses it is not sent another one.
        """
        member = self._sessions.pop(session_id, None)
        if member is not None:
            member.open -= 1
        member = member or self._members[0]  # a session of a batch, or one that generated nothing
        if not (self._refuses_closes or member.is_away):
            task = asyncio.ensure_future(self._close_session(member.engine, session_id))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_session(self, engine: EngineBase, session_id: str) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                await engine.async_close_session(session_id)
        except Exception as error:
            self._refuses_closes = self._refuses_closes or isinstance(error, BadRequestError | SessionError)
            logger.debug("The server did not note the end of session %s: %r", session_id, error)

    async def __aenter__(self) -> EnginePool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Wait for at most a second until the server has noted the ends. A cancelled batch does not wait."""
        closing = list(self._closing)
        if closing and not (kind is not None and issubclass(kind, asyncio.CancelledError)):
            await asyncio.wait(closing, timeout=_LAST_CLOSES)
        returns = [member.back for member in self._members if member.back is not None]
        for task in (*closing, *returns):
            task.cancel()
        await asyncio.gather(*returns, return_exceptions=True)

    # -- which engine --------------------------------------------------------------------------------------------

    def _member_of(self, session_id: Any) -> _Member:
        """Return the engine of a session. A session that is new, or must move, gets the engine with the fewest."""
        if not isinstance(session_id, str):
            return self._members[0]
        member = self._sessions.get(session_id)
        present = [each for each in self._members if not each.is_away]
        if member is None or (member.is_away and present):
            if member is not None:
                member.open -= 1
            member = min(present or self._members, key=lambda each: each.open)
            member.open += 1
            self._sessions[session_id] = member
        return member

    async def _is_lost(self, member: _Member, error: VerlServerError) -> bool:
        """Return True if the engine cannot generate until somebody acts. A server that is busy is not lost."""
        if not isinstance(error, ServerUnavailableError) or isinstance(error, ServerStoppingError):
            return True
        if not isinstance(member.engine, RoutedEngine):
            return False
        return await asyncio.to_thread(member.engine.lost, self._version) is not None

    def _lost(self, member: _Member, knew: str | None, error: VerlServerError) -> None:
        """Give the engine no session until it is back. Do nothing if it is back already, as another run."""
        if member.is_away or (knew is not None and member.run != knew):
            return
        if len(self._members) > 1:
            logger.warning("The episodes leave the server at %s until it is healed: %s", member.engine.url, error)
        else:
            bound = f", at most {self._restart_timeout:.0f} s" if self._restart_timeout < math.inf else ""
            logger.warning("Generation waits for the server%s: %s", bound, error)
        member.back = asyncio.ensure_future(self._return(member, knew, error))

    async def _return(self, member: _Member, knew: str | None, error: VerlServerError) -> None:
        """Return when the engine can generate again. Raise if it never will."""
        if knew is None or not isinstance(member.engine, HttpServerEngineAdapter):
            raise error  # it runs in this process, or names no run by which a restart would show
        await member.engine.async_wait_until_healed(math.inf, self._version)
        if member.run == knew:
            await asyncio.sleep(_RETRY_PAUSE)

    async def _until_one_is_back(self, deadline: float, error: VerlServerError) -> None:
        """Return when an engine can generate. Raise at the deadline, or when none of them can come back."""
        while all(member.is_away for member in self._members):
            returns = [member.back for member in self._members if member.back is not None and not member.back.done()]
            left = deadline - time.monotonic()
            if not returns:
                raise error
            if left <= 0:
                raise ServerRestartedError(
                    f"No server was healed within {self._restart_timeout:g} s: the engine that pushes must call heal() "
                    f"or accept_restart(). The first failure: {error}"
                ) from error
            await asyncio.wait(returns, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def stranded(engines: Sequence[EngineBase], version: str | None) -> str | None:
    """Return why no engine can generate until its server is healed, or None if one can. Any thread may call it.

    With `version`, the server's weights must have this version. An engine in this process cannot be healed, and its
    errors say what is wrong, so it does not count as lost.
    """
    reasons = [engine.lost(version) if isinstance(engine, HttpServerEngineAdapter) else None for engine in engines]
    return " ".join(map(str, reasons)) if all(reasons) else None


def check_alike(engines: Sequence[EngineBase]) -> None:
    """Raise BadRequestError if there is no engine, or if several differ in the model or the parser of reasoning."""
    if not engines:
        raise BadRequestError("AgentLoop needs at least one engine: a URL, an engine, or a list of them.")
    for name in ("model_path", "reasoning_parser") if len(engines) > 1 else ():
        values = {str(engine.url): location(str(getattr(engine.server_args, name))) for engine in engines}
        if len(set(values.values())) > 1:
            raise BadRequestError(
                f"The servers of one rollout must have the same {name}: {values}. Start them with the same settings."
            )
