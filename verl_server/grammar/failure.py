"""Errors of grammars that were compiled. A process that loads no grammar library can name them."""

from __future__ import annotations

from verl_server.errors import ServerUnavailableError


class GrammarFailedError(Exception):
    """A matcher cannot continue. The message states the cause: it reached a limit, or it did not expect the token."""


class GrammarLibraryError(Exception):
    """The library failed by itself, in another process. The message has the type and the text of its error."""


class MatchersLostError(ServerUnavailableError):
    """The process that had the matcher has ended."""
