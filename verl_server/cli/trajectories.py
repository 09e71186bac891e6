"""`verl-server trajectories ls | show | stats`: what an agent run, or another rollout, recorded.

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
from rich.table import Column, Table
from tyro.conf import Positional, subcommand

from verl_server.errors import BadRequestError
from verl_server.files.json_files import decode_json, read_bytes
from verl_server.files.model_folder import load_tokenizer
from verl_server.rollout.trajectory import Trajectory, by_episode, is_unsampled, read_jsonl, summarize
from verl_server.watch.viewer import ColorBy, TokenText, render


@dataclass(frozen=True)
class Ls:
    """List runs, or the trajectories of one run."""

    path: Positional[Path] = Path("runs")
    """Folder of a run, a folder with runs, or a trajectories.jsonl."""


@dataclass(frozen=True)
class Show:
    """Show one episode, token by token."""

    path: Positional[Path]
    """Folder of a run, or a trajectories.jsonl."""
    episode: str = "0-0"
    """TASK-MEMBER."""
    branch: int | None = None
    """Number of the branch. None shows all branches of the episode."""
    color: ColorBy = "logprob"
    """Color sampled tokens by log-probability, loss mask or weight version."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer. Default: the model of the run, if it launched its server. None shows ids."""


@dataclass(frozen=True)
class Stats:
    """Figures of a run."""

    path: Positional[Path]
    """Folder of a run, or a trajectories.jsonl."""


@dataclass(frozen=True)
class Repair:
    """Repair the session store of a server that was ended. `repair --help` has its options."""


class _Summary(msgspec.Struct):
    """The keys of summary.json that are listed."""

    episodes: int | None = None
    scored: int | None = None
    unsampled: int | None = None
    mean_reward: float | None = None
    tokens: int | None = None
    reasons: dict[str, int] = {}


class _Run(msgspec.Struct):
    """The key of run.json that names the tokenizer."""

    model_path: str | None = None


def ls(args: Ls, console: Console) -> int:
    """List runs or trajectories."""
    if args.path.is_dir() and not (args.path / "trajectories.jsonl").exists():
        return _ls_runs(args.path, console)
    end, error = (Column(name, no_wrap=True) for name in ("end", "error"))
    table = Table("episode", "branch", end, "reward", "turns", "tokens", "sampled", error)
    for t in sorted(_read(args.path), key=lambda t: (t.task.group, t.member, t.branch)):
        reward = "-" if t.reward is None else f"{t.reward:g}"
        sizes = (str(len(t.turns)), str(len(t.tokens)), str(t.sampled_tokens))
        table.add_row(_name(t), str(t.branch), str(t.stop_reason), reward, *sizes, (t.error or "")[:60])
    console.print(table)
    return 0


def _ls_runs(folder: Path, console: Console) -> int:
    files = sorted(folder.glob("*/summary.json"))
    if not files:
        raise BadRequestError(f"{folder} has no run: neither trajectories.jsonl nor folders with a summary.json.")
    table = Table("run", "episodes", "scored", "unsampled", "mean reward", "tokens", "ends")
    for file in files:
        found = decode_json(read_bytes(file), _Summary, str(file))
        mean = "-" if found.mean_reward is None else f"{found.mean_reward:.3f}"
        ends = ", ".join(f"{name} {count}" for name, count in found.reasons.items())
        facts = ["-" if fact is None else str(fact) for fact in (found.episodes, found.scored, found.unsampled)]
        table.add_row(str(file.parent), *facts, mean, str(found.tokens), ends)
    console.print(table)
    return 0


def show(args: Show, console: Console) -> int:
    """Show the branches of one episode."""
    found = [t for t in _read(args.path) if _name(t) == args.episode and args.branch in (None, t.branch)]
    if not found:
        wanted = args.episode if args.branch is None else f"{args.episode}, branch {args.branch}"
        raise BadRequestError(f"{args.path} has no trajectory of the episode {wanted}. List them: trajectories ls.")
    text_of = _token_text(args)
    for trajectory in found:
        console.print(f"[bold]{args.episode}[/] branch {trajectory.branch} {trajectory.session}", highlight=False)
        console.print(render(trajectory, args.color, text_of))
    return 0


def stats(args: Stats, console: Console) -> int:
    """Print figures of a run."""
    trajectories = _read(args.path)
    summary = summarize(trajectories)
    figures: dict[str, Any] = {k: getattr(summary, k) for k in ("trajectories", "trainable", "unsampled")}
    episodes = {(_name(t), t.attempt): t for t in trajectories}
    ignored = {
        (_name(branches[0]), branches[0].attempt) for branches in by_episode(trajectories) if is_unsampled(branches)
    }
    scored = [t for place, t in episodes.items() if t.reward is not None and place not in ignored]
    sampled = [lp for t in trajectories for lp, mask in zip(t.logprobs, t.loss_mask, strict=True) if mask]
    groups: dict[int, set[float]] = {}
    for t in scored:
        groups.setdefault(t.task.group, set()).add(t.reward or 0.0)
    branches = [t.branch for t in trajectories]
    figures |= {
        "episodes": len(episodes),
        "mean reward": _mean([t.reward or 0.0 for t in scored]),
        "groups whose rewards differ": f"{sum(len(g) > 1 for g in groups.values())} of {len(groups)}",
        "episodes with several branches": sum(b == 1 for b in branches),
        "sampled tokens": len(sampled),
        "mean log-probability": _mean(sampled),
        "mean turns": _mean([len(t.turns) for t in trajectories]),
        "longest trajectory": max((len(t.tokens) for t in trajectories), default=0),
        "weight versions": ", ".join(dict.fromkeys(v for t in trajectories for v in t.weight_versions if v)) or "-",
        "ends": ", ".join(f"{name} {count}" for name, count in summary.stop_reasons.items()),
    }
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name, str(value))
    console.print(table)
    return 0


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.4g}" if values else "-"


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.task.group}-{trajectory.member}"


def _read(path: Path) -> list[Trajectory]:
    file = path / "trajectories.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise BadRequestError(f"There is no file {file}. Name the folder of a run, or a trajectories.jsonl.")
    return read_jsonl(file)


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
        | Annotated[Repair, subcommand("repair")],  # type: ignore[arg-type]
        args=argv,
        prog="verl-server trajectories",
    )
    console = Console()
    if isinstance(command, Repair):
        raise BadRequestError("repair is the first word after trajectories: verl-server trajectories repair FOLDER.")
    if isinstance(command, Ls):
        return ls(command, console)
    return show(command, console) if isinstance(command, Show) else stats(command, console)
