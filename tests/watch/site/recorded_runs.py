"""Folders of runs, written by the project's own writers without training: what the page's server is tested on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from verl_server.files.run_output import store_settings
from verl_server.messages.session_types import Message, MessageCall
from verl_server.rollout.trajectory import Event, Fault, StopReason, Task, Trajectory, append_jsonl
from verl_server.train.metrics import StepMetrics, describe_rollout
from verl_server.train.rollout_report import Failure, RolloutReport
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import (
    HELD_OUT,
    Evaluation,
    EvaluationBegan,
    EvaluationEnded,
    GroupDone,
    PushEnded,
    RunEnded,
    RunResumed,
    RunStarted,
    ServerLaunched,
    ServerLost,
    StepBegan,
    StepEnded,
    TrainedTrajectory,
)

FIRST, SECOND = "00000001", "00000002"
SEED = 2**63 - 25
"""A seed that a script's numbers cannot hold."""
BEGAN = 1_790_000_000.0
HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202eevil\x00"
WORDS = ["guess", "a", "number", "seven", "<|end|>", "caf", "\u00c3", "\u00a9"]
"""Tokens 0 to 7 of `write_tokenizer`, in the characters of a byte-level vocabulary: the last two are the bytes of e
with an acute accent."""


def write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(BPE(vocab={word: number for number, word in enumerate(WORDS)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def trajectory(
    group: int, member: int, reward: float | None, *, turns: int = 2, said: str = "seven", **fields: Any
) -> Trajectory:
    """Return an episode of an `AgentLoop`: each turn reads three tokens and samples two."""
    t = Trajectory(task=Task(seed=SEED + group % 7, group=group, member=member), member=member, **fields)
    for number in range(turns):
        t.append_observation({"text": f"guess a number ({number})"}, [0, 1, 2])
        t.append_output([3, 4], [-0.5, -0.25 * (member + 1)], [f"{number}@{FIRST}"] * 2)
        t.turns[-1].action = {"text": said}
        t.turns[-1].finish_reason = "stop"
        t.events += [Event("env", 1.0 * number, number + 0.25), Event("generate", number + 0.25, number + 1.0)]
    if turns:
        t.turns[-1].reward = reward
    t.final_observation = {"text": "correct"}
    t.began = BEGAN + group
    t.finish(StopReason.DONE)
    t.fault = Fault.POLICY
    return t


def failed(group: int, member: int, error: str, attempt: int = 0) -> Trajectory:
    t = trajectory(group, member, None, turns=1, attempt=attempt)
    t.reward, t.stop_reason, t.fault, t.error = None, StopReason.ENV_ERROR, Fault.INFRASTRUCTURE, error
    return t


def step_metrics(step: int, incarnation: str, reward: float, **fields: Any) -> StepMetrics:
    metrics = describe_rollout(RolloutReport(), step=step, version=f"{step}@{incarnation}", ranks=1, gap=None)
    metrics.reward, metrics.trajectories = reward, 8
    metrics.rollout_seconds, metrics.train_seconds, metrics.sync_seconds = 2.0, 1.0, 0.25
    metrics.losses = {"kl": 0.01 * step, "entropy": 1.0}
    for name, value in fields.items():
        setattr(metrics, name, value)
    return metrics


def trained(step: int, t: Trajectory, *, rank: int = 0, sampled_step: int | None = None) -> TrainedTrajectory:
    positions = [i for i, mask in enumerate(t.loss_mask) if mask]
    return TrainedTrajectory(
        step=step,
        sampled_step=step if sampled_step is None else sampled_step,
        group=t.task.group,
        member=t.member,
        attempt=t.attempt,
        session=t.session,
        branch=t.branch,
        advantage=0.5,
        age=0,
        positions=positions,
        logprobs=[t.logprobs[i] + 0.125 for i in positions],
        entropy=[0.75] * len(positions),
        gap_mean=0.125,
        gap_max=0.125,
    )


def groups_of(step: int) -> list[Trajectory]:
    """Return two groups of a step with four episodes each: one with a spread of rewards, one without."""
    first = [trajectory(2 * step, member, float(member % 2)) for member in range(4)]
    return first + [trajectory(2 * step + 1, member, 1.0) for member in range(4)]


def write_run(folder: Path, steps: int = 3, *, ends: bool = True, tokenizer: bool = True) -> RunWriter:
    """Write a synchronous run of two ranks. Rank 1 plays an episode that failed and was replaced."""
    if tokenizer:
        write_tokenizer(folder / "model")
    folder.mkdir(parents=True, exist_ok=True)
    store_settings(
        folder / "run.json", {"command": "train.grpo", "model_path": "nobody/nothing", "env_url": "http://e"}
    )
    files, other = RunWriter(folder, FIRST, ranks=2), RunWriter(folder, FIRST, rank=1, ranks=2)
    files.begin(RunStarted(ranks=2, version="1"))
    files.note(ServerLaunched(url="http://server"))
    write_steps(files, other, 0, steps)
    if ends:
        files.note(ServerLost(url="http://server", error="gone"))
        files.note(RunEnded(exit_status=0))
    other.close()
    return files


def write_steps(files: RunWriter, other: RunWriter, first: int, last: int) -> None:
    for step in range(first, last):
        files.note(StepBegan(step=step))
        played = groups_of(step)
        lost = failed(2 * step + 1, 3, HOSTILE)
        played[7].attempt = 1
        failure = Failure(
            step=step, rank=1, url="http://e", stop_reason="env_error", error=HOSTILE, seed=SEED, group=2 * step + 1,
            episode_id=None, turns=1, fault="infrastructure", replaced=True,
        )  # fmt: skip
        files.record_trajectories(step, played[:4])
        other.record_trajectories(step, [*played[4:], lost])
        files.record_trained([trained(step, t) for t in played[:4]])
        other.record_trained([trained(step, t, rank=1) for t in played[4:]])
        files.note(PushEnded(version=f"{step + 1}@{FIRST}", seconds=0.25))
        files.record(step_metrics(step, files.incarnation, 0.75), [failure])
        files.note(StepEnded(step=step, phases={"rollout": 2.0, "train": 1.0, "sync": 0.25}))


def evaluate(files: RunWriter, step: int, rewards: list[float], *, begins: bool = True, **fields: Any) -> None:
    """Write an evaluation with an episode for each reward. `fields` are those of the record.

    Without `begins`, the event of its begin is there already.
    """
    version = f"{step}@{files.incarnation}"
    if begins:
        files.note(EvaluationBegan(step=step, version=version))
    files.record_held_out(step, [trajectory(HELD_OUT + task, 0, reward) for task, reward in enumerate(rewards)])
    mean = sum(rewards) / len(rewards) if rewards else None
    record = {
        "step": step, "version": version, "episodes": len(rewards), "failed": 0, "reward": mean, "success": mean,
        "seconds": 0.0, "push_delay": 0.0, "incomplete": None,
    } | fields  # fmt: skip
    files.record_evaluation(Evaluation(**record))
    names = ("step", "version", "seconds", "push_delay", "reward", "incomplete")
    files.note(EvaluationEnded(**{name: record[name] for name in names}))


def write_resumed_run(folder: Path) -> None:
    """Write a run that was killed after step 3 and resumed from step 2: two steps are lost."""
    write_run(folder, 4, ends=False).close()
    files, other = RunWriter(folder, SECOND, ranks=2), RunWriter(folder, SECOND, rank=1, ranks=2)
    files.begin(RunResumed(ranks=2, version="1", next_step=2, checkpoint="checkpoint-2"))
    write_steps(files, other, 2, 5)
    files.close()
    other.close()


def write_asynchronous_run(folder: Path) -> None:
    """Write a run whose groups are used a step after their start; one was dropped, and one still plays."""
    write_tokenizer(folder / "model")
    store_settings(folder / "run.json", {"command": "train.grpo", "model_path": str(folder / "model")})
    files = RunWriter(folder, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    for step in range(3):
        files.note(StepBegan(step=step))
        played = [trajectory(step, member, float(member)) for member in range(2)]
        files.record_trajectories(step, played)
        if step:
            used = [trajectory(step - 1, member, float(member)) for member in range(2)]
            files.record_trained([trained(step, t, sampled_step=step - 1) for t in used])
            fate = "dropped" if step == 2 else "trained"
            files.note(GroupDone(group=step - 1, fate=fate, step=step, start_step=step - 1, start_version=step - 1))
        files.record(step_metrics(step, FIRST, 0.5, age=1.0, idle={"trainer": 0.6}))
        files.note(StepEnded(step=step, phases={"rollout": 2.0, "train": 1.0, "sync": 0.25}))
    files.close()


def write_agents_run(folder: Path) -> None:
    """Write an agents' run: a session with two branches and a sub-agent, and an episode of an earlier version."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "model")
    settings = {"command": "run_agents", "model_path": str(folder / "model"), "agent": "program"}
    store_settings(folder / "run.json", settings)
    call = MessageCall(name="search", arguments='{"query": "seven"}', id="c1")
    root = _agent_trajectory("s1", 0)
    root.turns[0].messages = [Message(role="system", text="You guess."), Message(role="user", text=f"Guess. {HOSTILE}")]
    root.turns[0].reply = Message(role="assistant", text="I search.", reasoning="It may be seven.", calls=[call])
    root.turns[1].messages = [Message(role="tool", text="7 is likely", call_id="c1")]
    root.turns[1].reply = Message(role="assistant", text="7")
    fork = _agent_trajectory("s1", 1, fork_of=0, shared=5)
    child = _agent_trajectory("s1.helper", 0, parent="s1")
    old = _agent_trajectory("s9", 0, group=1)
    append_jsonl(folder / "trajectories.jsonl", [root, fork, child, old])
    lines = [_episode_line(0, "s1", 3), _episode_line(1, "s9", 1)]
    (folder / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text("{}")


def _agent_trajectory(session: str, branch: int, group: int = 0, **fields: Any) -> Trajectory:
    t = trajectory(group, 0, 1.0, session=session, branch=branch, **fields)
    for turn in t.turns:
        turn.observation, turn.action = {}, {}
    t.final_observation = None
    return t


def _episode_line(task: int, session: str, branches: int) -> dict[str, Any]:
    return {
        "task": task, "member": 0, "attempt": 0, "session": session, "server": "http://s", "reason": "done",
        "error": None, "exit_code": 0, "reward": 1.0, "environment_reward": 1.0, "seconds": 2.0, "tokens": 4,
        "turns": 2, "branches": branches, "final": True, "sampled": 4, "fault": "policy",
    }  # fmt: skip
