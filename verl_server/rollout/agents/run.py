"""`run_agents`: any async function, or any program, plays tasks through sessions of a rollout server.

Trainers, `verl-server rollout --agent` and users call it. Every episode has a session of its own, whose ids, loss mask
and log-probabilities the server records. An episode that the infrastructure ended has no reward; another one replaces
it, in a new session with another seed (`faults`, `replacements`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.run_output import location
from verl_server.messages.session_types import ForcedMode
from verl_server.rollout.agents.attempts import Attempts
from verl_server.rollout.agents.episode import Agent, AgentPlayer, Progress
from verl_server.rollout.agents.gateway import EnvironmentGateway
from verl_server.rollout.agents.installed import INSTALLED_AT_ONCE, InstalledAgent
from verl_server.rollout.agents.notices import AgentNotices
from verl_server.rollout.agents.output import RunFolder, settings_id
from verl_server.rollout.agents.own_memory import memory_hidden
from verl_server.rollout.agents.program import check_program
from verl_server.rollout.agents.rewards import Reward
from verl_server.rollout.agents.servers import ServerPool, opened_servers
from verl_server.rollout.agents.starting import ProgramStarts
from verl_server.rollout.agents.types import (
    AgentEpisode,
    AgentFunction,
    AgentLimits,
    AgentRun,
    AgentTask,
    EnvironmentFactory,
    Server,
)
from verl_server.rollout.environments.isolation import Isolation
from verl_server.rollout.faults import FaultRules
from verl_server.rollout.replacements import Replacements
from verl_server.rollout.rollout_clock import RolloutClock
from verl_server.rollout.running_loop import refuse_running_loop, run_all
from verl_server.rollout.scratch import private_root
from verl_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_TIME = "a bound of time ends an episode, and changes no other one"
MAY_DIFFER = {
    "limits.seconds": _TIME,
    "limits.idle_seconds": _TIME,
    "limits.environment_seconds": _TIME,
    "limits.reward_seconds": _TIME,
    "limits.restart_timeout": _TIME,
    "limits.kill_grace": _TIME,
    "limits.max_concurrent": "it changes the pace only",
    "limits.log_bytes": "it changes the logs only",
    "program": "the same program may be at another place",
}
"""Settings that may differ when a run is resumed, and why (docs/runs.md).

`servers`, `retries`, `replacements`, `max_concurrency` and `pass_env` are not stored, because they affect only where
and how fast episodes run, and how often the infrastructure may fail.
"""


_NOTED = {"program_version": "a program may be updated; a warning says so"}
"""The facts that run.json has beside the settings. They are not compared."""


def run_agents(agent: Agent, tasks: Sequence[AgentTask], **options: Any) -> AgentRun:
    """Play all tasks, and return the run when its last episode has ended. The options are those of `arun_agents`."""
    refuse_running_loop("run_agents", "Use `await arun_agents(agent, tasks, ...)`.")
    return asyncio.run(arun_agents(agent, tasks, **options))


async def arun_agents(
    agent: Agent,
    tasks: Sequence[AgentTask],
    *,
    servers: Sequence[Server] | None = None,
    model_path: str | None = None,
    reward: Reward = "environment",
    environment: EnvironmentFactory | None = None,
    group_size: int = 1,
    limits: AgentLimits | None = None,
    retries: int = 2,
    replacements: int | None = None,
    faults: FaultRules | None = None,
    max_concurrency: int | None = None,
    sampling_params: Mapping[str, Any] | None = None,
    forced_sampling_params: Mapping[str, Any] | None = None,
    forced_mode: ForcedMode = "override",
    seed: int = 0,
    session_seeds: Sequence[int] | None = None,
    out: Path | None = None,
    resume: bool = False,
    on_finish: Callable[[AgentEpisode], None] | None = None,
    allow_open_server: bool = False,
    pass_env: Sequence[str] = (),
    isolation: Isolation | None = None,
    readable: Sequence[Path] = (),
    hidden: Sequence[Path] = (),
    progress: Progress | None = None,
    describe: Mapping[str, Any] | None = None,
    notices: AgentNotices | None = None,
    version: str | None = None,
    slots: AbstractAsyncContextManager[object] | None = None,
    starts: ProgramStarts | None = None,
) -> AgentRun:
    """Play each task `group_size` times, every episode in a session of its own.

    `agent` is an async function `(session, task)`, the command of a program as a list, or an `InstalledAgent`.
    `servers` share the sessions: a new one goes to the server with the fewest. Without `servers`, a server for
    `model_path` is launched with a random key. `environment` makes the environment of an episode from its task. The
    final answer of an installed agent is the last step in it. `reward` is a function of the ended episode,
    "environment" (the sum of the rewards that the runner saw), "exit" (1.0 for exit code 0, else 0.0) or "agent" (that
    of the `Scored` which an agent function returns).

    `limits` bound one episode and `max_concurrency` the episodes at one time (None: no bound, but 16 of an installed
    agent, because such programs take hundreds of megabytes each). `faults` says which ends are the
    policy's, which are scored, and which are the infrastructure's. These alone are replaced: `retries` bounds the
    further attempts of one episode, and `replacements` those of a group (None: no other bound). Each attempt has
    another seed of its own. `sampling_params` hold for requests that set none of their own,
    `forced_sampling_params` for all. A request that sets one of these to another value is sampled with the forced
    one, which its turn records, or refused (`forced_mode`: "override", "refuse"). `seed`, the places of task and
    member and the number of the attempt settle every session's seed. With `session_seeds`, the seeds of the episodes,
    those of a task in a row, stand in the place of `seed` and the places. `pass_env` names variables that a program
    receives beside its own. `isolation` "bubblewrap" keeps the program of a command apart (docs/agents.md), which may
    then read the folders `readable` beside the working folder and the system's, without `out` and without what is
    `hidden` in them; None is "none". An `InstalledAgent` has its own.

    `out` is a folder for the run's files. A folder that has another run is refused; with `resume`, that run
    continues: its settings must be equal, except those that docs/runs.md lists, and episodes that have ended are
    not played again. `describe` is added to run.json and must be equal in a resumed run. `on_finish` is called with
    each attempt that has ended, and `progress` counts what runs now. `notices` logs what is wrong with the first
    episodes: none has a sampled token, each answer is empty, they have many branches. Pass the same object to log once
    over several calls. With `version`, a session begins only on a server whose weights satisfy it
    (`weight_version.satisfies`). `slots` bounds the episodes of several calls together, in the place of
    `max_concurrency`, and `starts` the isolated programs that start at one time.

    Raise BadRequestError for input that cannot work, and if a server generates for callers without a key, unless
    `allow_open_server`. Faults of single episodes raise nothing.
    """
    agent = await _checked(agent, pass_env, isolation, readable)
    limits, faults = limits or AgentLimits(), faults or FaultRules()
    if reward == "environment" and environment is None:
        raise BadRequestError('reward="environment" needs an environment. Pass one, or a reward function, or "exit".')
    if reward == "exit" and isinstance(agent, InstalledAgent):
        raise BadRequestError(
            'reward="exit" is for commands: an installed agent exits with 0 whatever it did. Pass a reward function, '
            'or an environment with reward="environment".'
        )
    if reward == "exit" and callable(agent):
        raise BadRequestError('reward="exit" is for programs. Pass a reward function, or reward="environment".')
    if group_size < 1 or (max_concurrency is not None and max_concurrency < 1):
        raise BadRequestError("group_size and max_concurrency must be at least 1.")
    if session_seeds is not None and len(session_seeds) != len(tasks) * group_size:
        raise BadRequestError(
            f"session_seeds has {len(session_seeds)} seeds for {len(tasks)} tasks with {group_size} episodes each. "
            "Pass one for each episode."
        )
    if retries < 0 or (replacements is not None and replacements < 0):
        raise BadRequestError("retries and replacements must be at least 0.")
    for given in (sampling_params, forced_sampling_params):
        SamplingParams.parse({"max_new_tokens": None} | dict(given or {}))
    if resume and out is None:
        raise BadRequestError("resume needs the folder `out` of the run.")
    settings = {
        "command": "run_agents",
        **_described(agent, isolation),
        "reward": reward if isinstance(reward, str) else _name(reward),
        "environment": None if environment is None else _name(environment),
        "group_size": group_size,
        "seed": seed if session_seeds is None else list(session_seeds),
        "sampling_params": dict(sampling_params or {}),
        "forced_sampling_params": dict(forced_sampling_params or {}),
        "forced_mode": forced_mode,
        "model_path": None if model_path is None else location(model_path),
        **{f"limits.{name}": value for name, value in msgspec.to_builtins(limits).items()},
        **{f"faults.{name}": value for name, value in msgspec.to_builtins(faults).items()},
    } | dict(describe or {})
    clock = RolloutClock()
    progress = progress or Progress()
    async with contextlib.AsyncExitStack() as stack:
        folder = RunFolder(out, settings, tasks, resume, MAY_DIFFER | _NOTED) if out is not None else None
        if folder is not None:
            stack.callback(folder.close)
            if isinstance(agent, InstalledAgent):
                _note_version(folder, agent)
        pool = await stack.enter_async_context(opened_servers(servers, model_path, version))
        if not allow_open_server:
            await pool.check_closed()
        logs = folder.logs if folder is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not callable(agent):
            await asyncio.to_thread(private_root)
        served = None
        if isinstance(agent, InstalledAgent):
            served = await pool.served()
            agent.check_served(served)
        player = AgentPlayer(
            run=folder.id if folder is not None else settings_id(),
            agent=agent,
            reward=reward,
            environment=environment,
            limits=limits,
            sampling_params=sampling_params or {},
            forced_sampling_params=forced_sampling_params or {},
            forced_mode=forced_mode,
            isolation=isolation or "none",
            readable=readable,
            starts=starts or ProgramStarts(),
            hidden=[*hidden, *([out] if out is not None else [])],
            served=served,
            faults=faults,
            pool=pool,
            gateway=await stack.enter_async_context(EnvironmentGateway().running()),
            logs=logs,
            pass_env=pass_env,
            progress=progress,
            clock=clock,
        )
        if sees_processes(agent, isolation):
            stack.enter_context(memory_hidden())
        if folder is not None:
            folder.begin(await pool.models())
        if folder is not None and folder.earlier is not None:
            await _delete_leftovers(pool, folder.earlier)
        stack.enter_context(_background(pool.watch()))
        spent = folder.replaced if folder is not None else Counter[tuple[int, int]]()
        left = Replacements(replacements, spent)
        notices = notices or AgentNotices()
        run = Attempts(player, folder, retries, left, on_finish, notices)
        places = [(i, member) for i in range(len(tasks)) for member in range(group_size)]
        finished = folder.finished if folder is not None else {}
        most = max_concurrency or (INSTALLED_AT_ONCE if isinstance(agent, InstalledAgent) else max(1, len(places)))
        slots = slots or asyncio.Semaphore(most)

        async def play(index: int, member: int, slots: AbstractAsyncContextManager[object] = slots) -> None:
            async with slots:
                own = None if session_seeds is None else session_seeds[index * group_size + member]
                begin = session_seed(seed, index, member) if own is None else own
                await run.play(tasks[index], index, member, begin, spent[index, member])

        try:
            await run_all(play(*place) for place in places if place not in finished)
        finally:
            notices.end()
            if folder is not None:
                folder.write_summary(clock(), len(places))
    trajectories = folder.trajectories() if folder is not None else run.trajectories
    trajectories.sort(key=lambda t: (t.task.group, t.member, t.branch))
    return AgentRun(run.episodes, trajectories, clock())


def session_seed(seed: int, index: int, member: int) -> int:
    """Return the session seed of the first attempt of one member of a task's group. `attempt_seed` has the others."""
    digest = hashlib.blake2b(f"{seed}/{index}/{member}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


async def _checked(
    agent: Agent, pass_env: Sequence[str], isolation: Isolation | None, readable: Sequence[Path]
) -> AgentFunction | list[str] | InstalledAgent:
    if isinstance(agent, str):
        raise BadRequestError(
            f"Pass the command as a list, for example {agent.split()!r}, an async function, or an InstalledAgent "
            "(load_agent makes one of the name of a recipe)."
        )
    if isinstance(agent, InstalledAgent):
        await asyncio.to_thread(agent.check, pass_env)
        return agent
    if not callable(agent):
        return await asyncio.to_thread(check_program, agent, pass_env, isolation=isolation or "none", readable=readable)
    target = agent if inspect.isroutine(agent) else type(agent).__call__
    if not inspect.iscoroutinefunction(target) and not inspect.iscoroutinefunction(getattr(agent, "func", None)):
        raise BadRequestError(f"{agent!r} is no async function: write `async def agent(session, task)`.")
    return agent


def _described(agent: AgentFunction | list[str] | InstalledAgent, isolation: Isolation | None) -> dict[str, Any]:
    """Return the settings of run.json that name the agent."""
    if isinstance(agent, InstalledAgent):
        return agent.described()
    if callable(agent):
        return {"agent": _name(agent)}
    return {"agent": list(agent), "isolation": isolation or "none"}


def sees_processes(agent: Agent, isolation: Isolation | None) -> bool:
    """Return True if an agent is a program that sees the processes of this host, and so could read their memory."""
    own = agent.isolation if isinstance(agent, InstalledAgent) else isolation
    return not callable(agent) and own != "bubblewrap"


def _name(function: Any) -> str:
    """Return the module and name of a function for run.json, or the `repr` of an object without addresses."""
    name = getattr(function, "__qualname__", None)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(function)) if name is None else f"{function.__module__}:{name}"


def _note_version(folder: RunFolder, agent: InstalledAgent) -> None:
    """Log a warning if the program is another version than that with which the resumed run began."""
    began = folder.stored.get("program_version")
    if began not in (None, agent.version):
        logger.warning(
            "The run in %s began with %s, and goes on with %s, whose prompts may differ.",
            *(folder.folder, began, agent.version),
        )


async def _delete_leftovers(pool: ServerPool, run: str) -> None:
    """Delete the sessions that an interrupted run left on the servers."""
    for client in pool.clients:
        with contextlib.suppress(VerlServerError):
            for info in await client.list():
                if info.group.startswith(f"{run}/"):
                    await client.delete(info.id)


@contextlib.contextmanager
def _background(work: Any) -> Any:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
