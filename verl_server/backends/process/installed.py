"""`check_installed`: whether an engine is installed in the version that was run with this release."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from verl_server.errors import BadRequestError


def check_installed(engine: str, title: str, tested: Mapping[str, str], allow_untested: bool) -> str:
    """Return "NAME VERSION" of the installed engine. Raise BadRequestError if there is none, or an untested one.

    `engine` is the value of `ServerArgs.engine`, `title` the name of the project. `tested`: distribution -> the version
    with which tests and benchmarks were run.
    """
    installed = {name: found for name in tested if (found := version(name)) is not None}
    if not installed:
        raise BadRequestError(
            f"engine={engine!r} needs {title}, which is not installed: pip install 'verl-server[{engine}]'."
        )
    name, found = next(iter(installed.items()))
    if found.split("+")[0] != tested[name] and not allow_untested:
        raise BadRequestError(
            f"{name} {found} is installed, but this release was run with {name} {tested[name]} only. Install that "
            "version, or set allow_untested_engine=True."
        )
    return f"{name} {found}"


def version(distribution: str) -> str | None:
    """Return the version of an installed distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
