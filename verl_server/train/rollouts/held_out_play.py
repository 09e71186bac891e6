"""`HeldOutPlay`: the evaluations of an asynchronous run, which play beside the groups of the training.

`async_grpo` begins one right after a push, hands on the news of the rollouts, and waits for its end before the next
push: so one version samples all of its tokens. Rank 0 has the episodes. The others take part in the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from verl_server.engine.rank_group import RankGroup
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.evaluation import OnEvaluated, Playing, merge_shares, score
from verl_server.train.held_out import HELD_OUT, HeldOut
from verl_server.train.rollouts.group_messages import GroupBegan, GroupEnded, PlayGroup
from verl_server.train.servers import RolloutServers
from verl_server.weight_version import WeightVersion

_LOOK_SECONDS = 1.0
"""Seconds of a wait after which all ranks meet."""


class _Rollouts(Playing, Protocol):
    """The player of groups: a `RolloutProcess`."""

    def play(self, group: PlayGroup) -> None:
        """Play a group as soon as there is room for it."""

    def cancel(self, group: int) -> None:
        """Stop to play a group."""


class HeldOutPlay:
    def __init__(
        self,
        rollouts: _Rollouts | None,
        servers: RolloutServers,
        ranks: RankGroup,
        collect: Callable[[float], None],
        stop_signal: Callable[[], bytes],
    ) -> None:
        """`rollouts` is None on all ranks but rank 0.

        `collect` waits for news of the rollouts, at most for some seconds, and hands them to `take`. `stop_signal`
        returns b"" unless a stop of the run is requested.
        """
        self._rollouts = rollouts
        self._servers = servers
        self._ranks = ranks
        self._collect = collect
        self._stop_signal = stop_signal
        self._is_open = False
        """True, on all ranks, from `begin` until a `wait` found that the evaluation has ended."""
        self._playing: _Episodes | None = None

    def begin(self, held_out: HeldOut, step: int, version: WeightVersion, done: OnEvaluated) -> None:
        """Begin to play. All ranks call it between two steps, when the evaluation before has ended.

        The servers have `version`, and the rollouts know it. `done` takes the result on rank 0.
        """
        assert not self._is_open
        self._is_open = True
        if self._rollouts is not None:
            self._playing = _Episodes(held_out, step, version, self._rollouts, self._servers.urls, done)

    def take(self, news: GroupBegan | GroupEnded) -> bool:
        """Take news of the rollouts. Return False if they are about a group of the training. Rank 0 calls it."""
        if news.group < HELD_OUT:
            return False
        if isinstance(news, GroupEnded) and self._playing is not None and self._playing.has_last(news):
            self.end(None)
        return True

    def wait(self, *, before_push: bool = False) -> float:
        """Wait for the evaluation, if one plays, until its deadline at most. Return the seconds of the wait.

        All ranks call it together. They look once a second if a stop is requested or no server is left, which ends the
        evaluation: before a push, the trainer has newer weights already, and could not give the servers the old ones.
        """
        start = time.monotonic()

        def held(signals: list[bytes]) -> float | None:
            """Return the seconds of the wait, or None if the evaluation still plays. Rank 0 calls it."""
            if (playing := self._playing) is None:
                return 0.0  # it had ended before
            playing.holds_push_since = start if before_push else None
            until = min(time.monotonic() + _LOOK_SECONDS, playing.deadline)
            self._collect(0.0)
            while self._playing is not None and (left := until - time.monotonic()) > 0:
                self._collect(left)
            if any(signals):
                self.end("stopped")
            elif time.monotonic() >= playing.deadline:
                self.end("timeout")
            elif self._playing is not None and self._servers.are_lost():
                self.end("server")
            return None if self._playing is not None else time.monotonic() - start

        seconds: float | None = 0.0
        while self._is_open:
            seconds = self._ranks.call("HeldOutPlay.wait", held, self._stop_signal)
            self._is_open = seconds is None
        return seconds or 0.0

    def end(self, reason: str | None) -> None:
        """Cancel the episodes that have not ended, and hand the result on, if an evaluation plays. Rank 0 calls it.

        `reason` is why nobody waits for them.
        """
        if self._playing is not None:
            playing, self._playing = self._playing, None
            playing.end(reason)


class _Episodes:
    """The episodes of one evaluation. Each is a group of its own."""

    def __init__(
        self,
        held_out: HeldOut,
        step: int,
        version: WeightVersion,
        rollouts: _Rollouts,
        server_urls: list[str],
        done: OnEvaluated,
    ) -> None:
        self.deadline = time.monotonic() + held_out.timeout
        self.holds_push_since: float | None = None
        """Time since which a push waits for the evaluation, on the monotonic clock."""
        self._held_out, self._step, self._version = held_out, step, version
        self._rollouts, self._server_urls, self._done = rollouts, server_urls, done
        self._began = self._ended = time.time()
        self._trajectories: list[Trajectory] = []
        self._error: str | None = None
        first = HELD_OUT + step * held_out.episodes  # no other evaluation of this start has these numbers
        self._open = set(range(first, first + held_out.episodes))
        for number, task in enumerate(held_out.share(), first):
            rollouts.play(PlayGroup(group=number, tasks=[task], held_out=step))

    def has_last(self, ended: GroupEnded) -> bool:
        """Take an episode. Return True if it was the last one."""
        if ended.group not in self._open:
            return False
        self._open.discard(ended.group)
        self._ended = max(self._ended, ended.time)
        self._error = self._error or ended.error
        self._trajectories += [] if ended.rollout is None else ended.rollout.trajectories
        return not self._open

    def end(self, reason: str | None) -> None:
        for number in sorted(self._open):
            self._rollouts.cancel(number)
        share = score(
            self._held_out,
            self._trajectories,
            self._held_out.episodes,
            self._version,
            rank=0,
            playing=self._rollouts,
            server_urls=self._server_urls,
        )
        share.incomplete = reason or self._error
        seconds = max(0.0, (time.time() if self._open else self._ended) - self._began)
        delay = 0.0 if self.holds_push_since is None else time.monotonic() - self.holds_push_since
        self._done(merge_shares(self._held_out, [share], self._step, self._version, seconds=seconds, push_delay=delay))
