"""The version of SGLang that was run with this release."""

from __future__ import annotations

import importlib.metadata

from verl_server.errors import BadRequestError

TESTED = "0.5.16"


def check_installed(allow_untested: bool) -> str:
    """Return "sglang VERSION" of the installed SGLang. Raise BadRequestError if there is none, or an untested one."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise BadRequestError(
            "engine='sglang' needs SGLang, which is not installed: pip install 'verl-server[sglang]'."
        ) from None
    if version.split("+")[0] != TESTED and not allow_untested:
        raise BadRequestError(
            f"sglang {version} is installed, but this release was run with sglang {TESTED} only. Install that version, "
            "or set allow_untested_engine=True."
        )
    return f"sglang {version}"
