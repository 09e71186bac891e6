"""`AgentGroups`: an agent plays each step's groups through sessions of the rollout server.

`GRPO` calls it where it otherwise calls an `AgentLoop`. Tokens, loss mask and log-probabilities are those that
the server recorded. An episode whose history the agent edited, or that has sub-agents, is several trajectories.

The trainer computes the distribution of its policy at one temperature, without penalties, bias and filters. So these
parameters are fixed for the agent's sessions. If a request sets other values, `TrainArgs.agent_sampling` decides
whether the request is refused, or is sampled with the fixed values. In the latter case its turn records the requested
values. Masks (grammars of tool calls and answers) are the agent's choice, and the records contain their effect.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import OnGroup, Rollout
from verl_server.rollout.agents.branches import episode_trajectories
from verl_server.rollout.agents.installed import INSTALLED_AT_ONCE, InstalledAgent
from verl_server.rollout.agents.loading import check_playable, environment_factory, load_agent, load_reward, read_tasks
from verl_server.rollout.agents.notices import AgentNotices
from verl_server.rollout.agents.program import check_program
from verl_server.rollout.agents.run import arun_agents, sees_processes
from verl_server.rollout.agents.starting import ProgramStarts
from verl_server.rollout.agents.types import AgentEpisode, AgentLimits, AgentTask, EnvironmentFactory, Server
from verl_server.rollout.agents.verifiers_agent import VerifiersAgent, close_agent
from verl_server.rollout.engine_pool import stranded
from verl_server.rollout.environments.named import is_named, is_url
from verl_server.rollout.environments.openenv import OpenEnvEnvironment
from verl_server.rollout.environments.verifiers import is_verifiers
from verl_server.rollout.group_ends import GroupEnds
from verl_server.rollout.loop_thread import LoopThread, Running
from verl_server.rollout.recorded_turns import Recording
from verl_server.rollout.rollout_clock import RolloutClock
from verl_server.rollout.trajectory import Event, Task, Trajectory
from verl_server.train.batches import check_usable
from verl_server.train.held_out import HELD_OUT
from verl_server.train.options import TrainArgs

logger = logging.getLogger(__name__)

_UNEDITED: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
}
"""Sampling parameters with which a token is drawn from the policy's own distribution, or from its part under a mask."""


_NOT_RECORDED = "the options refuse --replay-actions with an agent"


class AgentGroups:
    def __init__(self, args: TrainArgs) -> None:
        """Load the agent, the tasks and the reward. Raise BadRequestError if one of their names is wrong."""
        self._verifiers = _verifiers(args)
        self._agent = self._verifiers or load_agent(args.agent or "", program=args.program)
        self._isolation, self._readable = args.program.isolation, args.program.folders
        if isinstance(self._agent, InstalledAgent):
            self._agent.check()
            logger.info("Agent: %s.", self._agent)
        elif isinstance(self._agent, list):
            check_program(self._agent, isolation=self._isolation or "none", readable=self._readable)
        self._tasks = (
            None
            if args.tasks is None or is_named(args.tasks)
            else read_tasks(Path(args.tasks), environment=args.env_url)
        )
        self._held_out = (
            None if args.eval_file is None else read_tasks(Path(args.eval_file), "--eval-file", args.env_url)
        )
        self._environment = _environment(args)
        if self._environment is not None:
            check_playable(self._agent, args.env_url or args.tasks or "", args.reward)
        by_itself = self._verifiers is not None
        self._reward = "agent" if by_itself else load_reward(args.reward, self._agent, self._environment)
        limits = args.limits
        self._limits = AgentLimits(
            max_turns=limits.max_turns,
            max_context=limits.max_tokens,
            seconds=limits.trajectory_timeout,
            idle_seconds=limits.generate_timeout,
            environment_seconds=_call_seconds(args),
            # Episodes wait for the trainer, who brings servers back, as long as an episode may last.
            restart_timeout=limits.restart_timeout if self.hides_memory else limits.trajectory_timeout,
        )
        self._sampling_params = {"max_new_tokens": limits.max_new_tokens}
        self._temperature = args.grpo.temperature
        self._forced = {"temperature": self._temperature} | _UNEDITED
        self._forced_mode = args.agent_sampling
        self._warned: set[str] = set()
        self._max_concurrency = args.max_concurrency
        self._faults, self._replacements = args.faults, args.replacements
        self._name = args.env_url or args.tasks or ""
        self._engines: Sequence[HttpServerEngineAdapter] = ()
        self._background = LoopThread("agents")
        self._notices, self._starts = AgentNotices(), ProgramStarts()

    @property
    def environment_url(self) -> str:
        """URL or name of the environment, in reports of failures."""
        return self._name

    @property
    def described(self) -> dict[str, Any]:
        """What run.json says of an installed agent, beside the options."""
        return {"program_version": self._agent.version} if isinstance(self._agent, InstalledAgent) else {}

    @property
    def hides_memory(self) -> bool:
        """True if this process hides its memory while it plays: from programs that see the processes of the host."""
        return sees_processes(self._agent, self._isolation)

    @property
    def most_at_once(self) -> int | None:
        """Most episodes at one time if the options set no bound. None: no bound."""
        return INSTALLED_AT_ONCE if isinstance(self._agent, InstalledAgent) else None

    @property
    def is_agent(self) -> bool:
        """True: the agent may call another server than its session."""
        return True

    @contextlib.contextmanager
    def serving(self, engines: Sequence[HttpServerEngineAdapter]) -> Iterator[None]:
        """Play on the servers of `engines`, which have owners' keys, during the block."""
        self._engines = engines
        try:
            yield
        finally:
            self._background.close()
            close_agent(self._agent)
            self._engines = ()

    def start(
        self,
        tasks: Sequence[Task],
        on_finish: Callable[[Trajectory], None] | None = None,
        *,
        version: str | None = None,
        replaces: bool = True,
        on_group: OnGroup | None = None,
        recording: Recording | None = None,
    ) -> Running[Rollout]:
        """Play the tasks on an event loop in another thread, and return at once; see `arun`."""
        assert recording is None, _NOT_RECORDED
        self._background.close()  # with what an agent of the last step left behind
        play = self.arun(tasks, on_finish, version=version, replaces=replaces, on_group=on_group)
        return self._background.start(play)

    def stranded(self, version: str | None = None) -> str | None:
        """Return why no server can generate until the trainer brings one back, or None if one can.

        While this process hides its memory, a server could not read the weights. So the episodes end first, and the
        servers are brought back afterwards: None.
        """
        return None if self.hides_memory else stranded(self._engines, version)

    async def arun(
        self,
        tasks: Sequence[Task],
        on_finish: Callable[[Trajectory], None] | None = None,
        *,
        version: str | None = None,
        slots: AbstractAsyncContextManager[object] | None = None,
        replaces: bool = True,
        on_group: OnGroup | None = None,
        recording: Recording | None = None,
    ) -> Rollout:
        """Play the tasks of whole groups, which are equally large and in a row. `on_finish` is called with each branch.

        `on_group` is called with the episodes of each group when all of them have ended, unless a token to train on has
        no known log-probability.

        With `version`, sessions begin only on servers whose weights satisfy it. `slots` bounds the episodes of several
        calls together, in the place of `max_concurrency`. With `replaces`, episodes that the infrastructure ended are
        replaced, within the bound `--replacements` of their group. A fault of one episode raises nothing. Raise
        BadRequestError if a token to train on has no known log-probability under the policy.
        """
        assert self._engines, "serving() comes first"
        assert recording is None, _NOT_RECORDED
        group_size = sum(task.group == tasks[0].group for task in tasks)
        replacements = self._replacements if replaces else 0
        trajectories: list[Trajectory] = []
        replaced: list[Trajectory] = []
        clock = RolloutClock()

        def hand_on(trajectories: list[Trajectory], replaced: list[Trajectory]) -> None:
            if on_group is not None and self._is_usable(trajectories):
                on_group(Rollout(trajectories=trajectories, replaced=replaced, seconds=clock()))

        groups = GroupEnds(tasks, hand_on)

        def keep(episode: AgentEpisode) -> None:
            place = episode.index * group_size + episode.member
            branches = _branches(episode, tasks[place])
            if episode.final:
                trajectories.extend(branches)
                groups.ended(place, branches)
            else:
                replaced.extend(branches)
                groups.replaced(branches)
            if on_finish is not None:
                for branch in branches:
                    on_finish(branch)

        played = await arun_agents(
            self._agent,
            [self._agent_task(task.seed) for task in tasks[::group_size]],
            servers=[Server(str(engine.url), str(engine.server_args.api_key)) for engine in self._engines],
            reward=self._reward,
            environment=self._environment,
            group_size=group_size,
            limits=self._limits,
            retries=replacements,
            replacements=replacements,
            faults=self._faults,
            max_concurrency=self._max_concurrency,
            sampling_params=self._sampling_params,
            forced_sampling_params=self._forced,
            forced_mode=self._forced_mode,
            session_seeds=[task.sampling_seed or 0 for task in tasks],
            on_finish=keep,
            notices=self._notices,
            starts=self._starts,
            version=version,
            slots=slots,
            isolation=self._isolation,
            readable=self._readable,
        )
        places = {task.episode_id: place for place, task in enumerate(tasks)}
        trajectories.sort(key=lambda t: places[t.task.episode_id])  # stable: branches keep their order
        self._warn(trajectories)
        self._check(trajectories)
        return Rollout(trajectories=trajectories, seconds=played.seconds, replaced=replaced)

    def _check(self, trajectories: Sequence[Trajectory]) -> None:
        check_usable([trajectory for trajectory in trajectories if trajectory.is_trainable], self._temperature)

    def _is_usable(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return False if the rollout of these episodes will raise BadRequestError."""
        try:
            self._check(trajectories)
        except BadRequestError:
            return False
        return True

    def _warn(self, trajectories: Sequence[Trajectory]) -> None:
        """Log once for each sampling parameter that the agent set and that was overridden."""
        for trajectory in trajectories:
            for turn in trajectory.turns:
                for name, value in turn.overridden.items():
                    if name not in self._warned:
                        self._warned.add(name)
                        logger.warning(
                            "The agent asks for %s=%.80r, and its turns are sampled with %r. The records of such turns "
                            "say what was asked for (agent_sampling=refuse refuses them).",
                            *(name, value, self._forced.get(name)),
                        )

    def _agent_task(self, seed: int) -> AgentTask:
        """Return the task of a group. The seeds of groups count up, so that groups take the lines of a file in turn."""
        if self._verifiers is not None:
            return self._verifiers.task(seed % HELD_OUT, held_out=seed >= HELD_OUT)
        tasks = self._tasks if seed < HELD_OUT else self._held_out
        return AgentTask(seed=seed) if tasks is None else tasks[seed % HELD_OUT % len(tasks)]


def _call_seconds(args: TrainArgs) -> float:
    """Return the bound of one call. It is no shorter than the bounds of the environment server's client together."""
    env = args.limits.env
    return max(env.reset + (env.connect + env.capacity if _has_server(args) else 0.0), env.step)


def _has_server(args: TrainArgs) -> bool:
    return args.env_url is not None and is_url(args.env_url)


def _environment(args: TrainArgs) -> EnvironmentFactory | None:
    if args.env_url is not None and not is_url(args.env_url):
        return environment_factory(args.env_url, args.program.isolation)
    if args.env_url is not None:
        url, keys, timeouts = args.env_url, (args.observation_key, args.action_key), args.limits.env
        return lambda task: OpenEnvEnvironment(
            url, observation_key=keys[0], action_key=keys[1], timeouts=timeouts, **task.environment
        )
    if args.tasks is None or not is_named(args.tasks) or is_verifiers(args.tasks):
        return None
    return environment_factory(args.tasks)


def _verifiers(args: TrainArgs) -> VerifiersAgent | None:
    if args.tasks is None or not is_verifiers(args.tasks):
        return None
    return VerifiersAgent(args.tasks, max_turns=args.limits.max_turns, needs_held_out=args.eval_every > 0)


def _branches(episode: AgentEpisode, task: Task) -> list[Trajectory]:
    """Return the trajectories of an episode, labelled with the trainer's task.

    An episode without tokens is one empty trajectory, so that it is counted and its error is reported.
    """
    task = msgspec.structs.replace(task, sampling_seed=episode.seed)
    branches = episode_trajectories(episode) or [
        Trajectory(
            task=task,
            reward=episode.reward,
            metrics=episode.metrics,
            stop_reason=episode.reason,
            fault=episode.fault,
            error=episode.error,
            events=[Event(*event) for event in episode.events],
            began=episode.began,
            member=episode.member,
            attempt=episode.attempt,
        )
    ]
    for branch in branches:
        branch.task, branch.member = task, task.member
    return branches
