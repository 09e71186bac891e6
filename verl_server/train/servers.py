"""`RolloutServers`: the rollout servers of a training run. It pushes weights, and brings back servers that are lost.

The algorithm calls it on all ranks at the same point. A server that has ended, or was started again, does not serve the
trainer's weights any more, and only the trainer has them. All ranks must push them together, so the ranks meet
(`grpo.GRPO`), and every decision here is made by rank 0 and sent to the others. A server that the run launched is
launched again. One that somebody else started is waited for.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.rank_group import RankGroup
from verl_server.engine.router_client import RouterClient
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerLaunchError,
    ServerRestartedError,
    ServerUnavailableError,
    UpdateConflictError,
    VerlServerError,
)
from verl_server.messages.weight_requests import UpdateMode
from verl_server.train.server_use import ServerCounters
from verl_server.train.stopping import StopRequest
from verl_server.watch.run_records import PushBegan, PushEnded, RunEvent, ServerHealed, ServerLost, ServerRelaunched

logger = logging.getLogger(__name__)

NamedWeights = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Returns this rank's (name, tensor) pairs, once for each push."""
MAX_RELAUNCHES = 3
"""Default of the launches of a server that ended, between two pushes that succeeded."""
_PROBE_SECONDS = 1.0
"""Seconds between two looks at servers that are away."""
_EXIT_SECONDS = 20.0
"""Seconds that a launched server has to end after it has stopped to answer."""


class RolloutServers:
    """The servers of all ranks. Each rank has the same list of engines, and makes the same calls in the same order."""

    def __init__(
        self,
        engines: Sequence[VerlEngine],
        ranks: RankGroup,
        *,
        restart_timeout: float = 300.0,
        max_relaunches: int = MAX_RELAUNCHES,
        stop: StopRequest | None = None,
        note: Callable[[RunEvent], None] = lambda event: None,
        mode: UpdateMode = "wait",
        router: RouterClient | None = None,
    ) -> None:
        """`restart_timeout`: seconds to wait for a server when none is left. `stop` interrupts this wait.

        `note` takes the events of servers and pushes. `mode` is the treatment of requests that run during a push.
        `router` is the router through which the episodes play, if there is one. Rank 0 tells it of each push.
        """
        if not engines:
            raise BadRequestError("RolloutServers needs at least one engine.")
        self.engines = list(engines)
        self._ranks = ranks
        self._restart_timeout = restart_timeout
        self._max_relaunches = max_relaunches
        self._relaunches_left = max_relaunches
        self._has_pushed = False  # a server that ends before the first push may be one that can never work
        self._version: str | None = None
        self._away: list[VerlEngine] = []
        """Servers that do not have the newest weights."""
        self._stop = stop or StopRequest()
        self._note = note
        self._mode = mode
        self._router = router

    @property
    def adapters(self) -> list[HttpServerEngineAdapter]:
        """The connections to the servers. Rank 0 has them."""
        return [_adapter(engine) for engine in self.engines]

    def counters(self) -> dict[str, ServerCounters]:
        """Return instance id -> counters of each server that answers. Rank 0 calls it."""
        found: dict[str, ServerCounters] = {}
        for adapter in self.adapters:
            with contextlib.suppress(VerlServerError):
                info = adapter.get_server_info()
                state: Mapping[str, Any] = next(iter(info.get("internal_states") or ()), {})
                found[str(info.get("instance_id"))] = ServerCounters(
                    info.get("busy_seconds"), state.get("prompt_tokens_total"), state.get("cached_tokens_total")
                )
        return found

    @property
    def urls(self) -> list[str]:
        return [str(engine.url) for engine in self.engines]

    def push(self, named_weights: NamedWeights, version: str) -> None:
        """Copy the trainer's weights into every server as `version`. All ranks call it.

        A server that is away is left out if another one has the weights; the next push tries it again. If none has
        them, wait until one is back. Raise ServerDiedError if none is back within `restart_timeout`, and
        ServerLaunchError if a launched server ends again and again, or before the first push.
        """

        def update(engine: VerlEngine) -> None:
            engine.update_weights_from_tensor(named_weights(), weight_version=version, partial=False, mode=self._mode)

        self._version = version
        with self._noted(version):
            self._away = [engine for engine in self.engines if not self._done(engine, update)]
            self._bring_back(named_weights)
        self._commit()
        self._relaunches_left, self._has_pushed = self._max_relaunches, True

    def ensure(self, named_weights: NamedWeights) -> None:
        """Push the newest weights again into servers that were lost since. All ranks call it, with the same weights.

        Return when at least one server has them, and the router, if there is one, has such a server. Raise errors as
        `push` does, and UpdateConflictError if a server has weights that somebody else pushed.
        """
        lost = self._ranks.call("RolloutServers.ensure", lambda _: self._lost())
        for engine in (self.engines[place] for place in lost):
            if engine not in self._away:
                self._note(ServerLost(url=str(engine.url), error="It does not have the newest weights any more."))
        self._away = [self.engines[place] for place in lost]
        if len(self._away) == len(self.engines):
            self._bring_back(named_weights)
            self._commit()
        if self._router is not None:
            self._ranks.call("RolloutServers.ensure, router", lambda _: self._await_router())

    def are_lost(self) -> bool:
        """Return True if no server has the newest weights. Rank 0 calls it."""
        return len(self._lost()) == len(self.engines)

    @contextlib.contextmanager
    def _noted(self, version: str) -> Iterator[None]:
        """Note the begin and the end of the push of `version` in the block."""
        start, error = time.monotonic(), None
        self._note(PushBegan(version=version))
        try:
            yield
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            self._note(PushEnded(version=version, seconds=time.monotonic() - start, error=error))

    def _bring_back(self, named_weights: NamedWeights) -> None:
        """Heal the servers that are away and answer. If no other server is left, wait for one of them."""
        deadline, failed = time.monotonic() + self._restart_timeout, False
        if self._away and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()  # a server that is launched again on a rank's GPU needs the memory that it had
        while self._away:
            is_last = len(self._away) == len(self.engines)
            await_one = functools.partial(self._await_one, deadline, failed) if is_last else self._that_answer
            up = self._ranks.call("RolloutServers", lambda _: await_one())  # noqa: B023  (called before the next round)
            tried = [self._away[place] for place in up]
            healed = [engine for engine in tried if self._heal(engine, named_weights)]
            self._away = [engine for engine in self._away if engine not in healed]
            failed = True
            if not is_last or healed:
                break
        for engine in self._away:
            logger.warning("The server at %s is left out until it is back. The next push tries it again.", engine.url)

    def _heal(self, engine: VerlEngine, named_weights: NamedWeights) -> bool:
        # It answered a moment ago. If it does not now, the ranks must not wait for it beside servers that can play.
        def heal(engine: VerlEngine) -> None:
            engine.heal(named_weights(), version=self._version, timeout=0.0, mode=self._mode)

        is_healed = self._done(engine, heal)
        if is_healed:
            logger.warning("The server at %s serves version %s again.", engine.url, self._version)
            self._note(ServerHealed(url=str(engine.url), version=str(self._version)))
        return is_healed

    def _done(self, engine: VerlEngine, act: Callable[[VerlEngine], Any]) -> bool:
        """Run `act` on all ranks. Return False if the server has ended or was started again, which all ranks learn."""
        try:
            act(engine)
        except (ServerDiedError, ServerRestartedError, ServerUnavailableError) as error:
            logger.warning("The server at %s has no weights of this trainer: %s", engine.url, error)
            self._note(ServerLost(url=str(engine.url), error=str(error)))
            return False
        return True

    # -- on rank 0 -----------------------------------------------------------------------------------------------

    def _lost(self) -> list[int]:
        """Return the places of the servers that do not have the newest weights."""
        lost = [place for place, engine in enumerate(self.engines) if _adapter(engine).lost(self._version)]
        for engine in (self.engines[place] for place in lost):
            if engine not in self._away and (served := _served(engine)) not in (None, self._version):
                raise UpdateConflictError(
                    f"The server at {engine.url} serves version {served!r}, and this run pushed {self._version!r}: "
                    "another trainer pushes to it. Use a server for one run at a time."
                )
        return lost

    def _await_one(self, deadline: float, failed: bool) -> list[int]:
        """Return the places of servers that can be healed, when there is one. `failed`: they were, and could not be."""
        if failed:
            self._pause()
        while True:
            found = self._that_answer()
            if found and not (failed and time.monotonic() > deadline):
                return found
            if time.monotonic() > deadline:
                why = " ".join(filter(None, map(_silence, self._away))) or "It answers, but no push to it succeeds."
                raise ServerDiedError(
                    f"No rollout server was brought back within {self._restart_timeout:g} s (--restart-timeout). {why}"
                )
            self._pause()

    def _that_answer(self) -> list[int]:
        """Launch the launched server again if it has ended. Return the places of the away servers that answer."""
        for engine in self._away:
            self._relaunch_if_ended(engine)
        return [place for place, engine in enumerate(self._away) if _silence(engine) is None]

    def _commit(self) -> None:
        """Tell the router, on rank 0, which version the servers have been given."""
        if self._router is not None and self._ranks.rank == 0:
            self._router.commit(str(self._version))

    def _await_router(self) -> None:
        """Wait until the router has a server for the episodes. Raise ServerDiedError after `restart_timeout`."""
        assert self._router is not None
        deadline = time.monotonic() + self._restart_timeout
        while (reason := self._router.lost(self._version)) is not None:
            if time.monotonic() > deadline:
                raise ServerDiedError(
                    f"The servers have version {self._version!r}, but the router at {self._router.url} let no episode "
                    f"play for {self._restart_timeout:g} s (--restart-timeout). {reason}"
                )
            self._pause()

    def _pause(self) -> None:
        with self._stop.interruptible():
            time.sleep(_PROBE_SECONDS)

    def _relaunch_if_ended(self, engine: VerlEngine) -> None:
        """Launch a server again that this run launched, and whose process has ended. Raise once it ends too often."""
        adapter = _adapter(engine)
        report = self._wait_for_exit(adapter)
        while report is not None:
            if not self._has_pushed:
                raise ServerLaunchError(f"{report} It is not launched again, because it ended before the first push.")
            if self._relaunches_left == 0:
                raise ServerLaunchError(
                    f"{report} It is not launched again: it ended after each of {self._max_relaunches} launches since "
                    "the last push (--max-relaunches)."
                )
            self._relaunches_left -= 1
            logger.warning("%s It is launched again. Launches that are left: %d.", report, self._relaunches_left)
            try:
                adapter.relaunch(self._stop.check)
                self._note(ServerRelaunched(url=str(engine.url), launches_left=self._relaunches_left))
                return
            except ServerLaunchError as error:
                report = str(error)

    def _wait_for_exit(self, adapter: HttpServerEngineAdapter) -> str | None:
        """Return how a launched server ended. Return None if it answers, or was not launched by this run.

        A server that has lost one of its processes needs some seconds to end. One that does not end is ended by
        `relaunch`.
        """
        if adapter.pid is None:
            return None
        deadline = time.monotonic() + _EXIT_SECONDS
        while (report := adapter.exit_report()) is None and adapter.is_unreachable():
            if time.monotonic() > deadline:
                return f"The server at {adapter.url} (process {adapter.pid}) did not answer for {_EXIT_SECONDS:g} s."
            self._pause()
        return report


def _adapter(engine: VerlEngine) -> HttpServerEngineAdapter:
    adapter = engine.engine
    if not isinstance(adapter, HttpServerEngineAdapter):
        raise BadRequestError(
            "RolloutServers needs engines with a server: VerlEngine(launch_server=True) or server_url."
        )
    return adapter


def _silence(engine: VerlEngine) -> str | None:
    """Return the error of a server that does not answer yet, or None if one of its runs answers."""
    try:
        _adapter(engine).get_server_info()
    except ServerRestartedError:
        return None
    except VerlServerError as error:
        return str(error)
    return None


def _served(engine: VerlEngine) -> str | None:
    """Return the version that a server has in the run to which this trainer pushed last; None if it has another run."""
    try:
        return _adapter(engine).get_server_info()["weight_version"]
    except VerlServerError:
        return None
