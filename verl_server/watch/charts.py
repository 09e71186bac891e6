"""SVG charts of the rollout report: functions from numbers to markup.

`report` puts the markup into its page. The drawings need no library and no script. Coordinates are CSS pixels; the
drawing scales with the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from verl_server.rollout.trajectory import Trajectory

BLUE, AMBER, GREEN, INK, MUTED, GRID, IDLE = "#2f5fd0", "#eaa53c", "#157f57", "#1b1f24", "#6b7280", "#e7e9ee", "#f1f2f5"
RED, AMBER_INK = "#b8452d", "#8a5a00"
"""`AMBER_INK` is for texts about what is amber, which is too light for texts."""


def svg(width: float, height: float, body: str, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def text(x: float, y: float, content: str, *, fill: str = MUTED, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(content)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, *, stroke: str = GRID, width: float = 1, dash: str = "") -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{stroke}" stroke-width="{width}"{dashed}/>'


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", radius: float = 0) -> str:
    hint = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.4):.2f}" height="{height:.2f}" rx="{radius}" '
        f'fill="{fill}">{hint}</rect>'
    )


def polyline(
    points: Sequence[tuple[float, float]], stroke: str, width: float = 2, *, dash: str = "", opacity: float = 1
) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = (f' stroke-dasharray="{dash}"' if dash else "") + (f' stroke-opacity="{opacity:g}"' if opacity < 1 else "")
    return (
        f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"{style} '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    )


def dot(x: float, y: float, fill: str, radius: float = 3, title: str = "") -> str:
    hint = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}">{hint}</circle>'


def ticks(top: float, count: int = 4) -> list[float]:
    """Return round numbers from 0 to `top` or a little more, in about `count` steps."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw - 1e-12)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def learning_curve(
    success: Sequence[float], reward: Sequence[float], baseline: float, before: float, after: float
) -> str:
    """Draw success and reward over training steps. A dashed line shows the best policy without feedback."""
    width, height, left, right, top, bottom = 1060.0, 320.0, 44.0, 130.0, 16.0, 38.0
    span = max(1, len(success) - 1)

    def at(step: float, value: float) -> tuple[float, float]:
        return left + (width - left - right) * step / span, height - bottom - (height - top - bottom) * value

    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(0, value)[1]
        parts += [line(left, y, width - right, y), text(left - 8, y + 4, f"{value:.2f}", anchor="end")]
    for step in ticks(span, 6):
        if step <= span:
            parts.append(text(at(step, 0)[0], height - bottom + 18, f"{step:.0f}", anchor="middle"))
    parts.append(text((left + width - right) / 2, height - 4, "training step", anchor="middle"))
    y = at(0, baseline)[1]
    parts.append(line(left, y, width - right, y, stroke=MUTED, width=1.2, dash="5 4"))
    end = width - right + 10
    labels = [
        (y, ["best without", f"feedback {baseline:.2f}"], MUTED, 400),
        (at(0, reward[-1])[1], ["reward"], AMBER_INK, 500),
        (at(0, after)[1], [f"success {after:.2f}"], BLUE, 600),
    ]
    parts.append(polyline([at(i, value) for i, value in enumerate(reward)], AMBER, 1.6))
    parts.append(polyline([at(i, value) for i, value in enumerate(success)], BLUE, 2.4))
    for step, value, name in ((0, before, "before"), (span, after, "after")):
        parts.append(
            dot(*at(step, value), "#fff", 6) + dot(*at(step, value), BLUE, 4.5, f"held out, {name}: {value:.3f}")
        )
    free = 0.0
    for label_y, lines, color, weight in sorted(labels):  # labels of curves that end side by side lie below each other
        for place, content in enumerate(lines):
            free = max(free, label_y + 4 + 15 * place)
            parts.append(text(end, free, content, fill=color, weight=weight))
            free += 15
    parts.append(text(left + 9, at(0, before)[1] + 14, f"{before:.2f}", fill=BLUE, weight=600))
    return svg(width, height, "".join(parts), "success over training")


def timeline(
    panels: Sequence[tuple[str, Sequence[Trajectory], float]], marks: Sequence[tuple[float, str]], rows: int = 44
) -> str:
    """Draw trajectories as rows of bars over one time axis, with a panel for each (title, trajectories, seconds)."""
    width, left, right, row, gap, head = 1060.0, 8.0, 8.0, 4.6, 1.4, 30.0
    longest = max(seconds for _, _, seconds in panels)
    scale = (width - left - right) / (longest * 1.02)
    body = rows * (row + gap)
    parts, y = [], 0.0
    for title, trajectories, seconds in panels:
        parts.append(text(left, y + 18, title, fill=INK, weight=600))
        y += head
        parts += _rows(_spread(trajectories, rows), left, y, scale, seconds, row, gap)
        x = left + seconds * scale
        parts.append(line(x, y - 4, x, y + body, stroke=INK, width=1.5))
        anchor, shift = ("end", -6.0) if x > width - 130 else ("start", 6.0)
        parts.append(text(x + shift, y - 8, f"all done: {seconds:.2f} s", fill=INK, anchor=anchor, weight=600))
        if y < body:
            for at, name in marks:
                x = left + at * scale
                parts.append(line(x, y - 4, x, y + body, stroke=GREEN, width=1.2, dash="4 3"))
                parts.append(text(x - 6, y - 8, name, fill=GREEN, anchor="end"))
        y += body + 10
    for value in ticks(longest, 8):
        if value <= longest * 1.02:
            x = left + value * scale
            parts += [line(x, y - 4, x, y, stroke=MUTED), text(x, y + 14, f"{value:g} s", anchor="middle")]
    return svg(width, y + 20, "".join(parts), "timeline of concurrent trajectories")


def _rows(
    trajectories: Sequence[Trajectory], left: float, y: float, scale: float, seconds: float, row: float, gap: float
) -> list[str]:
    colors = {"env": AMBER, "generate": BLUE, "queue": IDLE}
    names = {"env": "waiting for the environment", "generate": "generating", "queue": "waiting for a place"}
    parts = []
    for trajectory in trajectories:
        parts.append(rect(left, y, seconds * scale, row, IDLE, "waiting for the others, or done"))
        for event in trajectory.events:
            hint = f"{names[event.kind]}: {1e3 * (event.end - event.start):.0f} ms"
            parts.append(
                rect(left + event.start * scale, y, (event.end - event.start) * scale, row, colors[event.kind], hint)
            )
        y += row + gap
    return parts


def _spread(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Return `count` of the trajectories, evenly spaced in the order of their time in the environment."""
    ordered = sorted(trajectories, key=lambda t: t.seconds("env"))
    if len(ordered) <= count:
        return ordered
    return [ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)]


def push_latency(milliseconds: Sequence[float], median: float) -> str:
    """Draw the latency of the weight pushes, one dot each."""
    marks = ticks(max(milliseconds))
    names = [(value, f"{value:g}") for value in marks]
    dots = [(value, f"push {i + 1}: {value:.1f} ms") for i, value in enumerate(milliseconds)]
    parts, _ = _dots(dots, names, lambda value: value / marks[-1], (median, GREEN), "push")
    parts.append(text(_DOTS_RIGHT, 10, f"median {median:.1f} ms", fill=GREEN, anchor="end", weight=600))
    parts.append(text(_DOTS_LEFT, 9, "milliseconds"))
    return svg(_DOTS_WIDTH, _DOTS_HEIGHT, "".join(parts), "latency of each weight push")


def logprob_gap(gaps: Sequence[float], limit: float) -> str:
    """Draw the log-probability gap after each push on a logarithmic scale, with its limit as a line."""
    low, high = -8.0, math.log10(limit) + 0.5
    names = [(10.0**power, f"1e{power}") for power in range(-8, math.floor(high) + 1)]
    dots = [(value, f"step {i}: {value:.1e}") for i, value in enumerate(gaps)]

    def share(value: float) -> float:
        return min(1.0, (math.log10(max(value, 1e-8)) - low) / (high - low))

    parts, y = _dots(dots, names, share, (limit, RED), "training step")
    name = f"limit 1e{math.log10(limit):.0f}"
    parts.append(text(_DOTS_RIGHT, y - 5, name, fill=RED, anchor="end", weight=600))
    return svg(_DOTS_WIDTH, _DOTS_HEIGHT, "".join(parts), "log-probability gap after each push")


_DOTS_WIDTH, _DOTS_HEIGHT, _DOTS_LEFT, _DOTS_RIGHT = 520.0, 200.0, 44.0, 508.0


def _dots(
    dots: Sequence[tuple[float, str]],
    names: Sequence[tuple[float, str]],
    share: Callable[[float], float],
    bound: tuple[float, str],
    axis: str,
) -> tuple[list[str], float]:
    """Draw a dot for each (value, hint), a line for each named value and a dashed one for `bound` (value, color).

    `share` returns the height of a value between 0 and 1. Return the parts, and the y of the bound.
    """

    def at(i: float, value: float) -> tuple[float, float]:
        x = _DOTS_LEFT + (_DOTS_RIGHT - _DOTS_LEFT) * i / max(1, len(dots) - 1)
        return x, _DOTS_HEIGHT - 36.0 - (_DOTS_HEIGHT - 60.0) * share(value)

    parts = []
    for value, name in names:
        y = at(0, value)[1]
        parts += [line(_DOTS_LEFT, y, _DOTS_RIGHT, y), text(_DOTS_LEFT - 8, y + 4, name, anchor="end")]
    y = at(0, bound[0])[1]
    parts.append(line(_DOTS_LEFT, y, _DOTS_RIGHT, y, stroke=bound[1], width=1.2, dash="5 4"))
    parts += [dot(*at(i, value), BLUE, 2.6, hint) for i, (value, hint) in enumerate(dots)]
    parts.append(text((_DOTS_LEFT + _DOTS_RIGHT) / 2, _DOTS_HEIGHT - 4, axis, anchor="middle"))
    return parts, y


def shades(count: int) -> list[str]:
    """Return `count` shades of blue, from a light one to a dark one."""
    light, dark = (201, 216, 245), (24, 52, 120)
    steps = [i / max(1, count - 1) for i in range(count)]
    return ["#" + "".join(f"{round(a + (b - a) * at):02x}" for a, b in zip(light, dark, strict=True)) for at in steps]


def stacked_steps(
    rows: Sequence[Sequence[float]], names: Sequence[str], colors: Sequence[str], title: str, unit: str = ""
) -> str:
    """Draw a bar for each training step, of one part for each name. Without a `unit`, each bar is a whole of 100 %."""
    sums = [sum(row) for row in rows]
    marks = ticks(max(sums, default=0.0)) if unit else [0.0, 0.25, 0.5, 0.75, 1.0]
    across, up = _DOTS_RIGHT - _DOTS_LEFT, _DOTS_HEIGHT - 60.0
    wide = across / max(1, len(rows))
    parts = []
    for value in marks:
        y = _DOTS_HEIGHT - 36.0 - up * value / marks[-1]
        name = f"{value:g}" if unit else f"{value:.0%}"
        parts += [line(_DOTS_LEFT, y, _DOTS_RIGHT, y), text(_DOTS_LEFT - 8, y + 4, name, anchor="end")]
    for step, (row, total) in enumerate(zip(rows, sums, strict=True)):
        y, whole = _DOTS_HEIGHT - 36.0, marks[-1] if unit else total
        for value, name, color in zip(row, names, colors, strict=True):
            if value > 0:
                high = up * value / whole
                y -= high
                share = f"{value:.2f} {unit}" if unit else f"{value / total:.0%}"
                hint = f"step {step}, {name}: {share}"
                parts.append(rect(_DOTS_LEFT + step * wide, y, wide * 0.88, high, color, hint))
    parts += [*_step_axis(len(rows)), text(_DOTS_LEFT, 9, title)]
    return svg(_DOTS_WIDTH, _DOTS_HEIGHT, "".join(parts), title)


def share_lines(curves: Sequence[tuple[str, Sequence[float | None], str]], title: str) -> str:
    """Draw shares between 0 and 1 over training steps: (name, share of each step or None, color) of each line."""
    count = max((len(values) for _, values, _ in curves), default=1)

    def at(step: int, value: float) -> tuple[float, float]:
        x = _DOTS_LEFT + (_DOTS_RIGHT - _DOTS_LEFT) * (step + 0.5) / max(1, count)
        return x, _DOTS_HEIGHT - 36.0 - (_DOTS_HEIGHT - 60.0) * min(1.0, max(0.0, value))

    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(0, value)[1]
        parts += [line(_DOTS_LEFT, y, _DOTS_RIGHT, y), text(_DOTS_LEFT - 8, y + 4, f"{value:.0%}", anchor="end")]
    for _, values, color in curves:
        points = [at(step, value) for step, value in enumerate(values) if value is not None]
        parts.append(polyline(points, color, 1.8))
    parts += [*_step_axis(count), text(_DOTS_LEFT, 9, title)]
    return svg(_DOTS_WIDTH, _DOTS_HEIGHT, "".join(parts), title)


def _step_axis(count: int) -> list[str]:
    wide = (_DOTS_RIGHT - _DOTS_LEFT) / max(1, count)
    steps = [step for step in ticks(max(1, count - 1), 5) if step <= count - 1 and step == int(step)]
    y = _DOTS_HEIGHT - 20.0
    marks = [text(_DOTS_LEFT + (step + 0.44) * wide, y, f"{step:g}", anchor="middle") for step in steps]
    return [*marks, text((_DOTS_LEFT + _DOTS_RIGHT) / 2, _DOTS_HEIGHT - 4, "training step", anchor="middle")]


def share_bar(parts: Sequence[tuple[str, float, str]]) -> str:
    """Draw one bar, divided in proportion to the seconds of each (name, seconds, color)."""
    width, total = 1060.0, sum(seconds for _, seconds, _ in parts)
    x, body = 0.0, []
    for name, seconds, color in parts:
        part = width * seconds / total
        body.append(rect(x, 0, part - 1.5, 26, color, f"{name}: {seconds:.1f} s", 2))
        x += part
    return svg(width, 26, "".join(body), "where the time went")
