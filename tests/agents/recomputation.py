"""`Recomputation`: the log-probabilities of an exported branch, computed again with transformers in float32.

A token's distribution is the softmax of (logits + bias) over the tokens that its grammar allowed, at temperature 1. The
masks come from llguidance's matcher, fed with the exported ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import Family
from llguidance import LLMatcher, LLTokenizer
from transformers import AutoModelForCausalLM

from verl_server.rollout.trajectory import Trajectory

TOLERANCE = 1e-4
SCALES = {"default": 1.0, "2": 1.1, "3": 0.9}
"""Weight version -> factor of all parameters of the folder's model."""
_ROWS = 128
"""Positions whose logits are computed at a time."""


class Recomputation:
    """The random model of a family under each version of its weights."""

    def __init__(self, family: Family, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, Any] = {}
        self.worst = 0.0
        """Largest difference that any check found."""
        backend = family.tokenizer.backend_tokenizer.to_str()
        vocab = -(-len(family.tokenizer) // 64) * 64
        self._tokens = LLTokenizer(backend, n_vocab=vocab, eos_token=family.end_ids)

    def model(self, version: str) -> Any:
        """Return transformers' model with the weights of this version, in float32."""
        if version not in self._models:
            auto: Any = AutoModelForCausalLM
            model = auto.from_pretrained(self._folder, dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(SCALES[version])
            self._models[version] = model
        return self._models[version]

    @torch.inference_mode()
    def check(self, branch: Trajectory, bias: Mapping[int, float], grammar: str | None) -> int:
        """Assert every id, mask, version and log-probability of a branch. Return the number of sampled tokens.

        `grammar` is that of the turns with tool calls, `bias` the `logit_bias` of all requests.
        """
        ids = branch.tokens
        assert len(ids) == len(branch.loss_mask) == len(branch.logprobs) == len(branch.weight_versions)
        # A token that an earlier branch has, too, was sampled, but has no mask here.
        sampled = {at for turn in branch.turns for at in range(*turn.action_span)}
        assert {at for at, mask in enumerate(branch.loss_mask) if mask} <= sampled
        assert {at for at, name in enumerate(branch.weight_versions) if name} == sampled
        assert all(value == 0.0 for at, value in enumerate(branch.logprobs) if at not in sampled)
        shift = torch.zeros(self._tokens.vocab_size)
        for token, value in bias.items():
            shift[token] = value
        hidden = {
            version: self.model(version).model(torch.tensor([ids])).last_hidden_state[0]
            for version in set(branch.weight_versions) - {""}
        }
        for turn in branch.turns:
            allowed = self._allowed(
                ids[slice(*turn.action_span)], grammar if (turn.action or {}).get("calls") else None
            )
            places = range(*turn.action_span)
            for start in range(0, len(places), _ROWS):
                for version in hidden:
                    rows = [at for at in places[start : start + _ROWS] if branch.weight_versions[at] == version]
                    if not rows:
                        continue
                    before = torch.tensor(rows) - 1
                    logits = self.model(version).lm_head(hidden[version][before]) + shift
                    if allowed is not None:
                        logits[~allowed[[at - turn.action_span[0] for at in rows]]] = -torch.inf
                    chosen = logits.log_softmax(-1)[range(len(rows)), [ids[at] for at in rows]]
                    recorded = torch.tensor([branch.logprobs[at] for at in rows])
                    worst = float((chosen - recorded).abs().max())
                    assert worst < TOLERANCE, f"tokens {rows} of version {version}: {chosen} and {recorded}"
                    self.worst = max(self.worst, worst)
        return sum(branch.loss_mask)

    def _allowed(self, output: list[int], grammar: str | None) -> Any:
        """Return which tokens the grammar allowed at each position: a bool tensor [tokens, vocabulary], or None."""
        if grammar is None:
            return None
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        masks = []
        for token in output:
            masks.append(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
            assert matcher.consume_token(token), f"the grammar does not allow {token}: {matcher.get_error()}"
        return torch.from_numpy(np.stack(masks)[:, : self._tokens.vocab_size]).bool()
