"""The parts of the demo's report about an asynchronous run: ages, versions of an episode, waits and idle shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_server.watch import charts
from verl_server.watch.page import legend, section

_WAITS = {
    "episodes": ("waiting for episodes", charts.AMBER),
    "deadline": ("waiting for a group at its deadline", charts.RED),
    "servers": ("waiting for servers", "#b9c0cc"),
}
"""Cause of a wait -> its name and color."""
_MOST_VERSIONS = 4
"""Episodes with this many versions or more are one part of a bar."""


def ages_section(ages: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    """Return the section about ages as HTML.

    `ages` is `asynchronous` of summary.json, `history` the lines of metrics.jsonl.
    """
    old = [str(age) for age in range(ages["max_staleness"] + 1)]
    spans = [str(count) for count in range(1, _MOST_VERSIONS + 1)]
    left = _stacked(
        [[float(m["ages"].get(age, 0)) for age in old] for m in history],
        [f"age {age}" for age in old],
        "age of the episodes of each step",
    )
    right = _stacked(
        [[float(_of_versions(m["version_spans"], int(count))) for count in spans] for m in history],
        [_versions(int(count)) for count in spans],
        "weight versions that sampled an episode",
    )
    episodes = max(1, sum(ages["ages"].values()))
    mean = sum(int(age) * count for age, count in ages["ages"].items()) / episodes
    several = [sum(n for count, n in ages["version_spans"].items() if int(count) >= least) for least in (2, 3)]
    note = (
        "Left: the age of an episode is the number of the version that was trained, minus that of the version that "
        f"sampled its oldest token. The mean is {mean:.2f}, and no group was trained more than {ages['max_staleness']} "
        "weight pushes after it began. Right: a push does not stop an episode. It goes on under the new weights, and "
        f"each token names its version: {several[0] / episodes:.0%} of the episodes are of two versions or more, "
        f"{several[1] / episodes:.0%} of three or more."
    )
    return section("How old the episodes were", _pair(left, right), note)


def time_section(ages: Mapping[str, Any], history: Sequence[Mapping[str, Any]], train_seconds: float) -> str:
    """Return the section about the trainer's time as HTML. `train_seconds` is the wall time of training."""
    causes = [cause for cause in _WAITS if ages["waits"].get(cause, 0) > 0]
    parts = [
        ("training", sum(m["train_seconds"] for m in history), charts.GREEN),
        ("weight sync", sum(m["sync_seconds"] for m in history), charts.INK),
        *((_WAITS[cause][0], ages["waits"][cause], _WAITS[cause][1]) for cause in causes),
    ]
    rest = train_seconds - sum(seconds for _, seconds, _ in parts)
    parts.append(("other work", max(0.0, rest), charts.GRID))
    names = legend([(f"{name} {seconds:.1f} s", color) for name, seconds, color in parts])
    waits = charts.stacked_steps(
        [[float(m["waits"].get(cause, 0.0)) for cause in causes] for m in history],
        [_WAITS[cause][0] for cause in causes],
        [_WAITS[cause][1] for cause in causes],
        "seconds that the trainer waited before each step",
        "s",
    )
    curves = [
        (f"{party} idle {ages['idle'][name]:.0%}", [m["idle"].get(name) for m in history], color)
        for name, party, color in (("trainer", "trainer", charts.GREEN), ("servers", "rollout server", charts.BLUE))
        if name in ages["idle"]
    ]
    lines = charts.share_lines(curves, "share of the time without work")
    lines += legend([(name, color) for name, _, color in curves])
    note = (
        "Bar: wall time of the trainer. Left: the seconds for which it waited before each step. It waits for episodes "
        "if too few groups have finished, and for a deadline if an older group must not become too old. Right: the "
        "share of the time in which the trainer waited, and in which the rollout server had no request. Episodes play "
        "all the time, also while the trainer trains."
    )
    return section("Where the time went", charts.share_bar(parts) + names + _pair(waits, lines, "apart"), note)


def _stacked(rows: Sequence[Sequence[float]], names: Sequence[str], title: str) -> str:
    """Return the drawing with its legend as HTML. A name without any episode is left out."""
    present = [i for i in range(len(names)) if any(row[i] for row in rows)]
    shown = [names[i] for i in present]
    colors = charts.shades(len(names))
    drawing = charts.stacked_steps(
        [[row[i] for i in present] for row in rows], shown, [colors[i] for i in present], title
    )
    return drawing + legend([(names[i], colors[i]) for i in present])


def _of_versions(spans: Mapping[str, int], count: int) -> int:
    """Return the number of episodes of `count` versions; the last count includes those of more."""
    return sum(n for found, n in spans.items() if min(int(found), _MOST_VERSIONS) == count)


def _versions(count: int) -> str:
    return "1 version" if count == 1 else f"{count} versions{' or more' if count == _MOST_VERSIONS else ''}"


def _pair(left: str, right: str, name: str = "") -> str:
    return f"<div class='two {name}'><div>{left}</div><div>{right}</div></div>"
