"""`write_run_report`: `report.html` for the folder of an agent run, on one page that loads nothing else.

The page is an export of the run (`watch.site.export`), and its first tab is what this module writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl_server.files.json_files import read_json
from verl_server.rollout.agents.output import EpisodeLine, read_lines, summarize_lines, trained_tokens
from verl_server.watch.page import embedded, section, tiles
from verl_server.watch.site.export import export_report

_BLUE = "#2f5fd0"
_EPISODES = 200


def write_run_report(folder: Path) -> Path:
    """Write `report.html` from run.json and episodes.jsonl of the folder, and return its path."""
    settings = read_json(folder / "run.json")
    lines = read_lines(folder / "episodes.jsonl")
    final = sorted((entry for entry in lines if entry.final), key=lambda entry: (entry.task, entry.member))
    summary = summarize_lines(lines)
    body = "\n".join(
        (
            _headline(folder.resolve().name, settings, summary),
            _rewards(final),
            _ends(lines),
            _tokens(lines),
            _episodes(final),
            _setup(settings),
        )
    )
    path = folder / "report.html"
    export_report(path, folder, f"verl-server {folder.resolve().name}", embedded(body))
    return path


def _headline(title: str, settings: dict[str, Any], summary: dict[str, Any]) -> str:
    mean = summary["mean_reward"]
    figures = (
        ("-" if mean is None else f"{mean:.3f}", "mean reward", f"{summary['scored']} episodes with a reward"),
        (str(summary["episodes"]), "episodes", f"{summary['attempts']} attempts"),
        (f"{summary['tokens']:,}", "sampled tokens", "in all attempts"),
        (str(summary["turns"]), "turns", "generations"),
        (str(summary["unsampled"]), "unsampled", "episodes without a sampled token, in no mean"),
        (str(summary["branches"]), "branches", "linear sequences to train on"),
    )
    agent = settings.get("agent")
    name = agent if isinstance(agent, str) else " ".join(agent or [])
    return (
        "<header><p class='kicker'>verl-server · agents</p>"
        f"<h1>{escape(title)}</h1><p class='lead'>{escape(name)}</p></header>"
        f"{tiles(figures)}"
    )


def _rewards(final: Sequence[EpisodeLine]) -> str:
    rewards = [entry.reward for entry in final if entry.reward is not None and not entry.is_unsampled]
    counts = Counter(round(reward, 2) for reward in rewards)
    content = _bars((f"{reward:g}", counts[reward]) for reward in sorted(counts)) or "<p>No episode has a reward.</p>"
    return section("Rewards", content, "Number of episodes for each reward, rounded to two places.")


def _ends(lines: Sequence[EpisodeLine]) -> str:
    counts = Counter(str(entry.reason) for entry in lines)
    note = "Every attempt. One that the infrastructure ended has no reward, and another one replaces it."
    return section("How attempts ended", _bars(counts.most_common()), note)


def _tokens(lines: Sequence[EpisodeLine]) -> str:
    counts = trained_tokens(lines)
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in counts.rows().items())
    note = (
        "Tokens of every attempt that has a record. A trainer computes the context of each branch anew. The kinds of "
        "branches are in docs/sessions.md."
    )
    return section("What is trained", f"<dl>{rows}</dl>", note)


def _bars(rows: Iterable[tuple[str, int]]) -> str:
    rows = list(rows)
    most = max((count for _, count in rows), default=1)
    return "".join(
        f"<div class='bar'><span>{escape(name)}</span><i style='width:{60 * count / most:.1f}%;background:{_BLUE}'></i>"
        f"<b>{count}</b></div>"
        for name, count in rows
    )


def _episodes(final: Sequence[EpisodeLine]) -> str:
    rows = []
    for entry in final[:_EPISODES]:
        reward = "-" if entry.reward is None else f"{entry.reward:g}"
        facts = (f"{entry.task}-{entry.member}", str(entry.reason), reward, str(entry.turns), str(entry.tokens))
        cells = "".join(f"<td>{escape(fact)}</td>" for fact in (*facts, f"{entry.seconds:.1f}", entry.error or ""))
        rows.append(f"<tr>{cells}</tr>")
    names = ("episode", "end", "reward", "turns", "tokens", "seconds", "error")
    head = "".join(f"<th>{name}</th>" for name in names)
    note = f"The final attempt of each episode, the first {_EPISODES}. All are in episodes.jsonl."
    return section("Episodes", f"<table><tr>{head}</tr>{''.join(rows)}</table>", note)


def _setup(settings: dict[str, Any]) -> str:
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(json.dumps(value) if not isinstance(value, str) else value)}</dd>"
        for name, value in settings.items()
    )
    return section("Setup", f"<dl>{rows}</dl>", "The settings of run.json.")
