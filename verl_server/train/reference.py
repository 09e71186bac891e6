"""`Reference`: the frozen policy from which the trained one is held near (`kl`), and a pass over samples with it.

`run` loads it beside the policy if the coefficient is above 0, and the trainer asks it once in each step. It has the
weights with which the run began, also after --resume, or those of --reference-path. They are in the dtype of the
passes, sharded as those of the policy, and have neither gradients nor an optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from verl_server.errors import BadRequestError
from verl_server.files.model_folder import load_tokenizer
from verl_server.train.batches import Sample, behaviour_logprobs
from verl_server.train.finite_check import reference_error
from verl_server.train.kl import kl_estimates
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.policy import Policy, load_language_model, shard
from verl_server.train.ranks import over_ranks
from verl_server.train.scoring import logprobs_of


class Reference:
    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy = policy.requires_grad_(False).eval()
        self._device = device

    def score(self, samples: Sequence[Sample], config: GRPOConfig) -> tuple[list[Sample], dict[str, float]]:
        """Return (the samples with `reference_logprobs`, the figure of the step). All ranks call it.

        `kl_reference` is the mean k3 over the tokens of all ranks, between the weights that sampled a token and the
        reference. Raise NonFiniteError on all ranks if a log-probability of the reference is not finite.
        """
        found = [logprobs.cpu() for logprobs in logprobs_of(self.policy, samples, config, self._device)]
        sums = torch.zeros(3, dtype=torch.float64)
        for sample, own in zip(samples, found, strict=True):
            estimates = kl_estimates(behaviour_logprobs(sample.trajectory), own, "k3")
            sums += torch.stack([torch.tensor(len(own)), estimates.double().sum(), (~own.isfinite()).sum()])
        tokens, total, broken = over_ranks(sums).tolist()
        if broken:
            raise reference_error(self.policy)
        scored = [replace(sample, reference_logprobs=own) for sample, own in zip(samples, found, strict=True)]
        return scored, {"kl_reference": total / max(1, tokens)}


def load_reference(args: TrainArgs, policy: Policy, tokenizer: Any, device: torch.device) -> Reference | None:
    """Load the reference policy of a run with the options `args`; None if nothing needs one. All ranks call it.

    `policy` is the policy of the run, and `tokenizer` its tokenizer. Raise BadRequestError if the reference has another
    vocabulary.
    """
    if args.grpo.kl_coef == 0:
        return None
    path, setting = args.model_path, "--model-path"
    if args.reference_path is not None:
        path, setting = args.reference_path, "--reference-path"
        _check_tokens(load_tokenizer(path, setting), tokenizer, f"{setting}={path!r}")
    model = load_language_model(path, setting, device, gradient_checkpointing=False, dtype=policy.compute_dtype)
    vocabulary = policy.language_model.config.vocab_size
    if model.config.vocab_size < vocabulary:
        raise BadRequestError(
            f"{setting}={path!r} has {model.config.vocab_size} tokens, and the policy has {vocabulary}: the reference "
            "needs a probability for each token of the policy. Name a model with the same vocabulary."
        )
    reference = Policy(model, args.logprob_chunk, policy.compute_dtype)
    shard(reference, model.model.layers, policy.compute_dtype, device)
    return Reference(reference, device)


def _check_tokens(reference: Any, policy: Any, where: str) -> None:
    """Raise BadRequestError if two tokenizers do not have the same tokens, with the first that differs."""
    theirs, ours = reference.get_vocab(), policy.get_vocab()
    different = {token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)}
    if different:
        first = min(different, key=lambda token: (ours.get(token, theirs.get(token)), token))
        raise BadRequestError(
            f"{where} has another vocabulary than --model-path: {len(different)} tokens differ, such as {first!r}, "
            f"which is {theirs.get(first, 'absent')} there and {ours.get(first, 'absent')} in the policy. The "
            "reference reads the policy's tokens: name a model with the same tokenizer."
        )
