"""The reference policy is loaded, sharded, frozen and the same in each start of a run, and holds the policy near it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.torchrun import run_ranks
from tests.train import faulty_run
from tests.train.reference_ranks import CONFIGS, main, make_trainer, make_trajectories, reference_of
from tests.train.test_run_end import SETTINGS
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.batches import Sample
from verl_server.train.demo import make_policy_folder
from verl_server.train.finite_check import NonFiniteError
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.policy import Policy, load_policy
from verl_server.train.ppo_options import PPOConfig
from verl_server.train.reference import load_reference
from verl_server.train.scoring import logprobs_of

CPU = torch.device("cpu")
CONFIG = GRPOConfig(
    epochs=1, minibatches=1, warmup_steps=0, learning_rate=1e-2, kl_coef=0.5, temperature=0.8, micro_batch_tokens=16
)
one_rank = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy with the same tokenizer."""
    return make_policy_folder(tmp_path_factory.mktemp("other"), seed=1)


def by_transformers(folder: Path, trajectory: Trajectory, temperature: float) -> Tensor:
    """Return log-probabilities of the sampled tokens, which are all but the first two: [n]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([trajectory.tokens])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0] / temperature, -1)
    return logprobs[1:-1].gather(1, tokens[0, 2:, None]).squeeze(1)


@one_rank
def test_it_scores_as_the_model_of_its_folder(policy_folder: Path, other_folder: Path) -> None:
    """At the temperature of training, without gradients, and each value with its token, however rows are packed."""
    trainer = make_trainer(str(policy_folder), str(other_folder), CONFIG)
    samples = [Sample(trajectory, 0.0) for trajectory in make_trajectories()]
    scored, figures = trainer.compare_with_reference(samples)
    total = 0.0
    for before, sample in zip(samples, scored, strict=True):
        assert sample.trajectory is before.trajectory and sample.reference_logprobs is not None
        expected = by_transformers(other_folder, sample.trajectory, 0.8)
        torch.testing.assert_close(sample.reference_logprobs, expected, rtol=1e-4, atol=1e-5)
        log_ratio = expected - (-1.0)  # each token was sampled with log-probability -1
        total += float((log_ratio.exp() - 1 - log_ratio).sum())
    tokens = sum(len(sample.trajectory.tokens) - 2 for sample in samples)
    assert figures == {"kl_reference": pytest.approx(total / tokens, rel=1e-4)}


@one_rank
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_at_the_begin_it_is_the_policy_bit_for_bit(policy_folder: Path, dtype: torch.dtype) -> None:
    """It has the dtype of the passes, half of the memory in bf16, and their arithmetic."""
    policy = load_policy(str(policy_folder), CPU, compute_dtype=dtype)
    args = TrainArgs(str(policy_folder), env_url="http://e", grpo=CONFIG)
    reference = load_reference(args, policy, None, CPU)
    assert reference is not None
    assert {parameter.dtype for parameter in reference.policy.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in reference.policy.parameters())
    samples = [Sample(trajectory, 0.0) for trajectory in make_trajectories()]
    ours, theirs = (logprobs_of(model, samples, CONFIG, CPU) for model in (policy, reference.policy))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@one_rank
def test_training_moves_the_policy_and_not_the_reference(policy_folder: Path) -> None:
    trainer = make_trainer(str(policy_folder), str(policy_folder), CONFIG)
    assert trainer.reference is not None
    before = [parameter.clone() for parameter in trainer.reference.policy.parameters()]
    learned = [trainer.update(trainer.samples(make_trajectories()), step) for step in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.reference.policy.parameters(), strict=True))
    assert all("kl_reference" in each.losses for each in learned)
    page = (Path(__file__).parents[2] / "docs/training.md").read_text(encoding="utf-8")
    assert [name for name in learned[0].losses if f"| `{name}` |" not in page] == []


@one_rank
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_step_has_the_gradient_of_policy_and_kl(policy_folder: Path, other_folder: Path, estimator: Any) -> None:
    """One optimizer step with SGD goes along the gradient of the formula over all tokens at once."""
    config = dataclasses.replace(CONFIG, kl_estimator=estimator, max_grad_norm=1e9, loss="unclipped", learning_rate=1.0)
    trainer = make_trainer(str(policy_folder), str(other_folder), config)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), lr=1.0)
    before = {name: weight.detach().clone() for name, weight in trainer.policy.named_weights()}
    samples = trainer.samples(make_trajectories())
    trainer.update(samples, 0)

    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    terms: list[Tensor] = []
    for sample in samples:
        tokens = torch.tensor([sample.trajectory.tokens])
        logprobs = torch.log_softmax(model(tokens).logits[0] / 0.8, -1)[1:-1].gather(1, tokens[0, 2:, None]).squeeze(1)
        log_ratio = by_transformers(other_folder, sample.trajectory, 0.8) - logprobs
        kl = log_ratio.square() / 2 if estimator == "k2" else log_ratio.exp() - 1 - log_ratio
        # `unclipped`: ratio to the weights that sampled, whose log-probabilities are -1.
        terms.append(-(logprobs + 1).exp() * sample.advantage + 0.5 * kl)
    torch.cat(terms).mean().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(
            before[name] - trainer.policy.get_parameter(f"language_model.{name}"), weight.grad, rtol=1e-3, atol=1e-4
        )


@one_rank
def test_penalties_are_in_the_advantages_of_groups(
    policy_folder: Path, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reward minus coefficient times the episode's sum of k1, compared in the group, also if all rewards are equal."""
    config = dataclasses.replace(CONFIG, kl_in="reward")
    trainer = make_trainer(str(policy_folder), str(other_folder), config)
    seen: list[Sample] = []
    monkeypatch.setattr(trainer.trained, "note", lambda rows, *_: seen.extend(rows))
    trainer.update(trainer.samples(make_trajectories()), 0)
    scores: dict[int, dict[int, float]] = {}
    for trajectory in make_trajectories():
        k1 = float((-1.0 - by_transformers(other_folder, trajectory, 0.8)).sum())
        members = scores.setdefault(trajectory.task.group, {})
        members[trajectory.member] = members.get(trajectory.member, trajectory.reward or 0.0) - 0.5 * k1
    assert len(seen) == 7 and {len(members) for members in scores.values()} == {2, 4}
    for sample in seen:
        members = scores[sample.trajectory.task.group]
        expected = members[sample.trajectory.member] - sum(members.values()) / len(members)
        assert sample.advantage == pytest.approx(expected, rel=1e-4, abs=1e-5)


@one_rank
def test_penalties_are_in_the_advantages_of_turns(
    policy_folder: Path, other_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a critic that says 0, gamma 1 and lambda 1, an advantage is the sum of rewards minus penalties."""
    config = PPOConfig(
        kl_coef=0.5, kl_in="reward", gae_lambda=1.0, normalize_std=False, epochs=1, minibatches=1, temperature=0.8
    )
    trainer = make_trainer(str(policy_folder), str(other_folder), config)
    seen: list[Sample] = []
    monkeypatch.setattr(trainer.trained, "note", lambda rows, *_: seen.extend(rows))
    trajectory = Trajectory(task=Task(seed=0, group=0))
    for reward in (0.25, 1.0):
        trajectory.append_observation({}, [1, 2])
        trajectory.append_output([5, 6], [-1.0, -1.0], ["0", "0"])
        trajectory.turns[-1].reward = reward
    trajectory.finish(StopReason.DONE)
    learned = trainer.update(trainer.samples([trajectory]), 0)
    k1 = -1.0 - by_transformers(other_folder, trajectory, 0.8)[[0, 1, 4, 5]]
    last = 1.0 - 0.5 * float(k1[2:].sum())
    first = 0.25 - 0.5 * float(k1[:2].sum()) + last
    (sample,) = seen
    assert sample.token_advantages is not None
    assert sample.token_advantages.tolist() == pytest.approx([first, first, last, last], rel=1e-4)
    assert learned.losses["return"] == pytest.approx((first + last) / 2, rel=1e-4)
    assert sample.trajectory.reward == 1.25, "the environment's reward stays as it is"


@one_rank
def test_without_a_coefficient_nothing_is_loaded_or_computed(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(str(policy_folder), CPU)
    assert load_reference(TrainArgs("absent", env_url="http://e"), policy, None, CPU) is None
    config = dataclasses.replace(CONFIG, kl_coef=0.0)
    trainer = PolicyTrainer(policy, config, 10, CPU)
    passes, forward = [], policy.forward
    monkeypatch.setattr(policy, "forward", lambda *a, **k: passes.append(torch.is_grad_enabled()) or forward(*a, **k))
    learned = trainer.update(trainer.samples(make_trajectories()), 0)
    assert all(passes) and "kl_reference" not in learned.losses


@one_rank
def test_another_vocabulary_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    policy = load_policy(str(policy_folder), CPU)
    other = tmp_path / "other"
    shutil.copytree(policy_folder, other)
    file = other / "tokenizer.json"
    words = json.loads(file.read_text())
    vocabulary = words["model"]["vocab"]
    names = {number: word for word, number in vocabulary.items()}
    vocabulary[names[7]], vocabulary[names[9]] = 9, 7
    file.write_text(json.dumps(words))
    assert Tokenizer.from_file(str(file)).token_to_id(names[7]) == 9
    with pytest.raises(
        BadRequestError, match=rf"--reference-path=.* 2 tokens differ, such as '{names[7]}', which is 9"
    ):
        reference_of(str(policy_folder), str(other), CONFIG, policy)
    small = tmp_path / "small"
    shutil.copytree(policy_folder, small)
    make_model_folder(small, "llama", vocab_size=39)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy_folder / name, small / name)
    with pytest.raises(BadRequestError, match=r"has 39 tokens, and the policy has 40: the reference needs a probabili"):
        reference_of(str(policy_folder), str(small), CONFIG, policy)
    with pytest.raises(BadRequestError, match=r"--reference-path='/absent/model' does not exist"):
        reference_of(str(policy_folder), "/absent/model", CONFIG, policy)


@one_rank
def test_a_reference_that_overflows_ends_the_run(policy_folder: Path) -> None:
    trainer = make_trainer(str(policy_folder), str(policy_folder), CONFIG)
    assert trainer.reference is not None
    with torch.no_grad():
        trainer.reference.policy.language_model.lm_head.weight[3] = float("inf")
    with pytest.raises(
        NonFiniteError, match=r"reference policy, computed in float32, are not finite\. Name another --r"
    ):
        trainer.update(trainer.samples(make_trajectories()), 0)


def test_two_ranks_have_the_values_of_one(policy_folder: Path, other_folder: Path, tmp_path: Path) -> None:
    """The reference is sharded, and groups and branches of an episode are divided over the ranks."""
    arguments = [str(policy_folder), str(other_folder)]
    main(*arguments, str(tmp_path / "1"))
    codes = run_ranks(2, "tests.train.reference_ranks", [*arguments, str(tmp_path / "2")], tmp_path / "log", 120)
    assert codes == [0, 0], (tmp_path / "log").read_text()[-6000:]
    one, two = (torch.load(tmp_path / name) for name in ("1", "2"))
    assert one.keys() == two.keys() == CONFIGS.keys()
    for name, (losses, weights) in one.items():
        assert two[name][0] == pytest.approx(losses, rel=1e-3, abs=1e-5), name
        torch.testing.assert_close(two[name][1], weights, rtol=0, atol=1e-5)
        assert losses["kl_reference"] == pytest.approx(one["k3"][0]["kl_reference"])


# -- a training that would leave the reference -----------------------------------------------------------------------

PROMPTS = torch.tensor([[1, 2], [1, 4], [3, 2], [5, 6]])
WINNING = 11


def distribution(policy: Policy) -> Tensor:
    """Return the log-probabilities of all first tokens after each prompt: [prompts, vocabulary]."""
    with torch.no_grad():
        return policy.language_model(PROMPTS).logits[:, -1].float().log_softmax(-1)


def played(policy: Policy, draw: torch.Generator) -> list[Trajectory]:
    """Return episodes of one token. Its reward is 1 for one of the tokens, whatever the prompt."""
    found = []
    logprobs = distribution(policy)
    for group, prompt in enumerate(PROMPTS.tolist()):
        for member, token in enumerate(torch.multinomial(logprobs[group].exp(), 16, True, generator=draw).tolist()):
            trajectory = Trajectory(task=Task(seed=group, group=group, episode_id=f"{group}-{member}"))
            trajectory.append_observation({}, prompt)
            trajectory.append_output([token], [float(logprobs[group, token])], ["0"])
            trajectory.turns[0].reward = float(token % 4 == WINNING % 4)
            trajectory.finish(StopReason.DONE)
            found.append(trajectory)
    return found


def kl_after_training(folder: Path, config: GRPOConfig) -> tuple[float, float | None]:
    """Return (KL per token between the trained policy and the first one, the last figure of the run)."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    trainer = make_trainer(str(folder), str(folder), config) if config.kl_coef else None
    trainer = trainer or PolicyTrainer(load_policy(str(folder), CPU), config, 20, CPU)
    before, figure = distribution(trainer.policy), None
    for step in range(20):
        if samples := trainer.samples(played(trainer.policy, draw)):  # none if the free policy wins all episodes
            figure = trainer.update(samples, step).losses.get("kl_reference")
    after = distribution(trainer.policy)
    return float((after.exp() * (after - before)).sum(-1).mean()), figure


@one_rank
def test_a_large_coefficient_holds_the_policy_at_the_reference(policy_folder: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "minibatches": 1, "warmup_steps": 0, "learning_rate": 3e-3}
    free, none = kl_after_training(policy_folder, GRPOConfig(**settings))
    assert free > 0.3 and none is None
    held = {
        "k3": GRPOConfig(kl_coef=20.0, **settings),
        "k2": GRPOConfig(kl_coef=20.0, kl_estimator="k2", **settings),
        "reward": GRPOConfig(kl_coef=20.0, kl_in="reward", **settings),
        "ppo, k3": PPOConfig(kl_coef=20.0, **settings),
        "ppo, reward": PPOConfig(kl_coef=20.0, kl_in="reward", value_clip=0.0, **settings),
    }
    for name, config in held.items():
        found, figure = kl_after_training(policy_folder, config)
        assert found < free / 20, name
        assert figure is not None and figure < free / 10, name


# -- whole runs, without servers -------------------------------------------------------------------------------------


def test_a_run_that_goes_on_has_the_same_reference(
    policy_folder: Path, other_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is that of --model-path, also after --resume and in a fork, whose weights are those of a checkpoint."""

    def run(out: Path, *more: str) -> int:
        model = ["--model-path", str(policy_folder), "--out", str(out)]
        return faulty_run.main(["none", "0", *model, *SETTINGS, "--grpo.kl-coef", "0.5", *more])

    def figures(out: Path) -> dict[int, float]:
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["losses"]["kl_reference"] for line in lines}

    straight, resumed, forked = (tmp_path / name for name in ("straight", "resumed", "forked"))
    assert run(straight, "--keep-checkpoints", "9") == 0
    assert run(resumed, "--steps", "2") == 0
    assert run(resumed, "--resume") == 0
    assert run(forked, "--fork", str(straight), "--fork-step", "2") == 0
    whole = figures(straight)
    assert figures(resumed) == whole and figures(forked) == {step: whole[step] for step in (2, 3)}
    assert run(resumed, "--resume", "--steps", "5", "--reference-path", str(other_folder)) == 1
    assert f"reference_path: was None, is '{other_folder}'" in capsys.readouterr().err
    assert run(resumed, "--resume", "--steps", "5", "--grpo.kl-in", "reward") == 1
    assert "grpo.kl_in: was 'loss', is 'reward'" in capsys.readouterr().err
    another = tmp_path / "another"
    assert run(another, "--fork", str(straight), "--fork-step", "2", "--reference-path", str(other_folder)) == 0
    assert figures(another)[2] != whole[2], "a fork may have another reference"
