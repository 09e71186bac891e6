"""Train a real model on one GPU: a game of sums, which SmolLM2-135M-Instruct learns in minutes.

    verl-server env serve examples/sums.py:Sums --port 8000
    python -m verl_server.train.grpo --model-path HuggingFaceTB/SmolLM2-135M-Instruct --env-url http://127.0.0.1:8000 \\
        --steps 80 --max-turns 3 --max-new-tokens 16 --grpo.learning-rate 5e-5 --grpo.groups 32 \\
        --grpo.micro-batch-tokens 16384 --out runs/sums

`examples/real_model.py` makes the model's folder for a machine that reaches no hub.
"""

from __future__ import annotations

import random
import re
from typing import Any


class Sums:
    """The sum of two numbers, in at most three turns, with a hint after each of them.

    The score of a reply is 1 if it is the number and nothing else; 0.1 to 0.3, the nearer the more, if it is another
    number and nothing else; 0.05 if it contains the number among other words; and 0 otherwise. The reward is the best
    score of the first reply, a fifth of that of the second, and a tenth of that of the third.

    The untrained policy answers in sentences. Few of its replies are a mere number, and hardly ever is it the right
    one. So the reward must first show what a reply looks like, then what is near.
    """

    shares = (1.0, 0.2, 0.1)
    """Share of a reply's score that counts at each turn."""

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        draw = random.Random(seed)
        first, second = draw.randint(10, 49), draw.randint(10, 49)
        self._sum = first + second
        self._turn = 0
        self._reward = 0.0
        return {"text": f"What is {first} + {second}? Reply with the number only."}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        reply = action["text"].strip()
        numbers = [int(digits) for digits in re.findall(r"[0-9]{1,9}", reply)]
        is_bare = re.fullmatch(r"[0-9]{1,9}", reply) is not None
        self._reward = max(self._reward, self.shares[self._turn] * self._score(numbers, is_bare))
        self._turn += 1
        if is_bare and numbers == [self._sum]:
            return {"text": "Right."}, self._reward, True
        if self._turn == len(self.shares):
            return {"text": f"It was {self._sum}."}, self._reward, True
        return {"text": self._hint(numbers)}, 0.0, False

    def _score(self, numbers: list[int], is_bare: bool) -> float:
        if not is_bare:
            return 0.05 * (self._sum in numbers)
        distance = abs(numbers[0] - self._sum)
        return 1.0 if distance == 0 else 0.1 + 0.2 * max(0.0, 1 - distance / 30)

    def _hint(self, numbers: list[int]) -> str:
        if not numbers:
            return "Reply with a number only."
        if self._sum in numbers:
            return "The number is right. Reply with the number only."
        return f"{numbers[-1]} is too {'high' if numbers[-1] > self._sum else 'low'}. Reply with the number only."
