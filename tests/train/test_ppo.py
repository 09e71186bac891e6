"""PPO: values and advantages of turns reach the losses, the critic learns, warm-up, and a resumed run is the run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.batches import MicroBatch, Sample
from verl_server.train.checkpoints import POLICY, save_checkpoint
from verl_server.train.critic import Critic, load_critic
from verl_server.train.critic_trainer import States, Targets, describe_values
from verl_server.train.finite_check import NonFiniteError
from verl_server.train.gae import TurnChain
from verl_server.train.losses import value_loss
from verl_server.train.policy import Policy, load_policy
from verl_server.train.ppo import PPOTrainer, whiten
from verl_server.train.ppo_options import PPOConfig
from verl_server.train.run_end import Progressing
from verl_server.train.trainer_state import TrainerState

CPU = torch.device("cpu")
CONFIG = PPOConfig(
    groups=8, epochs=2, minibatches=3, learning_rate=1e-2, critic_learning_rate=1e-2, warmup_steps=3, seed=7
)

pytestmark = pytest.mark.usefixtures("one_rank")


def make_trainer(folder: Path, config: PPOConfig = CONFIG, dtype: torch.dtype = torch.float32) -> PPOTrainer:
    critic = load_critic(str(folder), "--critic-path", CPU, vocabulary=40, compute_dtype=dtype)
    return PPOTrainer(load_policy(str(folder), CPU, compute_dtype=dtype), critic, config, 4, CPU)


def two_turns(seed: int, rewards: tuple[float, float]) -> Trajectory:
    """An episode of two turns: the first action has one token, the second one two."""
    trajectory = Trajectory(task=Task(seed=seed, group=seed, episode_id=str(seed)))
    for turn, reward in enumerate(rewards):
        trajectory.append_observation({}, [1, 10 + seed % 7])
        trajectory.append_output([5 + turn + seed % 3] * (turn + 1), [-3.0] * (turn + 1), ["0"] * (turn + 1))
        trajectory.turns[-1].reward = reward
    trajectory.finish(StopReason.DONE)
    return trajectory


def samples_of(trainer: PPOTrainer, step: int = 0) -> list[Sample]:
    played = [two_turns(step * 8 + i, (0.25 * (i % 2), 0.125 * i)) for i in range(6)]
    return trainer.samples([*played, make_trajectory(9, 0.5, 4), make_trajectory(9, None)])


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    modules: dict[str, Policy | Critic] = {"policy": trainer.policy, "critic": trainer.critic.critic}
    return {
        f"{name}.{weight}": parameter.detach().clone()
        for name, module in modules.items()
        for weight, parameter in module.checkpoint_weights()
    }


def test_a_value_is_read_at_the_last_token_before_the_action(policy_folder: Path) -> None:
    """The value of a turn does not depend on the tokens behind its state, nor on how rows are packed."""
    trainer = make_trainer(policy_folder, dataclasses.replace(CONFIG, micro_batch_tokens=8))
    torch.nn.init.normal_(trainer.critic.critic.head.weight)
    samples = samples_of(trainer)
    chains = [TurnChain.of(sample.trajectory) for sample in samples]
    states = [States(s.trajectory, chain.states) for s, chain in zip(samples, chains, strict=True)]
    found = trainer.critic.values(states)
    critic: Any = trainer.critic.critic.requires_grad_(False)
    for sample, chain, values in zip(samples, chains, found, strict=True):
        for state, value in zip(chain.states.tolist(), values.tolist(), strict=True):
            before = torch.tensor([sample.trajectory.tokens[: state + 1]])
            hidden = critic.body(input_ids=before).last_hidden_state[0, -1]
            assert float(critic.head(hidden)) == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_the_policy_is_trained_on_the_advantages_of_turns(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a critic that says 0, gamma 1 and lambda 1, the advantage of a turn is the sum of the rewards from it on."""
    config = dataclasses.replace(CONFIG, gae_lambda=1.0, normalize_std=False, epochs=1, minibatches=1)
    trainer = make_trainer(policy_folder, config)
    seen: list[Sample] = []
    monkeypatch.setattr(trainer.trained, "note", lambda rows, *_: seen.extend(rows))
    played = [two_turns(1, (0.25, 0.5)), two_turns(2, (0.0, 1.0))]
    trainer.update(trainer.samples(played), 0)
    by_seed = {sample.trajectory.task.seed: sample for sample in seen}
    assert by_seed[1].token_advantages is not None and by_seed[2].token_advantages is not None
    assert by_seed[1].token_advantages.tolist() == [0.75, 0.5, 0.5]
    assert by_seed[2].token_advantages.tolist() == [1.0, 1.0, 1.0]
    batch = MicroBatch.of([by_seed[1], by_seed[2]], CPU)
    assert batch.advantages.tolist() == [0.75, 0.5, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 16, 1])
def test_gradients_of_the_critic_do_not_depend_on_micro_batches(policy_folder: Path, micro_batch_tokens: int) -> None:
    """One pass, several, or one for each trajectory have the gradient of the mean loss over the states of all."""
    config = dataclasses.replace(
        CONFIG, micro_batch_tokens=micro_batch_tokens, epochs=1, minibatches=1, max_grad_norm=1e9, value_clip=0.0
    )
    trainer = make_trainer(policy_folder, config).critic
    torch.nn.init.normal_(trainer.critic.head.weight)
    samples = []
    for number, length in enumerate([1, 9, 4, 17, 2]):
        trajectory = make_trajectory(number, 1.0, length, seed=number)
        states = torch.tensor([1, length])[: min(2, length)]
        returns = torch.arange(len(states)) * 0.5 + number
        samples.append(Targets(trajectory, states, torch.zeros(len(states)), returns))
    critic: Any = trainer.critic
    values, wanted = [], []
    for sample in samples:
        hidden = critic.body(input_ids=torch.tensor([sample.trajectory.tokens])).last_hidden_state[0]
        values += [critic.head(hidden[state])[0] for state in sample.positions.tolist()]
        wanted += sample.returns.tolist()
    squares = [(value - target) ** 2 / 2 for value, target in zip(values, wanted, strict=True)]
    gradients = torch.autograd.grad(torch.stack(squares).mean(), list(critic.parameters()))

    before = [parameter.detach().clone() for parameter in critic.parameters()]
    trainer.optimizer = torch.optim.SGD(critic.parameters(), lr=1.0)
    learned = trainer.update(samples, 0)
    for parameter, old, gradient in zip(critic.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(old - parameter.detach(), gradient, rtol=1e-3, atol=1e-4)
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    assert learned.losses["value_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_the_critic_learns_what_follows(policy_folder: Path) -> None:
    trainer = make_trainer(policy_folder, dataclasses.replace(CONFIG, value_clip=0.0, gae_lambda=1.0))
    learned = [trainer.update(samples_of(trainer), 0).losses for _ in range(30)]
    assert learned[0]["value"] == 0 and learned[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert learned[-1]["explained_variance"] > 0.9 and learned[-1]["value_loss"] < learned[0]["value_loss"] / 10
    assert learned[-1]["return"] == pytest.approx(learned[-1]["value"], abs=0.05)
    assert {"loss", "grad_norm", "entropy", "value_grad_norm"} <= learned[-1].keys()


def test_in_the_first_steps_only_the_critic_is_trained(policy_folder: Path) -> None:
    trainer = make_trainer(policy_folder, dataclasses.replace(CONFIG, critic_warmup_steps=1))
    for step, moves in ((0, {"critic"}), (1, {"critic", "policy"})):
        before = weights(trainer)
        learned = trainer.update(samples_of(trainer), step)
        changed = {name.split(".")[0] for name, weight in weights(trainer).items() if not weight.equal(before[name])}
        assert changed == moves
        assert learned.optimizer_steps == 6 * len(moves) and ("loss" in learned.losses) == ("policy" in moves)


def test_whitened_advantages() -> None:
    """Turns that the mask leaves out do not count, but are moved and scaled as the others."""
    advantages = torch.tensor([[1.0, 3.0, 100.0], [5.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    found = whiten(advantages, mask)
    counted = found[mask.bool()]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    assert found[0, 2].item() == pytest.approx((100 - 3) / (8 / 3) ** 0.5)
    assert whiten(torch.full((2, 2), 4.0), torch.ones(2, 2)).abs().max().item() == 0


def test_the_loss_of_values() -> None:
    before, returns = torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    values = torch.tensor([0.125, 0.5, -0.5], requires_grad=True)  # near, too far towards the return, too far away
    loss = value_loss(values, before, returns, clip=0.25)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx((0.875**2 + 0.75**2 + 1.5**2) / 2)
    assert values.grad is not None and values.grad.tolist() == [-0.875, 0.0, -1.5]
    assert value_loss(values, before, returns, clip=0.0).item() == pytest.approx((0.875**2 + 0.5**2 + 1.5**2) / 2)


def test_figures_of_values() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert describe_values(returns, returns)["explained_variance"] == pytest.approx(1)
    assert describe_values(torch.full((4,), 7.0), returns) == {"value": 7.0, "return": 1.5, "explained_variance": 0.0}
    assert describe_values(returns, torch.ones(4)).keys() == {"value", "return"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_is_the_run(policy_folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    """Interrupted after the warm-up, when the policy's optimizer has no state yet, and a step later."""
    config = dataclasses.replace(CONFIG, critic_warmup_steps=1)
    straight, interrupted = (make_trainer(policy_folder, config, dtype) for _ in range(2))
    for step in range(3):
        straight.update(samples_of(straight, step), step)
        interrupted.update(samples_of(interrupted, step), step)
        state = interrupted.state
        folder = save_checkpoint(tmp_path, state.models, state.progress(Progressing(step + 1, step + 1)))
        interrupted = make_trainer(policy_folder, config, dtype)
        progress = interrupted.state.load(folder)
        assert progress.has_optimizer_state == (step > 0) and progress.further == {"critic": True}
        ours, theirs = weights(interrupted), weights(straight)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_of_other_models_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_folder)
    alone = TrainerState({POLICY: trainer.state.models[POLICY]}, trainer.scaling)
    folder = save_checkpoint(tmp_path, alone.models, alone.progress(Progressing(1, 1)))
    with pytest.raises(BadRequestError, match=r"has the models \['policy'\], and this run has \['critic', 'policy'\]"):
        trainer.state.load(folder)


def test_a_critic_that_diverges_ends_the_run_with_finite_weights(policy_folder: Path) -> None:
    trainer = make_trainer(policy_folder)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"The loss of the critic is inf.*--ppo\.critic-learning-rate"):
        trainer.update(trainer.samples([two_turns(1, (0.0, 1e30))]), 0)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())


def test_a_critic_needs_the_policys_tokens(policy_folder: Path) -> None:
    with pytest.raises(BadRequestError, match=r"--critic-path=.* has 40 tokens, and the policy has 41"):
        load_critic(str(policy_folder), "--critic-path", CPU, vocabulary=41, compute_dtype=torch.float32)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(BadRequestError, match=r"--ppo\.gae-lambda must be from 0 to 1, not 1\.5"):
        PPOConfig(gae_lambda=1.5)
    with pytest.raises(BadRequestError, match=r"--ppo\.value-clip must not be negative, not -1"):
        PPOConfig(value_clip=-1.0)
    with pytest.raises(BadRequestError, match=r"--ppo\.tis-bound is for --ppo\.loss tis"):
        PPOConfig(tis_bound=3.0)
