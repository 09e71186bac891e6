"""`Critic`: a model that estimates how much reward follows a state of an episode.

`ppo` loads one, and `critic_trainer` trains it. It is a language model of its own, with a scalar head in the place of
the head for tokens: by default a second copy of the policy's first weights. So the critic's loss does not move the
policy, and a smaller model with the same tokenizer may do. The head begins at 0, so that the first values are 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from verl_server.errors import BadRequestError
from verl_server.train.policy import load_language_model, shard


class Critic(nn.Module):
    """The body of a language model, and a scalar head in fp32."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(body.config.hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self._stored: list[tuple[str, nn.Parameter]] | None = None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the value at each of `positions`, fp32 [n].

        tokens [rows, length] int64 are padded on the right. positions [n] int64 index the flattened tokens; a value
        depends on the token at its position and on those before it in its row.
        """
        hidden = self.body(input_ids=tokens, use_cache=False).last_hidden_state
        at = hidden.flatten(0, 1).index_select(0, positions)
        # Not a view, because FSDP has hooks at the tensor that it returns.
        values: Tensor = self.head(at.float()).squeeze(1).clone()
        return values

    def checkpoint_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Return [(name in this module, fp32 parameter that the optimizer updates)], also after an error in a pass."""
        return self._stored or list(self.named_parameters())

    def remember_stored_weights(self) -> None:
        """Store references to the present parameters. `load_critic` calls this after sharding."""
        self._stored = list(self.named_parameters())


def load_critic(
    model_path: str,
    setting: str,
    device: torch.device,
    *,
    vocabulary: int,
    compute_dtype: torch.dtype,
    gradient_checkpointing: bool = False,
) -> Critic:
    """Load the critic's body from a Hugging Face folder, sharded as the policy is. All ranks call it.

    `setting` is what named the folder. Raise BadRequestError if the model has fewer tokens than the `vocabulary` of the
    policy. Passes are in `compute_dtype`, but in bfloat16 in the place of float16: the critic's loss is not scaled, and
    no server has to agree with its values.
    """
    dtype = torch.bfloat16 if compute_dtype == torch.float16 else compute_dtype
    body = load_language_model(model_path, setting, device, gradient_checkpointing).model
    if body.config.vocab_size < vocabulary:
        raise BadRequestError(
            f"{setting}={model_path!r} has {body.config.vocab_size} tokens, and the policy has {vocabulary}: the "
            "critic reads the policy's tokens. Name a model with the same tokenizer."
        )
    critic = Critic(body).to(device)
    # Neighbours in bf16 are further apart than many values of states.
    shard(critic, body.layers, dtype, device, exact=[critic.head])
    critic.remember_stored_weights()
    return critic.train()
