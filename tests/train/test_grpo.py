"""The algorithm matches numbers worked out by hand; with a real server, the loop learns and log-probabilities agree."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.train.conftest import make_trajectory
from tests.train.faulty_run import Player, Servers
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.train.batches import MicroBatch, Sample
from verl_server.train.grpo import GRPO, PolicyTrainer, group_advantages
from verl_server.train.losses import policy_loss
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks, attach_engine
from verl_server.train.run_tasks import make_tasks
from verl_server.train.servers import RolloutServers

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_rank")


def test_advantages_are_relative_to_the_group() -> None:
    rewards = [(0, 1.0), (1, 5.0), (0, 0.0), (1, 5.0), (0, 0.5)]
    trajectories = [make_trajectory(group, reward) for group, reward in rewards]
    samples = group_advantages(trajectories, normalize_std=False)
    # the other group has equal rewards, so it has nothing to learn
    assert [(s.trajectory.reward, s.advantage) for s in samples] == [(1.0, 0.5), (0.0, -0.5), (0.5, 0.0)]
    normalized = group_advantages(trajectories, normalize_std=True)
    assert normalized[0].advantage == pytest.approx(0.5 / math.sqrt(1 / 6))


def test_a_failed_episode_is_neither_trained_nor_counted_as_zero() -> None:
    samples = group_advantages([make_trajectory(0, reward) for reward in (1.0, None, 0.0)], False)
    assert [s.advantage for s in samples] == [0.5, -0.5]  # the mean of the two rewards


def plain_gradients(policy_folder: Path, samples: list[Sample], config: GRPOConfig) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean loss over all sampled tokens: one batch, all logits in fp32, plain autograd."""
    model: Any = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    batch = MicroBatch.of(samples, CPU)
    distribution = (model(input_ids=batch.tokens).logits / config.temperature).log_softmax(-1)
    before = distribution.flatten(0, 1)[batch.positions - 1]
    logprobs = before.gather(1, batch.tokens.flatten()[batch.positions, None]).squeeze(1)
    entropy = -(before.exp() * before).sum(-1)
    loss, _ = policy_loss(logprobs, entropy, batch, config, config.entropy_coef)
    (loss / len(batch.positions)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("micro_batch_tokens", [10_000, 40, 1])
def test_gradients_do_not_depend_on_micro_batches(policy_folder: Path, micro_batch_tokens: int) -> None:
    """Rows of different lengths, in one micro-batch, several, or one each, have the gradients of the plain formula."""
    settings: dict[str, Any] = {"epochs": 1, "minibatches": 1, "max_grad_norm": 1e9, "warmup_steps": 0}
    config = GRPOConfig(
        micro_batch_tokens=micro_batch_tokens, learning_rate=1.0, temperature=0.8, entropy_coef=0.1, **settings
    )
    lengths = [1, 9, 4, 17, 2, 6]
    samples = [Sample(make_trajectory(0, 1.0, n, seed=n), (-1.0) ** n * n) for n in lengths]
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU, logprob_chunk=7), config, 10, CPU)
    before = {name: weight.detach().clone() for name, weight in trainer.policy.named_weights()}
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
    learned = trainer.update(samples, step=0)
    expected = plain_gradients(policy_folder, samples, config)
    for name, weight in trainer.policy.named_weights():
        torch.testing.assert_close(before[name] - weight.detach(), expected[name], rtol=1e-4, atol=1e-5)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert learned.losses["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert learned.tokens == sum(lengths) + 2 * len(lengths)
    padded = {10_000: 6 * 19, 40: 2 * 19 + 4 * 8, 1: learned.tokens}
    assert learned.padded_tokens == padded[micro_batch_tokens]


def test_entropy_is_tracked_only_on_request(policy_folder: Path) -> None:
    samples = [Sample(make_trajectory(0, 1.0), 1.0)]
    losses = {}
    for track in (True, False):
        config = GRPOConfig(track_entropy=track, epochs=1, minibatches=1)
        losses[track] = PolicyTrainer(load_policy(str(policy_folder), CPU), config, 1, CPU).update(samples, 0).losses
    assert losses[True].keys() - losses[False].keys() == {"entropy"}
    assert losses[True]["loss"] == losses[False]["loss"]


def test_tasks_are_disjoint_and_repeatable() -> None:
    config = GRPOConfig(groups=4, group_size=3, seed=5)
    ranks = make_tasks(7, config, 0, 2) + make_tasks(7, config, 2, 2)
    assert ranks == make_tasks(7, config, 0, 4)
    assert [t.group for t in ranks] == [g for g in range(4) for _ in range(3)]
    assert len({t.seed for t in ranks}) == 4
    later = make_tasks(8, config, 0, 4)
    assert not {t.seed for t in ranks} & {t.seed for t in later}
    assert len({t.sampling_seed for t in ranks + later}) == 24


def test_groups_must_divide_over_ranks(policy_folder: Path) -> None:
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), GRPOConfig(groups=3), 10, CPU)
    ranks = all_ranks()
    ranks.size = 2
    with pytest.raises(BadRequestError, match=r"--grpo\.groups 3 does not divide over 2 ranks"):
        GRPO(trainer, None, None, ranks)  # type: ignore[arg-type]


def test_steps_against_a_real_server(policy_folder: Path, server_url: str, environment_url: str) -> None:
    """The trainer improves at an easy game, and log-probabilities of server and trainer agree after every push."""
    config = GRPOConfig(groups=8, group_size=12, epochs=2, minibatches=2, learning_rate=4e-3, warmup_steps=1, seed=1)
    renderer = TextRenderer(AutoTokenizer.from_pretrained(policy_folder))
    limits = Limits(max_turns=3, max_new_tokens=1)
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), config, 6, CPU)
    with attach_engine(server_url) as engine, AgentLoop(server_url, environment_url, renderer, limits=limits) as loop:
        run = GRPO(trainer, RolloutServers([engine], all_ranks()), loop, all_ranks())
        run.push()
        steps = [run.step() for _ in range(6)]
    metrics = [step.metrics for step in steps]
    assert all(m.logprob_gap is not None and m.logprob_gap < 1e-4 for m in metrics)
    assert (metrics[0].logprob_gap or 0) > 0, (
        "the first gap must not be 0; later gaps may be, when the policy is certain"
    )
    version, incarnation = 0, run.weight_version.incarnation
    for number, step in enumerate(steps):
        sampled = {v for t in step.rollout.trajectories for v in t.weight_versions if v}
        assert sampled == {metrics[number].weight_version} == {f"{version}@{incarnation}"}
        version = version if metrics[number].skipped else number + 1
    assert sum(m.reward or 0 for m in metrics[-2:]) / 2 > (metrics[0].reward or 0) + 0.2
    assert metrics[0].losses["grad_norm"] > 0


def test_steps_with_nothing_to_train_on_change_nothing(
    policy_folder: Path, server_url: str, environment_url: str
) -> None:
    """In step 1 every episode fails and in step 3 all rewards are equal. Both steps are skipped and name the cause; the
    others train."""
    config = GRPOConfig(groups=4, group_size=6, learning_rate=1e-2, warmup_steps=1)
    renderer = TextRenderer(AutoTokenizer.from_pretrained(policy_folder))
    limits = Limits(max_turns=3, max_new_tokens=1)
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), config, 5, CPU)
    with attach_engine(server_url) as engine, AgentLoop(server_url, environment_url, renderer, limits=limits) as loop:
        run = GRPO(trainer, RolloutServers([engine], all_ranks()), loop, all_ranks(), incarnation="5f2c9a1e")
        run.push()
        steps = []
        for number in range(5):
            before = [weight.detach().clone() for _, weight in trainer.policy.named_weights()]
            steps.append(run.step())
            changed = not all(
                torch.equal(a, b) for a, (_, b) in zip(before, trainer.policy.named_weights(), strict=True)
            )
            assert changed == (number not in (1, 3))
    metrics = [step.metrics for step in steps]
    assert [m.weight_version for m in metrics] == [f"{number}@5f2c9a1e" for number in (0, 1, 1, 3, 3)]
    assert [m.failed for m in metrics] == [12, 24, 0, 0, 0]
    assert [m.skipped is not None for m in metrics] == [False, True, False, True, False]
    assert str(metrics[1].skipped).startswith("24 of 24 episodes failed: 24 x ws://")
    assert "the sandbox is down" in str(metrics[1].skipped)
    assert metrics[1].logprob_gap is None and metrics[1].reward is None
    assert str(metrics[3].skipped) == "in no group did the rewards differ (24 episodes have a reward, 1 on average)"
    assert metrics[3].logprob_gap is not None
    assert {(f.step, f.url, f.seed) for f in steps[0].failures} == {(0, environment_url, 2), (0, environment_url, 3)}


def test_a_rollout_that_fails_on_one_rank_is_raised_on_all(
    policy_folder: Path, environment_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks exchange the errors of their rollouts at the point where other ranks wait for reports."""
    trainer = PolicyTrainer(load_policy(str(policy_folder), CPU), GRPOConfig(groups=4), 5, CPU)
    gathered: list[str] = []
    ranks = all_ranks()
    gather = ranks.gather

    def noted(what: str, prepare: Any) -> Any:
        gathered.append(what)
        return gather(what, prepare)

    class NoServer(Player):
        def run(self, *_: Any) -> Any:
            raise ServerUnavailableError("No generation succeeded.")

    monkeypatch.setattr(ranks, "gather", noted)
    run = GRPO(trainer, Servers(), NoServer(Servers()), ranks, incarnation="5f2c9a1e")  # type: ignore[arg-type]
    with pytest.raises(ServerUnavailableError):
        run.step()
    assert gathered == ["GRPO.step"]


def test_weights_that_fsdp_holds_for_one_rank_are_pushed_as_they_are(policy_folder: Path, server_url: str) -> None:
    """bf16 passes make every parameter a DTensor over one rank, but the server gets the fp32 weights."""
    client = HttpServerEngineAdapter.attach(server_url)
    sums = []
    with client, attach_engine(server_url) as engine:
        for dtype in (torch.float32, torch.bfloat16):
            policy = load_policy(str(policy_folder), CPU, compute_dtype=dtype)
            with torch.no_grad():
                for _, weight in policy.named_weights():
                    weight.mul_(1.1)
            engine.update_weights_from_tensor(policy.named_weights(), weight_version=str(dtype), partial=False)
            sums.append([rank["checksums"] for rank in client.weights_checker()["ranks"]])
    assert sums[0] == sums[1]
    assert dist.get_world_size() == 1
