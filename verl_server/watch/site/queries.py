"""`Query`: the parameters of a request's URL. `views` take what they know, and refuse everything else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from verl_server.watch.index.rows import EpisodeFilter
from verl_server.watch.site.page_errors import PageError

T = TypeVar("T", bound=str)

LONGEST = 500
"""Most characters of a parameter."""


class Query:
    """Each parameter is taken once. `finish` refuses those that nobody took."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._given: dict[str, str] = {}
        for name, value in pairs:
            if name in self._given:
                raise PageError(400, f"The parameter {name:.50} is given twice.")
            if len(value) > LONGEST:
                raise PageError(400, f"The parameter {name:.50} has more than {LONGEST} characters.")
            self._given[name] = value

    def text(self, name: str) -> str | None:
        """Return the value of a parameter, None if it is absent or empty."""
        return self._given.pop(name, "") or None

    def choice(self, name: str, choices: Sequence[T], default: T) -> T:
        value = self.text(name)
        if value is None:
            return default
        for each in choices:
            if each == value:
                return each
        raise PageError(400, f"{name}={value:.50} is unknown.", f"{name} is one of: {', '.join(choices)}.")

    def integer(self, name: str, least: int | None = None, most: int | None = None) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        try:
            found = int(value) if value.isascii() and len(value) < 20 else None
        except ValueError:
            found = None
        if found is None or (least is not None and found < least) or (most is not None and found > most):
            bounds = "" if least is None else f" from {least}" + ("" if most is None else f" to {most}")
            raise PageError(400, f"{name}={value:.50} must be an integer{bounds}.")
        return found

    def figure(self, name: str) -> float | None:
        """Return a finite number."""
        value = self.text(name)
        if value is None:
            return None
        try:
            found = float(value)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise PageError(400, f"{name}={value:.50} must be a number.")
        return found

    def flag(self, name: str) -> bool:
        return self.choice(name, ("0", "1"), "0") == "1"

    def filters(self, place: str | None = None) -> EpisodeFilter:
        """Return the filters of the URL, which `answers` lists. `place` is the step of the URL's path."""
        return EpisodeFilter(
            place=place or self.text("step"),
            first_step=self.integer("from", 0),
            last_step=self.integer("to", 0),
            stop_reason=self.text("stop"),
            fault=self.text("fault"),
            least_reward=self.figure("reward_from"),
            most_reward=self.figure("reward_to"),
            least_tokens=self.integer("tokens_from", 0),
            most_tokens=self.integer("tokens_to", 0),
            tool=self.text("tool"),
            has_error=True if self.flag("error") else None,
            group=self.integer("group", 0),
            version=self.text("version"),
            lost=self.flag("lost"),
        )

    def finish(self) -> None:
        """Raise PageError for parameters that the URL does not have."""
        if self._given:
            names = ", ".join(f"{name:.50}" for name in sorted(self._given)[:5])
            raise PageError(400, f"This URL has no parameter {names}.")
