"""`verl-server rollout --agent`: any async function or program plays tasks through sessions of rollout servers.

verl-server rollout --agent my_agent:play --tasks reasoning-gym:chain_sum --model-path MODEL --out runs/x
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from verl_server.cli.interrupts import Interrupts
from verl_server.cli.option_names import with_flags
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.command_options import parse_options
from verl_server.files.path_options import OutputPath
from verl_server.files.run_output import location, without_host
from verl_server.rollout.agents.episode import Agent, Progress
from verl_server.rollout.agents.installed import InstalledAgent, ProgramOptions
from verl_server.rollout.agents.loading import (
    check_playable,
    environment_factory,
    load_agent,
    load_reward,
    read_tasks,
)
from verl_server.rollout.agents.output import read_lines, summarize_lines
from verl_server.rollout.agents.own_memory import take_from_environment
from verl_server.rollout.agents.progress import ProgressView
from verl_server.rollout.agents.rewards import Reward
from verl_server.rollout.agents.run import arun_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentTask, EnvironmentFactory, Server
from verl_server.rollout.agents.verifiers_agent import VerifiersAgent, close_agent
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.environment_check import check_environment
from verl_server.rollout.environments.named import is_named, is_url
from verl_server.rollout.environments.verifiers import check_alone, is_verifiers
from verl_server.rollout.faults import FaultRules
from verl_server.rollout.server_check import routed_servers
from verl_server.sampling_params import SamplingParams
from verl_server.watch.agents_report import write_run_report
from verl_server.web.key_files import read_key_file

_GROUPS = 16
Repeated = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
"""An option that is written once for each value. Without the annotation, the last one would replace the others."""


@dataclass(frozen=True, kw_only=True)
class AgentRolloutArgs:
    """Let an agent play tasks with a policy, each episode in a session that records its tokens.

    Exit status: 0 if an episode has a reward and a sampled token, else 1; 1 after an error, 2 for wrong options, 130
    after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP (--resume continues).
    """

    agent: str | None = None
    """MODULE:function or FILE.py:function, an `async def (session, task)`, or the command of a program, in quotes.
    `tools` is a loop that lets the policy call the tools of the environment and those of `--tool`. The recipe of an
    installed program (docs/recipes.md): claude-code, codex, opencode, aider, mini-swe-agent, openhands, smolagents, or
    FILE.py:RECIPE. Further words in the quotes go to the program: "claude-code --tools Bash,Edit". Not
    with --tasks verifiers:NAME, whose own code plays."""
    tasks: str
    """Tasks of the agent: FILE.jsonl with one task a line, reasoning-gym:NAME or textarena:NAME. A line is an object
    with `seed`, `input` or `environment`, or any other JSON value, the task's `input`. Or verifiers:NAME, an installed
    environment of verifiers, with its settings in JSON: 'verifiers:NAME?{"taskset": {"split": "test"}}'."""
    out: OutputPath
    """Folder of the run. Missing folders above it are created. A folder that has another run is refused."""
    groups: int | None = None
    """Number of groups. The episodes of a group have the same task. Default: 16, or all lines of a file."""
    group_size: int = 1
    """Episodes of each group."""
    first_seed: int = 0
    """Group i has the seed first_seed + i. For `--tasks` that name an environment: a line of a file has its own, and of
    verifiers it is the row."""
    environment: str | None = None
    """Environment of the tasks of a file: reasoning-gym:NAME, textarena:NAME, the URL of an OpenEnv server, mcp:URL or
    mcp:COMMAND (tools of an MCP server), or code (the tool run_python, isolated by bubblewrap)."""
    tool: Repeated = ()
    """MODULE:function, a Python function that the policy may call. For `--agent tools`. May be repeated."""
    system: str | None = None
    """System message. For `--agent tools`."""
    reward: str | None = None
    """`environment`, `exit` (1.0 if a program's exit code is 0), or MODULE:function of the ended episode. Default:
    `environment` if there is one, `exit` for a program."""
    server: Repeated = ()
    """URL of a running server. May be repeated. The servers' key is VERL_SERVER_API_KEY of the environment, or in
    `--api-key-file`."""
    router: str | None = None
    """URL of a router (`verl-server router`), through which the episodes play. If --server is named, too, it must name
    the router's servers."""
    api_key_file: Path | None = None
    """File with the API key or admin key of the server."""
    model_path: str | None = None
    """Model of a server that is launched for this run, in place of `--server`."""
    resume: bool = False
    """Continue the run in `--out`. Episodes that have ended are not played again, except those without a sampled token.
    The settings must be equal, except those of servers, bounds of time, retries and concurrency."""
    retries: int = 2
    """Further attempts of an episode that the infrastructure ended. Each has another seed of sampling."""
    faults: Annotated[FaultRules, tyro.conf.arg(name="")] = field(default_factory=FaultRules)
    max_concurrency: int | None = None
    """Most episodes at one time. None is no bound, and 16 for a recipe, because such programs need much memory."""
    temperature: float = 1.0
    """Sampling temperature. A request of the agent that sets one has its own."""
    max_new_tokens: int | None = None
    """Most tokens of one reply, for requests of the agent that set none, and for the program of a recipe. Default: as
    many as fit, and what a recipe sets."""
    seed: int = 0
    """Seed of sampling. With the place of an episode it settles the seed of the episode's session."""
    program: Annotated[ProgramOptions, tyro.conf.arg(name="")] = field(default_factory=ProgramOptions)
    limits: AgentLimits = field(default_factory=AgentLimits)
    pass_env: Repeated = ()
    """Name of a variable that a program receives beside its own. May be repeated."""
    allow_open_server: bool = False
    """Accept servers that generate without a key, where an agent can sample outside its session."""

    def __post_init__(self) -> None:
        leasts = {"groups": 1, "group_size": 1, "max_concurrency": 1, "retries": 0, "max_new_tokens": 1}
        for name, least in leasts.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadRequestError(f"--{name.replace('_', '-')} must be at least {least}, not {value}.")
        SamplingParams.parse({"temperature": self.temperature})
        if is_verifiers(self.tasks):
            check_alone(
                agent=self.agent, environment=self.environment, reward=self.reward, tool=self.tool, system=self.system
            )
        elif self.agent is None:
            raise BadRequestError("--agent is missing: name what plays the tasks.")


def rollout_agents(args: AgentRolloutArgs, console: Console | None = None) -> int:
    """Play the run, print a summary and return the exit status: 1 if no episode has a reward and a sampled token."""
    console = console or Console()
    key = take_from_environment("VERL_SERVER_API_KEY")  # no agent inherits it, nor reads it in /proc
    servers = _servers(args, key)
    if is_verifiers(args.tasks):
        play = VerifiersAgent(args.tasks, max_turns=args.limits.max_turns)
        loaded: _Loaded = play, play.tasks(args.first_seed, args.groups or _GROUPS), None, "agent"
    else:
        loaded = _loaded(args, console)
    interrupts = Interrupts()
    try:
        with interrupts.caught():
            asyncio.run(_played(args, servers, *loaded, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"Interrupted. The same command with --resume continues {args.out}.", highlight=False)
        return interrupts.exit_status
    finally:
        close_agent(loaded[0])
    summary = summarize_lines(read_lines(args.out / "episodes.jsonl"))
    mean = "none" if summary["mean_reward"] is None else f"{summary['mean_reward']:.3f}"
    without = f"{summary['unsampled']} without a sampled token, " if summary["unsampled"] else ""
    console.print(
        f"{summary['episodes']} episodes in {summary['attempts']} attempts, {summary['tokens']} tokens, "
        f"mean reward {mean}, {without}ends {summary['reasons']}, faults {summary['faults']}. Files: {args.out}",
        highlight=False,
        soft_wrap=True,
    )
    for entry in [e for e in read_lines(args.out / "episodes.jsonl") if e.final and e.error][:5]:
        console.print(
            f"  {entry.task}-{entry.member} {entry.reason}: {entry.error}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    return 0 if summary["scored"] else 1


_Loaded = tuple[Agent, list[AgentTask], EnvironmentFactory | None, Reward]


def _loaded(args: AgentRolloutArgs, console: Console) -> _Loaded:
    """Return agent, tasks, environment and reward. Raise BadRequestError if one of them cannot be had."""
    assert args.agent is not None
    agent = load_agent(args.agent, args.tool, args.system, args.limits.max_turns, args.program)
    tasks, environment = load_tasks(args)
    if environment is not None:
        check_playable(agent, args.environment or args.tasks, args.reward)
    if isinstance(agent, InstalledAgent):
        agent.check(args.pass_env)
        console.print(f"Agent: {agent}.", highlight=False, markup=False, soft_wrap=True)
    return agent, tasks, environment, load_reward(args.reward, agent, environment)


async def _played(
    args: AgentRolloutArgs,
    servers: list[Server] | None,
    agent: Agent,
    tasks: list[AgentTask],
    environment: EnvironmentFactory | None,
    reward: Reward,
    console: Console,
) -> AgentRun:
    progress = Progress()
    done = sum(entry.final for entry in read_lines(args.out / "episodes.jsonl")) if args.resume else 0
    view = ProgressView(progress, len(tasks) * args.group_size - done, console)
    async with view.shown():
        run = await arun_agents(
            agent,
            tasks,
            servers=servers,
            model_path=args.model_path,
            reward=reward,
            environment=environment,
            group_size=args.group_size,
            limits=args.limits,
            retries=args.retries,
            faults=args.faults,
            max_concurrency=args.max_concurrency,
            sampling_params=_sampling_params(args),
            seed=args.seed,
            out=args.out,
            resume=args.resume,
            on_finish=view.note,
            allow_open_server=args.allow_open_server,
            pass_env=args.pass_env,
            isolation=args.program.isolation,
            readable=args.program.folders,
            hidden=[Path(file) for file in (args.tasks, args.api_key_file) if file and Path(file).is_file()],
            progress=progress,
            describe=_described(args, agent),
        )
    write_run_report(args.out)
    return run


def _sampling_params(args: AgentRolloutArgs) -> dict[str, Any]:
    bound = {} if args.max_new_tokens is None else {"max_new_tokens": args.max_new_tokens}
    return {"temperature": args.temperature} | bound


def _described(args: AgentRolloutArgs, agent: Agent) -> dict[str, Any]:
    """Return the settings of the command that run.json stores beside the settings of `run_agents`."""
    environment = args.environment
    is_function = args.reward is not None and ":" in args.reward
    return {
        "agent_from": agent.name if isinstance(agent, InstalledAgent) else location(args.agent or args.tasks),
        "tools_from": [location(tool) for tool in args.tool],
        "reward_from": location(args.reward or "") if is_function else None,
        "tasks_from": args.tasks if is_named(args.tasks) else Path(args.tasks).name,
        "environment": None if environment is None else location(without_host(environment)),
    }


def load_tasks(args: AgentRolloutArgs) -> tuple[list[AgentTask], EnvironmentFactory | None]:
    """Return the tasks and the factory of their environment. Raise BadRequestError if one of them cannot be had."""
    if is_named(args.tasks):
        if args.environment is not None:
            raise BadRequestError(f"--tasks {args.tasks} has its own environment: remove --environment.")
        count = _GROUPS if args.groups is None else args.groups
        return [AgentTask(seed=args.first_seed + i) for i in range(count)], environment_factory(args.tasks)
    tasks = read_tasks(Path(args.tasks), environment=args.environment)[: args.groups]
    if args.groups is not None and len(tasks) < args.groups:
        raise BadRequestError(f"{args.tasks} has {len(tasks)} tasks, fewer than --groups {args.groups}.")
    if args.environment is None:
        return tasks, None
    if is_url(args.environment):
        seconds = args.limits.environment_seconds
        timeouts = EnvTimeouts(connect=seconds, reset=seconds)
        bounds = "--limits.environment-seconds"
        check_environment(args.environment, None, timeouts, option="--environment", bounds=bounds)
    return tasks, environment_factory(args.environment, args.program.isolation)


def _servers(args: AgentRolloutArgs, key: str | None) -> list[Server] | None:
    """Return the running servers, or None if one is launched."""
    if not args.server and args.router is None:
        return None
    if args.api_key_file is not None:
        key = read_key_file(args.api_key_file, "--api-key-file")
    if not key:
        raise BadRequestError("The servers' key is missing: set VERL_SERVER_API_KEY, or name --api-key-file.")
    if args.router is not None:
        routed_servers(args.router, args.server)
    return [Server(url, key) for url in (args.server if args.router is None else (args.router,))]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_options(AgentRolloutArgs, argv, "verl-server rollout")
    try:
        return rollout_agents(args)
    except VerlServerError as error:
        raise VerlServerError(with_flags(str(error), ["model_path"])) from None
