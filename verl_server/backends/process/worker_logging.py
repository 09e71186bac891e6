"""`log_in_worker`: this package's messages in a worker process of another project's engine."""

from __future__ import annotations

import logging


def log_in_worker(level: str, name: str) -> None:
    """Log messages of this package from `level` on to stderr, marked with `name`, as the engine may log nothing."""
    own = logging.getLogger("verl_server")
    own.setLevel(level.upper())
    own.propagate = False
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"[%(asctime)s {name}] %(levelname)s %(message)s"))
    own.addHandler(handler)
