"""Compare policies of queue, admission and eviction for agents with growing histories, without a GPU.

    python -m benchmarks.cache_policies
    python -m benchmarks.cache_policies --workload 8b-768x6 --policy fcfs lpm --rows 256

The scheduler's own `BatchPlanner` decides, with its queue, prefix cache and page pool, about the agents of
`benchmarks.multi_turn`. The model computes nothing: a step takes the time that `Machine` says, on a virtual clock. So
the decisions are those of the code that runs, and only the times are a model. Policies:

    fcfs         first come, first served; the least recently used page is evicted
    lpm+lru      longest cached prefix first; the least recently used page is evicted
    lpm+lru+age  the same, but nobody is overtaken for longer than 5 s
    lpm+queue    lpm+lru, but pages that a waiting request needs are evicted last
    lpm          the scheduler's default: running episodes first, eviction by expected return
    lpm+ids      the same, with session ids, and a message at the end of each session
    gate         fcfs, and only as many episodes at once as the pool can hold when they end
    unlimited    lpm with a pool that holds everything: what a host tier without costs would make

Each run is one JSON line. `hit_rate` is the share of the prompt tokens that the cache had, `allowed` the share that the
token counts allow. `belady` is the hit rate of optimal eviction on the accesses of this run, which were recorded: the
same requests start and end in the same order, and the page is evicted whose next use is furthest. `largest_age` is the
longest time in seconds from the arrival of a request to its start.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.agents import Episode, Lengths, Waits, make_episodes, reusable_tokens
from verl_server.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.batch_planner import BatchPlanner
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch

LENGTHS = Lengths(prompt=(128, 512), output=(64, 256), observation=(16, 128))
PAGE_SIZE = 16
_ROUND_TRIP = 0.01
"""Seconds from the end of a turn to the arrival of the next one, besides the environment's wait."""
_HOST_BYTES_PER_SECOND = 50e9
"""Rate at which keys and values could be read from host memory."""


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


MACHINES = {
    "0.6b": Machine(1_090_000, 114_688, 0.8e-3, 0.3e-3, 2.2e-6, 114_688 / 4.1e12),
    "8b": Machine(745_000, 147_456, 0.9e-3, 3.75e-3, 22.6e-6, 147_456 / 3.9e12),
}


@dataclass(frozen=True)
class Work:
    """Agents that arrive together."""

    shape: str
    agents: int
    turns: int
    wait_scale: float = 0.0
    """Factor for the environments' waits (median 0.5 s, sigma 1.5, cap 20 s)."""

    def episodes(self) -> list[Episode]:
        return make_episodes(self.agents, self.turns, 1, LENGTHS, Waits(scale=self.wait_scale), 151936, 0)


WORKLOADS = {
    "0.6b-1024x8": Work("0.6b", 1024, 8),
    "8b-768x6": Work("8b", 768, 6),
    "0.6b-128x8-waits": Work("0.6b", 128, 8, 1.0),
    "0.6b-512x8-waits": Work("0.6b", 512, 8, 1.0),
    "0.6b-1024x8-waits": Work("0.6b", 1024, 8, 1.0),
    "8b-768x6-waits": Work("8b", 768, 6, 1.0),
}


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


def _without_protection(planner: BatchPlanner) -> None:
    """Evict the least recently used page, whoever needs it."""
    _without_expectation(planner)
    planner.cache.want = planner.cache.unwant = lambda node: None  # type: ignore[method-assign]
    planner._yields = lambda req, node, reserved: False  # type: ignore[method-assign]


def _without_expectation(planner: BatchPlanner) -> None:
    """Expect no turn to be continued, so that only waiting requests protect pages."""
    planner.returns.keep_seconds = lambda turn: 0.0  # type: ignore[method-assign]


POLICIES = {
    "fcfs": Policy("fcfs"),
    "lpm+lru": Policy(changes=_without_protection, max_age=1e9),
    "lpm+lru+age": Policy(changes=_without_protection, max_age=5.0),
    "lpm+queue": Policy(changes=_without_expectation),
    "lpm": Policy(),
    "lpm+ids": Policy(session_ids=True),
    "gate": Policy("fcfs", is_gated=True),
    "unlimited": Policy(is_unlimited=True),
}


@dataclass(frozen=True, slots=True)
class Access:
    """One entry of the record of a run."""

    kind: Literal["start", "end", "hold"]
    agent: int
    pages: int
    """start: pages that the request could reuse. end: pages that it leaves. hold: pages of all running requests."""


class Simulation:
    """Plays episodes against a planner. `now` is the virtual time."""

    def __init__(self, work: Work, policy: Policy, rows: int | None = None) -> None:
        self.machine, self.policy, self.episodes = MACHINES[work.shape], policy, work.episodes()
        self.now = 0.0
        tokens = self.machine.pool_tokens * (16 if policy.is_unlimited else 1)
        self.planner = BatchPlanner(
            tokens // PAGE_SIZE,
            PAGE_SIZE,
            rows or max(256, work.agents),
            8192,
            schedule_policy=policy.schedule_policy,
            max_age=policy.max_age,
            clock=lambda: self.now,
        )
        policy.changes(self.planner)
        self.num_steps = self.decoded = self.prefilled = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.largest_age = 0.0
        self.accesses: list[Access] = []
        self._history = [list(episode.prompt) for episode in self.episodes]
        self._turn = [0] * len(self.episodes)
        self._live: dict[str, tuple[int, float]] = {}
        """Agent and arrival of each request, by rid."""
        self._numbers = itertools.count(1)
        self._gated: list[int] = []
        first = len(self.episodes)
        if policy.is_gated:
            last = sum(_last_length(episode) for episode in self.episodes) // len(self.episodes)
            first = tokens // last
            self._gated = list(range(len(self.episodes) - 1, first - 1, -1))
        self._arrivals = [(0.0, agent) for agent in range(min(first, len(self.episodes)))]

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
            used = self.planner.pages.num_pages - self.planner.available_pages()
            self.accesses.append(Access("hold", -1, used))
            self.num_steps += 1
            self.decoded += len(batch.sampled)
            self.prefilled += sum([extend for extend in batch.forward.extend_lens if extend > 1])
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
        self.planner.add(Req(message, next(self._numbers), turn.output_len, 0))

    def _started(self, req: Req) -> None:
        """Count a request whose prefill is planned for the first time."""
        agent, arrived = self._live[req.rid]
        if arrived < 0.0:
            return
        self._live[req.rid] = agent, -1.0
        self.largest_age = max(self.largest_age, self.now - arrived)
        self.prompt_tokens += len(req.prompt_ids)
        self.cached_tokens += req.cached_tokens
        self.accesses.append(Access("start", agent, (len(req.prompt_ids) - 1) // PAGE_SIZE))

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
        self.accesses.append(Access("end", agent, (len(req.token_ids) - 1) // PAGE_SIZE))
        turn = self.episodes[agent].turns[self._turn[agent]]
        self._history[agent] = req.token_ids + turn.observation
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


def belady_hits(accesses: list[Access], num_pages: int) -> int:
    """Return the pages that optimal eviction would have had at the starts of `accesses`.

    Running requests hold what they held in the run. The histories of the others share the rest of the pool. The last
    page of the history is evicted whose next request starts last. Histories share no pages.
    """
    starts: dict[int, list[int]] = defaultdict(list)
    for index, access in enumerate(accesses):
        if access.kind == "start":
            starts[access.agent].append(index)
    for indices in starts.values():
        indices.reverse()
    idle: dict[int, int] = {}
    total = hits = 0
    furthest: list[tuple[int, int]] = []
    for access in accesses:
        if access.kind == "start":
            starts[access.agent].pop()
            pages = idle.pop(access.agent, 0)
            total -= pages
            hits += min(pages, access.pages)
        elif access.kind == "end":
            total += access.pages
            idle[access.agent] = access.pages
            following = starts[access.agent][-1] if starts[access.agent] else len(accesses)
            heapq.heappush(furthest, (-following, access.agent))
        while access.kind == "hold" and total > num_pages - access.pages:
            following, agent = furthest[0]
            if idle.get(agent) and -following == (starts[agent][-1] if starts[agent] else len(accesses)):
                evicted = min(idle[agent], total - (num_pages - access.pages))
                idle[agent] -= evicted
                total -= evicted
            else:
                heapq.heappop(furthest)
    return hits


def simulate(name: str, policy_name: str, rows: int | None = None) -> dict[str, float | str]:
    """Run one workload under one policy, and return the line of the result."""
    work, began = WORKLOADS[name], time.perf_counter()
    simulation = Simulation(work, POLICIES[policy_name], rows)
    simulation.run()
    planner, machine, prompts = simulation.planner, simulation.machine, simulation.prompt_tokens
    planner.check_invariants()
    belady = belady_hits(simulation.accesses, planner.pages.num_pages) * PAGE_SIZE / prompts
    hit_rate = simulation.cached_tokens / prompts
    again = simulation.prefilled - (prompts - reusable_tokens(simulation.episodes, 1))
    return {
        "workload": name,
        "policy": policy_name,
        "seconds": round(simulation.now, 1),
        "hit_rate": round(hit_rate, 3),
        "allowed": round(reusable_tokens(simulation.episodes, 1) / prompts, 3),
        "belady": round(belady, 3),
        "of_belady": round(hit_rate / belady, 3) if belady else 1.0,
        "largest_age": round(simulation.largest_age, 1),
        "rows": round(simulation.decoded / simulation.num_steps),
        "retractions": planner.num_retractions,
        "longest_alone": round(max(machine.alone(episode) for episode in simulation.episodes), 1),
        "computed_again": again,
        "computed_again_seconds": round(again * machine.per_token, 1),
        "read_from_host_seconds": round(again * machine.key_bytes / _HOST_BYTES_PER_SECOND, 1),
        "took": round(time.perf_counter() - began, 1),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="(all)")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="(all)")
    parser.add_argument("--rows", type=int, help="max_running_requests (the number of agents, at least 256)")
    args = parser.parse_args(argv)
    for name in args.workload:
        for policy in args.policy:
            print(json.dumps(simulate(name, policy, args.rows)), flush=True)


if __name__ == "__main__":
    main()
