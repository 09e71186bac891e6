"""`Simulation`: agents with growing histories against the scheduler's own planner, on a virtual clock.

The model computes nothing: a step takes the time that `Machine` says. The decisions are those of the code that runs,
and only the times are a model. `benchmarks.cache_policies` compares policies with it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.agents import Episode
from benchmarks.belady import Access, PageNumbers
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.batch_planner import BatchPlanner
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch

PAGE_SIZE = 16
_ROUND_TRIP = 0.01
"""Seconds from the end of a turn to the arrival of the next one, besides the environment's wait."""


@dataclass(frozen=True)
class Machine:
    """One model on one H200: the size of its KV pool, and how long a step takes (docs/performance.md)."""

    pool_tokens: int
    """0.85 of the memory, less the weights."""
    key_bytes: int
    """Bytes of keys and values for each token."""
    fixed: float
    """Seconds of a step that do not depend on its size."""
    weights: float
    """Least seconds of the products: the weights are read."""
    per_token: float
    """Seconds of products, norms and prefill attention for each token."""
    per_key: float
    """Seconds to read the keys and values of one token in a decode."""

    def step_seconds(self, batch: ScheduleBatch) -> float:
        """Return the time of a step."""
        forward = batch.forward
        lengths = zip(forward.cached_lens, forward.extend_lens, strict=True)
        keys = sum([cached + 1 for cached, extend in lengths if extend == 1])
        tokens = sum(forward.extend_lens)
        return self.fixed + max(self.weights, tokens * self.per_token) + keys * self.per_key

    def alone(self, episode: Episode) -> float:
        """Return the time of an episode without other requests."""
        token = self.fixed + self.weights + 1000 * self.per_key
        return episode.waiting - episode.turns[-1].wait + token * episode.output_tokens


@dataclass(frozen=True)
class Policy:
    schedule_policy: Literal["lpm", "fcfs"] = "lpm"
    max_age: float = 60.0
    changes: Callable[[BatchPlanner], None] = lambda planner: None
    """Turns parts of the planner's policy off."""
    session_ids: bool = False
    is_gated: bool = False
    """Start only as many episodes as the pool can hold when they end."""
    is_unlimited: bool = False
    """The pool holds everything."""


class Simulation:
    """Plays episodes against a planner. `now` is the virtual time."""

    def __init__(
        self,
        machine: Machine,
        episodes: Sequence[Episode],
        policy: Policy,
        *,
        rows: int,
        starts: Sequence[float] | None = None,
        dropped: float = 0.0,
    ) -> None:
        """`rows`: `max_running_requests`. `starts`: time at which each episode begins (all at 0).

        `dropped`: share of each output, from its beginning, that is not in the history of the next turn, as if it were
        reasoning.
        """
        self.machine, self.policy, self.episodes = machine, policy, episodes
        self.now = 0.0
        tokens = sum(map(_last_length, episodes)) + 2**20 if policy.is_unlimited else machine.pool_tokens
        self.planner = BatchPlanner(
            tokens // PAGE_SIZE,
            PAGE_SIZE,
            rows,
            8192,
            schedule_policy=policy.schedule_policy,
            max_age=policy.max_age,
            clock=lambda: self.now,
        )
        policy.changes(self.planner)
        self.num_steps = self.decoded = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.largest_age = 0.0
        self.accesses: list[Access] = []
        self._dropped = dropped
        self._numbers = PageNumbers(PAGE_SIZE)
        self._pages: list[list[int]] = [[] for _ in episodes]
        """Numbers of the pages of each history, as far as they are known."""
        self._history = [list(episode.prompt) for episode in episodes]
        self._turn = [0] * len(episodes)
        self._live: dict[str, tuple[int, float]] = {}
        """Agent and arrival of each request, by rid."""
        self._order = itertools.count(1)
        self._gated: list[int] = []
        first = len(episodes)
        if policy.is_gated:
            first = max(1, tokens * len(episodes) // sum(map(_last_length, episodes)))
            self._gated = list(range(len(episodes) - 1, first - 1, -1))
        times = starts or [0.0] * len(episodes)
        self._arrivals = [(times[agent], agent) for agent in range(min(first, len(episodes)))]
        heapq.heapify(self._arrivals)

    def run(self) -> None:
        """Play all episodes to their ends."""
        while self._arrivals or self._live:
            while self._arrivals and self._arrivals[0][0] <= self.now:
                self._send(*heapq.heappop(self._arrivals))
            batch = self.planner.plan()
            if batch is None:
                assert not self._live, "requests wait, but nothing runs"
                self.now = self._arrivals[0][0]
                continue
            for req in batch.prefills:
                self._started(req)
            used = self.planner.pages.num_pages - self.planner.cache.available_pages()
            self.accesses.append(Access("hold", held=used))
            self.num_steps += 1
            self.decoded += len(batch.sampled)
            self.now += self.machine.step_seconds(batch)
            self._collect(batch)

    def _send(self, arrived: float, agent: int) -> None:
        turn = self.episodes[agent].turns[self._turn[agent]]
        message = TokenizedGenerateReq(
            rid=f"{agent}/{self._turn[agent]}",
            input_ids=self._history[agent],
            sampling=SamplingParams(max_new_tokens=turn.output_len, ignore_eos=True),
            session_id=str(agent) if self.policy.session_ids else "",
        )
        self._live[message.rid] = agent, arrived
        self.planner.add(Req(message, next(self._order), turn.output_len, 0))

    def _started(self, req: Req) -> None:
        """Count a request whose prefill is planned for the first time."""
        agent, arrived = self._live[req.rid]
        if arrived < 0.0:
            return
        self._live[req.rid] = agent, -1.0
        self.largest_age = max(self.largest_age, self.now - arrived)
        self.prompt_tokens += len(req.prompt_ids)
        self.cached_tokens += req.cached_tokens
        self.accesses.append(Access("start", req.rid, self._page_numbers(agent, req.prompt_ids)))

    def _page_numbers(self, agent: int, token_ids: list[int]) -> list[int]:
        self._pages[agent] = self._numbers.of(token_ids, (len(token_ids) - 1) // PAGE_SIZE, self._pages[agent])
        return self._pages[agent]

    def _collect(self, batch: ScheduleBatch) -> None:
        planner = self.planner
        prefilled = planner.collected(batch)
        finished = [req for req in batch.sampled if req.row >= 0 and req.append(7) is not None]
        planner.remove_finished([(req, True) for req in finished])
        planner.share(prefilled)
        for req in finished:
            self._end(req)

    def _end(self, req: Req) -> None:
        agent, _ = self._live.pop(req.rid)
        self.accesses.append(Access("end", req.rid, self._page_numbers(agent, req.token_ids)))
        turn = self.episodes[agent].turns[self._turn[agent]]
        kept = req.output_ids[int(self._dropped * turn.output_len) :]
        if len(kept) < turn.output_len:
            self._pages[agent] = self._pages[agent][: len(req.prompt_ids) // PAGE_SIZE]
        self._history[agent] = req.prompt_ids + kept + turn.observation
        self._turn[agent] += 1
        if self._turn[agent] < len(self.episodes[agent].turns):
            heapq.heappush(self._arrivals, (self.now + turn.wait + _ROUND_TRIP, agent))
            return
        if self.policy.session_ids:
            self.planner.finish_session(str(agent))
        if self._gated:
            heapq.heappush(self._arrivals, (self.now, self._gated.pop()))


def _last_length(episode: Episode) -> int:
    return len(episode.prompt) + sum(turn.output_len + len(turn.observation) for turn in episode.turns)
