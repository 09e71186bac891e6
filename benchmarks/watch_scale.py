"""Make the folder of a large training run, and measure its index.

    python -m benchmarks.watch_scale --out runs/large

writes 100,000 episodes in 10 GB (unless the folder has a run) with the run's own writer: steps, groups, rewards, ends,
errors, tool calls, and what a trainer recorded. Then it prints one JSON line: the seconds to open the index that the
writer made, the speed of indexing the lines without it, the memory, and the time of each question of the page.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tyro

from verl_server.rollout.trajectory import Event, Fault, StopReason, Task, Trajectory
from verl_server.watch.index.line_rows import trajectory_row
from verl_server.watch.index.rows import EpisodeFilter
from verl_server.watch.index.run_index import RunIndex
from verl_server.watch.run_records import Label, RunEnded, RunStarted, StepBegan, StepEnded, TrainedTrajectory

INCARNATION = "5f2c9a1e"
TURNS = 5
_VERSION = "{version}"
NEEDLE = "a rare word"


@dataclass(frozen=True)
class Args:
    out: Path
    """Folder of the run."""
    episodes: int = 100_000
    """Number of episodes."""
    tokens: int = 2_700
    """Mean number of tokens of an episode. With what the trainer records, a token takes about 37 bytes."""
    group_size: int = 8
    groups: int = 32
    """Groups of a step."""
    measure: bool = True
    """Measure after writing."""


def write_run(out: Path, *, episodes: int, tokens: int, groups: int = 32, group_size: int = 8, seed: int = 0) -> None:
    """Write the folder of a run with at least so many episodes, which ended now."""
    # The process that measures must not hold the trainer's packages.
    from verl_server.train.metrics import describe_rollout
    from verl_server.train.rollout_report import RolloutReport
    from verl_server.train.run_writer import RunWriter

    draw = random.Random(seed)
    files = RunWriter(out, INCARNATION, kept_bytes=2**50)
    (out / "run.json").parent.mkdir(parents=True, exist_ok=True)
    (out / "run.json").write_text(json.dumps({"command": "train.grpo", "model_path": "a-model"}))
    files.begin(RunStarted(ranks=1, version="0"))
    steps = -(-episodes // (groups * group_size))
    sizes = [max(20, round(tokens * draw.lognormvariate(-0.125, 0.5))) for _ in range(64)]
    played = [_Body(_episode(draw, size)) for size in sizes]
    begin = time.time() - 60.0 * steps
    for step in range(steps):
        files.note(StepBegan(step=step))
        trajectories, trained = [], []
        for body, t in _step(draw, played, step, begin + 60.0 * step, groups, group_size):
            label = Label(step=step, rank=0, incarnation=INCARNATION, time=begin + 60.0 * step + 59.0)
            files.record_line(body.line(label, t), trajectory_row("trajectory", label, t))
            trajectories.append(t)
            if t.reward is not None:
                trained.append(_trained(body, t, step))
        files.record_trained(trained)
        rewards = [t.reward for t in trajectories if t.reward is not None]
        metrics = describe_rollout(
            RolloutReport(episodes=len(trajectories), scored=len(rewards), reward=sum(rewards), trainable=len(rewards)),
            step=step,
            version=f"{step}@{INCARNATION}",
            ranks=1,
            gap=None,
        )
        files.record(metrics)
        files.note(StepEnded(step=step, phases={"rollout": 50.0, "train": 9.0, "sync": 0.5, "record": 0.1}))
    files.note(RunEnded(exit_status=0))
    files.close()


class _Body:
    """The long lists of an episode, encoded once for all episodes that share them."""

    def __init__(self, played: Trajectory) -> None:
        self.played = played
        self.positions = [at for at, mask in enumerate(played.loss_mask) if mask]
        self.logprobs: list[float | None] = [round(played.logprobs[at] + 0.001, 6) for at in self.positions]
        self._versions = msgspec.json.encode([_VERSION if mask else "" for mask in played.loss_mask])
        kept = {name: getattr(played, name) for name in ("tokens", "loss_mask", "logprobs", "turns", "events")}
        self._text = msgspec.json.encode(kept)[1:-1]

    def line(self, label: Label, t: Trajectory) -> bytes:
        """Return the line of an episode with these lists."""
        values = msgspec.structs.asdict(label) | {
            name: getattr(t, name)
            for name in ("task", "reward", "stop_reason", "fault", "error", "began", "member", "attempt")
        }
        versions = self._versions.replace(_VERSION.encode(), t.weight_versions[-1].encode())
        head = msgspec.json.encode(values)[:-1]
        return b"".join((head, b",", self._text, b',"weight_versions":', versions, b"}\n"))


def _episode(draw: random.Random, tokens: int) -> Trajectory:
    """Return an episode of some turns, each of which reads as many tokens as it samples."""
    t, clock = Trajectory(task=Task(seed=0)), 0.0
    part = max(1, tokens // (2 * TURNS))
    for turn in range(TURNS):
        t.append_observation({"text": f"The tests say: {draw.randrange(99)} of 99 pass. " * 4}, _ids(draw, part))
        t.append_output(_ids(draw, part), [-draw.expovariate(2.0) for _ in range(part)], [""] * part)
        name = draw.choice(("edit", "run", "search", "read"))
        t.turns[-1].action = {"calls": [{"name": name, "arguments": {"path": f"src/file_{turn}.py"}}]}
        t.turns[-1].reward = 0.0
        ends = clock + draw.uniform(1.0, 4.0), clock + draw.uniform(5.0, 9.0)
        t.events += [Event("generate", clock, ends[0]), Event("env", ends[0], ends[1])]
        clock = ends[1]
    return t


def _ids(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(150_000) for _ in range(count)]


def _step(
    draw: random.Random, played: list[_Body], step: int, begin: float, groups: int, group_size: int
) -> Iterator[tuple[_Body, Trajectory]]:
    """Yield the episodes of a step, which share the long lists of `played`."""
    versions: dict[int, list[str]] = {}
    for group in range(groups):
        chance = min(0.95, max(0.02, draw.gauss(0.1 + 0.8 * step / 400, 0.3)))
        for member in range(group_size):
            body = played[draw.randrange(len(played))]
            base = body.played
            seed = step * groups + group
            t = Trajectory(task=Task(seed=seed, group=group, episode_id=f"{step}-{group}-{member}", member=member))
            t.tokens, t.loss_mask, t.logprobs = base.tokens, base.loss_mask, base.logprobs
            label = f"{step}@{INCARNATION}"
            t.weight_versions = versions.setdefault(id(base), [label if mask else "" for mask in base.loss_mask])
            t.turns, t.events, t.member, t.began = base.turns, base.events, member, begin
            kind = draw.random()
            if kind < 0.02:
                t.stop_reason, t.fault = StopReason.ENV_ERROR, Fault.INFRASTRUCTURE
                t.error = f"The environment's server refused the call: {NEEDLE if kind < 0.0002 else 'it is full'}."
            else:
                t.stop_reason, t.fault = (StopReason.MAX_TOKENS if kind < 0.1 else StopReason.DONE), Fault.POLICY
                t.reward = float(draw.random() < chance)
            yield body, t


def _trained(body: _Body, t: Trajectory, step: int) -> TrainedTrajectory:
    return TrainedTrajectory(
        step=step,
        sampled_step=step,
        group=t.task.group,
        member=t.member,
        advantage=round((t.reward or 0.0) - 0.5, 3),
        age=0,
        positions=body.positions,
        logprobs=body.logprobs,
        gap_mean=0.001,
        gap_max=0.001,
    )


def measure(out: Path) -> dict[str, Any]:
    """Return figures of the index of a run's folder."""
    index = RunIndex(out)
    try:
        began = time.process_time()
        seconds = _seconds(lambda: [None for _ in iter(lambda: index.poll(1.0), False)])
        processor = time.process_time() - began
        progress = index.progress()
        times = {name: round(1000 * _seconds(ask), 1) for name, ask in _questions(index).items()}
        again = _seconds(lambda: index.poll(1.0))
    finally:
        index.close()
    return {
        "gigabytes": round(progress.bytes_total / 1e9, 3),
        "episodes": progress.episodes,
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),
        "megabytes_per_second": round(progress.bytes_indexed / 1e6 / seconds, 1),
        "poll_without_news_ms": round(1000 * again, 2),
        "peak_megabytes": _peak_megabytes(),
        "milliseconds": times,
    }


def _questions(index: RunIndex) -> dict[str, Callable[[], object]]:
    middle = index.steps()[len(index.steps()) // 2].name
    begin, end = index.span() or (0.0, 1.0)
    row = index.groups(middle, limit=1)[0].members[0].row
    return {
        "steps": lambda: index.steps(lost=True),  # the others are remembered
        "groups_of_a_step": lambda: index.groups(middle),
        "groups_filtered": lambda: index.groups(middle, EpisodeFilter(stop_reason="env_error")),
        "newest_episodes": lambda: index.episodes(EpisodeFilter()),
        "filter_over_run": lambda: index.episodes(EpisodeFilter(stop_reason="env_error", tool="edit"), order="-tokens"),
        "longest_episodes": lambda: index.episodes(EpisodeFilter(), order="-tokens"),
        "search_slice": lambda: index.search(EpisodeFilter(), NEEDLE, seconds=1.0),
        "search_errors": lambda: index.search(EpisodeFilter(has_error=True), NEEDLE, seconds=1.0),
        "episode": lambda: (index.episode(row), index.trajectory(row), index.trained(row)),
        "lanes_of_run": lambda: index.lanes(begin, end),
        "activity_of_run": lambda: index.activity(begin, end),
        "activity_of_a_minute": lambda: index.activity(begin, begin + 60.0),
    }


def _peak_megabytes() -> int:
    """Return the largest memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    written = None
    if not (args.out / "run.json").exists():
        numbers = {"episodes": args.episodes, "tokens": args.tokens}
        sizes = {"groups": args.groups, "group_size": args.group_size}
        written = round(_seconds(lambda: write_run(args.out, **numbers, **sizes)), 1)
    if not args.measure:
        return
    print(json.dumps({"write_seconds": written}))
    for index in args.out.glob("index-rank*.sqlite"):
        print(json.dumps({"with_index": _measured(args.out)}), flush=True)
        index.rename(index.with_suffix(".away"))
        try:
            print(json.dumps({"without_index": _measured(args.out)}), flush=True)
        finally:
            index.with_suffix(".away").rename(index)


def _measured(out: Path) -> dict[str, Any]:
    """Measure in a process of its own, whose memory is that of the index alone."""
    code = "import json, pathlib, sys; from benchmarks.watch_scale import measure; "
    code += "print(json.dumps(measure(pathlib.Path(sys.argv[1]))))"
    done = subprocess.run([sys.executable, "-c", code, str(out)], check=True, stdout=subprocess.PIPE)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
