"""`SessionWatch`: looks at an episode while its agent runs, and finds the ends that the agent itself does not cause.

`AgentPlayer` waits for it beside the agent. It asks the server for the state of the session every few seconds.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from verl_server.errors import (
    ServerDiedError,
    ServerUnavailableError,
    SessionEndedError,
    SessionNotFoundError,
    VerlServerError,
)
from verl_server.rollout.agents.ends import End
from verl_server.rollout.agents.gateway import Referee
from verl_server.rollout.agents.servers import ServerPool
from verl_server.rollout.agents.sessions_client import SessionsClient
from verl_server.rollout.agents.types import AgentLimits
from verl_server.rollout.program_load import ProgramLoad
from verl_server.rollout.trajectory import StopReason

FINAL_LIMITS = {"max_turns": StopReason.MAX_TURNS, "max_tokens": StopReason.MAX_TOKENS}
"""Limits of a session, by their names on the server, after which it generates no more."""
LIMIT_SECONDS = 15.0
"""Seconds that a program may go on after its session's turns or tokens are used up."""


class SessionWatch:
    def __init__(
        self,
        client: SessionsClient,
        session: str,
        pool: ServerPool,
        limits: AgentLimits,
        referee: Referee | None,
        log: Path | None,
    ) -> None:
        """`session` is an id at the server of `client`. `log` is that of a program. None: the agent is a function."""
        self._client = client
        self._session = session
        self._pool = pool
        self._limits = limits
        self._referee = referee
        self._log = log

    async def end(self) -> End:
        """Return when the agent is idle for too long, or its session is lost. A program that computes is not idle.

        Return, too, when the session has no turn or no token left and a program does not end, which may try again for
        minutes. A full context is no such limit, because a program may go on with a shorter history.
        """
        idle, referee = self._limits.idle_seconds, self._referee
        seen: Any = None
        active = answered = time.monotonic()
        load = None if self._log is None else ProgramLoad(self._log)
        while True:
            await asyncio.sleep(min(5.0, idle / 4, LIMIT_SECONDS))
            now = time.monotonic()
            try:
                info = await self._client.get(self._session)
            except (ServerDiedError, ServerUnavailableError) as error:
                self._pool.lost(self._client)
                if now - answered > self._limits.restart_timeout:
                    return End(StopReason.SESSION_LOST, str(error))
                active = now  # the agent waits for the server
                continue
            except (SessionNotFoundError, SessionEndedError) as error:
                return End(StopReason.SESSION_LOST, str(error))
            except VerlServerError:
                continue
            answered = now
            if info.state != "open":
                return End(StopReason.SESSION_LOST, f"The session is {info.state} ({info.reason}).")
            calls = referee.calls if referee is not None else 0
            used_up = None if load is None else FINAL_LIMITS.get(info.limit or "")
            facts = (info.active if used_up is None else 0.0, info.turns, info.tokens, calls, used_up)
            if facts != seen or info.in_flight or (referee is not None and referee.waiting):
                seen, active = facts, now
            elif used_up is not None and now - active >= LIMIT_SECONDS:
                return End(used_up, f"The program did not end within {LIMIT_SECONDS:.3g} s after its last generation.")
            elif load is not None and now - active >= idle / 2 and await asyncio.to_thread(load.is_busy):
                active = now
            elif now - active >= idle:
                return End(
                    StopReason.IDLE,
                    f"No generation, no call of the environment and no work for {idle:.3g} s "
                    "(AgentLimits.idle_seconds).",
                )
