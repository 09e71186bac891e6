"""Scripted agents send the same turns at their own pace and in lock step, and count their reusable tokens correctly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from benchmarks.agents import (
    Episode,
    Lengths,
    Turn,
    Waits,
    make_episodes,
    play_at_own_pace,
    play_in_lock_step,
    reusable_tokens,
)

LENGTHS = Lengths(prompt=(3, 6), output=(2, 5), observation=(1, 4))


class FakeEngine:
    """Generates zeros. Its cache holds every prefix that it received or generated, except for the last token."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.sessions: list[str | None] = []
        self.closed: list[str] = []
        self._known: set[tuple[int, ...]] = set()

    async def async_close_session(self, session_id: str) -> None:
        self.closed.append(session_id)

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        *,
        session_id: Any = None,
        timeout: float | None = None,
    ) -> Any:
        if isinstance(input_ids[0], list):
            each = zip(input_ids, sampling_params, session_id or [None] * len(input_ids), strict=True)
            return [await self.async_generate(None, params, ids, session_id=name) for ids, params, name in each]
        self.prompts.append(list(input_ids))
        self.sessions.append(session_id)
        cached = max((k for k in range(len(input_ids)) if tuple(input_ids[:k]) in self._known), default=0)
        ids = [0] * sampling_params["max_new_tokens"]
        whole = (*input_ids, *ids)
        self._known |= {whole[:k] for k in range(len(whole) + 1)}
        meta = {"prompt_tokens": len(input_ids), "cached_tokens": cached, "completion_tokens": len(ids)}
        return {"output_ids": ids, "meta_info": meta}


def test_episodes_repeat_and_groups_share_their_prompt() -> None:
    first, second = (make_episodes(6, 3, 2, LENGTHS, Waits(), 320, seed=4) for _ in range(2))
    assert first == second != make_episodes(6, 3, 2, LENGTHS, Waits(), 320, seed=5)
    assert first[0].prompt == first[1].prompt != first[2].prompt
    assert first[0].turns != first[1].turns


def test_waits_are_heavy_tailed_and_capped() -> None:
    rng = random.Random(0)
    waits = sorted(Waits(scale=0.5).draw(rng) for _ in range(4001))
    assert waits[2000] == pytest.approx(0.25, rel=0.1), "the median must be half of 0.5 s"
    assert waits[-1] == 10.0, "the longest wait must be the scaled cap"
    assert waits[-40] > 10 * waits[2000]


def test_both_ways_send_the_same_turns() -> None:
    episodes = make_episodes(4, 3, 1, LENGTHS, Waits(scale=0.0), 320, seed=1)
    own, lock_step = FakeEngine(), FakeEngine()
    played = asyncio.run(play_at_own_pace(own, episodes))
    in_step = asyncio.run(play_in_lock_step(lock_step, episodes))
    assert sorted(own.prompts) == sorted(lock_step.prompts)
    assert played.output_tokens == in_step.output_tokens == sum(e.output_tokens for e in episodes)
    assert lock_step.prompts[:4] == [e.prompt for e in episodes], "all prompts of a turn must precede those of the next"


@pytest.mark.parametrize("play", [play_at_own_pace, play_in_lock_step])
def test_an_agent_names_its_session_on_request(play: Any) -> None:
    episodes = make_episodes(4, 3, 1, LENGTHS, Waits(scale=0.0), 320, seed=1)
    without, engine = FakeEngine(), FakeEngine()
    asyncio.run(play(without, episodes))
    assert set(without.sessions) == {None} and not without.closed
    asyncio.run(play(engine, episodes, session_ids=True))
    assert sorted(Counter(engine.sessions).values()) == [3] * 4
    assert sorted(engine.closed) == sorted(set(engine.sessions))  # type: ignore[type-var]
    of_prompt = {tuple(prompt[:3]): name for prompt, name in zip(engine.prompts, engine.sessions, strict=True)}
    assert len(of_prompt) == 4, "all turns of an agent have the same id"


def test_what_can_be_reused_is_what_was_there_before() -> None:
    turns = [Turn(2, [9] * 3, 0.0), Turn(4, [9], 0.0), Turn(1, [9], 0.0)]
    assert Episode([1] * 5, turns).reusable_tokens() == (5 + 2) + (5 + 2 + 3 + 4)
    episodes = make_episodes(6, 3, 3, LENGTHS, Waits(scale=0.0), 320, seed=2)
    engine = FakeEngine()
    played = asyncio.run(play_at_own_pace(engine, episodes, waiting=False))
    # The engine always computes the last token of a prompt. Otherwise only the first prompts of a group's followers
    # would be cached completely, so each follower reuses one token less than `reusable_tokens` counts.
    followers = sum(1 for i in range(len(episodes)) if i % 3)
    assert played.cached_tokens == reusable_tokens(episodes, 3) - followers


def test_lock_step_waits_for_the_slowest_of_every_turn() -> None:
    turns = [[Turn(1, [9], 100.0), Turn(1, [9], 1.0)], [Turn(1, [9], 2.0), Turn(1, [9], 50.0)]]
    played = asyncio.run(play_in_lock_step(FakeEngine(), [Episode([1], each) for each in turns]))
    assert 150.0 <= played.seconds < 160.0
