"""A trajectory in the terminal: its tokens, colored by log-probability, loss mask or weight version."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from verl_server.messages.session_types import Message
from verl_server.rollout.trajectory import Trajectory

ColorBy = Literal["logprob", "mask", "version"]
TokenText = Callable[[list[int]], str]

_PROBABILITIES = ((0.9, "green"), (0.5, "cyan"), (0.2, "yellow"), (0.05, "magenta"), (0.0, "bold red"))
_VERSIONS = ("cyan", "yellow", "magenta", "green", "blue", "red")
_READ = "bright_black"
_SHARED = "blue"


def render(trajectory: Trajectory, color: ColorBy, text_of: TokenText | None) -> RenderableType:
    """Return the whole trajectory for the terminal.

    `text_of` decodes ids. None shows what an agent and its policy said, and ids where the record has no text.
    """
    parts: list[RenderableType] = [legend(color, trajectory)]
    style = _style(trajectory, color)
    for number, turn in enumerate(trajectory.turns):
        start, end = turn.observation_span[0], turn.action_span[1]
        calls = (turn.action or {}).get("calls") or []
        names = "".join(f" · {call.get('name', 'call')}" for call in calls if isinstance(call, dict))
        ended = f" · {turn.finish_reason}" if turn.finish_reason else ""
        parts.append(Rule(Text(f"turn {number}{ended}{names}"), style="bright_black", align="left"))
        if text_of is None and (turn.messages or turn.reply):
            parts += [_said(message) for message in turn.messages]
            parts += [_said(turn.reply, "none")] if turn.reply is not None else []
            continue
        line = Text()
        for first, last, kind in _runs(style[start:end]):
            ids = trajectory.tokens[start + first : start + last]
            line.append(_visible(text_of(ids)) if text_of is not None else " ".join(map(str, ids)) + " ", kind)
        parts.append(line)
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    parts.append(Rule(f"{trajectory.stop_reason} · reward {reward}", style="bright_black", align="left"))
    if trajectory.error:
        parts.append(Text(trajectory.error, "red"))
    return Group(*parts)


def _said(message: Message, style: str = _READ) -> Text:
    """Return a message as text, each part after its name."""
    parts = [(f"{message.role}, reasoning", message.reasoning)] if message.reasoning else []
    parts += [(message.role, message.text)] if message.text or not (message.reasoning or message.calls) else []
    parts += [(f"call {call.name}", call.arguments) for call in message.calls]
    line = Text("\n").join(Text(f"{_visible(name)}: ", "bold").append(_visible(text), style) for name, text in parts)
    if message.cut:
        line.append(f"\n({message.cut} characters are missing)", "red")
    return line


def _visible(text: str) -> str:
    """Return a text that cannot change the terminal: its control characters are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


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
