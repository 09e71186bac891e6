"""`FaultRules`: who is responsible for the end of an episode, and what follows from it.

Each `StopReason` has a fault. The policy's ends are scored, because the policy must learn from its failures, and a
group of survivors has biased rewards. Ends of the infrastructure say nothing about the policy: another episode
replaces them (`replacements`). Unknown ones are neither replaced nor scored: a second try could favour a policy that
works only in some tries, and a score could blame it for what it did not do. docs/debugging.md has this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import tyro

from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory

FAULTS: Mapping[StopReason, Fault] = MappingProxyType(
    {
        StopReason.DONE: Fault.POLICY,
        StopReason.MAX_TURNS: Fault.POLICY,
        StopReason.MAX_TOKENS: Fault.POLICY,
        StopReason.CONTEXT_FULL: Fault.POLICY,
        StopReason.TIME_LIMIT: Fault.POLICY,
        StopReason.IDLE: Fault.POLICY,
        StopReason.ACTION_REFUSED: Fault.POLICY,
        StopReason.AGENT_ERROR: Fault.POLICY,
        StopReason.ENV_TIMEOUT: Fault.INFRASTRUCTURE,
        StopReason.ENV_ERROR: Fault.INFRASTRUCTURE,
        StopReason.GENERATION_ERROR: Fault.INFRASTRUCTURE,
        StopReason.SESSION_LOST: Fault.INFRASTRUCTURE,
        StopReason.ISOLATION_FAILED: Fault.INFRASTRUCTURE,
        StopReason.ABORTED: Fault.INFRASTRUCTURE,
        StopReason.GENERATION_TIMEOUT: Fault.UNKNOWN,
        StopReason.STRAGGLER: Fault.UNKNOWN,
        StopReason.AGENT_KILLED: Fault.UNKNOWN,
    }
)
"""The fault of each end, unless an option moves it. docs/debugging.md gives the reason for each line."""


@dataclass(frozen=True)
class FaultRules:
    """The fault of each end of an episode, and the score of failures."""

    fault: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """REASON=policy, REASON=infrastructure or REASON=unknown: another fault for one stop reason, for example
    env_timeout=policy if the environment runs code that the policy writes. May be repeated. docs/debugging.md has the
    table."""
    score_failed: float | None = 0.0
    """Reward of an episode that ends by the policy's fault, or at a limit, before the environment has returned a reward
    or where no verifier judges it. None leaves such episodes out of their groups, which then have survivors only."""

    def __post_init__(self) -> None:
        _ = self.moved  # raises for a wrong option
        if self.score_failed is not None and not math.isfinite(self.score_failed):
            raise BadRequestError(f"score_failed must be a finite number or None, not {self.score_failed}.")

    @property
    def moved(self) -> dict[StopReason, Fault]:
        """The faults that `fault` names. Raise BadRequestError if one of them is wrong or is named twice."""
        moved: dict[StopReason, Fault] = {}
        for text in self.fault:
            name, _, fault = text.partition("=")
            if name not in list(StopReason) or fault not in list(Fault):
                raise BadRequestError(
                    f"{text!r} moves no fault: write REASON=FAULT with a reason of {', '.join(StopReason)} and one of "
                    f"the faults {', '.join(Fault)}."
                )
            if StopReason(name) is StopReason.DONE:
                raise BadRequestError(f"{text!r}: an episode that the environment ended is the policy's.")
            if StopReason(name) in moved:
                raise BadRequestError(f"The fault of {name} is named twice: {', '.join(self.fault)}.")
            moved[StopReason(name)] = Fault(fault)
        return moved

    def of(self, reason: StopReason) -> Fault:
        """Return the fault of an end."""
        return self.moved.get(reason) or FAULTS[reason]

    def settle(self, trajectory: Trajectory) -> None:
        """Set fault and reward of a trajectory that has ended. The environment is the verifier: its rewards are summed.

        An episode without a sampled token gets no score for a failure, because the policy had no part in it.
        """
        reason = trajectory.stop_reason
        assert reason is not None
        trajectory.fault = self.of(reason)
        if trajectory.fault is not Fault.POLICY:
            trajectory.reward = None
        elif reason is not StopReason.DONE and (reason.is_regular or any(trajectory.loss_mask)):
            rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
            trajectory.reward = sum(rewards) if rewards else self.score_failed


def fault_of(reason: StopReason, recorded: Fault | None) -> Fault:
    """Return the recorded fault of an end, or that of the table if an earlier version recorded none."""
    return recorded or FAULTS[reason]


def describe_ends(ends: Iterable[tuple[StopReason, Fault | None]]) -> str:
    """Return the ends by fault as text: "policy 3 (done 2, time_limit 1), infrastructure 1 (env_error 1)"."""
    found: dict[Fault, dict[str, int]] = {fault: {} for fault in Fault}
    for reason, recorded in ends:
        counts = found[fault_of(reason, recorded)]
        counts[str(reason)] = counts.get(str(reason), 0) + 1
    return ", ".join(
        f"{fault} {sum(counts.values())} ({', '.join(f'{name} {count}' for name, count in _by_count(counts))})"
        for fault, counts in found.items()
        if counts
    )


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda entry: -entry[1])
