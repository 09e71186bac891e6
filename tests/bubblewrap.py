"""The mark of tests that run a program in bubblewrap, which a machine may lack or forbid: `needs_bubblewrap`."""

from __future__ import annotations

import shutil

import pytest

from verl_server.errors import BadRequestError
from verl_server.rollout.environments.isolation import check_isolation


def _reason() -> str | None:
    """Return why bubblewrap cannot isolate a program here, with the remedy; None if it can. This starts it once."""
    if shutil.which("bwrap") is None:
        return "needs bubblewrap: apt-get install bubblewrap"
    try:
        check_isolation("bubblewrap")
    except BadRequestError as error:
        return f"needs bubblewrap and the right to make namespaces: {error}"
    return None


_MISSING = _reason()
needs_bubblewrap = pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "")

ISOLATIONS = ["none", pytest.param("bubblewrap", marks=needs_bubblewrap)]
"""The values of a parameter `isolation`."""
