"""Environments that come with the package: the demo's guessing game, and tasks of `reasoning-gym`.

`env_server` serves them. They contain no tokens, models or HTTP. `HeavyTail` draws waiting times that are like
those of real environments.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from verl_server.errors import BadRequestError

TEXT_SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}


class HeavyTail:
    """Waiting times with a lognormal distribution (median in seconds, shape `sigma`), capped at `cap` medians.

    The n-th wait of an episode depends on n and the episode's name only, so that a run can be repeated exactly.
    """

    def __init__(self, median: float, sigma: float = 1.5, cap: float = 20.0) -> None:
        self._median = median
        self._sigma = sigma
        self._cap = cap

    def seconds(self, episode: str, n: int) -> float:
        """Return the n-th waiting time of an episode, in seconds."""
        digest = hashlib.sha256(f"{episode}/{n}".encode()).digest()
        normal = random.Random(digest).gauss(0.0, 1.0)
        return self._median * min(math.exp(self._sigma * normal), self._cap)


class GuessNumber:
    """Find a hidden number from 1 to `numbers` in at most `guesses` guesses. The answers are "higher" and "lower".

    The reward is 1 for the number at the first guess, 0.1 less for each further guess, and 0 without the number.
    """

    action_schema = TEXT_SCHEMA
    observation_schema = TEXT_SCHEMA

    def __init__(self, numbers: int = 12, guesses: int = 5, latency: float = 0.0, longest: float | None = None) -> None:
        """`latency` is the median time of `reset` and `step`, in seconds. The times are heavy-tailed.

        `longest` is the longest time, in seconds. Default: 20 medians.
        """
        self._numbers = numbers
        self._guesses = guesses
        self._latency = HeavyTail(latency, cap=20.0 if longest is None or latency == 0 else longest / latency)
        self._hidden = 0
        self._taken = 0
        self._episode = ""

    async def reset(self, seed: int | None = None, episode_id: str | None = None) -> dict[str, Any]:
        self._hidden = self.hidden(random.randrange(2**31) if seed is None else seed, self._numbers)
        self._taken = 0
        self._episode = f"{seed}/{episode_id}"
        await self._wait()
        return {"text": f"guess 1 to {self._numbers}"}

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        self._taken += 1
        await self._wait()
        word = str(action.get("text", "")).strip()
        if not (word.isascii() and word.isdigit()):
            answer = "what"
        elif int(word) == self._hidden:
            return {"text": "correct"}, 1.0 - 0.1 * (self._taken - 1), True
        else:
            answer = "higher" if int(word) < self._hidden else "lower"
        return {"text": answer}, 0.0, self._taken >= self._guesses

    @property
    def state(self) -> dict[str, Any]:
        return {"episode_id": self._episode, "step_count": self._taken}

    async def _wait(self) -> None:
        seconds = self._latency.seconds(self._episode, self._taken)
        if seconds > 0:
            await asyncio.sleep(seconds)

    @staticmethod
    def hidden(seed: int, numbers: int) -> int:
        """Return the hidden number of the episode with this seed."""
        return random.Random(seed).randint(1, numbers)

    @staticmethod
    def best_without_feedback(seeds: Iterable[int], numbers: int, guesses: int) -> float:
        """Return the success rate, on these seeds, of the best policy that ignores the answers.

        The guesses of such a policy do not depend on the hidden number. So it is no better than the best fixed list of
        `guesses` numbers, which in hindsight are the numbers that were hidden most often.
        """
        counts = Counter(GuessNumber.hidden(seed, numbers) for seed in seeds)
        return sum(count for _, count in counts.most_common(guesses)) / max(1, counts.total())


class ReasoningGym:
    """One question of a `reasoning-gym` task. The observation is the question, the reward is the task's score.

    With `attempts` above 1, the policy may try again after a wrong answer.
    """

    action_schema = TEXT_SCHEMA
    observation_schema = TEXT_SCHEMA

    def __init__(self, task: str = "basic_arithmetic", attempts: int = 1, **config: Any) -> None:
        """`config` are options of the task, such as `min_digits`. Needs the extra `games`."""
        try:
            gym: Any = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise BadRequestError("ReasoningGym needs reasoning-gym: pip install 'verl-server[games]'.") from error
        self._create: Callable[[int], Any] = lambda seed: gym.create_dataset(task, size=1, seed=seed, **config)
        self._attempts = attempts
        self._dataset: Any = None
        self._entry: dict[str, Any] = {}
        self._taken = 0

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        self._dataset = self._create(random.randrange(2**31) if seed is None else seed)
        self._entry = self._dataset[0]
        self._taken = 0
        return {"text": self._entry["question"]}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        self._taken += 1
        answer = str(action.get("text", "")).strip()
        score = float(self._dataset.score_answer(answer=answer, entry=self._entry))
        solved = score >= 1.0
        done = solved or self._taken >= self._attempts
        reward = score if done else 0.0
        return {"text": "correct" if solved else "That is not right. Try again."}, reward, done

    @property
    def state(self) -> dict[str, Any]:
        return {"episode_id": None, "step_count": self._taken}
