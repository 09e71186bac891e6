"""Compare policies of queue, admission and eviction for agents with growing histories, without a GPU.

    python -m benchmarks.cache_policies
    python -m benchmarks.cache_policies --workload 8b-512x10-long --policy fcfs lpm --rows 256
    python -m benchmarks.cache_policies --trajectories runs/mine/trajectories.jsonl --machine 8b

The scheduler's own `BatchPlanner` decides, with its queue, prefix cache and page pool, about the agents of
`benchmarks.multi_turn`, or about those of your own rollout (`--trajectories`): its tokens, its starts, and the waits of
its environments. The model computes nothing: a step takes the time that `Machine` says, on a virtual clock. So the
decisions are those of the code that runs, and only the times are a model. Policies:

    fcfs         first come, first served; the least recently used page is evicted
    lpm+lru      longest cached prefix first; the least recently used page is evicted
    lpm+queue    lpm+lru, but pages that a waiting request needs are evicted last
    lpm-headroom the default, but without headroom for the growth of running episodes
    lpm          the scheduler's default: running episodes first, headroom, eviction by expected return
    lpm+ids      the same, with session ids, and a message at the end of each session
    gate         fcfs, and only as many episodes at once as the pool can hold when they end
    unlimited    lpm with a pool that holds everything: what a host tier without costs would make

Each run is one JSON line. `hit_rate` is the share of the prompt tokens that the cache had, `allowed` the share that
earlier requests had computed. `belady` is the hit rate of optimal eviction on the accesses of this run, which were
recorded: the same requests start and end in the same order, and the page is evicted whose next use is furthest.
`largest_age` is the longest time in seconds from the arrival of a request to its start.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agents import Episode, Lengths, Waits, make_episodes
from benchmarks.belady import allowed_hits, optimal_hits
from benchmarks.cache_simulation import PAGE_SIZE, Machine, Policy, Simulation
from benchmarks.recorded_episodes import recorded_episodes
from verl_server.rollout.trajectory import read_jsonl
from verl_server.scheduler.batch_planner import BatchPlanner

_HOST_BYTES_PER_SECOND = 50e9
"""Rate at which keys and values could be read from host memory."""
_VOCAB = 151936
MACHINES = {
    "0.6b": Machine(1_090_000, 114_688, 0.8e-3, 0.3e-3, 2.2e-6, 114_688 / 4.1e12),
    "8b": Machine(745_000, 147_456, 0.9e-3, 3.75e-3, 22.6e-6, 147_456 / 3.9e12),
}
SHORT = Lengths(prompt=(128, 512), output=(64, 256), observation=(16, 128))
LONG = Lengths(prompt=(1024, 3072), output=(64, 256), observation=(256, 1024))
"""Agents that read files and tool outputs: 2,000 tokens at first, 10,000 after ten turns."""


@dataclass(frozen=True)
class Work:
    """Agents that arrive together."""

    machine: str
    agents: int
    turns: int
    wait_scale: float = 0.0
    """Factor for the environments' waits (median 0.5 s, sigma 1.5, cap 20 s)."""
    lengths: Lengths = SHORT
    varies: bool = False
    """An episode has 1 to 2 * `turns` turns."""
    system: int = 0
    """Tokens of a system prompt that all agents share."""
    group: int = 1
    """Agents with the same prompt."""
    dropped: float = 0.0
    """Share of each output, from its beginning, that the client drops from the history."""

    def episodes(self) -> list[Episode]:
        turns = 2 * self.turns if self.varies else self.turns
        waits = Waits(scale=self.wait_scale)
        episodes = make_episodes(self.agents, turns, self.group, self.lengths, waits, _VOCAB, 0)
        rng = random.Random(1)
        system = [rng.randrange(5, _VOCAB) for _ in range(self.system)]
        counts = [rng.randint(1, turns) if self.varies else turns for _ in episodes]
        return [Episode(system + e.prompt, e.turns[:count]) for e, count in zip(episodes, counts, strict=True)]


WORKLOADS = {
    "0.6b-1024x8": Work("0.6b", 1024, 8),
    "8b-768x6": Work("8b", 768, 6),
    "0.6b-128x8-waits": Work("0.6b", 128, 8, 1.0),
    "0.6b-512x8-waits": Work("0.6b", 512, 8, 1.0),
    "0.6b-1024x8-waits": Work("0.6b", 1024, 8, 1.0),
    "8b-768x6-waits": Work("8b", 768, 6, 1.0),
    "8b-512x10-long": Work("8b", 512, 10, lengths=LONG),
    "8b-512x10-long-waits": Work("8b", 512, 10, 1.0, LONG),
    "8b-512x8-long-varied": Work("8b", 512, 8, 0.3, LONG, varies=True),
    "8b-512x8-long-system": Work("8b", 512, 8, 0.3, LONG, varies=True, system=2000),
    "8b-512x8-long-groups": Work("8b", 512, 8, lengths=LONG, group=16),
    "8b-512x8-long-dropped": Work("8b", 512, 8, 0.3, LONG, dropped=0.7),
    "8b-512x6-slow-environments": Work("8b", 512, 6, 20.0, LONG),
    "8b-2048x1": Work("8b", 2048, 1, lengths=LONG),
}


def _without_protection(planner: BatchPlanner) -> None:
    """Evict the least recently used page, whoever needs it."""
    _without_expectation(planner)
    planner.cache.want = planner.cache.unwant = lambda node: None  # type: ignore[method-assign]
    planner.admission._yields = lambda running, req, node, reserved: False  # type: ignore[method-assign]


def _without_expectation(planner: BatchPlanner) -> None:
    """Expect no turn to be continued, so that only waiting requests protect pages."""
    planner.returns.keep_seconds = lambda turn: 0.0  # type: ignore[method-assign]
    _without_headroom(planner)


def _without_headroom(planner: BatchPlanner) -> None:
    planner.admission.headroom.lost = lambda pages: None  # type: ignore[method-assign]


POLICIES = {
    "fcfs": Policy("fcfs"),
    "lpm+lru": Policy(changes=_without_protection, max_age=1e9),
    "lpm+queue": Policy(changes=_without_expectation),
    "lpm-headroom": Policy(changes=_without_headroom),
    "lpm": Policy(),
    "lpm+ids": Policy(session_ids=True),
    "gate": Policy("fcfs", is_gated=True),
    "unlimited": Policy(is_unlimited=True),
}


def report(simulation: Simulation) -> dict[str, float | str]:
    """Run a simulation, and return the figures of its line."""
    began = time.perf_counter()
    simulation.run()
    planner, machine, prompts = simulation.planner, simulation.machine, simulation.prompt_tokens
    planner.check_invariants()
    took = time.perf_counter() - began
    belady = optimal_hits(simulation.accesses, planner.pages.num_pages) * PAGE_SIZE / prompts
    allowed = allowed_hits(simulation.accesses) * PAGE_SIZE
    hit_rate, again = simulation.cached_tokens / prompts, allowed - simulation.cached_tokens
    return {
        "seconds": round(simulation.now, 1),
        "hit_rate": round(hit_rate, 3),
        "allowed": round(allowed / prompts, 3),
        "belady": round(belady, 3),
        "of_belady": round(hit_rate / belady, 3) if belady else 1.0,
        "largest_age": round(simulation.largest_age, 1),
        "rows": round(simulation.decoded / simulation.num_steps),
        "retractions": planner.num_retractions,
        "longest_alone": round(max(machine.alone(episode) for episode in simulation.episodes), 1),
        "computed_again": again,
        "computed_again_seconds": round(again * machine.per_token, 1),
        "read_from_host_seconds": round(again * machine.key_bytes / _HOST_BYTES_PER_SECOND, 1),
        "took": round(took, 1),
    }


def simulate(name: str, policy: str, rows: int | None = None) -> dict[str, float | str]:
    """Run one of `WORKLOADS` under one of `POLICIES`, and return the line of the result."""
    work = WORKLOADS[name]
    rows = rows or max(256, work.agents)
    machine = MACHINES[work.machine]
    simulation = Simulation(machine, work.episodes(), POLICIES[policy], rows=rows, dropped=work.dropped)
    return {"workload": name, "policy": policy} | report(simulation)


def replay(
    episodes: Sequence[Episode], starts: Sequence[float], machine: str, policy: str, rows: int | None = None
) -> dict[str, float | str]:
    """Run recorded episodes under one of `POLICIES`, and return the line of the result."""
    simulation = Simulation(MACHINES[machine], episodes, POLICIES[policy], rows=rows or 256, starts=starts)
    return {"workload": "trajectories", "policy": policy} | report(simulation)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_policies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="(all)")
    parser.add_argument("--policy", nargs="+", choices=list(POLICIES), default=list(POLICIES), help="(all)")
    parser.add_argument(
        "--rows", type=int, help="max_running_requests (the number of agents, at least 256; trajectories: 256)"
    )
    parser.add_argument("--trajectories", type=Path, help="replay the episodes in this file instead of a workload")
    parser.add_argument("--machine", choices=list(MACHINES), default="8b", help="machine of the trajectories (8b)")
    args = parser.parse_args(argv)
    if args.trajectories is None:
        for name in args.workload:
            for policy in args.policy:
                print(json.dumps(simulate(name, policy, args.rows)), flush=True)
        return
    try:
        episodes, starts = recorded_episodes(read_jsonl(args.trajectories))
    except (OSError, ValueError) as error:
        parser.error(f"--trajectories {args.trajectories}: {error}")
    if not episodes:
        parser.error(f"--trajectories {args.trajectories}: no trajectory has sampled tokens.")
    for policy in args.policy:
        print(json.dumps(replay(episodes, starts, args.machine, policy, args.rows)), flush=True)


if __name__ == "__main__":
    main()
