"""Files that hold one API key, as every command with `--api-key-file` reads them."""

from __future__ import annotations

from pathlib import Path

from verl_server.errors import BadRequestError


def read_key_file(file: str | Path, setting: str) -> str:
    """Return the key in a file. Raise BadRequestError, which names `setting`, if there is none."""
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: an unknown ~user
        reason = getattr(error, "strerror", None) or error
        raise BadRequestError(f"{setting}={str(file)!r} cannot be read: {reason}.") from None
    check_key(key, f"The key in {setting}={str(file)!r}")
    return key


def check_key(key: str, what: str) -> None:
    """Raise BadRequestError, which names `what`, for a key that no header can carry."""
    if not (key and key.isascii() and key.isprintable() and " " not in key):
        raise BadRequestError(f"{what} must be one or more printable ASCII characters without spaces.")
