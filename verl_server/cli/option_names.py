"""`as_options` and `with_flags`: name options of the command line in an error that names fields of a class."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FIELD = re.compile(r"\b(?:sampling_params|Limits|GRPOConfig)\.(\w+)")


def as_options(message: str) -> str:
    """Return a message with `--max-turns` for `Limits.max_turns`, and `--temperature` for that of sampling params."""
    return _FIELD.sub(lambda found: "--" + found[1].replace("_", "-"), message)


def with_flags(message: str, names: Sequence[str]) -> str:
    """Return an error message of settings with flags instead of the field `names`: `tp_size=3` becomes `--tp-size 3`.

    A field name of one word ("port") may be an English word. It is replaced only with a value or after "ServerArgs.".
    """
    for name in names:
        flag = "--" + name.replace("_", "-")
        start, end = r"(?:\bServerArgs\.|(?<![\w/.'\"-]))", r"(?![\w/-])"
        message = re.sub(rf"{start}{name}=True{end}", flag, message)
        message = re.sub(rf"{start}{name}=False{end}", f"--no-{flag[2:]}", message)
        message = re.sub(rf"{start}{name}=(?=[^\s=])", f"{flag} ", message)
        message = re.sub(rf"\bServerArgs\.{name}{end}", flag, message)
        if "_" in name:
            message = re.sub(rf"{start}{name}{end}", flag, message)
    return message
