"""An example of an environment, which a policy plays and is trained on over HTTP. Run in the folder of this file:

    verl-server env serve my_environment:Countdown --port 8000
    verl-server serve --model-path MODEL --port 30000
    verl-server rollout --server http://127.0.0.1:30000 --environment http://127.0.0.1:8000 --straggler-timeout 30
    python -m verl_server.train.grpo --model-path MODEL --env-url http://127.0.0.1:8000

From another folder, name the file in the first command: `verl-server env serve PATH/TO/my_environment.py:Countdown`.
Any other OpenEnv server can replace the first command. The last command starts its own rollout server, and does not use
the server of the second command. Under `torchrun --nproc-per-node N -m verl_server.train.grpo`, the model is sharded
over N processes.
"""

from __future__ import annotations

import random
from typing import Any


class Countdown:
    """A game in which the policy counts down to 0. An environment needs two methods: `reset` and `step`.

    `verl_server.rollout.environment.Environment` documents the values that they may return.
    """

    # Optional. An action that does not match the schema is rejected before `step` is called.
    action_schema: dict[str, Any] = {  # noqa: RUF012
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    }

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
