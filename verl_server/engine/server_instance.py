"""`ServerInstance`: the server run that an HTTP adapter works with. It detects restarts of the server.

A restarted server serves the weights that it loads from disk, not the weights that were pushed to its previous run. So
every start of a server is a *run* with a random id. Each request of an adapter has the id of the expected run in a
header, and the server compares the ids before it does anything else (`server.instance`). This needs no extra request
and leaves no race. Each answer has the id of the run that answers. The adapter checks it, because a server of another
project or an older version may answer at the same URL and ignore the request's header.

If two adapters use one server, each of them must call `heal` or `accept_restart` after a restart. A new adapter accepts
the run that answers its first request. If this run sends no id, restarts are not detected.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from verl_server.errors import ServerRestartedError
from verl_server.messages.io_struct import EXPECTED_INSTANCE_HEADER


class ServerInstance:
    """The expected run of one server. All threads of an adapter share one `ServerInstance`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.id: str | None = None
        """Id of the expected run. None before the first answer, and if the server sends no id."""
        self.weight_version: str | None = None
        """The newest weight version that the server reported to this adapter."""
        self._thread = threading.local()

    @contextlib.contextmanager
    def addressing(self, id: str | None) -> Iterator[None]:
        """Expect the run `id` (None: any run) for the requests of this thread. Other threads are not affected."""
        self._thread.id = id
        try:
            yield
        finally:
            del self._thread.id

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that name the expected run."""
        expected = self._expected
        return {EXPECTED_INSTANCE_HEADER: expected} if expected is not None else {}

    def check(self, status_code: int, found: str | None) -> None:
        """Raise ServerRestartedError if an answer comes from another run than the expected one.

        `found` is the value of the answer's `INSTANCE_HEADER`; None if it has no such header. An error status without
        the header is accepted, because proxies send such answers.
        """
        expected = self._expected
        if expected is None or found == expected or (found is None and status_code >= 300):
            return
        now = f"it is run {found}" if found is not None else "its answer has no run id"
        raise ServerRestartedError(
            f"The server at {self._url} was started again: {now}, but this engine expects run {expected} with weight "
            f"version {self.weight_version!r}. The server serves the weights that it loaded at its start. On the "
            "engine that pushes weights, call heal() to push them again, or accept_restart() to use the weights that "
            "the server serves."
        )

    @property
    def _expected(self) -> str | None:
        expected: str | None = getattr(self._thread, "id", self.id)
        return expected
