"""`leave_out_other_versions`: a step trains on tokens of its own weights only.

The server's word decides, token by token. Tokens of other weights come from a server that was started again and not yet
healed, from one that another trainer pushes to, or from a run that was killed and whose tokens are still around.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.rollout.trajectory import Fault, StopReason, Trajectory, by_episode
from verl_server.train.ancestors import Ancestors
from verl_server.weight_version import WeightVersion


def leave_out_other_versions(
    trajectories: Sequence[Trajectory],
    newest: WeightVersion,
    oldest: int | None = None,
    ancestors: Ancestors | None = None,
) -> None:
    """Turn each episode with a reward into a failed one if weights sampled one of its tokens that must not have.

    The weights are those of versions from the number `oldest` (default: that of `newest`) to `newest`. `ancestors`
    place the versions of earlier starts of the run; without them, no token may be of such a version. The branches of an
    agent's episode fail together. Their reward is removed, so that nothing trains on them, and their error names the
    versions and the reward.
    """
    ancestors, oldest = ancestors or Ancestors(), newest.number if oldest is None else oldest
    expected = str(newest) if oldest == newest.number else f"{oldest}@{newest.incarnation} to {newest}"

    def is_right(label: str) -> bool:
        number = ancestors.number_of(label, newest.incarnation)
        return number is not None and oldest <= number <= newest.number

    for branches in by_episode(trajectories):
        sampled = [v for branch in branches for v in _sampled(branch)]
        others = [version for version in dict.fromkeys(sampled) if not is_right(version)]
        if not others or branches[0].reward is None:
            continue
        names = ", ".join(v or "(no version)" for v in others[:3]) + (", ..." if len(others) > 3 else "")
        count = sum(v in others for v in sampled)
        error = (
            f"{count} of {len(sampled)} sampled tokens are of the weights {names} instead of {expected}, which this "
            "step trains. Does another trainer push to this server, or was the server started again? The episode, with "
            f"the reward {branches[0].reward:g}, is left out of training."
        )
        for branch in branches:
            branch.reward, branch.stop_reason, branch.error = None, StopReason.GENERATION_ERROR, error
            branch.fault = Fault.INFRASTRUCTURE


def _sampled(trajectory: Trajectory) -> list[str]:
    """Return the version of each sampled token."""
    pairs = zip(trajectory.weight_versions, trajectory.loss_mask, strict=True)
    return [version for version, is_sampled in pairs if is_sampled]
