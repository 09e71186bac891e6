"""The losses of both trainers: options, formulas, sources, and the metrics that show how far the data is off-policy.

Three policies give a sampled token a probability:

    behaviour   the weights that sampled the token; the server recorded its log-probability, also if the tokens of an
                episode are of several versions
    proximal    the trainer's weights before its first optimizer step on this batch
    current     the weights that are trained

A is the advantage of the token, clip(r) limits r to [1 - clip_low, 1 + clip_high], and no gradient passes through w.
A loss is minus the sum over the sampled tokens of

    clip_behaviour   min(r A, clip(r) A)                 r = current / behaviour
    tis              min(w, tis_bound) min(r A, clip(r) A)   r = current / proximal,  w = proximal / behaviour
    decoupled        w min(r A, clip(r) A)               r = current / proximal,  w = proximal / behaviour
    unclipped        r A                                 r = current / behaviour

If the three policies are equal, all losses have the gradient of the policy gradient, A grad log current.

    clip_behaviour   PPO (Schulman et al. 2017, arXiv 1707.06347) as GRPO uses it (Shao et al. 2024, arXiv 2402.03300);
                     two bounds as in DAPO (Yu et al. 2025, arXiv 2503.14476)
    tis              truncated importance sampling (Ionides 2008) between sampler and trainer: Yao et al. 2025, "Your
                     efficient RL framework secretly brings you off-policy RL training"
    decoupled        Hilton et al. 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641; for
                     asynchronous training of language models AReaL (Fu et al. 2025, arXiv 2505.24298)
    unclipped        the surrogate of importance sampling alone (Schulman et al. 2015, TRPO, arXiv 1502.05477, eq. 14)

Masks set the term of a token to 0. They look at w, which is the same in all optimizer steps of a batch:

    token_mask       keeps a token if w is within the bounds. `decoupled` with this mask has the terms of IcePop (Ling
                     Team 2025, "Every step evolves", arXiv 2510.18855), whose bounds are 0.5 and 5.
    sequence_mask    keeps the tokens of a trajectory if the geometric mean of its w is within the bounds: geometric
                     sequence masking (Liu, Li et al. 2025, "When speed kills stability"). Unlike the product, the
                     geometric mean does not favour short trajectories.

With `kl_in` loss, `kl_coef` times an estimate of the KL from a reference policy is added for each token (`kl`). Neither
masks nor importance weights apply to it.

The trainer divides the sum by the number of sampled tokens of all ranks. Masked tokens count in it, as in IcePop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from verl_server.errors import BadRequestError
from verl_server.train.batches import MicroBatch
from verl_server.train.kl import kl_estimates

_MOST_LOG_RATIO = 20.0
"""Bound of a log ratio in metrics, so that one token cannot make them infinite. Losses have no such bound."""


@dataclass(frozen=True)
class LossConfig:
    """Options of the loss."""

    option: ClassVar[str] = "grpo"
    """Prefix of the options in messages."""

    loss: Literal["clip_behaviour", "tis", "decoupled", "unclipped"] = "clip_behaviour"
    """clip_behaviour: PPO's clip of the ratio to the weights that sampled the token. tis: a truncated importance weight
    (trainer before its first optimizer step of the batch / where sampled), times PPO's clip of the ratio to that
    trainer. decoupled: the same, not truncated. unclipped: importance weights alone, unstable on old samples. tis and
    decoupled take one more forward pass if a batch has several optimizer steps."""
    clip_low: float = 0.2
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]. Not for the loss unclipped."""
    clip_high: float = 0.28
    """The upper end of that interval is 1 + clip_high."""
    tis_bound: float = 2.0
    """Largest importance weight of the loss tis."""
    token_mask: tuple[float, float] | None = None
    """Two bounds: leave a token out of the loss if its importance weight (trainer before its first optimizer step of
    the batch / where sampled) is outside. None: no mask. IcePop is the loss decoupled with the bounds 0.5 5."""
    sequence_mask: tuple[float, float] | None = None
    """Two bounds: leave a trajectory out of the loss if the geometric mean of its importance weights is outside, such
    as 0.9 1.1. Long trajectories permit narrower bounds. None: no mask."""
    kl_coef: float = 0.0
    """Weight of the KL divergence per token between the policy and a reference policy, which is the policy at the
    run's begin or that of --reference-path. 0: no reference policy is loaded."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is: added to the loss of each token, or subtracted from rewards (of the episode in GRPO, of each
    turn in PPO)."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimate of the KL for a token. In the loss k3 (the default, as in GRPO's paper) or k2, whose gradient is that of
    the KL of policy and reference; in the reward k1."""

    @classmethod
    def flag(cls, name: str) -> str:
        """Return the option of a field, as it is typed on the command line."""
        return f"--{cls.option}.{name.replace('_', '-')}"

    def __post_init__(self) -> None:
        flag = f"--{self.option}."
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0):
            raise BadRequestError(
                f"{flag}clip-low must be from 0 to 1 and {flag}clip-high not negative, not {self.clip_low:g} and "
                f"{self.clip_high:g}: the ratio is clipped to [1 - clip_low, 1 + clip_high]."
            )
        if not 0 < self.tis_bound < math.inf:
            raise BadRequestError(
                f"{flag}tis-bound must be finite and more than 0, not {self.tis_bound:g}. {flag}loss decoupled does "
                "not truncate."
            )
        if self.loss != "tis" and self.tis_bound != LossConfig.tis_bound:
            raise BadRequestError(
                f"{flag}tis-bound is for {flag}loss tis, and has no effect on {self.loss}: remove it, or name tis."
            )
        clip = (self.clip_low, self.clip_high)
        if self.loss == "unclipped" and clip != (LossConfig.clip_low, LossConfig.clip_high):
            raise BadRequestError(
                f"{flag}clip-low and {flag}clip-high have no effect on {flag}loss unclipped: remove them, or name "
                "another loss."
            )
        for option, bounds in (("token-mask", self.token_mask), ("sequence-mask", self.sequence_mask)):
            if bounds is not None and not 0 <= bounds[0] < 1 < bounds[1]:
                raise BadRequestError(
                    f"{flag}{option} needs a bound below 1 and a bound above 1, such as 0.5 5, not {bounds[0]:g} "
                    f"{bounds[1]:g}: the importance weight of a token that the trainer itself would sample is 1."
                )
        self._check_kl()

    def _check_kl(self) -> None:
        flag = self.flag
        if not 0 <= self.kl_coef < math.inf:
            raise BadRequestError(f"{flag('kl_coef')} must be finite and not negative, not {self.kl_coef:g}.")
        if self.kl_coef == 0 and (self.kl_in != "loss" or self.kl_estimator is not None):
            raise BadRequestError(
                f"{flag('kl_in')} and {flag('kl_estimator')} have no effect with {flag('kl_coef')} 0: remove them, or "
                "name a coefficient."
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise BadRequestError(
                f"{flag('kl_estimator')} k1 in the loss has a mean gradient of 0, so it would hold nothing. Take k2, "
                f"whose gradient is that of the KL, or k3, or {flag('kl_in')} reward."
            )
        if self.kl_in == "reward" and self.kl_estimator in ("k2", "k3"):
            raise BadRequestError(
                f"{flag('kl_estimator')} {self.kl_estimator} in the reward does not have the gradient of a KL. Take "
                f"k1, which has it, or {flag('kl_in')} loss."
            )

    @property
    def has_masks(self) -> bool:
        return self.token_mask is not None or self.sequence_mask is not None

    @property
    def has_kl_loss(self) -> bool:
        """True if the loss has the KL from the reference policy."""
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def has_kl_reward(self) -> bool:
        """True if rewards have the penalty of the KL from the reference policy."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def needs_proximal(self) -> bool:
        """True if the loss reads the log-probabilities of the proximal policy."""
        return self.loss in ("tis", "decoupled") or self.has_masks


def policy_loss(
    logprobs: Tensor, entropy: Tensor | None, batch: MicroBatch, config: LossConfig, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (the loss, a scalar; the sum of each metric), both summed over the sampled tokens.

    `logprobs` and `entropy` [n] fp32 are the current policy's at the sampled tokens of `batch`. Masks do not apply to
    the entropy bonus. `mean_losses` makes metrics of the sums over all micro-batches and ranks.
    """
    factors, kept = token_factors(logprobs, batch, config)
    behaviour, advantages = batch.behaviour_logprobs, batch.advantages
    log_ratio = logprobs - (_proximal(logprobs, batch) if config.loss in ("tis", "decoupled") else behaviour)
    # Masked before `exp`: the gradient of a ratio that is infinite would not be finite, even times 0.
    ratio = torch.where(kept, log_ratio, 0.0).exp()
    objective = factors * torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages)
    whole = log_ratio.detach().exp()
    sums = {"clip_fraction": (whole != _clipped(whole, config)).sum(), "log_allowed_mass": batch.log_weights.sum()}
    sums |= _drift(logprobs.detach() - behaviour)
    if config.loss == "tis":
        sums["truncated_fraction"] = ((_proximal(logprobs, batch) - behaviour).exp() > config.tis_bound).sum()
    if config.has_masks:
        sums["masked_fraction"] = (~kept).sum()
    loss = -objective.sum()
    if entropy is not None:
        sums["entropy"] = entropy.detach().sum()
        if entropy_coef:
            loss = loss - entropy_coef * entropy.sum()
    if config.has_kl_loss and batch.reference_logprobs is not None:  # a batch without samples has none
        estimates = kl_estimates(logprobs, batch.reference_logprobs, config.kl_estimator or "k3")
        loss = loss + config.kl_coef * estimates.sum()
    return loss, {"loss": loss.detach()} | sums


def token_factors(logprobs: Tensor, batch: MicroBatch, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Return (the factor of each token's term [n] fp32; False [n] for the tokens that masks leave out).

    The factor is the importance weight of `tis` and `decoupled`, else 1, and 0 for a token that masks leave out. No
    gradient passes through it. `logprobs` [n] are the current policy's.
    """
    log_weights = _proximal(logprobs, batch) - batch.behaviour_logprobs
    kept = torch.ones_like(log_weights, dtype=torch.bool)
    if config.token_mask is not None:
        kept &= _within(log_weights.exp(), config.token_mask)
    if config.sequence_mask is not None:
        # Sums of rows, not `index_add`, whose order of additions differs from run to run on CUDA.
        table = torch.zeros((2, batch.tokens.numel()), dtype=log_weights.dtype, device=log_weights.device)
        table[0, batch.positions], table[1, batch.positions] = log_weights, 1.0
        logs, counts = table.view(2, *batch.tokens.shape).sum(-1)
        means = (logs / counts.clamp(min=1)).exp()
        kept &= _within(means, config.sequence_mask)[batch.positions // batch.tokens.shape[1]]
    factors = log_weights.exp() if config.loss in ("tis", "decoupled") else torch.ones_like(log_weights)
    if config.loss == "tis":
        factors = factors.clamp(max=config.tis_bound)
    return torch.where(kept, factors, 0.0), kept


def value_loss(values: Tensor, before: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return the critic's loss, summed over the turns: half of the squared distance to `returns`.

    All are fp32 [n]; `before` are the values before the first optimizer step on the batch. With `clip` > 0 it is the
    larger of the losses of `values` and of `values` limited to [before - clip, before + clip], so that a value that has
    moved by more than `clip` towards its return is left where it is. The source is the code of PPO's authors, which
    Engstrom et al. 2020, "Implementation matters in deep policy gradients", arXiv 2005.12729, describes.
    """
    error = (values - returns).square()
    if clip > 0:
        limited = before + (values - before).clamp(-clip, clip)
        error = torch.maximum(error, (limited - returns).square())
    return error.sum() / 2


def mean_losses(sums: Mapping[str, float], share: float) -> dict[str, float]:
    """Return the metrics of an optimizer step: means over the sampled tokens, and the effective sample size.

    `sums` are those of `policy_loss` over all micro-batches and ranks, and `share` is 1 / number of sampled tokens. The
    effective sample size is (sum of r)^2 / sum of r^2, r = current / behaviour, as a share of the tokens (Kong 1992).
    """
    means = {name: value * share for name, value in sums.items()}
    ratio, squared = means.pop("ratio"), means.pop("squared_ratio")
    return means | {"effective_sample_size": ratio**2 / squared if squared else 0.0}


def _drift(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return sums over current / behaviour, whose logs are `log_ratio` [n].

    The estimate of KL(behaviour || current) is r - 1 - log r, k3 of `kl`.
    """
    log_ratio = log_ratio.clamp(-_MOST_LOG_RATIO, _MOST_LOG_RATIO)
    ratio = log_ratio.exp()
    return {
        "behaviour_kl": (log_ratio.expm1() - log_ratio).sum(),
        "ratio": ratio.sum(),
        "squared_ratio": ratio.square().sum(),
    }


def _proximal(logprobs: Tensor, batch: MicroBatch) -> Tensor:
    return logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs


def _clipped(ratio: Tensor, config: LossConfig) -> Tensor:
    return ratio if config.loss == "unclipped" else ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


def _within(values: Tensor, bounds: tuple[float, float]) -> Tensor:
    """Return True for values within the bounds, and for NaN: a mask must not hide a log-probability that is broken."""
    return ~((values < bounds[0]) | (values > bounds[1]))
