"""Compare policies of queue, admission and eviction for agents with growing histories, without a GPU.

    python -m benchmarks.cache_policies
    python -m benchmarks.cache_policies --workload 8b-768x6 --policy fcfs+lru lpm

The scheduler's own `BatchPlanner`, `PagePool` and `RadixCache` decide, over a model that computes nothing: a step takes
the time that `StepTimes` says, on a virtual clock. So what is measured is the code that runs.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.agents import Episode, Lengths, Waits, make_episodes, reusable_tokens
from verl_server.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.batch_planner import BatchPlanner
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch

LENGTHS = Lengths(prompt=(128, 512), output=(64, 256), observation=(16, 128))
PAGE = 16


@dataclass(frozen=True)
class Machine:
    """One model on one H200: the size of its KV pool, and how long a step takes (docs/performance.md)."""

    pool_tokens: int
    fixed: float
    """Seconds of a step that do not depend on its size."""
    weights: float
    """Seconds to read the weights."""
    per_token: float
    """Seconds of products, norms and prefill attention for a token."""
    per_key: float
    """Seconds to read the keys and values of one token."""

    def step_seconds(self, batch: ScheduleBatch) -> float:
        forward = batch.forward
        keys = sum(
            cached + 1 for cached, extend in zip(forward.cached_lens, forward.extend_lens, strict=True) if extend == 1
        )
        tokens = sum(forward.extend_lens)
        return self.fixed + max(self.weights, tokens * self.per_token) + keys * self.per_key


MACHINES = {
    "0.6b": Machine(1_090_000, 0.8e-3, 0.3e-3, 2.2e-6, 114_688 / 4.1e12),
    "8b": Machine(745_000, 0.9e-3, 3.75e-3, 22.6e-6, 147_456 / 3.9e12),
}


class Clock:
    sim: Simulation

    def __call__(self) -> float:
        return self.sim.now


class Simulation:
    def __init__(self, machine: Machine, episodes: list[Episode], waiting: bool, planner: BatchPlanner) -> None:
        self.machine, self.episodes, self.waiting, self.planner = machine, episodes, waiting, planner
        self.now = 0.0
        self.steps = 0
        self.prefill = 0
        self.rows = 0
        self.prompt_tokens = self.cached_tokens = 0
        self.largest_age = 0.0
        self._arrivals = [(0.0, agent) for agent in range(len(episodes))]
        heapq.heapify(self._arrivals)
        self._turn = [0] * len(episodes)
        self._history = [list(e.prompt) for e in episodes]
        self._agent: dict[str, tuple[int, float]] = {}
        self._count = itertools.count(1)
        self._live: dict[str, Req] = {}

    def run(self) -> None:
        planner = self.planner
        while self._arrivals or self._live:
            while self._arrivals and self._arrivals[0][0] <= self.now:
                arrived, agent = heapq.heappop(self._arrivals)
                self._send(agent, arrived)
            batch = planner.plan() if self._live else None
            if batch is None:
                assert not self._live, "nothing runs"
                self.now = self._arrivals[0][0]
                continue
            for req in batch.prefills:
                if req.rid in self._agent and req.num_retractions == 0:
                    agent, arrived = self._agent.pop(req.rid)
                    self.largest_age = max(self.largest_age, self.now - arrived)
            self.steps += 1
            self.rows += len(batch.reqs)
            self.prefill += sum(e for e in batch.forward.extend_lens if e > 1)
            self.now += self.machine.step_seconds(batch)
            self._collect(batch)

    def _send(self, agent: int, arrived: float) -> None:
        turn = self.episodes[agent].turns[self._turn[agent]]
        rid = f"{agent}/{self._turn[agent]}"
        message = TokenizedGenerateReq(
            rid=rid,
            input_ids=self._history[agent],
            sampling=SamplingParams(max_new_tokens=turn.output_len, ignore_eos=True),
        )
        req = Req(message, next(self._count), turn.output_len, 0)
        self._live[rid] = req
        self._agent[rid] = agent, arrived
        self.planner.add(req)

    def _collect(self, batch: ScheduleBatch) -> None:
        planner = self.planner
        prefilled = planner.collected(batch)
        finished = []
        for req in batch.sampled:
            if req.row >= 0 and req.append(7) is not None:
                finished.append((req, True))
        planner.remove_finished(finished)
        planner.share(prefilled)
        for req, _ in finished:
            del self._live[req.rid]
            agent = int(req.rid.partition("/")[0])
            episode, turn = self.episodes[agent], self.episodes[agent].turns[self._turn[agent]]
            self.prompt_tokens += len(req.prompt_ids)
            self.cached_tokens += req.cached_tokens
            self._history[agent] = self._history[agent] + req.output_ids + turn.observation
            self._turn[agent] += 1
            if self._turn[agent] < len(episode.turns):
                wait = turn.wait if self.waiting else 0.0
                heapq.heappush(self._arrivals, (self.now + wait + 0.01, agent))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--agents", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--policy", default="lpm")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--max-age", type=float, default=60.0)
    args = parser.parse_args()
    machine = MACHINES[args.shape]
    episodes = make_episodes(args.agents, args.turns, 1, LENGTHS, Waits(scale=args.scale), 151936, 0)
    clock = Clock()
    planner = BatchPlanner(
        machine.pool_tokens // PAGE, PAGE, args.rows or max(256, args.agents), 8192, schedule_policy=args.policy, max_age=args.max_age, clock=clock
    )
    sim = Simulation(machine, episodes, args.waits, planner)
    clock.sim = sim
    start = time.perf_counter()
    sim.run()
    longest = max(
        sum(t.wait + t.output_len * (machine.fixed + machine.weights + 1000 * machine.per_key) for t in e.turns[:-1]) + e.turns[-1].output_len * (machine.fixed + machine.weights + 1000 * machine.per_key)
        for e in episodes
    )
    allowed = reusable_tokens(episodes, 1) / sim.prompt_tokens
    print(
        f"{sim.now:.1f} s, hits {sim.cached_tokens / sim.prompt_tokens:.3f} of {allowed:.3f}, age {sim.largest_age:.1f}, "
        f"steps {sim.steps}, rows {sim.rows / sim.steps:.0f}, prefill {sim.prefill}, longest {longest:.1f}, retractions {planner.num_retractions}, took {time.perf_counter() - start:.1f}"
    )


if __name__ == "__main__":
    main()
