"""`WeightVersion`: names the weights that one incarnation of a writer made, such as "13@5f2c9a1e".

A step number alone is no name. A run that is killed after step 13 and resumed from step 12 trains another step 13,
while servers, caches, session stores and trajectories still hold the weights or tokens of the lost one. So every start
of a writer (a training run that begins, is resumed or forked; a server, for the pushes that bring no label) draws an
*incarnation*, and the versions that it makes are numbered within it.

On the wire, a version is the string NUMBER@INCARNATION: the number in decimal digits without leading zeros, and 8
lowercase hexadecimal digits. Every other string is a *free label*. Two free labels are equal or not, and neither is the
newer one. Equal free labels do not prove equal weights either, because nobody knows who chose them, and when.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from verl_server.errors import BadRequestError

MAX_LABEL_LENGTH = 256
"""Most characters of a label."""
_FORM = re.compile("(0|[1-9][0-9]{0,17})@([0-9a-f]{8})")


def new_incarnation() -> str:
    """Draw the incarnation of a start. The ranks of a run share the one that rank 0 draws."""
    return secrets.token_hex(4)


@functools.total_ordering
@dataclass(frozen=True)
class WeightVersion:
    """Version `number` of an incarnation. `str` returns the label, `parse` reads it.

    Versions of one incarnation are ordered. Comparing those of two incarnations with `<` raises BadRequestError.
    """

    number: int
    """At least 0, and less than 10**18."""
    incarnation: str
    """8 lowercase hexadecimal digits (`new_incarnation`)."""

    def __post_init__(self) -> None:
        if type(self.number) is not int or _FORM.fullmatch(str(self)) is None:  # "10" would be less than "9"
            raise BadRequestError(
                f"{self.number!r}@{self.incarnation} is no weight version: it needs an integer from 0 to 10**18 - 1, "
                "and 8 lowercase hexadecimal digits."
            )

    @classmethod
    def parse(cls, label: str) -> WeightVersion | None:
        """Return the version that `label` names, or None for a free label."""
        found = _FORM.fullmatch(label)
        return None if found is None else cls(int(found[1]), found[2])

    def next(self) -> WeightVersion:
        """Return the version after this one."""
        return WeightVersion(self.number + 1, self.incarnation)

    def __str__(self) -> str:
        return f"{self.number}@{self.incarnation}"

    def __lt__(self, other: WeightVersion) -> bool:
        if not isinstance(other, WeightVersion):
            return NotImplemented
        if self.incarnation != other.incarnation:
            raise BadRequestError(
                f"The weight versions {self} and {other} have no order: they are of two incarnations, and the numbers "
                "of one say nothing about those of the other."
            )
        return self.number < other.number


def at_least(version: WeightVersion) -> str:
    """Return the demand that `version`, and every later one of its incarnation, satisfies (`satisfies`)."""
    return f">={version}"


def satisfies(served: str | None, demand: str) -> bool:
    """Return True if weights with the label `served` satisfy `demand`: a label, or `at_least` a version."""
    least = WeightVersion.parse(demand[2:]) if demand.startswith(">=") else None
    if least is None:
        return served == demand
    version = None if served is None else WeightVersion.parse(served)
    return version is not None and version.incarnation == least.incarnation and version >= least


AnyVersion = str | int | WeightVersion
"""A version as a caller of an engine may name it; see `label_of`."""


def label_of(version: AnyVersion | None) -> str | None:
    """Return the label that a caller's version is: a text as it is, an integer in decimal digits. None stays None.

    Raise BadRequestError for anything else, such as bytes: its text would be another label than the caller's.
    """
    if version is None or isinstance(version, str):
        return version
    if isinstance(version, bool) or not isinstance(version, int | WeightVersion):
        raise BadRequestError(f"A weight version is a text, an integer or a WeightVersion, not {version!r:.80}.")
    return str(version)


class OwnVersions:
    """The versions that a server, or the adapter of a server, makes for weights that come without a label."""

    def __init__(self, draw: Callable[[], str] = new_incarnation) -> None:
        """`draw` returns an incarnation, the same on all ranks. It is called when the first label is needed."""
        self._draw = draw
        self._newest: WeightVersion | None = None

    def next_label(self) -> str:
        """Return a label that no weights had before."""
        self._newest = (self._newest or WeightVersion(0, self._draw())).next()
        return str(self._newest)

    def note(self, label: str) -> None:
        """Take note of a caller's label. If it is of this incarnation, the next label is of another one."""
        version = WeightVersion.parse(label)
        if version is not None and self._newest is not None and version.incarnation == self._newest.incarnation:
            self._newest = None
