"""`GrammarFailedError`. A process that loads no grammar library can name it."""

from __future__ import annotations


class GrammarFailedError(Exception):
    """A matcher cannot continue. The message states the cause: it reached a limit, or it did not expect the token."""
