"""`Recomputation`: the log-probabilities of an exported branch, computed again with transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl_server.rollout.trajectory import Trajectory

TOLERANCE = 1e-4


class Recomputation:
    """A model of transformers, for sequences of many thousand tokens: logits are computed where a token was sampled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded: Any = None
        self.worst = 0.0
        """Largest difference that any check found."""

    @property
    def _model(self) -> Any:
        if self._loaded is None:
            auto: Any = AutoModelForCausalLM
            self._loaded = auto.from_pretrained(self._folder, dtype=torch.float32).eval()
        return self._loaded

    @torch.inference_mode()
    def check(self, branch: Trajectory) -> int:
        """Assert masks and log-probabilities of a branch. Return the number of its sampled tokens.

        The log-probabilities are those under the policy, at temperature 1: also of tokens drawn under a mask.
        """
        ids, count = branch.tokens, len(branch.tokens)
        assert count == len(branch.loss_mask) == len(branch.logprobs) == len(branch.weight_versions)
        sampled = sorted(at for turn in branch.turns for at in range(*turn.action_span))
        assert [at for at, name in enumerate(branch.weight_versions) if name] == sampled
        assert [at for at, mask in enumerate(branch.loss_mask) if mask] == [at for at in sampled if at >= branch.shared]
        assert all(turn.policy_logprobs in ("same", "given") for turn in branch.turns)
        recorded = branch.policy_logprobs or branch.logprobs
        if not sampled:
            return 0
        hidden = self._model.model(torch.tensor([ids])).last_hidden_state[0]
        logits = self._model.lm_head(hidden[torch.tensor(sampled) - 1])
        computed = logits.log_softmax(-1)[range(len(sampled)), [ids[at] for at in sampled]]
        worst = float((computed - torch.tensor([recorded[at] for at in sampled])).abs().max())
        assert worst < TOLERANCE, f"the log-probabilities of {branch.session} differ by {worst:.1e}"
        self.worst = max(self.worst, worst)
        return sum(branch.loss_mask)
