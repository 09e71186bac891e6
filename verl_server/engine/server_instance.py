"""`ServerInstance`: the run of a server that an adapter knows, so that it never takes a restarted one for it.

A server that is started again serves the weights that it loads, not those that were pushed to it before. Every request
of an adapter names the run that it expects; the server checks that before it does anything (`server.instance`), so no
race is left, and no round trip is added. Every answer names its run, too, which also covers a server of another make,
or of an older version, that took over the URL and knows nothing of the check.

Each adapter knows its run by itself: of two that share a server, each must `heal` or `accept_restart`. An adapter that
attaches takes the server as it is. A server that names no run is not watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from verl_server.errors import ServerRestartedError
from verl_server.io_struct import EXPECTED_INSTANCE_HEADER


class ServerInstance:
    """Used by all threads of an adapter."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.id: str | None = None
        """None: the server names no run, or was not asked yet."""
        self.weight_version: str | None = None
        """The newest version that this adapter knows of."""
        self._thread = threading.local()

    @contextlib.contextmanager
    def addressing(self, id: str | None) -> Iterator[None]:
        """The calls of this thread are for the run `id` (None: for any), those of other threads as before."""
        self._thread.id = id
        try:
            yield
        finally:
            del self._thread.id

    def headers(self) -> dict[str, str]:
        """Of a request."""
        expected = self._expected
        return {EXPECTED_INSTANCE_HEADER: expected} if expected is not None else {}

    def check(self, status_code: int, found: str | None) -> None:
        """Raise ServerRestartedError unless an answer comes from the expected run, or is a proxy's error.

        `found`: its `INSTANCE_HEADER`.
        """
        expected = self._expected
        if expected is None or found == expected or (found is None and status_code >= 300):
            return
        now = f"is run {found}" if found is not None else "names no run"
        raise ServerRestartedError(
            f"The server at {self._url} was started again: it {now}, this engine knew run {expected} at weight "
            f"version {self.weight_version!r}. It serves what it loaded at its start until the weights are pushed "
            "again. On the engine that pushes, call heal(), which pushes them again, or accept_restart() to go on with "
            "what is served."
        )

    @property
    def _expected(self) -> str | None:
        expected: str | None = getattr(self._thread, "id", self.id)
        return expected
