"""Agents with growing histories and slow environments: own pace against lock step and the ideal schedule.

    python -m benchmarks.multi_turn --device cpu --shape tiny --wait-scale 0.1
    python -m benchmarks.multi_turn --device cuda --shape 0.6b --agents 128 --turns 8
    python -m benchmarks.multi_turn --device cuda --shape 8b --agents 128 --turns 40 --wait-scale 0 --only-work

Every agent plays `--turns` turns. It sends its whole history as token ids, appends the sampled tokens, waits for its
environment (lognormal, median 0.5 s, sigma 1.5, capped at 20 s, drawn from a seed) and appends the observation. The
engine is a server process that is called over HTTP, with prefix cache and without log-probabilities. With
`--session-ids` every agent names its session in each turn, and closes it after the last one.

The model's context is as long as the longest history. There are four runs, each with an empty prefix cache and one JSON
line. In `own_pace` every agent proceeds by itself. In `lock_step` all agents generate, then all wait for the slowest
environment; these waits are added to the clock instead of slept. `work` is own pace without any wait, which is the
engine's throughput for this work. `longest_alone` is the longest episode without other requests. No schedule can be
faster than `work` or `longest_alone`, so the larger of the two is the ideal. The last lines are `ideal_ratio` (own pace
to ideal), `lock_step_ratio` (lock step to own pace) and `prefix_hit_rate`, with the rate that the token counts allow
(`limit`) and the quotient of both (`ratio`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.agents import (
    Episode,
    Lengths,
    Played,
    Waits,
    make_episodes,
    play_at_own_pace,
    play_in_lock_step,
    reusable_tokens,
)
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import SHAPES, shape_folder
from verl_server import EngineBase, HttpServerEngineAdapter

LENGTHS = {
    "tiny": Lengths(prompt=(24, 48), output=(8, 24), observation=(4, 16)),
    "0.6b": Lengths(prompt=(128, 512), output=(64, 256), observation=(16, 128)),
    "8b": Lengths(prompt=(128, 512), output=(64, 256), observation=(16, 128)),
}


_WARM_UP = 64
"""Episodes of a short warm-up."""


def benchmark(engine: EngineBase, episodes: list[Episode], group: int, only_work: bool, session_ids: bool) -> None:
    def run(name: str, work: Coroutine[Any, Any, Played]) -> Played:
        engine.flush_cache(timeout=10)
        played = uvloop.run(work)
        tokens = {"output_tokens": played.output_tokens, "prompt_tokens": played.prompt_tokens}
        report(f"{name}_seconds", played.seconds, "s", **tokens, prefix_hit_rate=round(played.hit_rate, 4))
        return played

    warm_up = episodes[:_WARM_UP] if only_work else episodes
    uvloop.run(play_at_own_pace(engine, warm_up, waiting=False, session_ids=session_ids))
    work = run("work", play_at_own_pace(engine, episodes, waiting=False, session_ids=session_ids))
    if only_work:
        return
    token_seconds = _seconds_per_token_alone(engine, episodes)
    longest = max(episodes, key=lambda e: e.waiting + token_seconds * e.output_tokens)
    alone = run("longest_alone", _alone(engine, longest))
    own_pace = run("own_pace", play_at_own_pace(engine, episodes, session_ids=session_ids))
    lock_step = run("lock_step", play_in_lock_step(engine, episodes, session_ids=session_ids))
    ideal = max(work.seconds, alone.seconds)
    report("ideal_seconds", ideal, "s", bound="work" if ideal == work.seconds else "longest episode")
    report("ideal_ratio", own_pace.seconds / ideal, "x")
    report("lock_step_ratio", lock_step.seconds / own_pace.seconds, "x", ideal=round(lock_step.seconds / ideal, 4))
    allowed = reusable_tokens(episodes, group) / own_pace.prompt_tokens
    ratio = round(own_pace.hit_rate / allowed, 4)
    report("prefix_hit_rate", own_pace.hit_rate, "of prompt tokens", limit=round(allowed, 4), ratio=ratio)


def _seconds_per_token_alone(engine: EngineBase, episodes: list[Episode]) -> float:
    shortest = min(episodes, key=lambda e: e.output_tokens)
    played = uvloop.run(play_at_own_pace(engine, [shortest], waiting=False))
    return played.seconds / shortest.output_tokens


async def _alone(engine: EngineBase, episode: Episode) -> Played:
    """Play one episode without other requests. The episode's waits are added to the time instead of slept."""
    played = await play_at_own_pace(engine, [episode], waiting=False)
    played.seconds += episode.waiting
    return played


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.multi_turn", __doc__)
    parser.add_argument("--agents", type=int, help="number of agents at one time (128; tiny: 16)")
    parser.add_argument("--turns", type=int, help="turns of each agent (8; tiny: 4)")
    parser.add_argument("--group", type=int, default=1, help="number of agents with the same prompt (1)")
    parser.add_argument("--wait-scale", type=float, default=1.0, help="factor for every environment wait (1.0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of lengths, waits and observations (0)")
    parser.add_argument("--only-work", action="store_true", help="run `work` alone, after a short warm-up")
    parser.add_argument("--session-ids", action="store_true", help="name the session of each turn, and close sessions")
    args = parser.parse_args(argv)
    args.agents = args.agents or (16 if args.shape == "tiny" else 128)
    args.turns = args.turns or (4 if args.shape == "tiny" else 8)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.multi_turn", args, argv)
    episodes = make_episodes(
        args.agents,
        args.turns,
        args.group,
        LENGTHS[args.shape],
        Waits(scale=args.wait_scale),
        SHAPES[args.shape]["vocab_size"],
        args.seed,
    )
    with tempfile.TemporaryDirectory() as temporary:
        context = max(episode.total_tokens for episode in episodes)
        folder: Path = shape_folder(temporary, args.shape, context=context)
        settings = engine_settings(args, folder, port=0, max_running_requests=max(256, args.agents))
        with HttpServerEngineAdapter(**settings) as engine:
            benchmark(engine, episodes, args.group, args.only_work, args.session_ids)


if __name__ == "__main__":
    main()
