"""Training uses the distribution that was sampled: agents that force tools, set a bias or top-p, over a real server.

The reference is transformers in float32, at the trainer's temperature of 0.7. Before the policy's log-probabilities
were recorded, forced tokens entered the ratio with a log-probability of 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask, Server
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.agent_groups import AgentGroups
from verl_server.train.batches import MicroBatch, Sample, check_usable, sampled_positions
from verl_server.train.metrics import describe_rollout, describe_step
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.rollout_report import merge_reports, report_rollout

KEY, TEMPERATURE, TOLERANCE = "owner", 0.7, 2e-4
CPU = torch.device("cpu")
TOOL = {
    "type": "function",
    "function": {
        "name": "move",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["left", "right"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, dict[str, Any]] = {
    "forced": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 64},
    "bias": {"logit_bias": {"7": 5.0, "9": -5.0}, "frequency_penalty": 1.0},
    "filtered": {"top_p": 0.1, "temperature": 0.1},
    "masked": {"extra_body": {"allowed_token_ids": list(range(5, 40))}},
    "plain": {},
}


async def act(session: AgentSession, task: AgentTask) -> None:
    messages: list[Any] = [{"role": "user", "content": "go"}]
    async with session.openai(max_retries=0) as client:
        for _ in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": 12} | ASKED[task.input]
            reply = await client.chat.completions.create(**body)
            messages += [reply.choices[0].message, {"role": "user", "content": "and then?"}]


def score(episode: AgentEpisode) -> float:
    return float(episode.member)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    small: dict[str, Any] = {"kv_cache_gib": 0.1, "cpu_threads": 1, "cpu_kernel_choice": "torch", "port": 0}
    with HttpServerEngineAdapter(model_path=str(folder), api_key=KEY, **small) as engine:
        yield Server(str(engine.url), KEY)


def play(server: Server, tmp_path: Path, *names: str, **options: Any) -> list[Trajectory]:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode({"seed": 0, "input": name}) + b"\n" for name in names))
    groups = AgentGroups(
        TrainArgs(
            model_path="unused",
            agent=f"{__name__}:act",
            tasks=str(file),
            reward=f"{__name__}:score",
            grpo=GRPOConfig(group_size=1, groups=len(names), temperature=TEMPERATURE),
            **options,
        )
    )
    tasks = [Task(seed=i, group=i, episode_id=name, sampling_seed=i) for i, name in enumerate(names)]
    with HttpServerEngineAdapter.attach(server.url, server.api_key) as engine, groups.serving([engine]):
        running = groups.start(tasks)
        assert running.wait(120)
        return running.result().trajectories


@torch.inference_mode()
def reference(folder: Path, trajectory: Trajectory, positions: Sequence[int]) -> list[float]:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    rows = (model(torch.tensor([trajectory.tokens])).logits[0] / TEMPERATURE).log_softmax(-1)
    return [float(rows[place - 1, trajectory.tokens[place]]) for place in positions]


@pytest.mark.timeout(240)
def test_ratios_hold_the_policys_values_and_no_token_without_a_choice(
    server: Server, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        played = {t.task.episode_id: t for t in play(server, tmp_path, *ASKED)}
    assert [str(t.stop_reason) for t in played.values()] == ["done"] * len(ASKED), [t.error for t in played.values()]
    for name, trajectory in played.items():
        batch = MicroBatch.of([Sample(trajectory, 1.0)], CPU)
        positions = sampled_positions(trajectory).tolist()
        expected = reference(folder, trajectory, positions)
        assert batch.positions.tolist() == positions and positions, name
        assert batch.behaviour_logprobs.tolist() == pytest.approx(expected, abs=TOLERANCE), name
    forced = played["forced"]
    all_sampled = [place for place, mask in enumerate(forced.loss_mask) if mask]
    values = zip(all_sampled, reference(folder, forced, all_sampled), strict=True)
    assert max(abs(forced.logprobs[place] - value) for place, value in values) > 4  # what the ratio once held
    assert sum(forced.trained_mask) < forced.sampled_tokens / 2  # the syntax of a call leaves no choice
    assert all(
        logprob == 0.0
        for logprob, mask, choice in zip(forced.logprobs, forced.loss_mask, forced.has_choice, strict=True)
        if mask and not choice
    )
    # Under a mask alone, the weight is the mass of the allowed tokens.
    masked = MicroBatch.of([Sample(played["masked"], 2.0)], CPU, correction=0.5)
    assert (masked.log_weights < 0).all() and masked.advantages.tolist() == pytest.approx(
        (2 * masked.log_weights.exp().clamp(max=0.5)).tolist()
    )
    for name in ("bias", "filtered", "plain"):
        assert not played[name].policy_logprobs and not played[name].has_choice
        assert [turn.policy_logprobs for turn in played[name].turns] == ["same", "same"]
        assert played[name].turns[0].sampling["temperature"] == TEMPERATURE
    assert played["bias"].turns[1].overridden == {"logit_bias": {"7": 5.0, "9": -5.0}, "frequency_penalty": 1.0}
    assert played["filtered"].turns[0].overridden == {"top_p": 0.1, "temperature": 0.1}
    assert played["plain"].turns[0].overridden == played["forced"].turns[0].overridden == {}
    for name in ("logit_bias", "frequency_penalty", "top_p", "temperature"):
        assert sum(f"asks for {name}=" in record.message for record in caplog.records) == 1


@pytest.mark.timeout(240)
def test_requests_of_other_settings_are_refused_by_option(server: Server, tmp_path: Path) -> None:
    refused, accepted = play(server, tmp_path, "filtered", "plain", agent_sampling="refuse")
    assert refused.reward is None and "is fixed in this session" in str(refused.error)
    assert accepted.reward is not None


def test_generate_says_what_is_known(server: Server, folder: Path) -> None:
    with HttpServerEngineAdapter.attach(server.url, KEY) as client:
        for settings, known, counted in (
            ({}, "same", False),
            ({"top_p": 0.5}, "same", False),
            ({"logit_bias": {"7": 5.0}}, "given", False),
            ({"regex": "ab*c"}, "given", True),
            ({"bad_words": ["a"]}, "given", True),
        ):
            params: dict[str, Any] = {"temperature": TEMPERATURE, "max_new_tokens": 8, "sampling_seed": 1, **settings}
            result: Any = client.generate(input_ids=[5, 6, 7], sampling_params=params, return_logprob=True)
            meta, ids = result["meta_info"], result["output_ids"]
            assert meta["policy_logprobs"] == known, settings
            assert ("output_token_has_choice" in meta) == counted
            values = meta.get("output_token_policy_logprobs", [entry[0] for entry in meta["output_token_logprobs"]])
            whole = Trajectory(task=Task(seed=0), tokens=[5, 6, 7, *ids])
            assert values == pytest.approx(reference(folder, whole, range(3, 3 + len(ids))), abs=TOLERANCE)
            if "regex" in settings:
                assert meta["output_token_has_choice"][0] == 0


def sampled(known: Any, **turn: Any) -> Trajectory:
    trajectory = Trajectory(task=Task(seed=0, episode_id="one"), reward=1.0)
    trajectory.append_observation({}, [1, 2])
    given = [-2.0, -3.0] if known == "given" else None
    trajectory.append_output([3, 4], [0.0, -1.0], ["0", "0"], known=known, policy_logprobs=given, has_choice=[0, 1])
    for name, value in turn.items():
        setattr(trajectory.turns[0], name, value)
    return trajectory


def test_records_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(BadRequestError, match=r"top_p=0\.1.*does not have the log-probabilities of the policy"):
        Sample(sampled("unknown", sampling={"temperature": 1.0, "top_p": 0.1}), 1.0)
    check_usable([sampled("given", sampling={"temperature": 1.0}), sampled("same")], 1.0)
    with pytest.raises(BadRequestError, match=r"at the temperature 0\.5, and the trainer computes .* at 1"):
        check_usable([sampled("given", sampling={"temperature": 0.5})], 1.0)
    unused = sampled("unknown")
    unused.loss_mask = [0, 0, 0, 0]
    check_usable([unused])


def test_turns_of_different_records_share_the_columns() -> None:
    trajectory = sampled("given")
    trajectory.append_observation({}, [5])
    trajectory.append_output([6], [-0.5], ["0"])
    assert trajectory.policy_logprobs == [0.0, 0.0, -2.0, -3.0, 0.0, -0.5]
    assert trajectory.has_choice == [0, 0, 0, 1, 0, 1]
    assert trajectory.trained_mask == [0, 0, 0, 1, 0, 1]
    assert [turn.policy_logprobs for turn in trajectory.turns] == ["given", "same"]
    batch = MicroBatch.of([Sample(trajectory, 1.0)], CPU)
    assert batch.behaviour_logprobs.tolist() == [-3.0, -0.5] and batch.log_weights.tolist() == [-2.0, 0.0]
    assert msgspec.json.decode(msgspec.json.encode(trajectory), type=Trajectory) == trajectory
    alone = sampled("same")
    alone.has_choice = [0, 0, 0, 0]
    assert not alone.is_trainable


def test_metrics_have_the_share_of_forced_tokens() -> None:
    forced, free = sampled("same"), sampled("same")
    free.has_choice = []
    forced.stop_reason = free.stop_reason = StopReason.DONE
    reports = [
        report_rollout(trajectories, 2, 1.0, step=0, rank=0, env_url="", server_url="")
        for trajectories in ([forced], [free])
    ]
    metrics = describe_rollout(merge_reports(reports), step=0, version="0", ranks=2, gap=None)
    assert (metrics.sampled_tokens, metrics.forced_share) == (4, 0.25)
    assert "forced 25%" in describe_step(metrics)
    forced.has_choice = [0, 0, 0, 0]
    nothing = report_rollout([forced], 0, 1.0, step=0, rank=0, env_url="", server_url="")
    assert "2 of 2 sampled tokens were forced by masks" in str(nothing.obstacle())
