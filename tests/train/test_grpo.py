"""The algorithm on numbers worked out by hand, and the loop with a real server: it learns, and both sides agree."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.env_server import EnvServer
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.demo import make_policy_folder
from verl_server.train.grpo import (
    GRPO,
    Batch,
    GRPOConfig,
    PolicyTrainer,
    group_advantages,
    make_tasks,
    policy_loss,
    token_logprobs,
)
from verl_server.train.ranks import launch_engine, load_policy, setup_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    setup_ranks("cpu")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy_folder(tmp_path_factory.mktemp("policy"), seed=0)


def trajectory(group: int, reward: float | None, length: int = 3) -> Trajectory:
    t = Trajectory(task=Task(seed=0, group=group))
    t.append_observation({}, [1, 2])
    t.append_output(list(range(3, 3 + length)), [-1.0] * length, ["0"] * length)
    t.turns[0].reward = reward
    t.finish(StopReason.DONE if reward is not None else StopReason.ENV_ERROR)
    return t


def test_advantages_are_relative_to_the_group() -> None:
    group = [trajectory(0, 1.0), trajectory(1, 5.0), trajectory(0, 0.0), trajectory(1, 5.0), trajectory(0, 0.5)]
    kept, advantages = group_advantages(group, normalize_std=False)
    assert [t.reward for t in kept] == [1.0, 0.0, 0.5]  # the other group fared alike: nothing to learn
    assert advantages == [0.5, -0.5, 0.0]
    _, normalized = group_advantages(group, normalize_std=True)
    assert normalized[0] == pytest.approx(0.5 / math.sqrt(1 / 6))


def test_a_failed_episode_is_neither_trained_nor_counted_as_zero() -> None:
    kept, advantages = group_advantages([trajectory(0, 1.0), trajectory(0, None), trajectory(0, 0.0)], False)
    assert len(kept) == 2
    assert advantages == [0.5, -0.5]  # the mean is over the two


def test_the_loss_by_hand() -> None:
    batch = Batch(
        tokens=torch.tensor([[1, 2, 3]]),
        loss_mask=torch.tensor([[0.0, 1.0, 1.0]]),
        behaviour_logprobs=torch.log(torch.tensor([[0.9, 0.5, 0.5]])),
        advantages=torch.tensor([2.0]),
    )
    logprobs = torch.log(torch.tensor([[0.1, 0.75, 0.4]]))
    entropy = torch.tensor([[9.0, 1.0, 2.0]])
    config = GRPOConfig(clip_low=0.2, clip_high=0.28)
    loss, sums = policy_loss(logprobs, entropy, batch, config, entropy_coef=0.1)
    # ratios 1.5 (clipped to 1.28) and 0.8 count, the masked token does not
    assert loss.item() == pytest.approx(-(1.28 * 2 + 0.8 * 2 + 0.1 * 3))
    assert sums["entropy"].item() == pytest.approx(3.0)
    assert sums["clip_fraction"].item() == 1.0
    batch.advantages = torch.tensor([-2.0])
    loss, _ = policy_loss(logprobs, entropy, batch, config, entropy_coef=0.0)
    assert loss.item() == pytest.approx(1.5 * 2 + 0.8 * 2)  # a bad token that got likelier is not clipped


def test_logprobs_ignore_padding(policy: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy)
    short, long = trajectory(0, 1.0, 2), trajectory(0, 1.0, 7)
    both = Batch.of([short, long], [1.0, 1.0], CPU)
    alone = Batch.of([short], [1.0], CPU)
    with torch.no_grad():
        together, _ = token_logprobs(model, both.tokens, 0.7)
        single, _ = token_logprobs(model, alone.tokens, 0.7)
    torch.testing.assert_close(together[:1, :4], single)
    assert both.loss_mask.sum() == 9


def test_tasks_are_disjoint_and_repeatable() -> None:
    config = GRPOConfig(groups=4, group_size=3, seed=5)
    ranks = make_tasks(7, config, 0, 2) + make_tasks(7, config, 2, 2)
    assert ranks == make_tasks(7, config, 0, 4)
    assert [t.group for t in ranks] == [g for g in range(4) for _ in range(3)]
    assert len({t.seed for t in ranks}) == 4
    later = make_tasks(8, config, 0, 4)
    assert not {t.seed for t in ranks} & {t.seed for t in later}
    assert len({t.sampling_seed for t in ranks + later}) == 24


def test_a_step_without_anything_to_learn_changes_nothing(policy: Path) -> None:
    trainer = PolicyTrainer(load_policy(str(policy), CPU), GRPOConfig(), 10, CPU)
    before = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    assert trainer.update([trajectory(0, 1.0), trajectory(0, 1.0), trajectory(0, None)]) == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.named_weights())


def test_groups_must_divide_over_ranks(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = PolicyTrainer(load_policy(str(policy), CPU), GRPOConfig(groups=3), 10, CPU)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(BadRequestError, match="groups=3 does not divide over 2 ranks"):
        GRPO(trainer, None, None)  # type: ignore[arg-type]


def test_steps_against_a_real_server(policy: Path) -> None:
    """An easy game is learned a little; after every push both sides agree on what was sampled."""
    config = GRPOConfig(groups=8, group_size=12, epochs=2, minibatches=2, learning_rate=1e-2, warmup_steps=1)
    game = {"numbers": 3, "guesses": 2}
    with (
        EnvServer("verl_server.rollout.games:GuessNumber", kwargs=game) as environment,
        launch_engine(str(policy), CPU, dtype="float32", cpu_threads=1, kv_cache_gib=0.1) as engine,
    ):
        assert engine.engine is not None
        renderer = TextRenderer(AutoTokenizer.from_pretrained(policy))
        limits = Limits(max_turns=2, max_new_tokens=1)
        with AgentLoop(engine.engine, environment.url, renderer, limits=limits) as loop:
            run = GRPO(PolicyTrainer(load_policy(str(policy), CPU), config, 12, CPU), engine, loop)
            run.push()
            steps = [run.step() for _ in range(12)]
    metrics = [m for m, _ in steps]
    assert all(m.logprob_gap < 1e-4 for m in metrics)
    assert metrics[0].logprob_gap > 0, "later both may be sure, and agree on 0"
    assert [m.weight_version for m in metrics] == [str(i) for i in range(12)]
    for step, (_, rollout) in enumerate(steps):
        sampled = {v for t in rollout.trajectories for v in t.weight_versions if v}
        assert sampled == {str(step)}
    assert sum(m.reward or 0 for m in metrics[-3:]) / 3 > (metrics[0].reward or 0) + 0.2
    assert metrics[0].losses["grad_norm"] > 0


def test_help_names_the_settings() -> None:
    command = [sys.executable, "-m", "verl_server.train.grpo", "--help"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for flag in ("--model-path", "--env-url", "--grpo.learning-rate", "--observation-key"):
        assert flag in out


def _run_ranks(ranks: int, policy: Path, env_url: str, out: Path) -> list[dict[str, Any]]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    settings = ["--steps", "2", "--no-chat", "--max-turns", "3", "--max-new-tokens", "1", "--device", "cpu"]
    settings += ["--grpo.groups", "4", "--grpo.group-size", "6", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
    settings += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1"]
    where = ["--model-path", str(policy), "--env-url", env_url, "--out", str(out)]
    result = subprocess.run(
        [*launcher, "-m", "verl_server.train.grpo", *where, *settings],
        capture_output=True,
        text=True,
        timeout=140,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(300)
def test_two_ranks_learn_what_one_learns(policy: Path, tmp_path: Path) -> None:
    """The command line under torchrun: sharded over two ranks, the same episodes give the same weights."""
    with EnvServer("verl_server.rollout.games:GuessNumber", kwargs={"numbers": 3, "guesses": 3}) as environment:
        both = {n: _run_ranks(n, policy, environment.url, tmp_path / str(n)) for n in (1, 2)}
    assert [m["logprob_gap"] < 1e-4 for m in both[2]] == [True, True]
    assert both[2][0]["trajectories"] * 2 == both[1][0]["trajectories"] == 24
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / str(n) / "model").state_dict() for n in (1, 2)]
    start = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-3, atol=1e-4)
        assert not torch.equal(tensor, start[name])
