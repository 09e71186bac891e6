"""A step trains on tokens of its own weights only: an episode with others fails, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.train.conftest import make_trajectory
from tests.train.faulty_run import Player, Servers
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import StopReason, Trajectory
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks
from verl_server.train.sampled_versions import leave_out_other_versions
from verl_server.weight_version import WeightVersion

LOST, NEW = WeightVersion(13, "aaaaaaaa"), WeightVersion(13, "bbbbbbbb")


def sampled(reward: float | None, *versions: str, member: int = 0) -> Trajectory:
    """Return a trajectory with one sampled token of each version."""
    trajectory = make_trajectory(0, reward, length=len(versions), seed=member)
    trajectory.weight_versions = ["", "", *versions]
    return trajectory


def test_an_episode_with_tokens_of_other_weights_fails() -> None:
    own, other = sampled(0.5, str(NEW), str(NEW)), sampled(1.0, str(NEW), str(LOST), "13", "")
    leave_out_other_versions([own, other], NEW)
    assert (own.reward, own.error) == (0.5, None)
    assert (other.reward, other.stop_reason, other.is_trainable) == (None, StopReason.GENERATION_ERROR, False)
    assert str(other.error).startswith(
        "3 of 4 sampled tokens are of the weights 13@aaaaaaaa, 13, (no version) instead of 13@bbbbbbbb"
    )
    assert "the reward 1, is left out" in str(other.error)


def test_the_branches_of_an_episode_fail_together() -> None:
    branches = [sampled(1.0, str(NEW)), sampled(1.0, str(LOST))]
    for number, branch in enumerate(branches):
        branch.session, branch.branch = "s", number
    leave_out_other_versions(branches, NEW)
    assert [branch.reward for branch in branches] == [None, None]


def test_the_error_of_an_episode_that_failed_stays() -> None:
    failed = sampled(None, "13")
    leave_out_other_versions([failed], NEW)
    assert (failed.stop_reason, failed.error) == (StopReason.ENV_ERROR, "ws://env:1/ws did not answer `step`")


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("others", [3, 12])
def test_a_step_reports_such_episodes_and_trains_on_the_others(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The server answers the first episodes with the lost version of the same number."""
    config = GRPOConfig(groups=3, group_size=4, warmup_steps=0)
    cpu = torch.device("cpu")
    trainer, servers = PolicyTrainer(load_policy(str(policy_folder), cpu), config, 1, cpu), Servers()
    player = Player(servers)

    def run(*arguments: object) -> Rollout:
        rollout = Player.run(player, *arguments)  # type: ignore[arg-type]
        for trajectory in rollout.trajectories[:others]:
            trajectory.weight_versions = [version and "0@aaaaaaaa" for version in trajectory.weight_versions]
        return rollout

    monkeypatch.setattr(player, "run", run)
    grpo = GRPO(trainer, servers, player, all_ranks(), incarnation="bbbbbbbb")  # type: ignore[arg-type]
    grpo.push()
    step = grpo.step()
    assert (step.metrics.weight_version, step.metrics.failed) == ("0@bbbbbbbb", others)
    assert (step.metrics.trajectories, step.metrics.trainable) == (12, 12 - others)
    assert {failure.stop_reason for failure in step.failures} == {"generation_error"}
    assert all("of the weights 0@aaaaaaaa instead of 0@bbbbbbbb" in failure.error for failure in step.failures)
    assert (step.metrics.skipped is not None) == (others == 12)
    assert servers.pushed == ["0@bbbbbbbb"] + ([] if others == 12 else ["1@bbbbbbbb"])


@pytest.mark.usefixtures("one_rank")
def test_each_start_of_a_run_has_its_own_versions(policy_folder: Path) -> None:
    cpu = torch.device("cpu")
    trainer = PolicyTrainer(load_policy(str(policy_folder), cpu), GRPOConfig(groups=4), 1, cpu)
    first, second = (GRPO(trainer, Servers(), None, all_ranks()).weight_version for _ in range(2))  # type: ignore[arg-type]
    assert first.number == second.number == 0 and first.incarnation != second.incarnation
