"""A trajectory in the terminal: its tokens, colored by log-probability, loss mask or weight version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from verl_server.rollout.trajectory import Trajectory

ColorBy = Literal["logprob", "mask", "version"]
TokenText = Callable[[list[int]], str]

_PROBABILITIES = ((0.9, "green"), (0.5, "cyan"), (0.2, "yellow"), (0.05, "magenta"), (0.0, "bold red"))
_VERSIONS = ("cyan", "yellow", "magenta", "green", "blue", "red")
_READ = "bright_black"
_SHARED = "blue"


def render(trajectory: Trajectory, color: ColorBy, text_of: TokenText | None) -> RenderableType:
    """Return the whole trajectory for the terminal. `text_of` decodes ids; None shows the ids themselves."""
    parts: list[RenderableType] = [legend(color, trajectory)]
    style = _style(trajectory, color)
    for number, turn in enumerate(trajectory.turns):
        start, end = turn.observation_span[0], turn.action_span[1]
        calls = (turn.action or {}).get("calls") or []
        names = "".join(f" · {call.get('name', 'call')}" for call in calls if isinstance(call, dict))
        ended = f" · {turn.finish_reason}" if turn.finish_reason else ""
        parts.append(Rule(Text(f"turn {number}{ended}{names}"), style="bright_black", align="left"))
        line = Text()
        for first, last, kind in _runs(style[start:end]):
            ids = trajectory.tokens[start + first : start + last]
            line.append(text_of(ids) if text_of is not None else " ".join(map(str, ids)) + " ", kind)
        parts.append(line)
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    parts.append(Rule(f"{trajectory.stop_reason} · reward {reward}", style="bright_black", align="left"))
    if trajectory.error:
        parts.append(Text(trajectory.error, "red"))
    return Group(*parts)


def legend(color: ColorBy, trajectory: Trajectory) -> Text:
    """Return the meaning of the colors."""
    line = Text("read", _READ)
    if color == "logprob":
        for least, style in _PROBABILITIES:
            line.append(f"  p ≥ {least:g}" if least else "  less", style)
        line.append("  in an earlier branch", _SHARED)
    elif color == "mask":
        line.append("  sampled, mask 1", "green").append("  sampled, in an earlier branch", _SHARED)
    else:
        for version, style in _version_styles(trajectory).items():
            line.append(f"  version {version}", style)
    return line


def _style(trajectory: Trajectory, color: ColorBy) -> list[str]:
    """Return the style of every token."""
    styles = [_READ] * len(trajectory.tokens)
    versions = _version_styles(trajectory)
    for turn in trajectory.turns:
        for i in range(*turn.action_span):
            if color == "version":
                styles[i] = versions.get(trajectory.weight_versions[i], _READ)
            elif not trajectory.loss_mask[i]:
                styles[i] = _SHARED
            elif color == "mask":
                styles[i] = "green"
            else:
                probability = math.exp(min(0.0, trajectory.logprobs[i]))
                styles[i] = next(style for least, style in _PROBABILITIES if probability >= least)
    return styles


def _version_styles(trajectory: Trajectory) -> dict[str, str]:
    versions = dict.fromkeys(version for version in trajectory.weight_versions if version)
    return {version: _VERSIONS[i % len(_VERSIONS)] for i, version in enumerate(versions)}


def _runs(styles: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, style) of the longest runs of one style. Tokens of a run are decoded together."""
    start = 0
    for i in range(1, len(styles) + 1):
        if i == len(styles) or styles[i] != styles[start]:
            yield start, i, styles[start]
            start = i
