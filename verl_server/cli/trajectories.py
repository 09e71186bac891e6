"""`verl-server trajectories ls | show | stats | index | export`: what an agent run, or another rollout, recorded.

`trajectories repair` is a command of the server (`server.sessions.journal_repair`), and `cli` calls it. It is here for
`--help` only.

verl-server trajectories show runs/x --episode 3-0 --color logprob --tokenizer MODEL
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, subcommand

from verl_server.cli.trajectory_files import Export, Index, export, index
from verl_server.errors import BadRequestError
from verl_server.files.json_files import decode_json, read_bytes
from verl_server.files.model_folder import load_tokenizer
from verl_server.rollout.agents.output import read_lines, trained_tokens
from verl_server.rollout.faults import describe_ends
from verl_server.rollout.listing import Listing, Row
from verl_server.rollout.token_counts import TokenCounts, count_tokens
from verl_server.rollout.trajectory import Trajectory, by_episode, is_unsampled
from verl_server.watch.recorded import Recorded, read_recorded, recorded_files
from verl_server.watch.viewer import ColorBy, TokenText, render

HELP = """\
List, show, count, index and export the trajectories that a rollout, an agent run, a demo or a training run recorded.

Examples:
- verl-server trajectories ls            (the runs in the folder runs)
- verl-server trajectories ls runs/x     (the episodes of a run)
- verl-server trajectories show runs/x --episode 3-0 --tokenizer MODEL
- verl-server trajectories show runs/grpo --step 12 --color version
- verl-server trajectories stats runs/x
- verl-server trajectories index runs/old
- verl-server trajectories export runs/grpo --parquet episodes.parquet
- verl-server trajectories repair SESSION_STORE --check

Exit status: 0, 1 if there is no such run, step or episode or a file is damaged, 2 for wrong options.
"""
_LISTED_CHARACTERS = 300
"""Most characters of an error in a list."""


@dataclass(frozen=True)
class Ls:
    """List the runs in a folder, or the trajectories of one run: episode, branch, end, reward, tokens."""

    path: Positional[Path] = Path("runs")
    """Folder of a run, a folder with runs, or a file of trajectories."""
    step: int | None = None
    """Step of a training run. None lists all steps."""


@dataclass(frozen=True)
class Show:
    """Show one episode, token by token."""

    path: Positional[Path]
    """Folder of a run, or a file of trajectories."""
    episode: str = "0-0"
    """TASK-MEMBER, as `ls` lists it."""
    step: int | None = None
    """Step of a training run. None shows the last step that has the episode."""
    branch: int | None = None
    """Number of the branch. None shows all branches of the episode."""
    color: ColorBy = "logprob"
    """Color sampled tokens by log-probability, loss mask or weight version."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. Default: the model of the run, if it launched its server. Without one,
    an agent's episode is shown as texts, and others as ids."""


@dataclass(frozen=True)
class Stats:
    """Count a run: rewards, groups, tokens, versions, and how episodes ended."""

    path: Positional[Path]
    """Folder of a run, or a file of trajectories."""
    step: int | None = None
    """Step of a training run. None counts all steps."""


@dataclass(frozen=True)
class Repair:
    """Repair the session store of a server that was ended: verl-server trajectories repair FOLDER."""


class _Summary(msgspec.Struct):
    """The keys of summary.json that are listed."""

    episodes: int | None = None
    scored: int | None = None
    unsampled: int | None = None
    mean_reward: float | None = None
    tokens: int | None = None
    reasons: dict[str, int] = {}


class _Run(msgspec.Struct):
    """The keys of run.json that name the tokenizer and the agent."""

    model_path: str | None = None
    agent: str | list[str] | None = None


def ls(args: Ls, console: Console) -> int:
    """List runs or trajectories."""
    if args.path.is_dir() and not recorded_files(args.path):
        return _ls_runs(args.path, console)
    found = read_recorded(args.path, args.step)
    has_steps = any(recorded.step is not None for recorded in found)
    is_mixed = any(recorded.trajectory.task.environment is not None for recorded in found)
    rows = []
    for recorded in sorted(found, key=_place):
        t = recorded.trajectory
        reward = "-" if t.reward is None else f"{t.reward:g}"
        sizes = (str(len(t.turns)), str(len(t.tokens)), str(t.sampled_tokens))
        step = ("-" if recorded.step is None else str(recorded.step),) if has_steps else ()
        environment = (t.task.environment or "-",) if is_mixed else ()
        facts = (*step, *environment, recorded.name, str(t.branch), str(t.stop_reason), reward, *sizes)
        rows.append(Row(facts, _shortened(t.error or "")))
    labels = ["step"] * has_steps + ["environment"] * is_mixed
    names = [*labels, "episode", "branch", "end", "reward", "turns", "tokens", "sampled"]
    console.print(Listing(names, rows, left=3 + len(labels)))
    return 0


def _ls_runs(folder: Path, console: Console) -> int:
    files = sorted(folder.glob("*/summary.json"))
    if not files:
        raise BadRequestError(f"{folder} has no run: neither trajectories.jsonl nor folders with a summary.json.")
    rows = []
    for file in files:
        found = decode_json(read_bytes(file), _Summary, str(file))
        mean = "-" if found.mean_reward is None else f"{found.mean_reward:.3f}"
        ends = ", ".join(f"{name} {count}" for name, count in found.reasons.items())
        facts = ["-" if fact is None else str(fact) for fact in (found.episodes, found.scored, found.unsampled)]
        tokens = "-" if found.tokens is None else str(found.tokens)
        rows.append(Row((str(file.parent), *facts, mean, tokens), ends and f"ends: {ends}"))
    console.print(Listing(("run", "episodes", "scored", "unsampled", "reward", "tokens"), rows))
    return 0


def _shortened(error: str) -> str:
    """Return the beginning of an error. `trajectories show` shows the whole."""
    line = " ".join(error.split())
    return line if len(line) <= _LISTED_CHARACTERS else f"{line[:_LISTED_CHARACTERS]}..."


def show(args: Show, console: Console) -> int:
    """Show the branches of one episode."""
    named = read_recorded(args.path, args.step, episode=args.episode)
    last = max((r.step for r in named if r.step is not None), default=None)
    found = [r for r in named if r.step == last and args.branch in (None, r.trajectory.branch)]
    if not found:
        wanted = args.episode if args.branch is None else f"{args.episode}, branch {args.branch}"
        raise BadRequestError(f"{args.path} has no trajectory of the episode {wanted}. List them: trajectories ls.")
    text_of = _token_text(args)
    for recorded in found:
        trajectory = recorded.trajectory
        step = "" if recorded.step is None else f"step {recorded.step} "
        attempt = f" attempt {trajectory.attempt}" if trajectory.attempt else ""
        title = Text(f"{step}{args.episode}{attempt}", "bold").append(
            f" branch {trajectory.branch} {trajectory.session}", "none"
        )
        console.print(title)
        console.print(render(trajectory, args.color, text_of))
    return 0


def stats(args: Stats, console: Console) -> int:
    """Print figures of a run."""
    found = read_recorded(args.path, args.step)
    trajectories = [recorded.trajectory for recorded in found]
    by_step: dict[int | None, list[Trajectory]] = {}
    for recorded in found:
        by_step.setdefault(recorded.step, []).append(recorded.trajectory)
    episodes = [(step, branches) for step, played in by_step.items() for branches in by_episode(played)]
    scored = [
        (step, branches[0].task.group, branches[0].reward)
        for step, branches in episodes
        if branches[0].reward is not None and not is_unsampled(branches)
    ]
    groups: dict[tuple[int | None, int], set[float]] = {}
    for step, group, reward in scored:
        groups.setdefault((step, group), set()).add(reward)
    sampled = [lp for t in trajectories for lp, mask in zip(t.logprobs, t.loss_mask, strict=True) if mask]
    firsts = [(step, played[0]) for step, played in episodes]
    last: dict[tuple[int | None, int, int], int] = {}
    for step, t in firsts:
        place = step, t.task.group, t.member
        last[place] = max(last.get(place, 0), t.attempt)
    replaced = sum(t.attempt < last[step, t.task.group, t.member] for step, t in firsts)
    figures: dict[str, Any] = {
        "trajectories": len(trajectories),
        "trainable": sum(t.is_trainable for t in trajectories),
        "unsampled": sum(is_unsampled(branches) for _, branches in episodes),
    }
    branches = [t.branch for t in trajectories]
    figures |= {
        "episodes": len(episodes) - replaced,
        "mean reward": _mean([reward for _, _, reward in scored]),
        **_means_of_environments([branches[0] for _, branches in episodes if not is_unsampled(branches)]),
        "groups whose rewards differ": f"{sum(len(g) > 1 for g in groups.values())} of {len(groups)}",
        "episodes with several branches": sum(b == 1 for b in branches),
        "sampled tokens": len(sampled),
        "mean log-probability": _mean(sampled),
        "mean turns": _mean([len(t.turns) for t in trajectories]),
        "longest trajectory": max((len(t.tokens) for t in trajectories), default=0),
        "weight versions": ", ".join(dict.fromkeys(v for t in trajectories for v in t.weight_versions if v)) or "-",
        "ends by fault": describe_ends([(t.stop_reason, t.fault) for _, t in firsts if t.stop_reason is not None])
        or "-",
        "replaced episodes": replaced,
    }
    if any(t.session for t in trajectories):
        figures |= _of_agents(args, [branches for _, branches in episodes])
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(Text(name), Text(str(value)))
    console.print(table)
    return 0


def _of_agents(args: Stats, episodes: Sequence[Sequence[Trajectory]]) -> dict[str, str]:
    """Return the program of an agents' run, and how often its sampled tokens are trained on.

    The run's own lines have the attempts that others replaced, too. Otherwise, `episodes` are counted.
    """
    lines, run = args.path / "episodes.jsonl", args.path / "run.json"
    recorded = trained_tokens(read_lines(lines)) if args.step is None and lines.is_file() else TokenCounts()
    counts = recorded if recorded.episodes else sum(map(count_tokens, episodes), TokenCounts())
    agent = decode_json(read_bytes(run), _Run, str(run)).agent if run.is_file() else None
    named = {} if agent is None else {"agent": agent if isinstance(agent, str) else " ".join(agent)}
    return named | counts.rows()


def _means_of_environments(firsts: Sequence[Trajectory]) -> dict[str, str]:
    """Return the mean reward of each environment of a mixture, under the name of the figure."""
    rewards: dict[str, list[float]] = {}
    for t in firsts:
        if t.task.environment is not None and t.reward is not None:
            rewards.setdefault(t.task.environment, []).append(t.reward)
    return {f"mean reward of {name}": _mean(rewards[name]) for name in sorted(rewards)}


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}" if values else "-"


def _place(recorded: Recorded) -> tuple[int, int, int, int]:
    trajectory = recorded.trajectory
    step = -1 if recorded.step is None else recorded.step
    return step, trajectory.task.group, trajectory.member, trajectory.branch


def _token_text(args: Show) -> TokenText | None:
    name, source = args.tokenizer, "--tokenizer"
    run = args.path / "run.json"
    if name is None and run.is_file():
        name, source = decode_json(read_bytes(run), _Run, str(run)).model_path, f"model_path of {run}"
    if name is None:
        return None
    tokenizer = load_tokenizer(name, source)
    return lambda ids: str(tokenizer.decode(ids))


def main(argv: Sequence[str] | None = None) -> int:
    command = tyro.cli(
        Annotated[Ls, subcommand("ls")]
        | Annotated[Show, subcommand("show")]
        | Annotated[Stats, subcommand("stats")]
        | Annotated[Index, subcommand("index")]
        | Annotated[Export, subcommand("export")]
        | Annotated[Repair, subcommand("repair")],  # type: ignore[arg-type]
        args=argv,
        prog="verl-server trajectories",
        description=HELP,
    )
    console = Console()
    if isinstance(command, Repair):
        raise BadRequestError("repair is the first word after trajectories: verl-server trajectories repair FOLDER.")
    if isinstance(command, Index):
        return index(command, console)
    if isinstance(command, Export):
        return export(command, console)
    if isinstance(command, Ls):
        return ls(command, console)
    return show(command, console) if isinstance(command, Show) else stats(command, console)
