"""Train a real model on one GPU: a game of sums, of which SmolLM2-135M-Instruct learns half in minutes.

    verl-server env serve examples/sums.py:Sums --port 8000
    python -m verl_server.train.grpo --model-path HuggingFaceTB/SmolLM2-135M-Instruct --env-url http://127.0.0.1:8000 \\
        --steps 40 --max-turns 3 --max-new-tokens 16 --grpo.learning-rate 1e-5 --out runs/sums

`examples/real_model.py` makes the model's folder for a machine that reaches no hub.
"""

from __future__ import annotations

import random
import re
from typing import Any


class Sums:
    """The sum of two numbers, in at most three turns, with a hint after each of them.

    The reward of a reply that is nothing but the number is 1 at the first turn, 0.6 at the second and 0.3 at the third.
    An episode that ends without such a reply has the reward 0.2 if some reply contained the number, 0.05 if the last
    reply was another number and nothing else, and 0 otherwise. At first the policy solves one sum in a hundred, and
    learns from these small rewards what a reply looks like.
    """

    turns = 3
    rewards = (1.0, 0.6, 0.3)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        draw = random.Random(seed)
        first, second = draw.randint(10, 49), draw.randint(10, 49)
        self._sum = first + second
        self._turn = 0
        self._was_near = False
        return {"text": f"What is {first} + {second}? Reply with the number only."}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool]:
        reply = action["text"].strip()
        if reply == str(self._sum):
            return {"text": "Right."}, self.rewards[self._turn], True
        self._turn += 1
        numbers = [int(digits) for digits in re.findall(r"\d{1,9}", reply)]
        self._was_near |= self._sum in numbers
        done = self._turn == self.turns
        if not done:
            return {"text": self._hint(numbers)}, 0.0, False
        return {"text": f"It was {self._sum}."}, 0.2 if self._was_near else 0.05 * reply.isdigit(), True

    def _hint(self, numbers: list[int]) -> str:
        if self._sum in numbers:
            return "The number is right. Reply with the number only."
        if not numbers:
            return "Reply with a number only."
        return f"{numbers[-1]} is too {'high' if numbers[-1] > self._sum else 'low'}. Reply with the number only."
