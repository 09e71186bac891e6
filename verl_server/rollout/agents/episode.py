"""`AgentPlayer`: play one attempt of an agent at a task, from the environment's reset to the deletion of the session.

`run.py` calls `play` for every attempt. The order at the end is fixed: end the agent as a whole; finish the session,
which ends generations that the agent left behind; read the trajectory; compute and record the reward; delete the
session. A fault ends its own episode only, with a recorded reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerUnavailableError,
    SessionNotFoundError,
    VerlServerError,
    WeightVersionError,
)
from verl_server.messages.session_types import CreatedSession, CreateSession, ForcedMode, SessionInfo, SessionLimits
from verl_server.rollout.agents import rewards
from verl_server.rollout.agents.activity import FINAL_LIMITS, SessionWatch
from verl_server.rollout.agents.ends import End, environment_end, own_end
from verl_server.rollout.agents.gateway import EnvironmentGateway, GuardedEnvironment, Referee
from verl_server.rollout.agents.installed import InstalledAgent
from verl_server.rollout.agents.program import run_program
from verl_server.rollout.agents.servers import PROBE_SECONDS, ServerPool
from verl_server.rollout.agents.sessions_client import SessionsClient
from verl_server.rollout.agents.starting import ProgramStarts
from verl_server.rollout.agents.types import (
    AgentEpisode,
    AgentFunction,
    AgentLimits,
    AgentSession,
    EnvironmentFactory,
    Scored,
    Served,
)
from verl_server.rollout.environment import EnvError
from verl_server.rollout.environment_ends import is_away
from verl_server.rollout.environments.isolation import Isolation
from verl_server.rollout.faults import FaultRules
from verl_server.rollout.rollout_clock import RolloutClock
from verl_server.rollout.trajectory import Fault, StopReason

T = TypeVar("T")

Agent = AgentFunction | Sequence[str] | InstalledAgent
"""A function, the command of a program, or an installed program with a recipe."""

_LIMIT_REASONS = FINAL_LIMITS | {"max_context": StopReason.CONTEXT_FULL}
_SERVER_SLACK = 60.0
"""Seconds by which the server's time limits of a session exceed the runner's.

The server's limits end the sessions of a runner that died.
"""


@dataclass
class Progress:
    """The episodes that run now, for a live display. Pass one to `run_agents`, and read it while the run goes on."""

    running: int = 0
    """Number of episodes that run now."""
    began: float | None = None
    """`time.monotonic` at the start of the first episode."""
    referees: set[Referee] = field(default_factory=set)
    """The environments of these episodes, as the runner sees them."""

    @property
    def in_environment(self) -> int:
        """Number of episodes that wait for their environment now."""
        return sum(referee.waiting > 0 for referee in self.referees)


@dataclass(frozen=True)
class AgentPlayer:
    """Plays the episodes of a run. The fields are the same for all episodes."""

    run: str
    """Name of the run: the first part of its sessions' groups."""
    agent: Agent
    reward: rewards.Reward
    environment: EnvironmentFactory | None
    limits: AgentLimits
    sampling_params: Mapping[str, Any]
    """Sampling parameters for requests that do not set them."""
    forced_sampling_params: Mapping[str, Any]
    """Sampling parameters that replace those of a request."""
    pool: ServerPool
    gateway: EnvironmentGateway
    logs: Path
    pass_env: Sequence[str]
    progress: Progress
    clock: RolloutClock
    starts: ProgramStarts
    """The isolated programs that start now."""
    forced_mode: ForcedMode = "override"
    isolation: Isolation = "none"
    """Isolation of a command. An installed agent has its own."""
    readable: Sequence[Path] = ()
    hidden: Sequence[Path] = ()
    """Files that an isolated command must not see, although they lie in a folder that the command may read."""
    served: Served | None = None
    """The served model, for an installed agent."""
    faults: FaultRules = field(default_factory=FaultRules)

    async def play(self, episode: AgentEpisode) -> None:
        """Play an attempt and record its end in `episode`. If cancelled, record ABORTED and raise CancelledError."""
        start = self.clock()
        episode.began = self.clock.began
        referee: Referee | None = None
        self.progress.running += 1
        self.progress.began = self.progress.began or time.monotonic()
        try:
            if self.environment is not None:
                referee = await self._opened(self.environment, episode)
                self.progress.referees.add(referee)
            await self._in_session(episode, referee)
        except End as end:
            _note(episode, end)
        except asyncio.CancelledError:
            episode.reason = episode.reason or StopReason.ABORTED
            raise
        finally:
            self.progress.running -= 1
            if episode.reason is not None:
                episode.fault = self.faults.of(episode.reason)
            if referee is not None:
                self.progress.referees.discard(referee)
                await referee.close()
                episode.events = referee.events
            episode.seconds = self.clock() - start

    async def _opened(self, make: EnvironmentFactory, episode: AgentEpisode) -> Referee:
        try:
            environment = make(episode.task)
        except Exception as error:
            text = f"The environment was not made: {error}"
            raise End(StopReason.ENV_ERROR, text, environment_away=is_away(error)) from error
        referee = Referee(environment, self.limits.environment_seconds, self.clock)
        try:
            await referee.reset(episode.task.seed)
        except BaseException as error:
            await referee.close()
            if isinstance(error, EnvError | BadRequestError):
                raise environment_end(error) from error
            raise
        return referee

    async def _in_session(self, episode: AgentEpisode, referee: Referee | None) -> None:
        limits = self.limits
        request = CreateSession(
            group=f"{self.run}/{episode.index}",
            metadata={"task": episode.index, "member": episode.member, "attempt": episode.attempt},
            limits=SessionLimits(
                max_turns=limits.max_turns,
                max_tokens=limits.max_tokens,
                max_context=limits.max_context,
                max_concurrent=limits.max_concurrent,
                seconds=limits.seconds + _SERVER_SLACK,
                idle_seconds=limits.idle_seconds + limits.seconds + _SERVER_SLACK,
            ),
            sampling_params=dict(self.sampling_params),
            forced_sampling_params=dict(self.forced_sampling_params),
            forced_mode=self.forced_mode,
            seed=episode.seed,
        )
        try:
            async with self.pool.session(request, limits.restart_timeout) as (client, created):
                episode.session, episode.server = created.id, client.url
                try:
                    end = await self._agent_end(client, created, episode, referee)
                    await self._closed(client, created.id, episode, referee, end)
                except asyncio.CancelledError:
                    episode.reason = StopReason.ABORTED
                    await _shielded(self._dropped(client, created.id))
                    raise
        except (ServerDiedError, ServerUnavailableError, WeightVersionError) as error:
            raise End(StopReason.SESSION_LOST, str(error)) from error

    # -- the agent ------------------------------------------------------------------------------------------

    async def _agent_end(
        self, client: SessionsClient, created: CreatedSession, episode: AgentEpisode, referee: Referee | None
    ) -> End:
        """Run the agent until it ends or reaches a limit, and return the `End`. At the return the agent has ended."""
        session = AgentSession(
            session_id=created.id,
            base_url=client.url + created.base_url,
            anthropic_base_url=client.url + created.anthropic_base_url,
            api_key=created.key,
            environment=GuardedEnvironment(referee) if referee is not None else None,
        )
        run = client.run
        agent = asyncio.ensure_future(self._run_agent(session, episode, referee))
        log = self.logs / f"{episode.name}.log"
        watch = SessionWatch(client, created.id, self.pool, self.limits, referee, None if callable(self.agent) else log)
        activity = asyncio.ensure_future(watch.end())
        waits: list[asyncio.Future[Any]] = [agent, activity] + ([referee.fault] if referee is not None else [])
        try:
            await asyncio.wait(waits, timeout=self.limits.seconds, return_when=asyncio.FIRST_COMPLETED)
            if referee is not None and referee.fault.done():
                return environment_end(referee.fault.result())
            if agent.done():
                return await self._checked(own_end(agent, client.url), client, created.id, run)
            if activity.done():
                return activity.result()
            return End(StopReason.TIME_LIMIT, f"The agent ran for {self.limits.seconds:.3g} s (AgentLimits.seconds).")
        finally:
            activity.cancel()
            await _shielded(self._ended(agent))

    async def _run_agent(self, session: AgentSession, episode: AgentEpisode, referee: Referee | None) -> Any:
        if callable(self.agent):
            return await self.agent(session, episode.task)
        log = self.logs / f"{episode.name}.log"
        workspace = None if referee is None else referee.folder
        if isinstance(self.agent, InstalledAgent):
            assert self.served is not None
            return await self.agent.play(
                session,
                episode.task,
                served=self.served,
                limits=self.limits,
                max_output=self.forced_sampling_params.get("max_new_tokens")
                or self.sampling_params.get("max_new_tokens"),
                workspace=workspace,
                log=log,
                pass_env=self.pass_env,
                starts=self.starts,
            )
        with contextlib.ExitStack() as stack:
            # An environment with a folder is judged by the runner alone: its report may show the task's tests.
            played = referee if workspace is None else None
            url = None if played is None else stack.enter_context(self.gateway.serving(played))
            return await run_program(
                self.agent,
                session,
                episode.task,
                limits=self.limits,
                log=log,
                environment_url=url,
                pass_env=self.pass_env,
                about={"task": episode.index, "member": episode.member, "attempt": episode.attempt},
                isolation=self.isolation,
                readable=self.readable,
                hidden=self.hidden,
                workspace=workspace,
                starts=self.starts,
            )

    async def _ended(self, agent: asyncio.Future[Any]) -> None:
        """Cancel the agent and wait for its end.

        A function that ignores its cancellation continues to run, unattended.
        """
        agent.cancel()
        bound = self.limits.kill_grace if callable(self.agent) else None  # the end of a program has its own bound
        await asyncio.wait([agent], timeout=bound)
        if agent.done() and not agent.cancelled():
            agent.exception()  # it was read: asyncio logs nothing

    async def _checked(self, end: End, client: SessionsClient, session_id: str, run: str | None) -> End:
        """Return `end`, as GENERATION_ERROR if an agent failed that can generate no more.

        It cannot if its server is away, has another run than `run` or another version, or has lost the session.
        """
        if end.reason is not StopReason.AGENT_ERROR:
            return end
        if not (await self.pool.serves(client) and client.run == run and await client.has(session_id)):
            end.reason = StopReason.GENERATION_ERROR
            end.error = f"The server ended meanwhile, or its weights were replaced. {end.error}"
        return end

    # -- the end --------------------------------------------------------------------------------------------

    async def _closed(
        self, client: SessionsClient, session_id: str, episode: AgentEpisode, referee: Referee | None, end: End
    ) -> None:
        try:
            info = await self._retried(lambda: client.finish(session_id, str(end.reason)))
            asked = self.clock()
            episode.trajectory = await self._retried(lambda: client.trajectory(session_id))
            episode.server_clock = self.clock.server_offset(episode.trajectory.now, asked)
        except (ServerDiedError, ServerUnavailableError, SessionNotFoundError) as error:
            lost = error if end.reason is not StopReason.SESSION_LOST else end.error
            raise End(StopReason.SESSION_LOST, f"{lost} (the agent's end: {end.reason})") from error
        episode.turns, episode.tokens = info.turns, info.tokens
        if end.reason in (StopReason.AGENT_ERROR, StopReason.GENERATION_ERROR, StopReason.MAX_TOKENS):
            end.reason = self._limit_reason(info) or end.reason
        if end.reason is StopReason.GENERATION_ERROR:
            end.error = f"{client.url}: {end.error}"
        if referee is not None:
            end = await self._judged_by_environment(end, referee, self.logs / f"{episode.name}.check.log")
            episode.environment_reward = referee.reward
        _note(episode, end)
        fault = self.faults.of(end.reason)
        if rewards.is_scored(self.reward, end.reason, fault, episode.sampled_tokens):
            if not rewards.is_judged(self.reward, episode, referee is None or referee.has_reward):
                episode.reward = self.faults.score_failed
            else:
                try:
                    episode.reward = await rewards.compute(self.reward, episode, self.limits.reward_seconds)
                except BadRequestError as error:
                    episode.error, episode.reward_failed = _encodable(f"No reward: {error}"), True
        with contextlib.suppress(VerlServerError):  # the run's own files have the reward, and the server cleans up
            if episode.reward is not None:
                await client.reward(session_id, episode.reward)
            await client.delete(session_id)

    async def _judged_by_environment(self, end: End, referee: Referee, log: Path) -> End:
        """Play the final answer of a program in an environment that judges it, and return the end of the episode.

        An installed agent plays no steps of its own, and an environment with a folder judges what is in it. What the
        environment said goes to `log`.
        """
        is_judged_last = isinstance(self.agent, InstalledAgent) or referee.folder is not None
        if referee.done or not is_judged_last or self.faults.of(end.reason) is not Fault.POLICY:
            return end
        try:
            said, _ = await referee.step(end.result if isinstance(end.result, str) else "")
            if said:
                await asyncio.to_thread(log.write_text, said, errors="backslashreplace")
        except EnvError as error:
            failed = environment_end(error)
            failed.result, failed.exit_code, failed.output = end.result, end.exit_code, end.output
            return failed
        except BadRequestError as error:
            end.error = f"The environment refused the final answer: {error}"
        return end

    async def _dropped(self, client: SessionsClient, session_id: str) -> None:
        with contextlib.suppress(VerlServerError):
            await client.finish(session_id, str(StopReason.ABORTED))
            await client.delete(session_id)

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while the server is away, for at most `restart_timeout` seconds."""
        deadline = time.monotonic() + self.limits.restart_timeout
        while True:
            try:
                return await work()
            except (ServerDiedError, ServerUnavailableError):
                if time.monotonic() + PROBE_SECONDS > deadline:
                    raise
                await asyncio.sleep(PROBE_SECONDS)

    def _limit_reason(self, info: SessionInfo) -> StopReason | None:
        """Return the limit of the session that refused the agent's last request, or None."""
        if info.limit is not None:
            return _LIMIT_REASONS.get(info.limit)
        if self.limits.max_turns is not None and info.turns >= self.limits.max_turns:
            return StopReason.MAX_TURNS
        if self.limits.max_tokens is not None and info.tokens >= self.limits.max_tokens:
            return StopReason.MAX_TOKENS
        return None


def _note(episode: AgentEpisode, end: End) -> None:
    episode.reason, episode.error = end.reason, None if end.error is None else _encodable(end.error)
    episode.result, episode.exit_code, episode.output = end.result, end.exit_code, end.output
    episode.metrics = end.result.metrics if isinstance(end.result, Scored) else {}
    episode.environment_away = end.environment_away


def _encodable(text: str) -> str:
    """Return `text` with lone surrogates as escapes. An agent's exception may quote some, and no file can hold them."""
    return text.encode("utf-8", "backslashreplace").decode()


async def _shielded(work: Awaitable[T]) -> T:
    """Await `work` to its end even if this task is cancelled meanwhile, then raise the cancellation."""
    future = asyncio.ensure_future(work)
    cancelled = False
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.cancelled():
                raise
            cancelled = True
    if cancelled:
        future.exception()
        raise asyncio.CancelledError
    return future.result()
