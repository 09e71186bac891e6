"""`AgentLoop`: play many episodes at once, each at its own pace.

Trainers and `verl-server rollout` call it. Every episode has an environment of its own, and sends its next turn to its
engine as soon as that environment has answered. The server batches the turns that are due, and a slow environment
delays no other episode. For comparison, `run_lockstep` plays the same episodes in lock step: one batched generation for
each turn, then a wait for all environments.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import uvloop

from verl_server.engine.base import EngineBase
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.messages.results import SchedulerInfo
from verl_server.rollout.engine_pool import EnginePool, check_alike, stranded
from verl_server.rollout.environment_setup import EnvironmentSetup
from verl_server.rollout.episode import EnvClient, Episode, Limits
from verl_server.rollout.faults import FaultRules
from verl_server.rollout.group_ends import GroupEnds
from verl_server.rollout.lockstep import play_in_lockstep
from verl_server.rollout.loop_thread import LoopThread, Running
from verl_server.rollout.recorded_turns import RecordedTurn, Recording
from verl_server.rollout.renderer import Renderer, TokenizerRenderer
from verl_server.rollout.replacements import Replacements, attempt_seed, pause_before
from verl_server.rollout.rollout_clock import RolloutClock
from verl_server.rollout.running_loop import is_loop_running, refuse_running_loop, run_all
from verl_server.rollout.stragglers import StragglerWatch
from verl_server.rollout.trajectory import Event, Fault, StopReason, Task, Trajectory, is_unsampled
from verl_server.rollout.unsampled import UnsampledNotice

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnFinish = Callable[[Trajectory], None]
_GENERATION_FAILED = (StopReason.GENERATION_ERROR, StopReason.GENERATION_TIMEOUT)


class Rollout(msgspec.Struct, kw_only=True):
    """The result of one run."""

    trajectories: list[Trajectory]
    """One trajectory for each task, in the order of the tasks."""
    seconds: float
    """Wall time of the whole run."""
    replaced: list[Trajectory] = []
    """Episodes that the infrastructure ended and that others replaced, in the order of the replacements."""


OnGroup = Callable[[Rollout], None]


class AgentLoop:
    """A player of tasks, with a policy (engines or URLs of servers) against environments (a server's URL).

    Use it as a context manager. `run` and `run_lockstep` are synchronous, and share one event loop whose connections
    stay open between runs. Code that runs in an event loop awaits `arun` instead, and `start` plays in the background.
    """

    def __init__(
        self,
        engine: EngineBase | str | Sequence[EngineBase | str],
        environment: str | Callable[[], EnvClient] | Mapping[str | None, EnvironmentSetup],
        renderer: Renderer | None = None,
        *,
        sampling_params: dict[str, Any] | None = None,
        limits: Limits | None = None,
        max_concurrency: int | None = None,
        faults: FaultRules | None = None,
        replacements: int = 0,
    ) -> None:
        """Connect to the engines: a URL or an engine object, or a list of them, which serve one model.

        The episodes spread over the engines, and each stays with its engine. If the server of an engine dies or is
        started again, its episodes continue on the others until the engine that pushes weights has healed it.
        `environment` is the URL of an environment server, or a function that returns the client of one environment. Or
        it is a mixture, `Task.environment` -> environment, each of which has a renderer of its own.
        `max_concurrency` is the largest number of episodes, hence of environments, at one time (None: no bound).
        A renderer of this package separates the policy's reasoning from its answer as the engine's chat routes do.
        `faults` says which ends are the policy's. `replacements` bounds the episodes of each group and run that replace
        others, which the infrastructure ended.
        """
        if replacements < 0:
            raise BadRequestError(f"replacements must be at least 0, not {replacements}.")
        if renderer is None and not isinstance(environment, Mapping):
            raise BadRequestError("AgentLoop needs a renderer for its environment.")
        if max_concurrency is not None and max_concurrency < 1:
            raise BadRequestError(f"max_concurrency must be at least 1 or None, not {max_concurrency}.")
        given = [engine] if isinstance(engine, EngineBase | str) else list(engine)
        self._attached: list[HttpServerEngineAdapter] = []
        try:
            self.engines = [self._attach(each) if isinstance(each, str) else each for each in given]
            check_alike(self.engines)
        except BaseException:
            self._detach()
            raise
        self.limits = limits or Limits()
        self._faults = faults or FaultRules()
        self._replacements = replacements
        self._setups = self._setups_of(environment, renderer)
        self._sampling_params = sampling_params or {}
        self._max_concurrency = max_concurrency
        self._notice = UnsampledNotice(agent=False)
        self._has_told_of_replay = False
        self._capacity = min(_sequence_capacity(engine.scheduler_info) for engine in self.engines)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._background = LoopThread("agent-loop")

    def _setups_of(
        self,
        environment: str | Callable[[], EnvClient] | Mapping[str | None, EnvironmentSetup],
        renderer: Renderer | None,
    ) -> dict[str | None, EnvironmentSetup]:
        """Return `Task.environment` -> how it is played. The renderers are those for the engines' server."""
        setups: dict[str | None, EnvironmentSetup] = {}
        if isinstance(environment, Mapping):
            setups.update(environment)
        else:
            assert renderer is not None
            setups[None] = EnvironmentSetup(environment, renderer, self.limits)
        for name, setup in setups.items():
            if isinstance(setup.renderer, TokenizerRenderer):
                served = setup.renderer.for_server(self.engines[0].server_args.reasoning_parser)
                setups[name] = dataclasses.replace(setup, renderer=served)
        return setups

    def _attach(self, url: str) -> HttpServerEngineAdapter:
        self._attached.append(HttpServerEngineAdapter.attach(url))
        return self._attached[-1]

    def _detach(self) -> None:
        for engine in self._attached:
            engine.shutdown()

    @property
    def engine(self) -> EngineBase:
        """The first engine; the only one where the loop has one."""
        return self.engines[0]

    @property
    def environment_url(self) -> str:
        """URLs of the environment servers; the name of the callable where environments are made by one."""
        return ", ".join(setup.url for setup in self._setups.values())

    @property
    def is_agent(self) -> bool:
        """False: the loop itself samples each turn."""
        return False

    # -- each at its own pace -------------------------------------------------------------------------------

    def run(self, tasks: Sequence[Task], on_finish: OnFinish | None = None) -> Rollout:
        """Play all tasks. `on_finish` is called with each trajectory when it ends, also with those that are replaced.

        A fault ends its own trajectory only. Raise ServerUnavailableError if every trajectory failed to generate.
        """
        refuse_running_loop("AgentLoop.run", "Use `await loop.arun(tasks)`.")
        return self._runner.run(self.arun(tasks, on_finish))

    def run_async(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this loop's event loop, whose connections to the engine are open."""
        try:
            refuse_running_loop("AgentLoop.run_async", "Await the coroutine itself.")
        except BadRequestError:
            work.close()
            raise
        return self._runner.run(work)

    async def arun(
        self,
        tasks: Sequence[Task],
        on_finish: OnFinish | None = None,
        *,
        version: str | None = None,
        slots: AbstractAsyncContextManager[object] | None = None,
        replaces: bool = True,
        on_group: OnGroup | None = None,
        recording: Recording | None = None,
    ) -> Rollout:
        """Play all tasks as `run` does, in the caller's event loop.

        `on_group` is called with the episodes of each group when all of them have ended. With `version`, episodes play
        only on servers whose weights satisfy it (`weight_version.satisfies`), and wait without a bound of their own
        until there is one: the trainer, who pushes this version, looks at `stranded` and brings the servers back.
        `slots` bounds the episodes of several calls together, in the place of `max_concurrency`. Such a call is a part
        of a rollout: it does not raise if every generation failed. Without `replaces`, no episode replaces another one.
        `recording` takes the turns as they end, and has the episodes that go on from an earlier process.
        """
        clock = RolloutClock()
        is_part = slots is not None
        recording = recording or Recording()
        slots = slots or asyncio.Semaphore(self._max_concurrency or max(1, len(tasks)))
        watch = StragglerWatch(self.limits, len(tasks))

        spent = {place: episode.attempt for place, episode in recording.earlier.items()}
        left = Replacements(self._replacements if replaces else 0, spent)
        replaced: list[Trajectory] = []

        def hand_on(trajectories: list[Trajectory], replaced: list[Trajectory]) -> None:
            if on_group is not None:
                on_group(Rollout(trajectories=trajectories, replaced=replaced, seconds=clock()))

        groups = GroupEnds(tasks, hand_on)

        async def is_replaced(episode: Episode) -> bool:
            """Return True if another episode takes the place of this one, which has ended. Wait before it begins."""
            trajectory = episode.trajectory
            group = trajectory.task.group
            if trajectory.fault is not Fault.INFRASTRUCTURE or not left.has_left(group):
                return False
            await asyncio.sleep(pause_before(trajectory.attempt + 1, episode.environment_away))
            return not watch.has_cut and left.take(group)

        async def attempt(
            task: Task, number: int, since: float, turns: Sequence[RecordedTurn] = (), kept_turns: int | None = None
        ) -> tuple[Trajectory, bool]:
            waited = clock()
            episode = self._episode(task, clock, number, recording.played)
            episode.trajectory.events.append(Event("queue", since, waited))
            episode.trajectory.kept_turns = kept_turns
            with watch.playing(episode):
                begins_again = bool(turns) and await self._begins_again(episode, turns)
                if not begins_again:
                    trajectory = await episode.play(server)
                    server.close_session(episode.session_id)
                    self._ended(trajectory, on_finish)
                    another = await is_replaced(episode)
                if begins_again or another:
                    watch.expect_replacement()
            if begins_again:
                return await attempt(task, number, waited, kept_turns=0)
            return trajectory, another

        async def play(place: int, task: Task) -> Trajectory:
            begun = recording.begun(task)
            async with slots:
                if begun.ended is None:
                    trajectory, another = await attempt(task, begun.attempt, 0.0, begun.turns)
                else:
                    trajectory, another = _kept(begun.ended, on_finish), False
                while another:
                    replaced.append(trajectory)
                    groups.replaced([trajectory])
                    trajectory, another = await attempt(task, trajectory.attempt + 1, trajectory.events[-1].end)
            if begun.ended is None:
                recording.ended(trajectory)
            groups.ended(place, [trajectory])
            return trajectory

        restart_timeout = self.limits.restart_timeout if version is None else math.inf
        async with EnginePool(self.engines, restart_timeout, version) as server:
            with watch:
                trajectories = await run_all(play(place, task) for place, task in enumerate(tasks))
        rollout = Rollout(trajectories=trajectories, seconds=clock(), replaced=replaced)
        return rollout if is_part else self._checked(rollout)

    def start(
        self,
        tasks: Sequence[Task],
        on_finish: OnFinish | None = None,
        *,
        version: str | None = None,
        replaces: bool = True,
        on_group: OnGroup | None = None,
        recording: Recording | None = None,
    ) -> Running[Rollout]:
        """Play all tasks as `arun` does, on an event loop in another thread, and return at once.

        `on_finish`, `on_group` and those of `recording` are called in that thread.
        """
        play = self.arun(tasks, on_finish, version=version, replaces=replaces, on_group=on_group, recording=recording)
        return self._background.start(play)

    def stranded(self, version: str | None = None) -> str | None:
        """Return why no server can generate until somebody heals it, or None if one can. Any thread may call it.

        With `version`, the server's weights must have this version.
        """
        return stranded(self.engines, version)

    # -- in lock step ---------------------------------------------------------------------------------------

    def run_lockstep(self, tasks: Sequence[Task], on_finish: OnFinish | None = None) -> Rollout:
        """Play all tasks in batches of `max_concurrency`. Every turn waits for the slowest episode of its batch.

        One engine generates each turn's batch, so this loop must have one engine only.
        The bounds of single calls apply (`EnvTimeouts`, `generate_timeout`), those of episodes and batches do not, and
        no episode is replaced. A generation that fails raises, because it fails for the whole batch.
        """
        if len(self.engines) > 1:
            raise BadRequestError(
                f"run_lockstep plays on one engine, and this loop has {len(self.engines)}: use `run`."
            )
        refuse_running_loop("AgentLoop.run_lockstep", "Use `await asyncio.to_thread(loop.run_lockstep, tasks)`.")
        return self._runner.run(self._run_lockstep(tasks, on_finish))

    async def _run_lockstep(self, tasks: Sequence[Task], on_finish: OnFinish | None) -> Rollout:
        clock = RolloutClock()
        size = self._max_concurrency or max(1, len(tasks))
        trajectories: list[Trajectory] = []
        async with EnginePool(self.engines, self.limits.restart_timeout) as server:
            for start in range(0, len(tasks), size):
                episodes = [self._episode(task, clock) for task in tasks[start : start + size]]
                await play_in_lockstep(server, episodes, self.limits.generate_timeout, clock)
                trajectories += [episode.trajectory for episode in episodes]
        for trajectory in trajectories:
            self._ended(trajectory, on_finish)
        return self._checked(Rollout(trajectories=trajectories, seconds=clock()))

    # -- shared ---------------------------------------------------------------------------------------------

    async def _begins_again(self, episode: Episode, turns: Sequence[RecordedTurn]) -> bool:
        """Replay the recorded turns. Return True if they are not kept, and another episode must begin again.

        The first reason of several is logged as a warning.
        """
        reason = await episode.replay(turns)
        if reason is None or episode.is_over:
            return False
        level = logging.DEBUG if self._has_told_of_replay else logging.WARNING
        self._has_told_of_replay = True
        name = episode.trajectory.task.episode_id or f"with the seed {episode.trajectory.task.seed}"
        logger.log(
            level,
            "The episode %s, of which %d turns were recorded, begins again: %s. Only environments that repeat their "
            "answers can go on. Further episodes that begin again are counted (replay_refused), and not logged.",
            *(name, len(turns), reason),
        )
        return True

    def _episode(
        self,
        task: Task,
        clock: RolloutClock,
        attempt: int = 0,
        on_turn: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> Episode:
        """Return an attempt at a task. Each attempt has a sampling seed of its own."""
        if task.sampling_seed is not None:
            task = msgspec.structs.replace(task, sampling_seed=attempt_seed(task.sampling_seed, attempt))
        if (setup := self._setups.get(task.environment)) is None:
            known = ", ".join(sorted(filter(None, self._setups))) or "one without a name"
            raise BadRequestError(f"A task names the environment {task.environment!r}, and the loop has {known}.")
        parts = setup.client(self.limits.env), setup.renderer, self._sampling_params, setup.limits
        episode = Episode(task, *parts, self._capacity, clock, on_turn)
        episode.trajectory.attempt = attempt
        episode.trajectory.began = clock.began
        return episode

    def _ended(self, trajectory: Trajectory, on_finish: OnFinish | None) -> None:
        self._faults.settle(trajectory)
        if is_unsampled([trajectory]):
            task = trajectory.task
            name = task.episode_id or f"with the seed {task.seed}"
            self._notice.give(name, trajectory.stop_reason, trajectory.reward)
        if on_finish is not None:
            on_finish(trajectory)

    def _checked(self, rollout: Rollout) -> Rollout:
        """Return `rollout`. Raise ServerUnavailableError, for the server is at fault, if every generation failed."""
        failed = [t for t in rollout.trajectories if t.stop_reason in _GENERATION_FAILED]
        if failed and len(failed) == len(rollout.trajectories):
            raise ServerUnavailableError(f"No generation succeeded. The last error: {failed[-1].error}")
        return rollout

    def close(self) -> None:
        """Close the connections. The engines keep running. A rollout of `start` that runs is cancelled."""
        if is_loop_running():  # in a notebook, after calls in other threads: the runner's loop cannot run here
            with ThreadPoolExecutor(1) as pool:
                pool.submit(self._runner.close).result()
        else:
            self._runner.close()
        self._background.close()
        self._detach()

    def __enter__(self) -> AgentLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _kept(trajectory: Trajectory, on_finish: OnFinish | None) -> Trajectory:
    """Return an episode that an earlier process has played to its end."""
    trajectory.kept_turns = len(trajectory.turns)
    if on_finish is not None:
        on_finish(trajectory)
    return trajectory


def _sequence_capacity(scheduler_info: SchedulerInfo) -> int:
    """Return the tokens of the longest sequence that the context length and the whole KV cache allow."""
    context_length = int(scheduler_info["context_length"])
    longest_input = scheduler_info.get("max_req_input_len")
    if longest_input is None:
        return context_length
    return min(context_length, int(longest_input) + 1)  # the last sampled token needs no place in the KV cache
