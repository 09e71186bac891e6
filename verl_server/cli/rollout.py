"""`verl-server rollout`: play episodes with a running server and a running environment, and write them to a file.

verl-server rollout --server http://127.0.0.1:30000 --environment http://127.0.0.1:8000 --groups 16 --group-size 4
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TextIO

import tyro

from verl_server.cli.interrupts import Interrupts
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.files.command_options import parse_options
from verl_server.files.model_folder import load_tokenizer
from verl_server.files.path_options import OutputPath
from verl_server.files.run_output import location, settings_of, without_host
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import environment_schema
from verl_server.rollout.environment_check import check_environment
from verl_server.rollout.episode import Limits
from verl_server.rollout.faults import FaultRules
from verl_server.rollout.renderer import ActionFormat, ChatRenderer, Renderer, TextRenderer
from verl_server.rollout.server_check import attach_server, routed_servers
from verl_server.rollout.trajectory import Task, summarize
from verl_server.sampling_params import SamplingParams
from verl_server.watch.trajectory_file import TrajectoryFile
from verl_server.web.key_files import read_key_file


@dataclass(frozen=True)
class RolloutArgs:
    """Play episodes of an environment with a policy, each at its own pace. With --agent AGENT, any function or program
    plays them, with other options: `verl-server rollout --agent AGENT --help`. Installed programs with a recipe:
    claude-code, codex, opencode, aider, mini-swe-agent, openhands, smolagents.

    Exit status: 0 if an episode has a reward and a sampled token, else 1; 1 after an error, 2 for wrong options, 130
    after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP (--resume continues).
    """

    server: Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    """URL of the rollout server. Name several servers of one model by repeating the option: the episodes spread over
    them, and those of a server that dies continue on the others."""
    environment: str
    """URL of an environment server (OpenEnv's protocol)."""
    router: str | None = None
    """URL of a router (`verl-server router`), through which the episodes play. If --server is named, too, it must name
    the router's servers."""
    groups: int = 16
    """Number of groups. The episodes of a group have the same environment seed."""
    group_size: int = 1
    """Episodes of each group."""
    first_seed: int = 0
    """Group i has the seed first_seed + i."""
    seed: int = 0
    """Seed of sampling. With the place of an episode it settles the episode's draws."""
    max_concurrency: int | None = None
    """Most episodes at one time. None is no bound."""
    out: OutputPath = Path("trajectories.jsonl")
    """File of this run: each trajectory is one line, written when it ends. Missing folders are created. The settings
    are in FILE.run.json beside it. A file that has the trajectories of another run is refused."""
    resume: bool = False
    """Continue the run in `--out`. Episodes that the infrastructure ended, or that have no sampled token, are
    played again, and their lines are replaced; the others are not. The settings must be equal, except those of servers,
    bounds of time, concurrency and the number of groups (docs/runs.md)."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. None is the server's."""
    chat: bool = True
    """Render observations as user messages of the chat template, otherwise as plain text."""
    observation_key: str = "text"
    """Key of the text in the environment's observations."""
    action_key: str = "text"
    """Key of the policy's text in the environment's actions. For `--action-format text`."""
    action_format: ActionFormat = "text"
    """`text` sends the policy's text under one key. `json` sends the JSON object that the policy writes, with any
    number of keys. JSON that is wrong, or that violates the environment's schema (at /schema), is answered by an
    observation that says why, and counts as a turn without a reward."""
    reasoning_parser: str | None = None
    """Format of the policy's reasoning, which the environment does not get. Default: the server's setting, or else what
    the chat template shows. `none` sends the whole text. A reasoning without an end is answered as wrong JSON is."""
    temperature: float = 1.0
    """Sampling temperature."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Limits(max_turns=8, max_new_tokens=512)
    )
    faults: Annotated[FaultRules, tyro.conf.arg(name="")] = field(default_factory=FaultRules)
    api_key: str | None = None
    """API key of the rollout server. Other users of this host can read it here. Default: VERL_SERVER_API_KEY of the
    environment, which they cannot read."""
    api_key_file: Path | None = None
    """File with the API key or admin key of the server."""

    def __post_init__(self) -> None:
        if (not self.server and self.router is None) or len(set(self.server)) < len(self.server):
            raise BadRequestError("Name at least one --server, and each only once, or a --router.")
        for name in ("groups", "group_size", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequestError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
        SamplingParams.parse({"temperature": self.temperature})


_TIME = "a bound of time ends an episode, and changes no other one"
MAY_DIFFER = {
    "server": "the same model may be served at another address, and `model` is compared",
    "router": "it is an address, too",
    "groups": "further groups have further seeds",
    "max_concurrency": "it changes the pace only",
    "limits.generate_timeout": _TIME,
    "limits.restart_timeout": _TIME,
    "limits.trajectory_timeout": _TIME,
    "limits.straggler_timeout": _TIME,
    "limits.straggler_fraction": _TIME,
    "limits.env.*": _TIME,
}
"""Settings that may differ when a run is resumed, and why (docs/runs.md). The host of `environment` may differ, too."""


def run_settings(args: RolloutArgs) -> dict[str, Any]:
    """Return the settings that a run stores."""
    settings = settings_of("rollout", args, without=("out", "resume", "api_key", "api_key_file"))
    settings |= {"server": [without_host(url) for url in args.server], "environment": without_host(args.environment)}
    settings["router"] = None if args.router is None else without_host(args.router)
    settings["tokenizer"] = None if args.tokenizer is None else location(args.tokenizer)
    return settings


def rollout(args: RolloutArgs) -> int:
    """Play the episodes, print a summary and return the exit status.

    The exit status is 1 if no episode has both a reward and a sampled token.
    """
    with contextlib.closing(TrajectoryFile(args.out, run_settings(args), MAY_DIFFER, resume=args.resume)) as file:
        interrupts = Interrupts()
        try:
            with interrupts.caught():
                return _rollout(args, file)
        except KeyboardInterrupt:
            print(f"Interrupted. The same command with --resume continues {args.out}.", file=_report_of(file))
            return interrupts.exit_status


def _rollout(args: RolloutArgs, file: TrajectoryFile) -> int:
    with contextlib.ExitStack() as stack:
        option, urls = "--server", args.server
        if args.router is not None:
            routed_servers(args.router, args.server)
            option, urls = "--router", (args.router,)
        engines = [stack.enter_context(attach_server(url, _api_key(args), option=option)) for url in urls]
        return _play(args, file, engines)


def _play(args: RolloutArgs, file: TrajectoryFile, engines: Sequence[HttpServerEngineAdapter]) -> int:
    model = engines[0].server_args.model_path
    served = "--tokenizer is not set, and the server's model_path"
    tokenizer = load_tokenizer(args.tokenizer or model, "--tokenizer" if args.tokenizer else served)
    make_renderer = ChatRenderer if args.chat else TextRenderer
    renderer: Renderer = make_renderer(
        tokenizer,
        observation_key=args.observation_key,
        action_key=args.action_key,
        action_format=args.action_format,
        action_schema=environment_schema(args.environment, args.limits.env.connect),
        reasoning_parser=args.reasoning_parser,
    )
    check_environment(args.environment, renderer, args.limits.env, option="--environment")
    tasks = [task for task in make_tasks(args) if (task.seed, task.member) not in file.finished]
    file.begin(model)
    with AgentLoop(
        engines,
        args.environment,
        renderer,
        sampling_params={"temperature": args.temperature},
        limits=args.limits,
        max_concurrency=args.max_concurrency,
        faults=args.faults,
    ) as loop:
        result = loop.run(tasks, file.add)
    trajectories = file.trajectories() or result.trajectories
    stats, played = summarize(trajectories), summarize(result.trajectories)
    reward = "none" if stats.mean_reward is None else f"{stats.mean_reward:.3f}"
    report = _report_of(file)
    print(
        f"{stats.trajectories} episodes in {result.seconds:.1f} s, {stats.mean_turns:.1f} turns, "
        f"{played.sampled_tokens / max(result.seconds, 1e-9):.0f} tokens/s, mean reward {reward}, "
        f"{f'{stats.unsampled} without a sampled token, ' if stats.unsampled else ''}ends {stats.stop_reasons}",
        file=report,
    )
    for error in {t.error for t in trajectories if t.error}:
        print(f"  {error}", file=report)
    return 0 if stats.mean_reward is not None else 1


def make_tasks(args: RolloutArgs) -> list[Task]:
    """Return the tasks of all groups. The sampling seed is a function of (seed, group, member)."""
    return [
        Task(
            seed=args.first_seed + group,
            group=group,
            member=member,
            sampling_seed=(args.seed * 1_000_003 + (args.first_seed + group) * 65_537 + member) % 2**62,
        )
        for group in range(args.groups)
        for member in range(args.group_size)
    ]


def _api_key(args: RolloutArgs) -> str | None:
    if args.api_key_file is not None:
        return read_key_file(args.api_key_file, "--api-key-file")
    return args.api_key or os.environ.get("VERL_SERVER_API_KEY")


def _report_of(file: TrajectoryFile) -> TextIO:
    """Return the stream for the summary, which must not mix with trajectories on the standard output."""
    return sys.stderr if file.is_stdout else sys.stdout


def main(argv: Sequence[str] | None = None) -> int:
    return rollout(parse_options(RolloutArgs, argv, "verl-server rollout"))
