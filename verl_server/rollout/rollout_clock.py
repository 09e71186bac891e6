"""`RolloutClock`: the seconds since a rollout began, and the wall time at which it began.

`AgentLoop` and `run_agents` make one for each rollout. The events of all its episodes count from its begin.
"""

from __future__ import annotations

import time


class RolloutClock:
    """Counts from its creation. Calls return seconds, which never go back."""

    def __init__(self) -> None:
        self.began = time.time()
        """Wall time of second 0, in seconds since 1970: `Trajectory.began`."""
        self._start = time.monotonic()

    def __call__(self) -> float:
        """Return the seconds since the begin."""
        return time.monotonic() - self._start

    def server_offset(self, now: float | None, asked: float) -> float | None:
        """Return what to add to a server's wall times to get seconds since the begin.

        `now` is the time on the server's clock while it answered a request that was sent at second `asked` and whose
        answer has come. Clocks count as equal if this is possible; otherwise the server's is moved to the nearest
        possible time. None if the server does not say its time.
        """
        if now is None:
            return None
        at = now - self.began
        return min(max(at, asked), self()) - at - self.began
