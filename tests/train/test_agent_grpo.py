"""GRPO with a black-box agent: advantages of branches by hand, then a short run in which the openai SDK plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train import agent_groups, async_grpo
from verl_server.train.grpo import group_advantages, main
from verl_server.train.options import TrainArgs
from verl_server.train.rollout_report import report_rollout

FAST = ["--device", "cpu", "--retry-pause", "0", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
FAST += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1", "--server.dtype", "float32"]
FAST += ["--server.cpu-threads", "1", "--server.kv-cache-gib", "0.1", "--max-new-tokens", "1"]


def branch(group: int, member: int, number: int, reward: float | None, session: str = "") -> Trajectory:
    trajectory = make_trajectory(group, reward, seed=number)
    trajectory.session, trajectory.member, trajectory.branch = session or f"s{group}-{member}", member, number
    return trajectory


def test_an_episode_counts_once_and_each_branch_has_its_advantage() -> None:
    child = branch(0, 0, 0, 1.0, session="child")  # a sub-agent's session belongs to the episode
    trajectories = [branch(0, 0, 0, 1.0), branch(0, 0, 1, 1.0), child, branch(0, 1, 0, 0.0), branch(1, 0, 0, 5.0)]
    samples = group_advantages(trajectories, normalize_std=False)
    # If branches counted, the mean were 0.75.
    assert [s.advantage for s in samples] == [0.5, 0.5, 0.5, -0.5]
    assert [s.trajectory for s in samples] == trajectories[:4]


def test_a_branch_without_sampled_tokens_is_left_out() -> None:
    empty = branch(0, 0, 1, 1.0)
    empty.loss_mask = [0] * len(empty.loss_mask)  # all its tokens are in the mask of an earlier branch
    samples = group_advantages([branch(0, 0, 0, 1.0), empty, branch(0, 1, 0, 0.0)], False)
    assert [(s.trajectory.branch, s.advantage) for s in samples] == [(0, 0.5), (0, -0.5)]


def test_the_report_counts_episodes_and_adds_the_tokens_of_branches() -> None:
    limited = branch(0, 1, 0, 0.0)
    limited.stop_reason, limited.error = StopReason.MAX_TURNS, "the SDK raised the refusal of the session"
    trajectories = [branch(0, 0, 0, 1.0), branch(0, 0, 1, 1.0), limited, branch(0, 2, 0, None)]
    report = report_rollout(trajectories, 2, 1.0, step=0, rank=0, env_url="e", server_url="s")
    assert (report.episodes, report.scored, report.trainable, report.reward) == (3, 2, 2, 1.0)
    assert report.stop_reasons == {"done": 1, "max_turns": 1, "env_error": 1}
    assert [failure.stop_reason for failure in report.failures] == ["env_error"]
    assert report.sampled_tokens == 4 * 3


def test_options_that_cannot_work_are_refused() -> None:
    def options(**changes: Any) -> TrainArgs:
        return TrainArgs(model_path="m", **changes)

    with pytest.raises(BadRequestError, match="--env-url is missing"):
        options()
    with pytest.raises(BadRequestError, match="--tasks and --reward are for --agent"):
        options(env_url="http://e", tasks="reasoning-gym:chain_sum")
    with pytest.raises(BadRequestError, match="needs something to play"):
        options(agent="m:f")
    with pytest.raises(BadRequestError, match="has its own environment"):
        options(agent="m:f", env_url="http://e", tasks="reasoning-gym:chain_sum")
    with pytest.raises(BadRequestError, match="--agent cannot be combined with --tasks verifiers:NAME"):
        options(agent="m:f", tasks="verifiers:maze")
    with pytest.raises(BadRequestError, match="--reward cannot be combined with --tasks verifiers:NAME"):
        options(reward="exit", tasks="verifiers:maze")
    with pytest.raises(BadRequestError, match="has its own environment"):
        options(env_url="http://e", tasks="verifiers:maze")
    assert options(tasks="verifiers:maze").is_played_by_agent
    with pytest.raises(BadRequestError, match="needs an owner's key"):
        options(agent="m:f", env_url="http://e", server_urls=("http://s",))


# -- a run ----------------------------------------------------------------------------------------------------


async def guess(session: AgentSession, task: AgentTask) -> None:
    """The loop of the openai SDK's documentation. It asks for a temperature at which the trainer does not train."""
    environment = session.environment
    assert environment is not None
    messages: list[Any] = []
    async with session.openai() as client:
        while not environment.done:
            messages.append({"role": "user", "content": environment.observation})
            reply = await client.chat.completions.create(model="policy", messages=messages, temperature=0.1)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            await environment.step(text)


async def guess_with_two_branches(session: AgentSession, task: AgentTask) -> None:
    """Ask twice: first about something else, in a history that the second question does not continue."""
    assert session.environment is not None
    async with session.openai() as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "what"}])
    await guess(session, task)


def share_of_even(episode: AgentEpisode) -> float:
    """A reward that depends on the sampled tokens of all branches, so that it differs between most episodes."""
    assert episode.trajectory is not None
    sampled = [
        token
        for branch in episode.trajectory.branches
        for token, mask in zip(branch.ids, branch.loss_mask, strict=True)
        if mask
    ]
    return sum(token % 2 == 0 for token in sampled) / len(sampled)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.timeout(240)
def test_a_run_with_the_openai_sdk_trains_on_every_branch(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    played: list[AgentEpisode] = []
    kept: list[Trajectory] = []
    keys: list[str] = []
    whole_branches, play = agent_groups._branches, agent_groups.arun_agents

    def noted(episode: AgentEpisode, task: Task) -> list[Trajectory]:
        played.append(episode)
        branches = whole_branches(episode, task)
        kept.extend(branches)
        return branches

    async def spied(*arguments: Any, **options: Any) -> Any:
        keys.extend(server.api_key for server in options["servers"])
        return await play(*arguments, **options)

    monkeypatch.setattr(agent_groups, "_branches", noted)
    monkeypatch.setattr(agent_groups, "arun_agents", spied)
    out = tmp_path / "run"
    command = ["--model-path", str(chat_folder), "--out", str(out), "--steps", "3", *FAST, "--max-turns", "6"]
    command += ["--grpo.groups", "4", "--grpo.group-size", "6"]
    with EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs={"numbers": 3, "guesses": 3}) as game:
        command += ["--agent", f"{__file__}:guess_with_two_branches", "--env-url", game.url]
        command += ["--reward", f"{__file__}:share_of_even"]
        assert main(command) == 0, capfd.readouterr().err

    metrics = lines(out / "metrics.jsonl")
    assert [(m["trajectories"], m["failed"], m["skipped"]) for m in metrics] == [(24, 0, None)] * 3
    assert [m["branches"] for m in metrics] == [{"root": 24, "child": 24}] * 3
    versions = [m["weight_version"] for m in metrics]
    assert [version.partition("@")[0] for version in versions] == ["0", "1", "2"]
    # Sampling was at the trainer's temperature in spite of the agent, and under the weights of the last push.
    assert all(m["logprob_gap"] < 1e-4 for m in metrics) and metrics[0]["logprob_gap"] > 0
    assert len(played) == 72 and len(kept) == 2 * 72
    for episode in played:
        branches = [t for t in kept if t.task.sampling_seed == episode.seed]
        assert [t.branch for t in branches] == [0, 1]
        sampled = [token for t in branches for token, mask in zip(t.tokens, t.loss_mask, strict=True) if mask]
        assert len(sampled) == episode.tokens
        reward = sum(token % 2 == 0 for token in sampled) / len(sampled)
        assert [t.reward for t in branches] == [reward, reward]
        assert all(t.is_trainable and {v for v in t.weight_versions if v} <= set(versions) for t in branches)
    names = {f"{step}-{group}-{member}" for step in range(3) for group in range(4) for member in range(6)}
    assert {t.task.episode_id for t in kept} == names

    # Each sampled token of a group that was trained is in the record of one branch, once.
    trained = [record for file in out.rglob("trained-rank0.jsonl") for record in lines(file)]
    places = [(record["session"], record["branch"], at) for record in trained for at in record["positions"]]
    sessions = {record["session"] for record in trained}
    masks = [t.trained_mask for t in kept if t.session in sessions]
    assert len(set(places)) == len(places) == sum(map(sum, masks)) > 0

    before, after = (load_file(folder / "model.safetensors") for folder in (chat_folder, out / "model"))
    assert all(not before[name].equal(after[name]) for name in before)

    (key,) = set(keys)  # one random key for the whole run, in no output and in no file of the run
    shown = capfd.readouterr()
    assert len(key) > 30 and key not in shown.out + shown.err
    assert not any(key.encode() in file.read_bytes() for file in out.rglob("*.json*"))


@pytest.mark.timeout(240)
def test_an_agent_plays_an_asynchronous_run(
    chat_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Several groups play at one time, each with sessions of its own, and go on over pushes."""
    out = tmp_path / "run"
    command = ["--model-path", str(chat_folder), "--out", str(out), "--steps", "4", *FAST, "--max-turns", "6"]
    command += ["--grpo.groups", "2", "--grpo.group-size", "4", "--max-staleness", "2"]
    game = {"numbers": 3, "guesses": 3, "latency": 0.02}
    with EnvServer("verl_server.rollout.environments.games:GuessNumber", kwargs=game) as server:
        command += ["--agent", f"{__file__}:guess_with_two_branches", "--env-url", server.url]
        command += ["--reward", f"{__file__}:share_of_even"]
        assert async_grpo.main(command) == 0, capfd.readouterr().err
    metrics = lines(out / "metrics.jsonl")
    assert [(m["trajectories"], m["failed"], m["skipped"]) for m in metrics] == [(8, 0, None)] * 4
    assert all(m["logprob_gap"] < 1e-4 and m["age_max"] <= 2 for m in metrics)
    fates = [event for event in lines(out / "events.jsonl") if event["kind"] == "group_done"]
    assert sorted(event["group"] for event in fates) == list(range(8))
    kept, trained = lines(out / "trajectories-rank0.jsonl"), lines(out / "trained-rank0.jsonl")
    assert len(kept) == 2 * 4 * 8  # two branches of each episode
    names = {(t["step"], t["task"]["group"], t["member"], t["session"], t["branch"]) for t in kept}
    assert {(t["sampled_step"], t["group"], t["member"], t["session"], t["branch"]) for t in trained} <= names


@pytest.mark.parametrize("option", ["--tasks", "--eval-file"])
def test_tasks_are_checked_for_their_workspace_before_the_run(tmp_path: Path, option: str) -> None:
    right, wrong = tmp_path / "right.jsonl", tmp_path / "wrong.jsonl"
    right.write_text('{"environment": {"check": {"command": ["true"]}}}\n')
    wrong.write_text(right.read_text() + '{"environment": {}}\n')
    tasks, held_out = (wrong, right) if option == "--tasks" else (right, wrong)
    args = TrainArgs(
        model_path="m", agent="true", env_url="workspace", tasks=str(tasks), eval_file=str(held_out), eval_every=1
    )
    with pytest.raises(BadRequestError, match=r"wrong.jsonl:2: environment.check is missing"):
        agent_groups.AgentGroups(args)


def test_a_program_plays_lines_of_a_file_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b"".join(msgspec.json.encode({"input": text}) + b"\n" for text in ("a", "b", "c")))
    groups = agent_groups.AgentGroups(TrainArgs(model_path="m", agent="true", tasks=str(file)))
    assert [groups._agent_task(seed).input for seed in range(2, 6)] == ["c", "a", "b", "c"]
    assert groups.environment_url == str(file)
