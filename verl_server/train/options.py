"""The options of a training run: `GRPOConfig` for the algorithm, `TrainArgs` for everything else.

The command lines of `verl_server.train.grpo` and `async_grpo` are generated from these classes: each docstring below a
field is the help text of that option.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from verl_server.engine.rank_group import RANK_TIMEOUT
from verl_server.errors import BadRequestError
from verl_server.files.path_options import OutputPath
from verl_server.messages.weight_requests import UpdateMode
from verl_server.rollout.agents.installed import ProgramOptions
from verl_server.rollout.environments.named import is_named, is_url
from verl_server.rollout.environments.verifiers import check_alone, is_verifiers
from verl_server.rollout.episode import Limits
from verl_server.rollout.faults import FaultRules
from verl_server.server_args import ServerArgs
from verl_server.train.kept_checkpoints import KEPT
from verl_server.train.losses import LossConfig
from verl_server.train.mixture import Mixture, MixtureFile
from verl_server.train.ranks import SAVE_TIMEOUT
from verl_server.train.run_advisor import check_names
from verl_server.train.schedules import Schedule
from verl_server.train.servers import MAX_RELAUNCHES
from verl_server.train.trackers.kinds import Logger, check_loggers
from verl_server.watch.advisories import GAP


class WrongOptionsError(BadRequestError):
    """Options that do not fit each other. Nothing has started."""

    exit_status = 2


@dataclass(frozen=True)
class GRPOConfig(LossConfig):
    """Settings of the algorithm, with those of its loss."""

    compares_groups: ClassVar[bool] = True
    """True if an episode is compared with the others of its group."""
    groups: int = 16
    """Number of groups of each step, over all ranks. The episodes of a group have the same environment seed."""
    group_size: int = 16
    """Episodes of each group."""
    refill: int = 0
    """Most rounds in which a step plays further groups in place of those whose rewards are all equal, from which it
    learns nothing (dynamic sampling of DAPO). Each round plays as many as lack, so a step plays at most groups x
    (1 + refill) groups. 0: none, and steps become smaller as the policy solves more of its tasks."""
    epochs: int = 2
    """Passes over a step's trajectories."""
    minibatches: int = 4
    """Optimizer steps per pass."""
    micro_batch_tokens: int = 8192
    """Largest number of tokens of one forward pass of a rank, padding included. A longer trajectory gets a pass of its
    own. Gradients are summed over the passes, so this changes memory and speed only."""
    learning_rate: float = 1e-6
    """Learning rate of AdamW after the warm-up."""
    schedule: Schedule = "linear"
    """How the learning rate falls after the warm-up: linearly towards 0 until the final share is left, along half a
    period of a cosine to that share, or not at all."""
    final_learning_rate: float = 0.15
    """Share of the learning rate below which it does not fall. Not for the schedule constant."""
    warmup_steps: int = 5
    """Steps over which the learning rate rises linearly."""
    correction_bound: float = 0.0
    """Multiply the advantage of a token that was drawn under a mask, a penalty or a bias with (its probability under
    the policy / its probability where it was drawn), at most this: truncated importance sampling. 0: do not."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus at the first step. The weight falls linearly to 0."""
    track_entropy: bool = True
    """Report the policy's entropy even without an entropy bonus. If this is off, training is a little faster."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation, which favours groups that are nearly solved."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    temperature: float = 1.0
    """Sampling temperature. The log-probabilities in training have it, too."""
    seed: int = 0
    """Seed of the environments, of sampling and of the order of training. The same seed repeats the run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        flag = self.flag
        for name in ("groups", "group_size", "epochs", "minibatches", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise BadRequestError(f"{flag(name)} must be at least 1, not {getattr(self, name)}.")
        if self.refill < 0:
            raise BadRequestError(f"{flag('refill')} must not be negative, not {self.refill}.")
        if self.refill and self.group_size == 1:
            raise BadRequestError(
                f"{flag('refill')} replaces groups whose rewards are all equal, and a group of one episode always is "
                f"one: {flag('group_size')} must be at least 2, or {flag('refill')} 0."
            )
        if not 0 < self.temperature < math.inf:
            raise BadRequestError(f"{flag('temperature')} must be finite and more than 0, not {self.temperature:g}.")
        if self.correction_bound < 0:
            raise BadRequestError(f"{flag('correction_bound')} must not be negative, not {self.correction_bound:g}.")
        if not 0 <= self.final_learning_rate <= 1:
            raise BadRequestError(
                f"{flag('final_learning_rate')} must be from 0 to 1, not {self.final_learning_rate:g}: it is a share "
                f"of {flag('learning_rate')}."
            )
        if self.has_kl_reward and self.compares_groups and self.normalize_std:
            raise BadRequestError(
                f"{flag('kl_in')} reward cannot be combined with {flag('normalize_std')}: in a group with equal "
                "rewards, the penalties alone, however small, would be scaled up to the size of rewards. Remove one "
                f"of them, or take {flag('kl_in')} loss."
            )
        if self.schedule == "constant" and self.final_learning_rate != GRPOConfig.final_learning_rate:
            raise BadRequestError(
                f"{flag('final_learning_rate')} has no effect on {flag('schedule')} constant: remove it, or name "
                "linear or cosine."
            )


@dataclass(frozen=True)
class TrainArgs:
    """Train a policy with GRPO on an environment that is served over HTTP (OpenEnv's protocol).

    Exit status: 0 if the run is complete, 1 after an error, 2 for wrong options, 3 if several steps in a row had
    nothing to train on, 4 if server and trainer disagree about log-probabilities, 5 for another advisory of --stop-on,
    129, 130 or 143 after SIGHUP, SIGINT or SIGTERM. Whatever ends the steps, checkpoint and model are saved, and
    --resume continues the run. (If a rank is gone or the disk is full, the last checkpoint stays.)
    """

    command: ClassVar[str] = "train.grpo"
    """Name of the command in run.json."""
    model_path: str
    """Model folder or hub id with the initial weights of the policy."""
    env_url: Annotated[str | None, tyro.conf.arg(aliases=("--environment",))] = None
    """URL of an environment server (OpenEnv's protocol). Required without --mixture and --agent. --environment is the
    same option. With --agent, also a name, for the tasks of a file: workspace, reasoning-gym:NAME, textarena:NAME,
    mcp:URL or code, as in `verl-server rollout`."""
    mixture: MixtureFile | None = None
    """FILE.toml with several environments, in place of --env-url: a table [[environment]] for each, with name, url and
    weight, and what it has of its own (docs/mixtures.md). Its groups are in proportion to the weights."""
    agent: str | None = None
    """MODULE:function or FILE.py:function, an `async def (session, task)`, or the command of a program, in quotes. It
    plays the episodes through sessions of the rollout server. The recipe of an installed program (docs/recipes.md):
    claude-code, codex, opencode, aider, mini-swe-agent, openhands, smolagents, or FILE.py:RECIPE, with further words
    for the program. Default: the built-in loop."""
    program: Annotated[ProgramOptions, tyro.conf.arg(name="")] = field(default_factory=ProgramOptions)
    tasks: str | None = None
    """Tasks of the agent: FILE.jsonl with one task a line, reasoning-gym:NAME or textarena:NAME. Groups take the lines
    in turn. Default: the environment at --env-url with a seed for each group. Or, without --agent, verifiers:NAME, an
    installed environment of verifiers, whose rows groups take in turn."""
    reward: str | None = None
    """`environment`, `exit` (1.0 if a program's exit code is 0), or MODULE:function of the ended episode. For --agent.
    Default: `environment` if there is one, `exit` for a program."""
    agent_sampling: Literal["override", "refuse"] = "override"
    """The treatment of an agent's request that sets temperature, top-p, top-k, min-p, penalties or bias.

    With `override`, the trainer's values replace the request's, and the turn records the request's values. With
    `refuse`, the request is answered with 400.
    """
    reference_path: str | None = None
    """Model folder or hub id of the reference policy, if the coefficient of the KL is above 0. It needs the tokenizer
    of the policy. Default: --model-path, also with --resume and --fork."""
    steps: int = 100
    """Steps of the whole run, including the steps before a --resume."""
    out: OutputPath = Path("runs/grpo")
    """Folder for the files of the run: metrics, events and trajectories (docs/reference/run-folder.md), the checkpoint,
    the trained model, and run.json with the settings. Missing folders above it are created. A folder that has another
    run is refused."""
    keep_trajectories: float = 16.0
    """Most GiB of trajectories, and of what the trainer computed for them, that all ranks keep together. The oldest are
    removed first. 0 keeps none. `verl-server trajectories` shows them."""
    logger: tuple[Logger, ...] = ()
    """Trackers that get the figures of each step, beside metrics.jsonl. Each needs the extra of its name, such as
    verl-server[wandb]. docs/trackers.md has the names of the figures."""
    resume: bool = False
    """Continue the run in `--out`. It goes on from its checkpoint. The settings must be equal, except those of servers,
    devices, bounds of time, memory and the number of steps (docs/runs.md has the list)."""
    replay_actions: bool = False
    """Record each turn of the episodes. After a kill, --resume sends the recorded actions to the environment again, and
    an episode goes on from its last turn if the environment repeats all answers exactly. Otherwise it begins again.
    Episodes that have ended are kept while others of their group go on. For environments whose answers are functions of
    seed and actions (docs/checkpoints.md). Not with --agent."""
    fork: OutputPath | None = None
    """Folder of another training run. This run begins from a copy of one of its checkpoints, in a new --out: with its
    weights, optimizer, step and position in the tasks. Settings may differ, but not the shape of the model."""
    fork_step: int | Literal["best"] | None = None
    """Step of the checkpoint of --fork, or `best` for the one of the best evaluated weights. Default: the newest."""
    save_every: int = 50
    """Steps between checkpoints. 0 saves at the end only."""
    save_in_background: bool = True
    """Write checkpoints while the steps go on, from a copy of each rank's weights and optimizer in the main memory of
    its host (12 bytes for each of its parameters). Otherwise the run waits, and there is no copy."""
    keep_checkpoints: int = KEPT
    """Number of newest checkpoints that are kept. The one of the best evaluated weights is kept, too."""
    eval_every: int = 0
    """Steps between evaluations on held-out tasks, which no step trains on. There is one before the first step and one
    after the last step, too. Each saves a checkpoint first. 0: never."""
    eval_tasks: int = 64
    """Number of held-out tasks: the seeds from 2**30 on, in each run and at each step. The environments of --mixture
    share them equally."""
    eval_samples: int = 1
    """Episodes of each held-out task. They have the temperature of training, and sampling seeds of their own."""
    eval_timeout: float = 300.0
    """Most seconds of an evaluation. Then its other episodes are cancelled, and it does not count as the best. So no
    push is held longer."""
    eval_success: float = 1.0
    """Least reward of a held-out episode that counts as a success. With --mixture, also of an episode of training; an
    environment may have a bound of its own."""
    eval_file: str | None = None
    """FILE.jsonl with the held-out tasks of an agent, in turn. Required with --eval-every if --tasks is a file, whose
    lines are trained on."""
    max_skipped_steps: int = 5
    """The run ends after this many steps in a row with nothing to train on (failed episodes, equal rewards)."""
    retry_pause: float = 10.0
    """Seconds to wait after a skipped step with failed episodes. Each further skipped step doubles the pause."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the policy, and of the launched server unless --server.device names another one."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of forward and backward passes, and of the launched server. auto: bfloat16 on CUDA, float32 on the CPU.
    Weights and optimizer are fp32. With float16, the loss is scaled, and the first optimizer steps may be skipped."""
    allow_dtype_mismatch: bool = False
    """Train even though the server computes in another dtype than the trainer's passes."""
    stop_on: tuple[str, ...] = (GAP,)
    """Advisories that end the run, which is saved: with status 4 for logprob_gap, if the gap is far above its bound or
    keeps growing, else with 5. The names replace the default. `none`: all advisories only warn. docs/training.md lists
    them."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a third more work, a fraction of the memory."""
    logprob_chunk: int = 2048
    """Number of tokens whose logits are in memory at one time. They need a few times this x vocabulary x 4 bytes."""
    chat: bool = True
    """Render observations as user messages of the chat template, otherwise as plain text."""
    observation_key: str = "text"
    """Key of the text in the environment's observations."""
    action_key: str = "text"
    """Key of the policy's text in the environment's actions."""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Limits(max_turns=8, max_new_tokens=512)
    )
    max_concurrency: int | None = None
    """Most episodes at one time. None is no bound. Each rank has its own."""
    replacements: int = 2
    """Most episodes of a group and step that replace others, which the infrastructure ended (failed environments and
    servers). A replacement has the environment's seed of the lost episode, and another seed of sampling."""
    faults: Annotated[FaultRules, tyro.conf.arg(name="")] = field(default_factory=FaultRules)
    rank_timeout: float = RANK_TIMEOUT
    """Seconds that one rank waits for another. Must exceed --trajectory-timeout."""
    save_timeout: float = SAVE_TIMEOUT
    """Seconds that one rank waits for another when they save. The next checkpoint, and the end of the run, wait for a
    checkpoint that is still being written as long."""
    server_urls: Annotated[tuple[str, ...], tyro.conf.arg(name="server"), tyro.conf.UseAppendAction] = ()
    """URL of a running rollout server of the same model on this host. Name several servers by repeating the option: the
    episodes spread over them, and each push reaches all of them. By default a server is launched."""
    router: str | None = None
    """URL of a router (`verl-server router`), through which the episodes play. Weights are pushed to its servers
    directly, so they run on this host. If --server is named, too, it must name the router's servers."""
    max_relaunches: int = MAX_RELAUNCHES
    """The launched server is launched again when it ends, at most this many times between two pushes. Servers at
    --server are waited for, at most --restart-timeout seconds if none is left."""
    server: ServerArgs = field(default_factory=lambda: ServerArgs(model_path=""))
    """Settings of the launched server. Model, device, dtype, port and weight version follow from the run unless they
    are set. With --server or --router, only the API keys may be set."""
    grpo: GRPOConfig = field(default_factory=GRPOConfig)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.max_skipped_steps < 1 or self.logprob_chunk < 1:
            raise BadRequestError("--steps, --max-skipped-steps and --logprob-chunk must be at least 1.")
        if self.reference_path is not None and self.grpo.kl_coef == 0:
            coefficient = self.grpo.flag("kl_coef")
            raise BadRequestError(f"--reference-path is for {coefficient} above 0: remove it, or name a coefficient.")
        if self.fork is not None and self.resume:
            raise BadRequestError("--resume continues the run in --out from its own checkpoint: remove --fork.")
        if self.fork_step is not None and self.fork is None:
            raise BadRequestError("--fork-step is a step of another run: name the folder of that run with --fork.")
        if self.keep_checkpoints < 1:
            raise BadRequestError(f"--keep-checkpoints must be at least 1, not {self.keep_checkpoints}.")
        if self.save_every < 0 or self.retry_pause < 0 or min(self.max_relaunches, self.replacements) < 0:
            raise BadRequestError(
                "--save-every, --retry-pause, --max-relaunches and --replacements must not be negative."
            )
        if self.eval_every < 0 or min(self.eval_tasks, self.eval_samples) < 1 or not self.eval_timeout > 0:
            raise BadRequestError(
                "--eval-every must not be negative, --eval-tasks and --eval-samples must be at least 1, and "
                "--eval-timeout must be more than 0."
            )
        if not 0 <= self.keep_trajectories < 2**30:
            raise BadRequestError("--keep-trajectories must be from 0 to 2**30 GiB.")
        if len(set(self.server_urls)) < len(self.server_urls):
            raise BadRequestError(f"--server names one server twice: {' '.join(self.server_urls)}.")
        if self.rank_timeout <= self.limits.trajectory_timeout:
            raise BadRequestError(
                f"--rank-timeout {self.rank_timeout:g} must exceed --trajectory-timeout "
                f"{self.limits.trajectory_timeout:g}, because a rank waits for the slowest episode of the others."
            )
        if self.replay_actions and self.rank_timeout < 2 * self.limits.trajectory_timeout:
            raise BadRequestError(
                f"--rank-timeout {self.rank_timeout:g} must be at least twice --trajectory-timeout "
                f"{self.limits.trajectory_timeout:g} with --replay-actions, because an episode may begin again after a "
                "replay."
            )
        check_names(self.stop_on)
        check_loggers(self.logger)
        self._check_mixture()
        self._check_agent()
        given = set(self.server_settings) - {"api_key", "admin_api_key"}
        if self.attaches and given:
            flags = ", ".join(f"--server.{name.replace('_', '-')}" for name in sorted(given))
            where = f"--server {self.server_urls[0]}" if self.server_urls else f"--router {self.router}"
            raise BadRequestError(f"The server at {where} is running already and has its own settings: remove {flags}.")

    def _check_mixture(self) -> None:
        if self.mixture is None:
            return
        if self.is_played_by_agent:
            raise BadRequestError(
                "--mixture is for the built-in loop, and an agent plays one environment: remove --mixture, or --agent."
            )
        if self.env_url is not None:
            raise BadRequestError("--mixture names the environments: remove --env-url, or add it to the file.")
        if self.eval_every and self.eval_tasks < (count := len(self.mixture.environments)):
            raise BadRequestError(
                f"--eval-tasks {self.eval_tasks} is less than the {count} environments of --mixture, each of which "
                f"needs a held-out task: name at least {count}."
            )

    @property
    def is_played_by_agent(self) -> bool:
        """True if an agent, or the code of an environment of verifiers, plays the episodes."""
        return self.agent is not None or is_verifiers(self.tasks)

    def _check_agent(self) -> None:
        if is_verifiers(self.tasks):
            check_alone(agent=self.agent, reward=self.reward, eval_file=self.eval_file)
        if not self.is_played_by_agent:
            if self.env_url is None and self.mixture is None:
                raise BadRequestError(
                    "--env-url is missing: name an environment server, or several in a file with --mixture, or play "
                    "with --agent."
                )
            if self.tasks is not None or self.reward is not None:
                raise BadRequestError("--tasks and --reward are for --agent: remove them, or name an agent.")
            if self.eval_file is not None:
                raise BadRequestError("--eval-file is for --agent with --tasks FILE.jsonl: remove it.")
            if self.program != ProgramOptions():
                raise BadRequestError("--program, --isolation and --readable are for --agent: remove them.")
            if self.env_url and not is_url(self.env_url):
                raise BadRequestError(
                    f"--env-url {self.env_url} is no URL: the built-in loop plays environment servers. Serve it "
                    "(verl-server env serve), or play it with --agent."
                )
            return
        is_file = self.tasks is not None and not is_named(self.tasks)
        if is_file and self.eval_every and self.eval_file is None:
            raise BadRequestError(
                f"--eval-every needs tasks that no step trains on, and all lines of --tasks {self.tasks} are trained "
                "on: name a file of other tasks with --eval-file."
            )
        if self.eval_file is not None and not is_file:
            raise BadRequestError(
                "--eval-file is for --tasks FILE.jsonl: other held-out tasks have seeds of their own."
            )
        if self.env_url is None and self.tasks is None:
            raise BadRequestError("--agent needs something to play: name --tasks, --env-url, or both.")
        if self.env_url is not None and not is_url(self.env_url) and self.tasks is None:
            raise BadRequestError(f"--environment {self.env_url} is for the tasks of a file: name it with --tasks.")
        if self.env_url is not None and self.tasks is not None and is_named(self.tasks):
            raise BadRequestError(f"--tasks {self.tasks} has its own environment: remove --env-url.")
        if self.replay_actions:
            raise BadRequestError(
                "--replay-actions is for the built-in loop: an agent is a program, and it would not act again as it "
                "did. Remove the option, or --agent."
            )
        if self.limits.straggler_timeout is not None:
            raise BadRequestError("--straggler-timeout is not implemented for --agent: use --trajectory-timeout.")
        if self.attaches and not (self.server.api_key or self.server.admin_api_key):
            raise BadRequestError(
                "--agent needs an owner's key of a running server: name its file with --server.api-key-file."
            )

    @property
    def attaches(self) -> bool:
        """True if the run uses servers that run already, and launches none."""
        return bool(self.server_urls) or self.router is not None

    @property
    def judged_mixture(self) -> Mixture | None:
        """The mixture, each environment with the least reward of its successes."""
        return None if self.mixture is None else self.mixture.judged(self.eval_success)

    def update_mode(self) -> UpdateMode:
        """Return the treatment of requests that run during a push. No episode plays then, but an agent may linger."""
        return "wait"

    @property
    def server_settings(self) -> dict[str, Any]:
        """The fields of `server` that differ from their defaults."""
        defaults = vars(ServerArgs(model_path=""))
        return {name: value for name, value in vars(self.server).items() if value not in (defaults[name], "")}


@dataclass(frozen=True)
class AsyncTrainArgs(TrainArgs):
    """Train a policy with GRPO while its episodes play: neither the trainer nor the environments wait for each other.

    The exit statuses and what is saved are those of verl_server.train.grpo. docs/async-training.md says when it pays.
    """

    command: ClassVar[str] = "train.async_grpo"
    out: OutputPath = Path("runs/async-grpo")
    """Folder for the files of the run: metrics, events and trajectories (docs/reference/run-folder.md), the checkpoint,
    the trained model, and run.json with the settings. Missing folders above it are created. A folder that has another
    run is refused."""
    max_staleness: int = 1
    """Largest age of a group when it is trained: the number of pushes since it started. At most groups x
    (max_staleness + 1) groups are started and not done. 0 is the synchronous run."""
    stale: Literal["wait", "drop"] = "wait"
    """The trainer waits for a group that would become too old, or does not: it drops the groups that are too old, and
    starts others. Dropping loses the slow tasks first."""
    max_concurrency: int | None = None
    """Most episodes at one time, of all ranks together. None: all episodes of the groups that may play, groups x
    group_size x (max_staleness + 1)."""
    push_mode: Literal["in_place", "retract"] = "in_place"
    """Episodes that generate during a push keep their KV cache, or compute it again under the new weights."""

    grpo: GRPOConfig = field(default_factory=lambda: GRPOConfig(loss="tis"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_staleness < 0:
            raise BadRequestError(f"--max-staleness must be at least 0, not {self.max_staleness}.")
        if self.limits.straggler_timeout is not None:
            raise BadRequestError(
                "--straggler-timeout is for verl_server.train.grpo, whose step waits for its slowest episode. Here a "
                "slow episode is trained at a later step: remove the option, or name a --trajectory-timeout."
            )

    def update_mode(self) -> UpdateMode:
        return self.push_mode
