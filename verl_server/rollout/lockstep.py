"""`play_in_lockstep`: play a batch of episodes in which every turn waits for the slowest episode.

`AgentLoop.run_lockstep` calls it. It serves comparisons (`pace`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_server.rollout.engine_pool import EnginePool
from verl_server.rollout.episode import Episode
from verl_server.rollout.running_loop import run_all
from verl_server.rollout.trajectory import Event


async def play_in_lockstep(
    server: EnginePool, episodes: Sequence[Episode], generate_timeout: float, clock: Callable[[], float]
) -> None:
    """Play the episodes: one batched generation for each turn, then a wait for all environments. Close them at the end.

    `generate_timeout` bounds each generation, in seconds. A generation that fails raises, because it fails for the
    whole batch.
    """
    try:
        await run_all(episode.open() for episode in episodes)
        while alive := [episode for episode in episodes if not episode.is_over]:
            pending = alive
            while pending:
                start = clock()
                requests = [episode.request() for episode in pending]
                results = await server.async_generate(
                    input_ids=[request["input_ids"] for request in requests],
                    sampling_params=[request["sampling_params"] for request in requests],
                    return_logprob=True,
                    session_id=[request["session_id"] for request in requests],
                    timeout=generate_timeout,
                )
                for episode in pending:
                    episode.trajectory.events.append(Event("generate", start, clock()))
                pending = [e for e, result in zip(pending, results, strict=True) if not e.accept(result)]
            await run_all(episode.act() for episode in alive)
    finally:
        for episode in episodes:
            server.close_session(episode.session_id)
        await run_all(episode.close() for episode in episodes)
