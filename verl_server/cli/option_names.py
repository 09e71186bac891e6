"""`as_options`: name options of the command line in an error that names fields of a class."""

from __future__ import annotations

import re

_FIELD = re.compile(r"\b(?:sampling_params|Limits|GRPOConfig)\.(\w+)")


def as_options(message: str) -> str:
    """Return a message with `--max-turns` for `Limits.max_turns`, and `--temperature` for that of sampling params."""
    return _FIELD.sub(lambda found: "--" + found[1].replace("_", "-"), message)
