"""`write_report`: the demo on one page, `report.html`, which the demo calls with its measurements.

The page is an export of the run (`watch.site.export`), and its first tab is what this module writes. Everything is
inside the page, which loads nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from verl_server.logprob_gap import BOUNDS
from verl_server.rollout.trajectory import Trajectory
from verl_server.watch import charts
from verl_server.watch.async_report import ages_section, time_section
from verl_server.watch.pace import PaceComparison
from verl_server.watch.page import embedded, legend, section, tiles
from verl_server.watch.site.export import export_report

GAP_LIMIT = BOUNDS[torch.float32].warn_largest
"""Largest difference of log-probabilities in fp32 that is allowed right after a push."""


@dataclass(frozen=True)
class Report:
    summary: dict[str, Any]
    """The figures of summary.json."""
    history: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    pace: PaceComparison
    before: list[Trajectory]
    """Trajectories of the held-out tasks before training."""
    after: list[Trajectory]
    """Trajectories of the same tasks after training, in the same order."""
    setup: dict[str, str]
    """Descriptions of the game, the policy and so on, by name."""


def write_report(path: Path, report: Report) -> None:
    """Write the page to `path`, in the folder of the run."""
    sections = (_headline, _learning, _ages, _timeline, _pushes, _time, _episodes, _method)
    body = "\n".join(part(report) for part in sections)
    export_report(path, path.parent, "verl-server demo", embedded(body))


def _headline(report: Report) -> str:
    s = report.summary
    figures = (
        (
            f"{s['eval_success_before']:.0%} → {s['eval_success_after']:.0%}",
            "success on held-out seeds",
            f"without feedback at best {s['best_without_feedback']:.0%}",
        ),
        (
            f"{s['lockstep_ratio']:.1f}\u00d7",
            "faster than lock step",
            f"an ideal schedule would reach {s['ideal_ratio']:.1f}\u00d7",
        ),
        (f"{s['push_ms_median']:.1f} ms", "per weight push", f"{s['weight_pushes']} pushes while serving"),
        (_power(s["max_logprob_gap"]), "largest logprob gap", "server against trainer, checked after every push"),
        (f"{s['seconds']:.0f} s", "for everything", f"{s['steps']} training steps, {s['episodes_played']:,} episodes"),
    )
    setup = report.setup
    ages = s.get("asynchronous")
    lead = (
        f"The game: {escape(setup['game'])}, from the answers <em>higher</em> and <em>lower</em>. A trainer, a rollout "
        "server and an environment server, three processes that talk over HTTP, trained a policy that started from "
        f"random weights: {escape(setup['policy'])}."
    )
    if ages is not None:
        lead += (
            " In a fourth process, episodes played all the time. No push stopped one, and each was trained at most "
            f"{ages['max_staleness']} pushes after its group began."
        )
    return (
        "<header><p class='kicker'>verl-server · demo</p><h1>From random weights to a policy that listens</h1>"
        f"<p class='lead'>{lead}</p></header>{tiles(figures)}"
    )


def _learning(report: Report) -> str:
    s = report.summary
    chart = charts.learning_curve(
        [m["success"] for m in report.history],
        [m["reward"] or 0.0 for m in report.history],
        s["best_without_feedback"],
        s["eval_success_before"],
        s["eval_success_after"],
    )
    note = (
        "The best policy that ignores the answers guesses different numbers, with a success rate at the dashed line "
        f"({s['best_without_feedback']:.3f}; {s['best_without_feedback_hindsight']:.3f} for the list that hindsight "
        "would pick on the evaluation's seeds). A success rate above the line comes from the use of feedback. The "
        "policy may sample every token of the vocabulary. Large dots: held-out seeds. Line: episodes of training."
    )
    return section("Learning", chart, note)


def _ages(report: Report) -> str:
    ages = report.summary.get("asynchronous")
    return "" if ages is None else ages_section(ages, report.history)


def _timeline(report: Report) -> str:
    s, pace = report.summary, report.pace
    chart = charts.timeline(
        (
            ("Each at its own pace", pace.own_pace, pace.own_pace_seconds),
            ("Lock step: one batch per turn, wait for all", pace.lockstep, pace.lockstep_seconds),
        ),
        [(pace.ideal_seconds, f"ideal: {pace.ideal_seconds:.2f} s")],
    )
    names = legend((("waiting for the environment", charts.AMBER), ("generating", charts.BLUE), ("idle", "#dfe2e8")))
    note = (
        f"The same {s['pace_episodes']} episodes, seeds and waits, played by the trained policy both ways "
        f"({s['same_trajectories']} of {s['pace_episodes']} sampled the very same tokens); 44 of them are drawn. "
        f"Environment waits: {report.setup['waits']}. Lock step took {s['lockstep_seconds']:.2f} s, own pace "
        f"{s['own_pace_seconds']:.2f} s. No schedule can beat the longest episode played alone "
        f"({s['longest_alone_seconds']:.2f} s) nor the work at the server's measured rate ({s['work_seconds']:.2f} s)."
    )
    return section("Why not in lock step", names + chart, note)


def _pushes(report: Report) -> str:
    syncs = [1e3 * m["sync_seconds"] for m in report.history if not m["skipped"]]
    left = charts.push_latency(syncs, report.summary["push_ms_median"])
    right = charts.logprob_gap([m["logprob_gap"] for m in report.history if m["logprob_gap"] is not None], GAP_LIMIT)
    note = (
        "Left: time from the trainer's call of update_weights_from_tensor to the server's answer that it serves the "
        "new weights. Handles travel, not bytes. Right: the largest difference between the log-probability that the "
        "server reported for a sampled token and the one that the trainer computes from the weights that it pushed."
    )
    return section("Weight pushes", f"<div class='two'><div>{left}</div><div>{right}</div></div>", note)


def _time(report: Report) -> str:
    if (ages := report.summary.get("asynchronous")) is not None:
        return time_section(ages, report.history, report.summary["train_seconds"])
    env = generate = 0.0
    for m in report.history:
        waiting = m["env_seconds"] + m["generate_seconds"]
        env += m["rollout_seconds"] * m["env_seconds"] / max(waiting, 1e-9)
        generate += m["rollout_seconds"] * m["generate_seconds"] / max(waiting, 1e-9)
    parts = (
        ("waiting for environments", env, charts.AMBER),
        ("generating", generate, charts.BLUE),
        ("training", sum(m["train_seconds"] for m in report.history), charts.GREEN),
        ("weight sync", sum(m["sync_seconds"] for m in report.history), charts.INK),
    )
    names = legend([(f"{name} {seconds:.1f} s", color) for name, seconds, color in parts])
    note = "Wall time of training. The time of rollouts is split by what their episodes waited for on average."
    return section("Where the time went", charts.share_bar(parts) + names, note)


def _episodes(report: Report, count: int = 8) -> str:
    """Return the first `count` held-out games before and after training, side by side, as HTML."""
    rows = []
    for before, after in list(zip(report.before, report.after, strict=True))[:count]:
        rows.append(f"<div class='pair'>{_episode(before)}{_episode(after)}</div>")
    head = "<div class='pair head'><div>Before: random weights</div><div>After training</div></div>"
    note = (
        "The first held-out seeds, without selection. Each row is one seed. The policy's words are bold, with the "
        "probability that it had for them."
    )
    return section("The same games, before and after", head + "".join(rows), note)


def _episode(trajectory: Trajectory) -> str:
    answers = [turn.observation for turn in trajectory.turns[1:]] + [trajectory.final_observation or {}]
    said = [f"<span class='env'>{_words(trajectory.turns[0].observation)}</span>"] if trajectory.turns else []
    for turn, answer in zip(trajectory.turns, answers, strict=False):  # an episode that could not begin has no turn
        probability = math.exp(sum(trajectory.logprobs[slice(*turn.action_span)]))
        said.append(f"<span class='say'>{_words(turn.action or {})}<small>{probability:.0%}</small></span>")
        said.append(f"<span class='env'>{_words(answer)}</span>")
    if trajectory.reward is None:
        verdict = f"<span class='verdict'>{escape(str(trajectory.stop_reason))}</span>"
    else:
        won = trajectory.reward > 0
        verdict = f"<span class='verdict {'won' if won else 'lost'}'>{'found' if won else 'not found'}</span>"
    return f"<div class='episode'>{verdict}{' '.join(said)}</div>"


def _words(message: dict[str, Any]) -> str:
    return escape(str(message.get("text", "")).strip() or "∅")


def _method(report: Report) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.setup.items())
    failed = f"{report.summary['episodes_failed']} (an environment that fails is counted, never scored as zero)"
    rows += f"<dt>failed episodes</dt><dd>{failed}</dd>"
    return section(
        "Setup", f"<dl>{rows}</dl>", "All figures are in summary.json, metrics.jsonl and trajectories.jsonl."
    )


def _power(value: float) -> str:
    """Return a number as a power of ten: 3.9e-06 becomes 4e-6."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"
