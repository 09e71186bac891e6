"""`VersionBorder`: the requests of an engine at the border between two weight versions.

The `ControlQueue` owns it. The loop of the engine asks `refusal` when a request arrives, and the `ControlQueue` calls
`cross` after each change of the version, before the next step. So at every step, the served version satisfies the
demand (`version_demand`) of each live request, also of a waiting one that the step admits. At a border, a request whose
demand excludes the new version ends with the tokens that it has. The front answers it as a complete output, or, if
there is no token, with the error.
"""

from __future__ import annotations

from verl_server.messages.io_struct import FinishReason
from verl_server.scheduler.control.engine_loop import EngineLoop
from verl_server.version_demand import ServedVersions


class VersionBorder:
    def __init__(self, scheduler: EngineLoop) -> None:
        self._scheduler = scheduler
        self._versions = ServedVersions(scheduler.worker.weights.version)

    def refusal(self, demand: str) -> FinishReason | None:
        """Return the reason why a request with `demand` cannot run now, or None if it can."""
        error = self._versions.refusal(demand)
        return None if error is None else FinishReason.refused(error, at_border=True)

    def cross(self) -> None:
        """Record the version that is served now. If it is another one than before, end the requests that exclude it.

        No step may be in flight, and the tokens of earlier steps must have been sent. Call it before the prefix cache
        starts a version, because the KV of the ended requests is of the version before.
        """
        if not self._versions.note(self._scheduler.worker.weights.version):
            return
        for rid, demand in self._scheduler.demands():
            if (reason := self.refusal(demand)) is not None:
                self._scheduler.end_request(rid, reason)
