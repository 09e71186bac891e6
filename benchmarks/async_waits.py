"""The demo's game with slow environments: synchronous against asynchronous GRPO, by the clock and by the age.

    python -m benchmarks.async_waits run --trainer grpo --seed 0 --until 0.95 --out waits.jsonl
    python -m benchmarks.async_waits run --trainer async_grpo --max-staleness 2 --seed 0 --until 0.95 --out waits.jsonl
    python -m benchmarks.async_waits run --trainer async_grpo --max-staleness 4 --latency 0.03 --steps 60 --loss tis \\
        --out ages.jsonl
    python -m benchmarks.async_waits table waits.jsonl --report waits.html

`run` trains once, on the CPU, with the settings of `verl-server demo`, and appends a line to the file. The waits of the
environment are lognormal (sigma 1.5). In an asynchronous run, ages depend on the speed of the machine. `--trainer
delayed` trains each token at exactly one age, for a comparison of losses.

The measurement does not disturb what it measures. After each step it keeps a copy of the weights and the time. When
training has ended and the servers are gone, it plays the game with these weights on held-out seeds, in this process,
without waits. The time to a success of 0.9 is that of the last of three evaluations in a row whose mean reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
import tyro
from transformers import AutoTokenizer

from benchmarks.async_report import report
from benchmarks.async_tables import tables
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.rollout.trajectory import Event, Task, Trajectory
from verl_server.train.ages import describe_ages
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.demo import CONFIG, HELD_OUT, make_policy_folder
from verl_server.train.demo_evaluation import success_rate
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.metrics import StepMetrics
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.policy import Policy, load_policy
from verl_server.train.ranks import all_ranks, launch_engine, setup_ranks
from verl_server.train.rollouts.group_messages import GroupBegan, GroupEnded, PlayerSetup, encode_args
from verl_server.train.rollouts.rollout_process import RolloutProcess
from verl_server.train.run import Step
from verl_server.train.run_advisor import RunAdvisor
from verl_server.train.servers import RolloutServers
from verl_server.watch.advisories import Advisor
from verl_server.watch.run_records import GroupDone, RunEvent
from verl_server.weight_version import WeightVersion, new_incarnation

NUMBERS, GUESSES = 12, 5
TARGET = 0.9
"""Held-out success whose time is measured."""
IN_A_ROW = 3
"""Evaluations in a row whose mean must reach it."""


@dataclass(frozen=True)
class Run:
    """Train the demo's game once, and append a line with the figures to --out."""

    out: Path
    """File of the lines. Missing folders above it are created."""
    trainer: Literal["grpo", "async_grpo", "delayed"] = "async_grpo"
    """grpo: all episodes of a step, then training. async_grpo: both at the same time. delayed: as grpo, but on the
    episodes of --max-staleness steps ago. Each token has this age, for a comparison of losses."""
    max_staleness: int = 1
    """Largest age of a group, for async_grpo; age of all tokens, for delayed."""
    steps: int = 140
    """Training steps, over which learning rate and entropy bonus fall."""
    until: float = 2.0
    """Training ends when the mean success of the episodes of four steps reaches this. 2: after all steps."""
    time_limit: float = 3600.0
    """Seconds after which no further step begins."""
    latency: float = 0.5
    """Median seconds of a wait."""
    longest: float | None = None
    """Longest wait in seconds. Default: 40 medians, 20 s for the default median."""
    max_concurrency: int = 256
    """Most episodes at one time, for both trainers."""
    every: int = 2
    """Steps between two evaluations."""
    held_out: int = 512
    """Held-out episodes of an evaluation."""
    grpo: Annotated[GRPOConfig, tyro.conf.arg(name="")] = CONFIG


@dataclass(frozen=True)
class Table:
    """Print the lines of files of `run` as Markdown tables: one row for each setting, its seeds together."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """The files."""
    report: Path | None = None
    """HTML file with the curves of the runs and their ages, waits and idle shares, written beside the tables."""


class Played(msgspec.Struct):
    """An episode that has ended. msgspec reads it from a line of an asynchronous run, whose other keys are ignored."""

    task: Task
    time: float
    """Wall time of its end, in seconds since 1970."""
    events: list[Event]

    @property
    def env_seconds(self) -> float:
        return sum(event.end - event.start for event in self.events if event.kind == "env")

    @property
    def generating(self) -> list[tuple[float, float]]:
        """The (start, end) of its generations, in seconds since 1970. The last event ends with the episode."""
        zero = self.time - self.events[-1].end if self.events else 0.0
        return [(zero + event.start, zero + event.end) for event in self.events if event.kind == "generate"]


@dataclass
class Record:
    """The measurements of a run. While it trains, they only grow lists."""

    weights: list[tuple[int, float, list[torch.Tensor]]] = field(default_factory=list)
    """(steps that were trained, seconds since training began, copy of the parameters)."""
    metrics: list[StepMetrics] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    """Ids of the episodes that a step used."""
    in_loss: set[str] = field(default_factory=set)
    """The used episodes in groups whose rewards differ."""
    lines: list[bytes] = field(default_factory=list)
    """Lines of episodes that ended, asynchronous."""
    played: list[Played] = field(default_factory=list)
    started: dict[int, int] = field(default_factory=dict)
    """Group -> number of the version that was served when it began, asynchronous."""
    fates: list[GroupDone] = field(default_factory=list)
    began: float = 0.0
    """Wall time at which training began, in seconds since 1970."""
    seconds: float = 0.0
    """Time of the training."""
    last_version: int = 0


class DelayedGRPO(GRPO):
    """GRPO that trains the episodes of each step `delay` steps after they were played: each token has that age.

    The first steps have smaller ages, because the first weights play `delay` + 1 batches.
    """

    delay: int
    waiting: deque[Any]

    def _roll_out(self, on_finish: Callable[[Trajectory], None] | None) -> Any:
        step = self.next_step
        try:
            while len(self.waiting) <= self.delay:
                self.next_step = step + len(self.waiting)  # of which the seeds are
                self.waiting.append(super()._roll_out(on_finish))
        finally:
            self.next_step = step
        return self.waiting.popleft()


class CountedRollouts(RolloutProcess):
    """A rollout process that notes the groups which begin to play."""

    record: Record

    def news(self, timeout: float) -> list[GroupBegan | GroupEnded]:
        found = super().news(timeout)
        for group in found:
            if isinstance(group, GroupBegan):
                version = WeightVersion.parse(group.version)
                assert version is not None
                self.record.started[group.group] = version.number
        return found


# -- training ----------------------------------------------------------------------------------------------------------


def train(args: Run, folder: Path) -> tuple[Record, Policy]:
    """Train on the model in `folder` and return (what it leaves, the policy). The servers are gone then."""
    torch.manual_seed(args.grpo.seed)
    torch.set_num_threads(1)
    device, record = setup_ranks("cpu"), Record()
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        longest = 40 * args.latency if args.longest is None else args.longest
        game = {"numbers": NUMBERS, "guesses": GUESSES, "latency": args.latency, "longest": longest}
        where = "verl_server.rollout.environments.games:GuessNumber"
        url = stack.enter_context(EnvServer(where, kwargs=game, max_concurrent_envs=2 * args.max_concurrency)).url
        settings: dict[str, Any] = {"dtype": "float32", "log_level": "warning", "cpu_threads": 1, "kv_cache_gib": 0.25}
        engine = stack.enter_context(launch_engine(str(folder), device, **settings))
        policy, ranks = load_policy(str(folder), device, compute_dtype=torch.float32), all_ranks()
        trainer = PolicyTrainer(policy, args.grpo, args.steps, device)
        advisor = RunAdvisor(Advisor("float32"), ranks)
        options = TrainArgs(
            model_path=str(folder),
            env_url=url,
            chat=False,
            limits=Limits(max_turns=GUESSES, max_new_tokens=1, env=EnvTimeouts(step=60, reset=60)),
            max_concurrency=args.max_concurrency,
            grpo=args.grpo,
        )
        run: GRPO | AsyncGRPO
        if args.trainer != "async_grpo":
            servers, loop = RolloutServers([engine], ranks), stack.enter_context(_agent_loop(options, str(engine.url)))
            run = (DelayedGRPO if args.trainer == "delayed" else GRPO)(trainer, servers, loop, ranks, advisor=advisor)
            if isinstance(run, DelayedGRPO):
                run.delay, run.waiting = args.max_staleness, deque()
        else:
            servers, incarnation = RolloutServers([engine], ranks, mode="in_place"), new_incarnation()
            setup = PlayerSetup(args=encode_args(options), urls=servers.urls, keys=[None], incarnation=incarnation)
            rollouts = CountedRollouts(setup, lambda line, row: record.lines.append(line), environment_url=url)
            rollouts.record = record
            stack.enter_context(contextlib.closing(rollouts))

            def note(event: RunEvent) -> None:
                if isinstance(event, GroupDone):
                    record.fates.append(event)

            age = args.max_staleness
            run = AsyncGRPO(
                trainer,
                servers,
                rollouts,
                ranks,
                steps=args.steps,
                max_staleness=age,
                advisor=advisor,
                incarnation=incarnation,
                note=note,
            )
        run.push()
        _train(args, run, record, policy)
    return record, policy


def _agent_loop(options: TrainArgs, server_url: str) -> AgentLoop:
    assert options.env_url is not None
    return AgentLoop(
        server_url,
        options.env_url,
        TextRenderer(AutoTokenizer.from_pretrained(options.model_path)),
        sampling_params={"temperature": options.grpo.temperature},
        limits=options.limits,
        max_concurrency=options.max_concurrency,
        faults=options.faults,
        replacements=options.replacements,
    )


def _train(args: Run, run: GRPO | AsyncGRPO, record: Record, policy: Policy) -> None:
    def keep() -> None:
        parameters = [parameter.detach().clone() for parameter in policy.parameters()]
        record.weights.append((run.next_step, time.monotonic() - begun, parameters))

    ended: list[tuple[float, Trajectory]] = []
    successes: list[float] = []
    begun, record.began = time.monotonic(), time.time()
    keep()
    while run.next_step < args.steps and time.monotonic() - begun < args.time_limit:
        step = run.step(lambda trajectory: ended.append((time.time(), trajectory)))
        keep()
        _note_step(record, step, ended)
        ended.clear()
        successes.append(success_rate(step.rollout.trajectories))
        _print_step(step.metrics, successes[-1], time.monotonic() - begun)
        if len(successes) >= 4 and sum(successes[-4:]) / 4 >= args.until:
            break
    record.seconds, record.last_version = time.monotonic() - begun, run.version


def _note_step(record: Record, step: Step, ended: Sequence[tuple[float, Trajectory]]) -> None:
    metrics, trajectories = step.metrics, step.rollout.trajectories
    record.metrics.append(metrics)
    record.played += [Played(trajectory.task, at, trajectory.events) for at, trajectory in ended]
    if not metrics.ages and (trained := WeightVersion.parse(metrics.weight_version)) is not None:
        ages = describe_ages([trajectories], trained)
        metrics.ages, metrics.version_spans = ages.ages, ages.spans
    if metrics.skipped is None:
        names = {(t.task.group, t.task.member): str(t.task.episode_id) for t in trajectories}
        record.used |= set(names.values())
        record.in_loss |= {names[trained.group, trained.member] for trained in step.trained}


def _print_step(metrics: StepMetrics, success: float, seconds: float) -> None:
    waits = ", ".join(f"{cause} {waited:.1f} s" for cause, waited in metrics.waits.items())
    line = f"step {metrics.step:3d}  {seconds:6.1f} s  success {success:.2f}  rollout {metrics.rollout_seconds:.1f} s"
    print(f"{line}  train {metrics.train_seconds:.1f} s  ages {metrics.ages}  waits {waits}", flush=True)


# -- held-out success --------------------------------------------------------------------------------------------------


class HeldOut:
    """Plays the game with a policy on held-out seeds, in batches and without waits."""

    def __init__(self, folder: Path, count: int, seed: int) -> None:
        self._renderer = TextRenderer(AutoTokenizer.from_pretrained(folder))
        self._seeds = [HELD_OUT + seed * 1_000_003 + i for i in range(count)]

    def success(self, policy: Policy, seed: int) -> float:
        """Return the share of the games that the policy wins, sampled at temperature 1 with `seed`."""
        return asyncio.run(self._success(policy, torch.Generator().manual_seed(seed)))

    async def _success(self, policy: Policy, draws: torch.Generator) -> float:
        games = [GuessNumber(NUMBERS, GUESSES) for _ in self._seeds]
        observations = [await game.reset(seed) for game, seed in zip(games, self._seeds, strict=True)]
        tokens = [self._renderer.observation_tokens(observation, None) for observation in observations]
        playing, won = list(range(len(games))), 0
        while playing:
            sampled = sample(policy, [tokens[i] for i in playing], draws)
            still = []
            for i, (token, _) in zip(playing, sampled, strict=True):
                action = self._renderer.action([token], tokens[i])
                observation, reward, done = await games[i].step(action)
                won += reward > 0
                if not done:
                    tokens[i] += [token, *self._renderer.observation_tokens(observation, token)]
                    still.append(i)
            playing = still
        return won / len(games)


@torch.no_grad()
def sample(policy: Policy, rows: Sequence[list[int]], draws: torch.Generator) -> list[tuple[int, float]]:
    """Return (a sampled token, its log-probability) behind each row."""
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.zeros((len(rows), int(lengths.max())), dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = torch.tensor(row)
    logits = policy.language_model(input_ids=padded, use_cache=False).logits
    logprobs = logits[torch.arange(len(rows)), lengths - 1].float().log_softmax(-1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=draws)
    return list(zip(tokens.squeeze(1).tolist(), logprobs.gather(1, tokens).squeeze(1).tolist(), strict=True))


def evaluate(args: Run, record: Record, policy: Policy, folder: Path) -> list[tuple[float, int, float]]:
    """Return (seconds, trained steps, held-out success) of the first, the last and every `every`-th kept weights."""
    held_out, curve = HeldOut(folder, args.held_out, args.grpo.seed), []
    for steps, seconds, parameters in record.weights:
        if steps % args.every == 0 or steps == record.weights[-1][0]:
            with torch.no_grad():
                for parameter, kept in zip(policy.parameters(), parameters, strict=True):
                    parameter.copy_(kept)
            curve.append((round(seconds, 2), steps, round(held_out.success(policy, steps), 4)))
    return curve


# -- the line ----------------------------------------------------------------------------------------------------------


def describe(args: Run, record: Record, curve: Sequence[tuple[float, int, float]]) -> dict[str, Any]:
    """Return the line of a run."""
    record.played += [msgspec.json.decode(line, type=Played) for line in record.lines]
    metrics, is_async = record.metrics, args.trainer == "async_grpo"
    episodes = sum(m.trajectories for m in metrics)
    ages, spans = _totals(m.ages for m in metrics), _totals(m.version_spans for m in metrics)
    waits = _totals(m.waits for m in metrics) if is_async else {"episodes": sum(m.rollout_seconds for m in metrics)}
    busy = sum(m.train_seconds + m.sync_seconds for m in metrics)
    successes = [success for _, _, success in curve]
    names = sorted({name for m in metrics for name in m.losses})
    return {
        "settings": asdict(args) | {"out": str(args.out), "cpus": os.cpu_count()},
        "seconds_to_target": _time_of_target(curve),
        "final_success": round(sum(successes[-IN_A_ROW:]) / len(successes[-IN_A_ROW:]), 4),
        "seconds": round(record.seconds, 1),
        "steps": len(metrics),
        "skipped_steps": sum(m.skipped is not None for m in metrics),
        "episodes_per_s": round(episodes / record.seconds, 2),
        "ages": ages,
        "spans": spans,
        "span_2": _share(spans, 2),
        "span_3": _share(spans, 3),
        "waits": {cause: round(seconds, 1) for cause, seconds in waits.items()},
        "idle": {
            "trainer": round(1 - busy / record.seconds, 4),
            "server": round(1 - _covered(record) / record.seconds, 4),
        },
        "groups": _describe_groups(args, record) if is_async else {"started": len(metrics) * args.grpo.groups},
        "slowest": _describe_slowest(record),
        "losses": {
            name: float(f"{sum(found) / len(found):.4g}")
            for name in names
            if (found := [m.losses[name] for m in metrics if name in m.losses])
        },
        "largest_gap": max((m.logprob_gap for m in metrics if m.logprob_gap is not None), default=None),
        "step_seconds": [round(b[1] - a[1], 2) for a, b in zip(record.weights, record.weights[1:], strict=False)],
        "curve": curve,
    }


def _time_of_target(curve: Sequence[tuple[float, int, float]]) -> float | None:
    for last in range(IN_A_ROW - 1, len(curve)):
        if sum(success for _, _, success in curve[last - IN_A_ROW + 1 : last + 1]) / IN_A_ROW >= TARGET:
            return curve[last][0]
    return None


def _describe_groups(args: Run, record: Record) -> dict[str, Any]:
    """Return the counts of the fates. A lost group has none, and must have been trained before the last version."""
    fates = Counter(done.fate for done in record.fates)
    known = {done.group for done in record.fates}
    undone = {group: start for group, start in record.started.items() if group not in known}
    lost = sum(start + args.max_staleness < record.last_version for start in undone.values())
    return (
        {"started": len(record.started)}
        | dict(fates)
        | {
            "undone": len(undone),
            "lost": lost,
            "two_fates": len(record.fates) - len(known),
        }
    )


def _describe_slowest(record: Record) -> dict[str, int]:
    """Return the fates of the slowest hundredth of the episodes that ended, by the seconds of their environment."""
    ordered = sorted(record.played, key=lambda played: -played.env_seconds)
    slowest = {str(played.task.episode_id): played.task.group for played in ordered[: max(1, len(ordered) // 100)]}
    known = {done.group for done in record.fates}
    waiting = {name for name, group in slowest.items() if record.started and group not in known}
    return {
        "episodes": len(slowest),
        "trained": len(slowest.keys() & record.used),
        "in_loss": len(slowest.keys() & record.in_loss),
        "undone": len(waiting),
        "lost": len(slowest.keys() - record.used - waiting),
        "all_trained": len(record.used),
        "all_in_loss": len(record.in_loss),
    }


def _covered(record: Record) -> float:
    """Return the seconds of the training in which the server generated for at least one episode that has ended."""
    spans = sorted(span for played in record.played for span in played.generating)
    end, covered = record.began, 0.0
    for start, stop in spans:
        stop = min(stop, record.began + record.seconds)
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered


def _totals(counts: Iterator[dict[str, Any]] | Any) -> dict[str, Any]:
    totals: dict[str, Any] = {}
    for count in counts:
        for name, value in count.items():
            totals[name] = totals.get(name, 0) + value
    return dict(sorted(totals.items()))


def _share(counts: dict[str, int], least: int) -> float:
    total = sum(counts.values())
    return round(sum(count for name, count in counts.items() if int(name) >= least) / max(1, total), 4)


def main() -> None:
    Command = Annotated[Run, tyro.conf.subcommand("run")] | Annotated[Table, tyro.conf.subcommand("table")]
    command: Run | Table = tyro.cli(Command, description=__doc__)  # type: ignore[arg-type]
    if isinstance(command, Table):
        lines = [json.loads(line) for file in command.files for line in file.read_text().splitlines()]
        if not lines:
            raise SystemExit(f"There are no lines in {', '.join(map(str, command.files))}: write some with `run`.")
        print(tables(lines))
        if command.report is not None:
            command.report.parent.mkdir(parents=True, exist_ok=True)
            command.report.write_text(report(lines, TARGET, IN_A_ROW))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_policy_folder(Path(temporary, "model"), command.grpo.seed)
        record, policy = train(command, folder)
        line = describe(command, record, evaluate(command, record, policy, folder))
    command.out.parent.mkdir(parents=True, exist_ok=True)
    with command.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps({name: value for name, value in line.items() if name not in ("settings", "step_seconds")}))


if __name__ == "__main__":
    main()
