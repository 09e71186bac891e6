"""Draws the learning curves of training runs, for the benchmarks that train."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from verl_server.watch import charts

COLOURS = (charts.BLUE, charts.AMBER, charts.GREEN, charts.INK)
MEAN_OF = 5
"""Steps of the moving mean that is drawn."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _BOTTOM = 760.0, 300.0, 60.0, 18.0, 26.0
_FONT = ' font-family="system-ui, sans-serif" font-size="12" style="background: white" viewBox'


def draw_curves(curves: Sequence[tuple[str, Sequence[float]]], steps: int, top: float, label: str) -> str:
    """Return an SVG drawing of (colour, value of each step) between 0 and `top`, over `steps` training steps."""
    across, up = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - 10
    body = ""
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = 10 + up * (1 - share)
        body += charts.line(_LEFT, y, _WIDTH - _RIGHT, y)
        body += charts.text(_LEFT - 6, y + 4, f"{share * top:.2g}", anchor="end")
    for step in (tick for tick in charts.ticks(steps, 8) if tick <= steps):
        body += charts.text(_LEFT + across * step / steps, _HEIGHT - 6, f"{step:g}", anchor="middle")
    for colour, values in curves:
        means = [statistics.mean(values[max(0, at + 1 - MEAN_OF) : at + 1]) for at in range(len(values))]
        points = [(_LEFT + across * (at + 1) / steps, 10 + up * (1 - mean / top)) for at, mean in enumerate(means)]
        body += charts.polyline(points, colour, width=1.5)
    return charts.svg(_WIDTH, _HEIGHT, body, label)


def as_file(drawing: str, names: Sequence[tuple[str, str]]) -> str:
    """Return a drawing of `draw_curves` as an SVG file of its own, with (name, colour) of each curve below it."""
    legend, x, y = "", _LEFT, _HEIGHT + 14
    for name, colour in names:
        legend += charts.rect(x, y - 9, 10, 10, colour) + charts.text(x + 16, y, name)
        x += 100
    taller = drawing.replace(f"{_WIDTH:g} {_HEIGHT:g}", f"{_WIDTH:g} {_HEIGHT + 24:g}", 1).replace(" viewBox", _FONT, 1)
    return taller.replace("</svg>", f"{legend}</svg>") + "\n"
