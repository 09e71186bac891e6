"""Agents for `benchmarks/multi_turn.py`: scripted episodes of token ids, and two schedules that play them.

The lengths, waits and observations of an episode are drawn from a seed before anything runs, so both schedules do the
same work; only the sampled tokens come from the engine. Each turn sends the whole history, and appends the sampled
tokens and the observation of the environment.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

_GENERATE_SECONDS = 600.0


class Generator(Protocol):
    """The part of an engine that an agent needs."""

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        session_id: Any = None,
        timeout: float | None = None,
    ) -> Any: ...

    async def async_close_session(self, session_id: str) -> None: ...


@dataclass(frozen=True)
class Lengths:
    """Ranges of lengths in tokens, each as (minimum, maximum)."""

    prompt: tuple[int, int]
    output: tuple[int, int]
    observation: tuple[int, int]


@dataclass(frozen=True)
class Waits:
    """Distribution of the seconds that an environment takes for a step: lognormal with a cap."""

    median: float = 0.5
    sigma: float = 1.5
    cap: float = 20.0
    scale: float = 1.0
    """Factor for every wait, applied after the cap."""

    def draw(self, rng: random.Random) -> float:
        return self.scale * min(self.cap, rng.lognormvariate(math.log(self.median), self.sigma))


@dataclass(frozen=True)
class Turn:
    output_len: int
    observation: list[int]
    wait: float


@dataclass(frozen=True)
class Episode:
    prompt: list[int]
    turns: list[Turn]

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_len for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """Tokens of the history after the last turn and its observation."""
        return len(self.prompt) + sum(turn.output_len + len(turn.observation) for turn in self.turns)

    @property
    def waiting(self) -> float:
        return sum(turn.wait for turn in self.turns)

    def reusable_tokens(self) -> int:
        """Number of prompt tokens that an earlier turn sent or sampled, which a perfect prefix cache contains."""
        history, reusable = len(self.prompt), 0
        for turn in self.turns[:-1]:
            history += turn.output_len
            reusable += history
            history += len(turn.observation)
        return reusable


def make_episodes(
    agents: int, turns: int, group: int, lengths: Lengths, waits: Waits, vocab_size: int, seed: int
) -> list[Episode]:
    """Draw the episodes of `agents` agents. Each `group` consecutive agents have the same prompt, as in GRPO."""
    rng = random.Random(seed)

    def ids(length: tuple[int, int]) -> list[int]:
        return [rng.randrange(5, vocab_size) for _ in range(rng.randint(*length))]

    prompts = [ids(lengths.prompt) for _ in range(-(-agents // group))]
    return [
        Episode(
            prompts[agent // group],
            [Turn(rng.randint(*lengths.output), ids(lengths.observation), waits.draw(rng)) for _ in range(turns)],
        )
        for agent in range(agents)
    ]


def reusable_tokens(episodes: list[Episode], group: int) -> int:
    """Number of prompt tokens that all episodes could reuse, including the shared prompt of each group."""
    shared = sum(len(e.prompt) for i, e in enumerate(episodes) if i % group)
    return shared + sum(episode.reusable_tokens() for episode in episodes)


@dataclass
class Played:
    """The time and the token counts of a run."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def count(self, result: dict[str, Any]) -> None:
        meta = result["meta_info"]
        self.prompt_tokens += meta["prompt_tokens"]
        self.cached_tokens += meta["cached_tokens"]
        self.output_tokens += meta["completion_tokens"]

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)


async def play_at_own_pace(
    engine: Generator, episodes: list[Episode], *, waiting: bool = True, session_ids: bool = False
) -> Played:
    """Play the episodes so that every agent sends its next turn as soon as its own environment has answered.

    With `session_ids`, each agent names its session in every turn, and closes the session after the last turn.
    """
    played = Played()

    async def play(episode: Episode) -> None:
        history, session_id = list(episode.prompt), secrets.token_hex(16) if session_ids else None
        for turn in episode.turns:
            result = await engine.async_generate(
                input_ids=history,
                sampling_params=_sampling(turn),
                session_id=session_id,
                timeout=_GENERATE_SECONDS,
            )
            played.count(result)
            history += result["output_ids"] + turn.observation
            if waiting:
                await asyncio.sleep(turn.wait)
        if session_id is not None:
            await engine.async_close_session(session_id)

    start = time.perf_counter()
    await asyncio.gather(*map(play, episodes))
    played.seconds = time.perf_counter() - start
    return played


async def play_in_lock_step(engine: Generator, episodes: list[Episode], *, session_ids: bool = False) -> Played:
    """Play each turn of all agents as one batch, then wait for the slowest environment.

    The engine is idle during these waits, whose length is known, so they are added to `seconds` instead of slept.
    `session_ids`: see `play_at_own_pace`.
    """
    played = Played()
    ids = [secrets.token_hex(16) for _ in episodes] if session_ids else None
    histories = [list(episode.prompt) for episode in episodes]
    start = time.perf_counter()
    for step in range(len(episodes[0].turns)):
        turns = [episode.turns[step] for episode in episodes]
        results = await engine.async_generate(
            input_ids=histories,
            sampling_params=[_sampling(turn) for turn in turns],
            session_id=ids,
            timeout=_GENERATE_SECONDS,
        )
        for history, turn, result in zip(histories, turns, results, strict=True):
            played.count(result)
            history += result["output_ids"] + turn.observation
        played.seconds += max(turn.wait for turn in turns)
    await asyncio.gather(*map(engine.async_close_session, ids or ()))
    played.seconds += time.perf_counter() - start
    return played


def _sampling(turn: Turn) -> dict[str, Any]:
    return {"max_new_tokens": turn.output_len, "ignore_eos": True}
