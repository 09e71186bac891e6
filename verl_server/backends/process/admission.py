"""`Admission`: the accepted requests of a `Backend`. `ControlQueue` uses it through the interface of a `BatchPlanner`.

A request waits here until it may start, and then runs in the engine. So a pause keeps new requests out of the engine,
and each request is computed with pages of the weights that were served when it started.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from verl_server.backends.process.driver import EngineDriver, NewTokens
from verl_server.messages.io_struct import TokenizedGenerateReq


@dataclass(slots=True)
class Accepted:
    """A request without a terminal entry yet."""

    req: TokenizedGenerateReq
    seed: int
    num_output: int = 0
    """Number of tokens that were sent."""
    num_retractions: int = 0


class Admission:
    """The waiting and running requests. `Backend` owns it, and it is the `Planner` of a `ControlQueue`."""

    def __init__(self, driver: EngineDriver, random_seed: int | None, timeout: float) -> None:
        """`timeout` is the most seconds of a retraction."""
        self._driver, self._timeout = driver, timeout
        self._seeds = random.Random(random_seed)
        """Source of seeds for requests without a `sampling_seed`."""
        self.waiting: dict[str, Accepted] = {}
        self.running: dict[str, Accepted] = {}
        self._restarting: set[str] = set()
        """Running requests without a new token since their KV was dropped."""
        self._epoch = 0
        """Counter in the prefix cache's key. It increases when new requests may no longer use earlier pages."""
        self.num_retractions = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self.waiting or rid in self.running

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def all(self) -> dict[str, Accepted]:
        """Return the accepted requests by rid, running requests first."""
        return self.running | self.waiting

    def add(self, req: TokenizedGenerateReq) -> None:
        seed = req.sampling.sampling_seed
        self.waiting[req.rid] = Accepted(req, self._seeds.getrandbits(63) if seed is None else seed)

    def start_all(self) -> None:
        """Start every waiting request. The engine schedules them."""
        for rid, accepted in self.waiting.items():
            self.running[rid] = accepted
            self._submit(accepted)
        self.waiting = {}

    def remove(self, rids: list[str]) -> list[Accepted]:
        """Remove requests, and abort the requests that the engine runs. Return the removed requests."""
        self._driver.abort([rid for rid in rids if rid in self.running])
        dropped = []
        for rid in rids:
            accepted = self.running.pop(rid, None) or self.waiting.pop(rid, None)
            self._restarting.discard(rid)
            if accepted is not None:
                dropped.append(accepted)
        return dropped

    def note(self, new: NewTokens) -> Accepted | None:
        """Count the new tokens of a request, and remove the request after its last token.

        Return the request, or None if it had ended before.
        """
        accepted = self.running.get(new.rid)
        if accepted is None:
            return None
        accepted.num_output += len(new.output_ids)
        self._restarting.discard(new.rid)
        if new.finish_reason is not None:
            if new.finish_reason.type == "length":
                new.finish_reason.length = accepted.num_output
            del self.running[new.rid]
        return accepted

    # -- what `ControlQueue` calls -------------------------------------------------------------------------------

    def has_started(self) -> bool:
        return bool(self.running)

    def is_restarting(self) -> bool:
        return bool(self._restarting)

    def retract_all(self) -> None:
        """Drop the KV of all running requests. They continue as soon as the engine continues."""
        if not self.running:
            return
        self._driver.retract(self._timeout)
        self._restarting = set(self.running)
        self.num_retractions += len(self.running)
        for accepted in self.running.values():
            accepted.num_retractions += 1

    def start_version(self) -> None:
        """Restart running requests that have no token yet, under a new key of the prefix cache.

        The engine may not have begun such a request, which would then read pages of the old weights. Or its prompt is
        half computed: the log-probabilities of a prompt and its first token must have the same version.
        """
        self._epoch += 1
        again = [accepted for accepted in self.running.values() if accepted.num_output == 0]
        self._driver.abort([accepted.req.rid for accepted in again])
        for accepted in again:
            self._submit(accepted)

    def flush_cache(self) -> None:
        """Start a new key of the prefix cache. The engine evicts the old pages when it needs them."""
        self._epoch += 1

    def _submit(self, accepted: Accepted) -> None:
        # The number has no colon, so no namespace can imitate the key of another epoch.
        self._driver.submit(accepted.req, accepted.seed, f"{self._epoch}:{accepted.req.namespace}")
