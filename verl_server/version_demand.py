"""Demands of requests on the weight version, and their judgement against the versions that a run of a server served.

A request may demand at least a version (`min_weight_version`) or exactly one label (`exact_weight_version`). One text
carries either demand: ">=NUMBER@INCARNATION" or the label itself, as `weight_version.satisfies` reads it; "" demands
nothing. Every token of the request's output satisfies the demand. The front reads demands and judges them before any
work; a scheduler judges them again when a request arrives and when the version changes, because a push may come
between.

A demand that the served version does not satisfy is *behind* if it may be satisfied later, and *superseded* if it will
never be. Superseded are: an exact version with a smaller number than the served one of its incarnation; a label that
was served before; and every demand on an incarnation that was served before, because no writer continues it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from verl_server.errors import BadRequestError, VersionBehindError, VersionSupersededError, WeightVersionError
from verl_server.weight_version import MAX_LABEL_LENGTH, WeightVersion, at_least, satisfies

MIN_FIELD, EXACT_FIELD = "min_weight_version", "exact_weight_version"
MIN_HEADER, EXACT_HEADER = "X-Verl-Min-Weight-Version", "X-Verl-Exact-Weight-Version"
"""Headers of a request that state its demand. Fields of the body win over the headers."""
VERSION_HEADER = "X-Verl-Weight-Version"
"""Header of every answer of a route that generates: the version that the server serves when the answer starts."""

Verdict = Literal["ok", "behind", "superseded"]

_MOST_KEPT = 1024
"""The most labels, and the most incarnations, that `ServedVersions` keeps."""


def read_demand(minimum: str | None, exact: str | None, names: tuple[str, str] = (MIN_FIELD, EXACT_FIELD)) -> str:
    """Return the demand that two fields state, or "" if both are None.

    `names` are the names of the fields in messages. Raise BadRequestError if both are set, if a label is empty or too
    long, and for a free label as the minimum.
    """
    if minimum is not None and exact is not None:
        raise BadRequestError(f"{names[0]} and {names[1]} cannot both be set. Send one of them.")
    if minimum is not None:
        _check_length(names[0], minimum)
        version = WeightVersion.parse(minimum)
        if version is None:
            raise BadRequestError(
                f"{names[0]}: {minimum!r} is a free label, and free labels have no order. Send a version "
                f"NUMBER@INCARNATION, or {names[1]}."
            )
        return at_least(version)
    if exact is not None:
        _check_length(names[1], exact)
        if exact.startswith(">=") and WeightVersion.parse(exact[2:]) is not None:
            raise BadRequestError(f"{names[1]}: {exact!r} is no label. Send {names[0]} to demand at least it.")
        return exact
    return ""


def demand_fields(demand: str | None) -> dict[str, str]:
    """Return the fields of a request that state `demand` (`read_demand` reads them); none for None and ""."""
    if not demand:
        return {}
    is_minimum = demand.startswith(">=") and WeightVersion.parse(demand[2:]) is not None
    return {MIN_FIELD: demand[2:]} if is_minimum else {EXACT_FIELD: demand}


def _check_length(name: str, label: str) -> None:
    if not 1 <= len(label) <= MAX_LABEL_LENGTH:
        raise BadRequestError(f"{name} must have 1 to {MAX_LABEL_LENGTH} characters, not {len(label)}.")


class ServedVersions:
    """The label that a run of a server serves, and the labels that it served before.

    The newest 1,024 free labels, versions and incarnations are kept.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.time) -> None:
        """Begin with the loaded weights. `clock` returns Unix seconds."""
        self._clock = clock
        self._labels: dict[str, None] = {}
        self._incarnations: dict[str, None] = {}
        self.current = label
        self.since = clock()
        """Unix time at which `current` was activated; of the start for the loaded weights."""

    def note(self, label: str) -> bool:
        """Record the label that is served now. Return True if it is another one than before."""
        if label == self.current:
            return False
        _keep(self._labels, self.current)
        if (before := WeightVersion.parse(self.current)) is not None:
            _keep(self._incarnations, before.incarnation)
        self.current, self.since = label, self._clock()
        return True

    def judge(self, demand: str) -> Verdict:
        """Return the verdict on a demand, "ok" for ""."""
        if not demand or satisfies(self.current, demand):
            return "ok"
        minimum = WeightVersion.parse(demand[2:]) if demand.startswith(">=") else None
        version = minimum or WeightVersion.parse(demand)
        served = WeightVersion.parse(self.current)
        if minimum is None and demand in self._labels:
            return "superseded"
        if version is None:
            return "behind"
        if served is None or served.incarnation != version.incarnation:
            return "superseded" if version.incarnation in self._incarnations else "behind"
        return "superseded" if minimum is None and served > version else "behind"

    def refusal(self, demand: str) -> WeightVersionError | None:
        """Return the error that refuses a request with this demand, or None if the served version satisfies it."""
        verdict = self.judge(demand)
        if verdict == "ok":
            return None
        is_minimum = demand.startswith(">=") and WeightVersion.parse(demand[2:]) is not None
        name, label = (MIN_FIELD, demand[2:]) if is_minimum else (EXACT_FIELD, demand)
        stated = f"The request demands {name}={label!r}, and the server serves {self.current!r}"
        if verdict == "behind":
            return VersionBehindError(f"{stated}. Retry when the weights were pushed, or send it to another server.")
        return VersionSupersededError(
            f"{stated}: the demanded version was superseded and will not be served again. Do not retry; send the "
            "request with another demand, or without one."
        )


def _keep(kept: dict[str, None], key: str) -> None:
    """Make `key` the newest entry, and drop the oldest one beyond the bound."""
    kept.pop(key, None)
    kept[key] = None
    if len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
