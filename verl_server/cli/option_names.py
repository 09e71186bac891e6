"""`with_flags`: an error about settings names their flags. `files.command_options` does so for classes of options."""

from __future__ import annotations

import re
from collections.abc import Sequence


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
