"""Episodes that were really played, for `benchmarks.cache_policies`: the trajectories of a rollout.

`AgentLoop`, `run_agents` and `verl-server rollout` write them, with the tokens of each turn and the times of its waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from benchmarks.agents import Episode, Turn
from verl_server.rollout.trajectory import Trajectory


def recorded_episodes(trajectories: Iterable[Trajectory]) -> tuple[list[Episode], list[float]]:
    """Return the episodes and the seconds at which they began, the first one at 0.

    A wait is the time from the end of a generation to the beginning of the next one. Trajectories that sampled nothing
    are left out. A branch of a session is an episode of its own.
    """
    found: list[tuple[float, Episode]] = []
    for trajectory in trajectories:
        sampled = [turn for turn in trajectory.turns if turn.action_span[1] > turn.action_span[0]]
        if not sampled:
            continue
        times = [event for event in trajectory.events if event.kind == "generate"]
        waits = [max(0.0, after.start - before.end) for before, after in itertools.pairwise(times)]
        waits += [0.0] * (len(sampled) - len(waits))
        turns = []
        for number, turn in enumerate(sampled):
            begin, end = turn.action_span
            following = sampled[number + 1].action_span[0] if number + 1 < len(sampled) else end
            turns.append(Turn(end - begin, trajectory.tokens[end:following], waits[number]))
        start = times[0].start if times else 0.0
        found.append((start, Episode(trajectory.tokens[: sampled[0].action_span[0]], turns)))
    found.sort(key=lambda each: each[0])
    first = found[0][0] if found else 0.0
    return [episode for _, episode in found], [start - first for start, _ in found]
