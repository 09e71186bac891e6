"""What is wrong with a run. `advice` fills these answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_server.watch.site.answers.values import Number


class Advisory(msgspec.Struct, kw_only=True):
    """What is wrong with a run, over all steps that said so."""

    name: str
    severity: Literal["notice", "warning", "error"]
    """error: the run learns little or nothing, or trains another policy than the one that is sampled."""
    step: int
    """The newest step."""
    first_step: int
    count: int
    """Number of times that it was said."""
    figure: dict[str, Number]
    """The measured numbers of the newest step, by name."""
    bound: Number
    """The bound that one of them crossed."""
    message: str
    cause: str
    remedy: str
    ended: int | None = None
    """Step at which it stopped being true, None if it still is, or if nobody noted the end."""
    computed: bool = False
    """True if the run's files have no advisories, and this server judged the metrics now."""


class Advisories(msgspec.Struct, kw_only=True):
    """Those that are true now come first, the most severe before, then the newest."""

    advisories: list[Advisory]
    judged: bool = True
    """False if the run has nothing to judge, such as a rollout without a trainer, or cannot be judged."""
    problem: str | None = None
    """Why it cannot be judged."""
