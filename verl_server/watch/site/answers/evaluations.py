"""The evaluations of a run on held-out tasks. `watch.site.evaluations` fills these answers."""

from __future__ import annotations

import msgspec

from verl_server.watch.site.answers.values import Number


class Evaluation(msgspec.Struct, kw_only=True):
    """An evaluation that has ended. Its episodes are those of the Step held-out-N, N is `step`."""

    step: int
    """Number of the steps before: the weights are those of checkpoint-STEP."""
    version: str
    """Version of the weights."""
    episodes: int
    """Episodes that were scored."""
    failed: int
    """Episodes that ended without a score."""
    unfinished: int
    """Episodes that were cancelled when the evaluation ended."""
    reward: Number
    """Mean reward of the scored episodes."""
    success: Number
    """Share of the scored episodes that succeeded."""
    seconds: Number
    """Time from its begin to the end of its last episode."""
    push_delay: Number
    """Seconds for which it held a push."""
    incomplete: str | None
    """The reason if its figures cannot be compared with others; null if they can."""
    time: float
    """Time of its end."""
    best: bool
    """True for the highest mean reward of those that are not incomplete, the later one of two equals."""
    checkpoint: bool
    """True if the folder of the run has checkpoint-STEP now."""


class Evaluations(msgspec.Struct, kw_only=True):
    """The evaluations of a run by their steps, without those of weights that a resumed run has lost."""

    evaluations: list[Evaluation]
    playing: int | None = None
    """Step of the evaluation that plays now, null if there is none."""
    next: int | None = None
