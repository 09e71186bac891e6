"""`write_report`: one run on one page, `report.html`.

The demo calls it with its measurements. Styles and drawings are inside the page, which loads nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from verl_server.rollout import charts
from verl_server.rollout.pace import PaceComparison
from verl_server.rollout.trajectory import Trajectory

GAP_LIMIT = 1e-4
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
    """Write the page to `path`."""
    sections = (_headline, _learning, _timeline, _pushes, _time, _episodes, _method)
    body = "\n".join(section(report) for section in sections)
    path.write_text(_PAGE.replace("{{body}}", body), encoding="utf-8")


def _headline(report: Report) -> str:
    s = report.summary
    tiles = (
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
    cards = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><i>{escape(note)}</i></div>'
        for value, name, note in tiles
    )
    setup = report.setup
    return (
        "<header><p class='kicker'>verl-server · demo</p><h1>From random weights to a policy that listens</h1>"
        f"<p class='lead'>The game: {escape(setup['game'])}, from the answers <em>higher</em> and <em>lower</em>. A "
        "trainer, a rollout server and an environment server, three processes that talk over HTTP, trained a policy "
        f"that started from random weights: {escape(setup['policy'])}.</p></header><div class='tiles'>{cards}</div>"
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
    return _section("Learning", chart, note)


def _timeline(report: Report) -> str:
    s, pace = report.summary, report.pace
    chart = charts.timeline(
        (
            ("Each at its own pace", pace.own_pace, pace.own_pace_seconds),
            ("Lock step: one batch per turn, wait for all", pace.lockstep, pace.lockstep_seconds),
        ),
        [(pace.ideal_seconds, f"ideal: {pace.ideal_seconds:.2f} s")],
    )
    legend = _legend((("waiting for the environment", charts.AMBER), ("generating", charts.BLUE), ("idle", "#dfe2e8")))
    note = (
        f"The same {s['pace_episodes']} episodes, seeds and waits, played by the trained policy both ways "
        f"({s['same_trajectories']} of {s['pace_episodes']} sampled the very same tokens); 44 of them are drawn. "
        f"Environment waits: {report.setup['waits']}. Lock step took {s['lockstep_seconds']:.2f} s, own pace "
        f"{s['own_pace_seconds']:.2f} s. No schedule can beat the longest episode played alone "
        f"({s['longest_alone_seconds']:.2f} s) nor the work at the server's measured rate ({s['work_seconds']:.2f} s)."
    )
    return _section("Why not in lock step", legend + chart, note)


def _pushes(report: Report) -> str:
    syncs = [1e3 * m["sync_seconds"] for m in report.history if not m["skipped"]]
    left = charts.push_latency(syncs, report.summary["push_ms_median"])
    right = charts.logprob_gap([m["logprob_gap"] for m in report.history if m["logprob_gap"] is not None], GAP_LIMIT)
    note = (
        "Left: time from the trainer's call of update_weights_from_tensor to the server's answer that it serves the "
        "new weights. Handles travel, not bytes. Right: the largest difference between the log-probability that the "
        "server reported for a sampled token and the one that the trainer computes from the weights that it pushed."
    )
    return _section("Weight pushes", f"<div class='two'><div>{left}</div><div>{right}</div></div>", note)


def _time(report: Report) -> str:
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
    legend = _legend([(f"{name} {seconds:.1f} s", color) for name, seconds, color in parts])
    note = "Wall time of training. The time of rollouts is split by what their episodes waited for on average."
    return _section("Where the time went", charts.share_bar(parts) + legend, note)


def _episodes(report: Report, count: int = 8) -> str:
    """The first `count` held-out games before and after training, side by side."""
    rows = []
    for before, after in list(zip(report.before, report.after, strict=True))[:count]:
        rows.append(f"<div class='pair'>{_episode(before)}{_episode(after)}</div>")
    head = "<div class='pair head'><div>Before: random weights</div><div>After training</div></div>"
    note = (
        "The first held-out seeds, without selection. Each row is one seed. The policy's words are bold, with the "
        "probability that it had for them."
    )
    return _section("The same games, before and after", head + "".join(rows), note)


def _episode(trajectory: Trajectory) -> str:
    answers = [turn.observation for turn in trajectory.turns[1:]] + [trajectory.final_observation or {}]
    said = [f"<span class='env'>{_words(trajectory.turns[0].observation)}</span>"] if trajectory.turns else []
    for turn, answer in zip(trajectory.turns, answers, strict=True):
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
    return _section(
        "Setup", f"<dl>{rows}</dl>", "All figures are in summary.json, metrics.jsonl and trajectories.jsonl."
    )


def _power(value: float) -> str:
    """3.9e-06 as 4e-6."""
    mantissa, _, exponent = f"{value:.0e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _section(title: str, content: str, note: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}<p class='note'>{escape(note)}</p></section>"


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<span><i style='background:{color}'></i>{escape(name)}</span>" for name, color in entries)
    return f"<div class='legend'>{items}</div>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>verl-server demo</title>
<style>
:root { --ink: #1b1f24; --muted: #6b7280; --line: #e7e9ee; --blue: #2f5fd0; --green: #1f9467; --red: #c8553d; }
* { box-sizing: border-box; }
body { margin: 0; background: #fbfbfc; color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 1120px; margin: 0 auto; padding: 56px 30px 80px; }
.kicker { margin: 0; color: var(--blue); font-weight: 600; letter-spacing: .02em; }
h1 { margin: 6px 0 10px; font-size: 36px; line-height: 1.15; letter-spacing: -.02em; font-weight: 700; }
.lead { margin: 0; max-width: 780px; font-size: 17px; color: #3b424c; }
h2 { margin: 0 0 16px; font-size: 20px; letter-spacing: -.01em; }
section { margin-top: 28px; padding: 26px 30px 22px; background: #fff; border: 1px solid var(--line);
  border-radius: 12px; }
.note { margin: 14px 0 0; max-width: 860px; color: var(--muted); font-size: 13.5px; }
svg { display: block; width: 100%; height: auto; font-size: 12px; font-family: inherit; }
.tiles { display: grid; grid-template-columns: 1.25fr repeat(4, 1fr); gap: 14px; margin-top: 30px; }
.tile { padding: 18px 18px 16px; background: #fff; border: 1px solid var(--line); border-radius: 12px; }
.tile b { display: block; font-size: 27px; line-height: 1.2; letter-spacing: -.02em; white-space: nowrap; }
.tile span { display: block; margin-top: 4px; font-weight: 500; font-size: 14px; }
.tile i { display: block; margin-top: 3px; color: var(--muted); font-style: normal; font-size: 12.5px;
  line-height: 1.4; }
.two { display: grid; grid-template-columns: 1fr 1fr; gap: 30px; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 22px; margin: 0 0 12px; font-size: 13px; color: #3b424c; }
svg + .legend { margin: 12px 0 0; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 7px;
  vertical-align: -1px; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 30px; padding: 11px 0; border-top: 1px solid var(--line); }
.pair.head { border: 0; padding: 0 0 8px; font-weight: 600; font-size: 13.5px; color: var(--muted); }
.episode { font-size: 14px; line-height: 2; }
.env { color: var(--muted); margin-right: 6px; }
.say { font-weight: 650; padding: 2px 7px; background: #eef2fc; color: #22459a; border-radius: 6px; margin-right: 4px; }
.say small { font-weight: 400; color: #7c90c2; margin-left: 5px; font-size: 11px; }
.verdict { float: right; margin-left: 12px; font-size: 12.5px; font-weight: 600; color: var(--muted); }
.won { color: var(--green); } .lost { color: var(--red); }
dl { display: grid; grid-template-columns: 150px 1fr; gap: 6px 18px; margin: 0; font-size: 14px; }
dt { color: var(--muted); } dd { margin: 0; }
@media (max-width: 860px) { .tiles, .two, .pair { grid-template-columns: 1fr; } main { padding: 32px 16px; } }
</style></head><body><main>
{{body}}
</main></body></html>
"""
