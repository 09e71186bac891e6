"""The demo's game follows the rules that the demo states, and a reasoning-gym task works as an environment."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from typing import Any

import pytest

from tests.rollout.fakes import env_server
from verl_server.rollout.environment import RemoteEnvironment
from verl_server.rollout.environments.games import GuessNumber, HeavyTail, ReasoningGym


def test_guessing() -> None:
    async def main() -> None:
        game = GuessNumber(numbers=13, guesses=3)
        assert await game.reset(seed=5) == {"text": "guess 1 to 13"}
        hidden = GuessNumber.hidden(5, 13)
        assert await game.step({"text": f" {hidden + 1} "}) == ({"text": "lower"}, 0.0, False)
        assert await game.step({"text": "what"}) == ({"text": "what"}, 0.0, False)
        assert await game.step({"text": str(hidden)}) == ({"text": "correct"}, 0.8, True)
        await game.reset(seed=5)
        steps = [await game.step({"text": str(hidden - 1)}) for _ in range(3)]
        assert [done for _, _, done in steps] == [False, False, True]
        assert {(o["text"], r) for o, r, _ in steps} == {("higher", 0.0)}

    asyncio.run(main())


def test_the_best_policy_without_feedback_by_brute_force() -> None:
    seeds, numbers, guesses = range(100), 6, 3
    hidden = [GuessNumber.hidden(seed, numbers) for seed in seeds]
    best = max(
        sum(h in plan for h in hidden) / len(hidden)
        for plan in itertools.product(range(1, numbers + 1), repeat=guesses)
    )
    assert GuessNumber.best_without_feedback(seeds, numbers, guesses) == pytest.approx(best)


def test_waits_are_heavy_tailed_capped_and_repeatable() -> None:
    waits = HeavyTail(0.01)
    draws = [waits.seconds(f"e{i}", n) for i in range(500) for n in range(4)]
    assert statistics.median(draws) == pytest.approx(0.01, rel=0.15)
    assert max(draws) == pytest.approx(0.2)
    assert 0.01 < sum(draw == max(draws) for draw in draws) / len(draws) < 0.04  # P(normal > 2) is 0.023
    assert draws[:4] == [HeavyTail(0.01).seconds("e0", n) for n in range(4)]


def test_a_game_has_a_longest_wait_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)

    async def longest(**settings: float) -> float:
        slept.clear()
        for seed in range(500):
            await GuessNumber(latency=0.01, **settings).reset(seed)
        return max(slept)

    assert asyncio.run(longest()) == pytest.approx(0.2)
    assert asyncio.run(longest(longest=0.05)) == pytest.approx(0.05)
    assert asyncio.run(longest(longest=0.3)) > 0.2


def test_a_reasoning_gym_task_over_http() -> None:
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym (extra `games`)")

    async def main() -> None:
        def make() -> Any:
            return ReasoningGym("chain_sum", attempts=2, min_terms=2, max_terms=2, min_digits=1, max_digits=1)

        async with env_server(make) as url, RemoteEnvironment(url) as environment:
            first = await environment.reset(3)
            assert await environment.reset(3) == first
            left, sign, right = first.observation["text"].split(":")[1].replace("=", "").split()
            answer = int(left) + (int(right) if sign == "+" else -int(right))
            wrong = await environment.step({"text": str(answer + 1)})
            assert (wrong.reward, wrong.done) == (0.0, False)
            right_one = await environment.step({"text": str(answer)})
            assert (right_one.reward, right_one.done) == (1.0, True)

    asyncio.run(main())
