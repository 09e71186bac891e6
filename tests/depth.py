"""How much of a parametrized test `make test` runs; `make test-all` runs the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_depth(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """The values as parameters of a test: the first `quick` of them for `make test`, the others marked exhaustive."""
    return [v if i < quick else pytest.param(v, marks=pytest.mark.exhaustive) for i, v in enumerate(values)]
