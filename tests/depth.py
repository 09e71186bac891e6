"""Parameters of tests that `make test` runs in part and `make test-all` runs completely."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def at_depth(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Return the values as parameters of a test: the first `quick` for `make test`, the others marked exhaustive.

    A tuple is one value for each of several arguments.
    """
    arguments = [value if isinstance(value, tuple) else (value,) for value in values]
    return [
        pytest.param(*value, marks=pytest.mark.exhaustive if i >= quick else ()) for i, value in enumerate(arguments)
    ]
