"""`verl-server demo`: the whole training loop on one machine, with a game whose progress a person can see.

Three parties communicate over HTTP: this process trains, a rollout server samples, and an environment server plays a
guessing game. Each answer of the game takes a random time with a heavy-tailed distribution. The policy starts from
random weights. With `--async`, the episodes play in a process of their own while this one trains. The demo writes
metrics.jsonl, trajectories.jsonl, summary.json and report.html to the output folder.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.rank_group import RankGroup
from verl_server.errors import BadRequestError
from verl_server.files.command_options import parse_options
from verl_server.files.json_files import read_json
from verl_server.files.path_options import OutputPath
from verl_server.files.run_output import Claim, claim_folder, recorded, settings_of, store_settings
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import EnvTimeouts
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.environments.games import GuessNumber
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.rollout.trajectory import Task, Trajectory, append_jsonl
from verl_server.train.ages import describe_history
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.demo_display import DemoDisplay
from verl_server.train.demo_evaluation import evaluation_figures, success_rate
from verl_server.train.demo_record import DemoTrajectories
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.metrics import StepMetrics
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks, launch_engine, setup_ranks
from verl_server.train.rollouts.group_messages import PlayerSetup, encode_args
from verl_server.train.rollouts.rollout_process import RolloutProcess
from verl_server.train.run_advisor import RunAdvisor
from verl_server.train.servers import RolloutServers
from verl_server.train.skipped_steps import SkippedSteps
from verl_server.train.trackers.kinds import Logger, check_loggers
from verl_server.train.trackers.tracked_run import TrackedRun
from verl_server.train.trackers.trackers import open_trackers
from verl_server.watch.advisories import Advisor
from verl_server.watch.pace import PaceComparison, compare_pace
from verl_server.watch.report import Report, write_report
from verl_server.weight_version import WeightVersion, new_incarnation

_WORDS = ("<pad>", "<bos>", "<eos>", "guess", "to", "higher", "lower", "correct", "what")
_VOCABULARY = (*_WORDS, *(str(n) for n in range(1, 40 - len(_WORDS) + 1)))
"""40 tokens. The policy may sample each of them at any time."""

_SHAPE: dict[str, Any] = {
    "vocab_size": len(_VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEAD_DIM_OF_OTHERS = 32
"""Size of a head with another project's engine: vLLM's attention on a CPU needs 32 or more."""
_RESULTS = ("metrics.jsonl", "trajectories.jsonl", "summary.json", "report.html")
CONFIG = GRPOConfig(groups=32, group_size=8, learning_rate=4e-3, entropy_coef=0.015, max_grad_norm=0.3)
"""Settings of the algorithm with which the policy learns the game of 12 numbers in about a hundred steps."""
HELD_OUT = 2**30
"""First evaluation seed. All training seeds are smaller."""


@dataclass(frozen=True)
class DemoArgs:
    """Train a tiny policy from random weights on a game in which it must use the environment's answers.

    Exit status: 0 if the policy has learned to use the answers, 1 if it has not or after an error, 2 for wrong options,
    130 after Ctrl-C.
    """

    out: OutputPath = Path("runs/demo")
    """Folder for the results. Missing folders above it are created. Results of an earlier demo in it are replaced when
    the servers of this one are up. A folder with anything else that the demo would replace is refused."""
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    """Device of trainer and server."""
    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine of the rollout server: this package's own one, or an installed vLLM (`verl-server[vllm]`) or SGLang
    (`verl-server[sglang]`)."""
    seed: int = 0
    """Seed of the weights, the games, the environment's delays and sampling."""
    steps: int = 140
    """Largest number of training steps."""
    target: float = 0.96
    """Training ends when the mean success rate of the last four steps reaches this."""
    time_limit: float = 420.0
    """Training ends after this many seconds."""
    numbers: int = 12
    """The hidden number is between 1 and this."""
    guesses: int = 5
    """Number of guesses in a game."""
    latency: float = 0.03
    """Median seconds that the environment takes to answer (lognormal, sigma 1.5, at most 20 medians)."""
    episodes: int = 768
    """Held-out episodes in each evaluation."""
    pace_episodes: int = 256
    """Episodes for the comparison of lock step and own pace."""
    asynchronous: Annotated[bool, tyro.conf.arg(name="async")] = False
    """Train while the episodes play (verl_server.train.async_grpo): neither waits for the other. Otherwise each step
    plays its episodes first, and then trains on them. The report shows how old the episodes were."""
    max_staleness: int = 1
    """With --async: largest age of a group of episodes when it is trained, in weight pushes since it started."""
    logger: tuple[Logger, ...] = ()
    """Trackers that get the figures of each step and of both evaluations, beside metrics.jsonl. Each needs the extra of
    its name, such as verl-server[tensorboard]. docs/trackers.md has the names of the figures."""

    def __post_init__(self) -> None:
        check_loggers(self.logger)
        if not 1 < self.guesses < self.numbers <= len(_VOCABULARY) - len(_WORDS):
            most = len(_VOCABULARY) - len(_WORDS)
            raise BadRequestError(f"The demo needs 1 < --guesses < --numbers <= {most}.")
        if self.latency < 0 or min(self.steps, self.episodes, self.pace_episodes) < 1:
            raise BadRequestError("--steps, --episodes and --pace-episodes must be at least 1, --latency at least 0.")
        if self.max_staleness < 0:
            raise BadRequestError(f"--max-staleness must be at least 0, not {self.max_staleness}.")
        if self.max_staleness != DemoArgs.max_staleness and not self.asynchronous:
            raise BadRequestError("--max-staleness is for --async: add it, or remove --max-staleness.")


@dataclass(frozen=True)
class _Parts:
    """The parties of a demo that are running, and what the algorithm needs of them."""

    trainer: PolicyTrainer
    servers: RolloutServers
    loop: AgentLoop
    options: TrainArgs
    """The options of a training run with these parties, of which the rollout process takes the part about episodes."""
    ranks: RankGroup
    advisor: RunAdvisor
    incarnation: str


class Demo:
    """One run of the demo. `run()` trains, evaluates, writes the report and returns the summary."""

    def __init__(self, args: DemoArgs, display: DemoDisplay) -> None:
        self.args = args
        self.display = display
        self.config = replace(CONFIG, seed=args.seed, loss="tis" if args.asynchronous else CONFIG.loss)
        self.history: list[StepMetrics] = []
        self.started = time.monotonic()

    def run(self) -> dict[str, Any]:
        out = self.args.out
        with contextlib.ExitStack() as stack:
            stack.callback(_claimed_folder(self.args).release)
            head_dim = 16 if self.args.engine == "embedded" else _HEAD_DIM_OF_OTHERS
            folder = make_policy_folder(out / "model", self.args.seed, head_dim)
            interrupt = stack.enter_context(_Interrupt())
            parts = self._start(stack, folder)
            for name in (*_RESULTS, "trajectories.jsonl.index.sqlite"):
                (out / name).unlink(missing_ok=True)
            trackers = stack.enter_context(open_trackers(self.args.logger, self._tracked()))
            before = self._evaluate(parts.loop, "before training")
            trackers.log_evaluation(evaluation_figures(before, step=0))
            recorded = DemoTrajectories(out)
            stack.callback(recorded.close)
            recorded.add(before, "before")
            with self._algorithm(parts) as run:  # ends the rollout process, which would slow what is measured below
                for metrics, trajectories in self._train(run, parts.advisor):
                    append_jsonl(out / "metrics.jsonl", [asdict(metrics)])
                    trackers.log_step(metrics)
                    recorded.add(trajectories[:4], "training", metrics.step)
                    interrupt.check()
            after = self._evaluate(parts.loop, "after training")
            recorded.add(after, "after")
            trackers.log_evaluation(evaluation_figures(after, step=len(self.history)))
            self.display.phase("lock step against own pace")
            pace = compare_pace(parts.loop, self._tasks("pace", self.args.pace_episodes))
        summary = self._summary(before, after, pace)
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        write_report(
            out / "report.html", Report(summary, [asdict(m) for m in self.history], pace, before, after, self._setup())
        )
        return summary

    def _start(self, stack: contextlib.ExitStack, folder: Path) -> _Parts:
        """Start the servers, load the policy and push it. `stack` ends what was started."""
        args = self.args
        self.display.phase("starting the environment server and the rollout server")
        device = setup_ranks(args.device)
        stack.callback(dist.destroy_process_group)
        torch.manual_seed(args.seed)
        torch.set_num_threads(1)  # the model is tiny, and the servers need the other cores
        game = {"numbers": args.numbers, "guesses": args.guesses, "latency": args.latency}
        at_once = self.config.groups * self.config.group_size * (1 + args.max_staleness)
        environment = stack.enter_context(
            EnvServer(
                "verl_server.rollout.environments.games:GuessNumber",
                kwargs=game,
                max_concurrent_envs=max(1024, 2 * at_once),
            )
        )
        settings = {"dtype": "float32", "log_level": "warning"} | server_settings(args.engine, device.type)
        engine = stack.enter_context(launch_engine(str(folder), device, **settings))
        policy = load_policy(str(folder), device, compute_dtype=getattr(torch, settings["dtype"]))
        trainer = PolicyTrainer(policy, self.config, args.steps, device)
        self.parameters = sum(p.numel() for p in trainer.policy.parameters())
        limits = Limits(max_turns=args.guesses, max_new_tokens=1, env=EnvTimeouts(step=30, reset=30))
        renderer = TextRenderer(AutoTokenizer.from_pretrained(folder))
        # By its URL: the server may be launched again, and then another process serves there.
        client = HttpServerEngineAdapter.attach(str(engine.url), admin_api_key=engine.admin_api_key)
        stack.enter_context(client)
        loop = AgentLoop(client, environment.url, renderer, sampling_params={"temperature": 1.0}, limits=limits)
        stack.enter_context(loop)
        ranks, incarnation = all_ranks(), new_incarnation()
        servers = RolloutServers([engine], ranks, mode="in_place" if args.asynchronous else "wait")
        servers.push(trainer.policy.named_weights, str(WeightVersion(0, incarnation)))
        options = TrainArgs(
            model_path=str(folder), env_url=environment.url, chat=False, limits=limits, replacements=0, grpo=self.config
        )
        self.ready_seconds = time.monotonic() - self.started
        advisor = RunAdvisor(Advisor(settings["dtype"]), ranks)
        return _Parts(trainer, servers, loop, options, ranks, advisor, incarnation)

    @contextlib.contextmanager
    def _algorithm(self, parts: _Parts) -> Iterator[GRPO | AsyncGRPO]:
        """Yield the algorithm, whose weights the servers have; afterwards end the rollout process, if there is one."""
        advisor, incarnation = parts.advisor, parts.incarnation
        if not self.args.asynchronous:
            yield GRPO(parts.trainer, parts.servers, parts.loop, parts.ranks, advisor=advisor, incarnation=incarnation)
            return
        self.display.phase("starting the rollout process")
        urls = parts.servers.urls
        setup = PlayerSetup(args=encode_args(parts.options), urls=urls, keys=[None], incarnation=incarnation)
        url = parts.loop.environment_url
        with contextlib.closing(RolloutProcess(setup, lambda line, row: None, environment_url=url)) as rollouts:
            yield AsyncGRPO(
                parts.trainer,
                parts.servers,
                rollouts,
                parts.ranks,
                steps=self.args.steps,
                max_staleness=self.args.max_staleness,
                advisor=advisor,
                incarnation=incarnation,
            )

    def _train(self, run: GRPO | AsyncGRPO, advisor: RunAdvisor) -> Iterator[tuple[StepMetrics, list[Trajectory]]]:
        args = self.args
        begun = time.monotonic()
        skipped = SkippedSteps(most=min(3, args.steps), pause=1.0)
        while run.next_step < args.steps and time.monotonic() - begun < args.time_limit:
            step = run.step()
            metrics, trajectories = step.metrics, step.rollout.trajectories
            metrics.success = success_rate(trajectories)
            self.history.append(metrics)
            self.display.step(metrics, trajectories)
            yield metrics, trajectories
            advisor.check_step(metrics, metrics.phases)
            skipped.note(metrics)
            recent = [m.success or 0.0 for m in self.history[-4:]]
            if len(recent) == 4 and statistics.mean(recent) >= args.target:
                break
        self.train_seconds = time.monotonic() - begun

    def _evaluate(self, loop: AgentLoop, name: str) -> list[Trajectory]:
        self.display.phase(f"evaluating {name} on held-out seeds")
        trajectories = loop.run(self._tasks("eval", self.args.episodes)).trajectories
        self.display.evaluated(name, success_rate(trajectories))
        return trajectories

    def _tasks(self, name: str, count: int) -> list[Task]:
        first = HELD_OUT + self.args.seed * 1_000_003
        return [Task(seed=first + i, group=i, episode_id=f"{name}-{i}", sampling_seed=first + i) for i in range(count)]

    def _summary(self, before: list[Trajectory], after: list[Trajectory], pace: PaceComparison) -> dict[str, Any]:
        args = self.args
        syncs = [m.sync_seconds for m in self.history if m.skipped is None]
        seeds = [task.seed for task in self._tasks("eval", args.episodes)]
        return {
            "eval_success_before": success_rate(before),
            "eval_success_after": success_rate(after),
            "best_without_feedback": args.guesses / args.numbers,
            "best_without_feedback_hindsight": GuessNumber.best_without_feedback(seeds, args.numbers, args.guesses),
            "seconds": time.monotonic() - self.started,
            "seconds_to_ready": self.ready_seconds,
            "train_seconds": self.train_seconds,
            "steps": len(self.history),
            "lockstep_ratio": pace.ratio,
            "ideal_ratio": pace.ideal_ratio,
            "lockstep_seconds": pace.lockstep_seconds,
            "own_pace_seconds": pace.own_pace_seconds,
            "ideal_seconds": pace.ideal_seconds,
            "longest_alone_seconds": pace.longest_alone_seconds,
            "work_seconds": pace.work_seconds,
            "same_trajectories": pace.same_trajectories,
            "pace_episodes": len(pace.own_pace),
            "weight_pushes": len(syncs) + 1,
            "push_ms_median": 1e3 * statistics.median(syncs),
            "push_ms_max": 1e3 * max(syncs),
            "max_logprob_gap": max(m.logprob_gap or 0.0 for m in self.history),
            "episodes_played": sum(m.trajectories for m in self.history),
            "episodes_failed": sum(m.trajectories - m.trainable for m in self.history),
            "episodes_unsampled": sum(m.unsampled for m in self.history),
            "sampled_tokens": sum(m.sampled_tokens for m in self.history),
            "asynchronous": describe_history(self.history, args.max_staleness) if args.asynchronous else None,
        }

    def _tracked(self) -> TrackedRun:
        """Return the description of the run for trackers."""
        settings = settings_of("demo", self.args, without=("out",))
        return TrackedRun(str(self.args.out), settings, next_step=0, is_resumed=False)

    def _setup(self) -> dict[str, str]:
        """Return the description of the run for the report."""
        args = self.args
        return {
            "game": f"guess a number from 1 to {args.numbers} in {args.guesses} guesses",
            "policy": f"Llama, 2 layers, {self.parameters:,} parameters, {len(_VOCABULARY)} tokens, random weights",
            "waits": f"lognormal, median {args.latency * 1e3:.0f} ms, sigma 1.5, at most 20 medians",
            "batch": f"{self.config.groups} groups of {self.config.group_size} episodes per step",
            "training": (
                f"asynchronous: episodes play meanwhile, trained at most {args.max_staleness} pushes after they began"
                if args.asynchronous
                else "synchronous: all episodes of a step, then training"
            ),
            "device": args.device,
            "torch": torch.__version__,
        }


class _Interrupt:
    """A memory of Ctrl-C until `check`, because Python discards a KeyboardInterrupt that is raised in a finalizer."""

    def __enter__(self) -> _Interrupt:
        self._requested = False
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, *_: object) -> None:
        self._requested = True
        raise KeyboardInterrupt

    def check(self) -> None:
        if self._requested:
            raise KeyboardInterrupt


def make_policy_folder(folder: Path, seed: int, head_dim: int = 16) -> Path:
    """Write a Llama model with random weights whose tokens are the words of the game, and return `folder`."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(_VOCABULARY)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    return make_model_folder(folder, "llama", seed=seed, tokenizer=tokenizer, head_dim=head_dim, **_SHAPE)


def server_settings(engine: str, device: str) -> dict[str, Any]:
    """Return the settings of the rollout server that differ between the engines."""
    match engine:
        case "vllm":  # its cache has whole GiB on a CPU; compiling takes longer than the demo
            return {"engine": engine, "kv_cache_gib": 1, "engine_args": {"enforce_eager": True}}
        case "sglang":  # its kernels for GPUs compute in half precision only
            dtype = "bfloat16" if device == "cuda" else "float32"
            return {"engine": engine, "dtype": dtype, "kv_cache_gib": 0.25, "engine_args": {"disable_cuda_graph": True}}
        case _:
            return {"cpu_threads": 1, "kv_cache_gib": 0.25}


def _claimed_folder(args: DemoArgs) -> Claim:
    """Check and lock the output folder, remove the model of an earlier demo, and store the settings.

    Raise BadRequestError if the folder has files that no demo wrote, and that this one would replace.
    """
    claim = claim_folder(args.out)
    try:
        file = args.out / "run.json"
        found = recorded(args.out, also=("model", "summary.json", "report.html"))
        if found and not (file.exists() and read_json(file).get("command") == "demo"):
            raise BadRequestError(
                f"{args.out} has files that are of no demo ({', '.join(found)}). Name another folder with --out."
            )
        store_settings(file, settings_of("demo", args, without=("out",)))
        shutil.rmtree(args.out / "model", ignore_errors=True)
    except BaseException:
        claim.release()
        raise
    return claim


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit status: 0 if the policy learned the game (success of at least 0.9), else 1."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    args = parse_options(DemoArgs, argv, "verl-server demo")
    with DemoDisplay(Console(stderr=False), args.guesses / args.numbers) as display:
        summary = Demo(args, display).run()
        display.result(summary, args.out)
    return 0 if summary["eval_success_after"] >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
