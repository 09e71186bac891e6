"""`Reference`: what transformers computes for the tokens that a server read and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TOLERANCE = 1e-4
"""Largest difference of a log-probability in fp32. The largest that was measured is 3e-5."""
TIE = 1e-4
"""Two tokens whose log-probabilities differ by less may be sampled in each other's place."""


class Reference:
    """A model of transformers. Each sequence of tokens is computed once."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        self.worst = 0.0
        """Largest difference of a log-probability that `check` found."""
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities of the token after each position, fp32 [len(ids), vocabulary]."""
        logits: torch.Tensor = self.model(torch.tensor([list(ids)])).logits[0].float()
        return logits.log_softmax(-1)

    def chosen(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (log-probabilities of ids[1:], those of the most likely tokens there), fp32 [len(ids) - 1]."""
        key = tuple(ids)
        if key not in self._known:
            logprobs = self.logprobs(ids)[:-1]
            own = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            self._known[key] = torch.stack([own, logprobs.max(-1).values])
        own, best = self._known[key]
        return own, best

    def check(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        logprobs: Sequence[float],
        prompt_logprobs: Sequence[float] = (),
        tolerance: float = TOLERANCE,
    ) -> None:
        """Assert that each output token is the most likely one, and all log-probabilities.

        `prompt_logprobs` are those of prompt[1:], or nothing.
        """
        own, best = self.chosen([*prompt, *output])
        start = len(prompt) - 1
        behind = best[start:] - own[start:]
        assert len(output) == len(logprobs) > 0
        assert float(behind.max()) < TIE, f"token {int(behind.argmax())} of {list(output)} is not the most likely one"
        found = torch.tensor([*prompt_logprobs, *logprobs])
        difference = float((own[-len(found) :] - found).abs().max())
        self.worst = max(self.worst, difference)
        assert difference < tolerance, f"{found} and {own[-len(found) :]} differ by {difference:.1e}"
