"""An environment of your own, played and trained over HTTP.

    python -m verl_server.rollout.env_process examples.my_environment:Countdown --port 8000
    verl-server serve --model-path MODEL --port 30000
    verl-server rollout --server http://127.0.0.1:30000 --environment http://127.0.0.1:8000
    python -m verl_server.train.grpo --model-path MODEL --env-url http://127.0.0.1:8000

The last line starts a rollout server of its own. Under `torchrun --nproc-per-node N -m verl_server.train.grpo`
the model is sharded over N processes. Any OpenEnv server may stand in for the first line.
"""

from __future__ import annotations

import random
from typing import Any


class Countdown:
    """Say the next lower number until 0. Two methods are all that an environment needs."""

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        self.left = random.Random(seed).randint(2, 5)
        return {"text": f"Count down from {self.left}, one number at a time. Begin with {self.left - 1}."}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float | None, bool]:
        self.left -= 1
        if action["text"].strip() != str(self.left):
            return {"text": f"No, that was {self.left}."}, 0.0, True
        if self.left == 0:
            return {"text": "Done."}, 1.0, True
        return {"text": "Go on."}, None, False
