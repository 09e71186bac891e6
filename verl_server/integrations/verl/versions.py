"""The versions of verl that this integration was run with. `__init__` checks the installed one before it registers."""

from __future__ import annotations

import importlib.metadata
import logging
import os

logger = logging.getLogger(__name__)

TESTED = ("0.9.1",)
"""Versions of verl that the tests in tests/verl were run with."""
ALLOW_UNTESTED = "VERL_SERVER_ALLOW_UNTESTED_VERL"
"""Environment variable; with the value 1, an untested version of verl causes a warning instead of an error."""


def check_version() -> None:
    """Raise ImportError, with the versions that work, unless a tested version of verl is installed."""
    works = " or ".join(TESTED)
    try:
        installed = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "verl_server.integrations.verl needs verl, which is not installed: pip install 'verl-server[verl]' "
            f"(verl {works})."
        ) from None
    if installed in TESTED:
        return
    if os.environ.get(ALLOW_UNTESTED) == "1":
        logger.warning("verl %s was not tested with verl-server. Tested: %s.", installed, works)
        return
    raise ImportError(
        f"verl {installed} was not tested with verl-server; verl {works} works: pip install 'verl=={TESTED[-1]}'. "
        f"Set {ALLOW_UNTESTED}=1 on every host to try version {installed} at your own risk."
    )
