"""`End`: the reason and the results of an episode's end, and what the end of an agent or of its environment says.

`episode.py` records the ends; `ToolLoop` raises its own.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from verl_server.rollout.agents.installed import ProgramEnd
from verl_server.rollout.agents.program import PlaceError, ProgramExit
from verl_server.rollout.agents.uplink import Traffic
from verl_server.rollout.environment_ends import end_of, is_away
from verl_server.rollout.launched import Exit
from verl_server.rollout.trajectory import StopReason


@dataclass
class End(Exception):
    """The reason and the results of an episode's end. The code of an episode raises or returns an `End`."""

    reason: StopReason
    error: str | None = None
    result: Any = None
    exit_code: int | None = None
    output: str = ""
    environment_away: bool = False


def environment_end(error: Exception) -> End:
    """Return the end that a fault of the environment causes."""
    return End(end_of(error), str(error), environment_away=is_away(error))


def _exit_end(exit: Exit) -> End:
    """Return the end of an agent whose program has ended."""
    lines = "\n".join(exit.output.splitlines()[-10:])
    if exit.isolation_failed:
        return End(StopReason.ISOLATION_FAILED, f"{exit.error}\n{lines}".strip(), output=exit.output)
    if exit.exceeded:
        error = f"{exit.exceeded} Its last lines:\n{lines}"
        return End(StopReason.AGENT_ERROR, error, exit_code=exit.code, output=exit.output)
    if exit.code == 0:
        return End(StopReason.DONE, exit_code=0, output=exit.output)
    if exit.launcher_was_killed:
        return End(StopReason.AGENT_KILLED, f"{exit.error}. Its last lines:\n{lines}", output=exit.output)
    if exit.code is not None and exit.code < 0:
        error = f"Signal {-exit.code} ended the program. Its last lines:\n{lines}"
        return End(StopReason.AGENT_KILLED, error, exit_code=exit.code, output=exit.output)
    cause = exit.error or f"The program ended with exit code {exit.code}"
    error = f"{cause}. Its last lines:\n{lines}"
    return End(StopReason.AGENT_ERROR, error, exit_code=exit.code, output=exit.output)


def _seen_end(end: End, traffic: Traffic | None) -> End:
    """Return the end of an isolated program, whose requests the runner saw.

    A program may exit with 0 after its server has failed, or has refused what it sent.
    """
    if traffic is None or end.reason not in (StopReason.DONE, StopReason.AGENT_ERROR):
        return end
    if traffic.last_status is None:
        if not traffic.generations:
            refused = f", and {traffic.refused} of its requests are none that a session serves" * bool(traffic.refused)
            said = f"The program asked its session for no generation{refused}."
            end.error = said if end.error is None else f"{end.error.rstrip()}\n{said}"
        return end
    if traffic.last_status == 0 or traffic.last_status >= 500:
        end.reason = StopReason.GENERATION_ERROR
        end.error = f"The last generation failed (HTTP {traffic.last_status}): {traffic.last_error[:500]}"
    elif traffic.last_error and end.error is None:
        end.error = f"The last generation was refused (HTTP {traffic.last_status}): {traffic.last_error[:500]}"
    return end


def own_end(agent: asyncio.Future[Any], server_url: str) -> End:
    """Return the end of an agent that returned, raised or exited."""
    if agent.cancelled():
        return End(StopReason.AGENT_ERROR, "The agent cancelled itself.")
    error = agent.exception()
    if error is None:
        result = agent.result()
        if isinstance(result, ProgramEnd):
            end = _seen_end(_exit_end(result.exit), result.exit.traffic)
            end.result, end.error = result.answer, end.error or result.error
            return end
        if isinstance(result, ProgramExit):
            return _seen_end(_exit_end(result), result.traffic)
        return End(StopReason.DONE, result=result)
    if isinstance(error, End):  # a `ToolLoop` names its reason
        return error
    if isinstance(error, PlaceError):
        return End(StopReason.ISOLATION_FAILED, str(error))
    reason = StopReason.GENERATION_ERROR if _server_failed(error, server_url) else StopReason.AGENT_ERROR
    return End(reason, f"{type(error).__name__}: {error}"[:2000])


def _server_failed(error: BaseException, server_url: str) -> bool:
    """Return True if an SDK's error, or its cause, says that the rollout server answered with status 5xx."""
    seen: BaseException | None = error
    while seen is not None:
        response = getattr(seen, "response", None)
        status = getattr(seen if response is None else response, "status_code", None)
        if isinstance(status, int) and status >= 500:
            url = getattr(getattr(seen, "request", None), "url", None)
            return url is None or str(url).startswith(f"{server_url}/")  # an agent may ask other servers, too
        seen = seen.__cause__ or seen.__context__
    return False
