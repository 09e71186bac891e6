"""What the rules of `advisories` read and return: figures of a step, facts of the whole run, and a finding.

A rule sees the last few steps that have its figure, so that one odd step raises nothing. Shares of episodes and groups
are judged by `surely`: three of four episodes of a small run say less than three quarters of a large one. Each rule
takes a `level`: below 1, it finds figures that are within the bound, but close to it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from verl_server.watch.run_records import Severity

WINDOW = 10
"""Steps whose mean reward is compared with the best one."""
Number = TypeVar("Number", int, float)
Steps = Sequence["StepFigures"]


class FailedEpisodes(msgspec.Struct):
    """Figures of one environment of a mixture in a step."""

    failed: int = 0
    replaced: int = 0


class StepFigures(msgspec.Struct, kw_only=True):
    """The fields of a line of metrics.jsonl that rules read. Lines of earlier versions lack some of them."""

    step: int
    reward: float | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    trajectories: int = 0
    trainable: int = 0
    kept: int = 0
    failed: int = 0
    replaced: int = 0
    failures: dict[str, int] = {}
    stop_reasons: dict[str, int] = {}
    groups: int | None = None
    groups_without_spread: int = 0
    refilled_groups: int = 0
    truncated: int | None = None
    losses: dict[str, float | None] = {}
    idle: dict[str, float] = {}
    waits: dict[str, float] = {}
    turns: float = 0.0
    prompt_tokens: int = 0
    reusable_tokens: int = 0
    cache_hit_rate: float | None = None
    age: float | None = None
    not_finite: list[str] = []
    environments: dict[str, FailedEpisodes] = {}
    phases: dict[str, float] = {}
    """Phase -> seconds, of the event `step_ended`."""

    def loss(self, name: str) -> float:
        """Return a mean of `losses`. One that is not finite is null in a file, and infinite here."""
        value = self.losses[name]
        return math.inf if value is None or math.isnan(value) else value


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A figure beyond its bound. Its texts name the options of GRPO; `typed` returns those of the run's algorithm."""

    figure: float
    bound: float
    message: str
    """The figures, as a sentence without its period."""
    cause: str
    """Likely causes, without a period."""
    remedy: str
    """The remedy, as sentences."""
    severity: Severity = "warning"

    def typed(self, option: str) -> Finding:
        """Return the finding with the options as the user of `RunSettings.option` types them."""
        texts = {name: getattr(self, name) for name in ("message", "cause", "remedy")}
        named = {name: text.replace("--grpo.", f"--{option}.") for name, text in texts.items()}
        return msgspec.structs.replace(self, **named)


class Window(msgspec.Struct, frozen=True):
    """The mean rewards of `WINDOW` steps in a row."""

    mean: float
    deviation: float
    """Standard deviation of a step's reward in it."""
    last: int
    """The last of the steps."""

    @staticmethod
    def of(rewards: Sequence[float], last: int) -> Window:
        return Window(statistics.fmean(rewards), statistics.stdev(rewards), last)


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What rules know of the settings of a run."""

    option: str = "grpo"
    """Begin of the options of the algorithm: --grpo.NAME, or --ppo.NAME."""
    learning_rate: float | None = None
    shares_gpu: bool = False
    """True if the run launched its server on the trainer's first GPU. False also if nobody knows."""

    @staticmethod
    def of(settings: Mapping[str, Any]) -> RunSettings:
        """Return those of a run.json, which may be of an earlier version or of another command."""
        rate = settings.get("grpo.learning_rate")
        launches = "server_urls" in settings and not settings["server_urls"] and settings.get("device") != "cpu"
        elsewhere = bool(settings.get("server.base_gpu_id")) or bool(settings.get("server.gpu_uuids"))
        return RunSettings(
            option="ppo" if str(settings.get("command")).endswith("ppo") else "grpo",
            learning_rate=float(rate) if isinstance(rate, int | float) else None,
            shares_gpu=launches and not elsewhere,
        )


class Past:
    """What rules need of the whole run: facts of all steps, and settings."""

    def __init__(self, settings: RunSettings | None = None) -> None:
        self.settings = RunSettings() if settings is None else settings
        self._first_entropies: list[float] = []
        self._first_rewards: list[float] = []
        self._last_rewards = deque[float](maxlen=WINDOW)
        self.best: Window | None = None
        """The `WINDOW` steps in a row with the highest mean reward so far."""
        self.lowest = math.inf
        self.highest = -math.inf
        """Lowest and highest reward so far."""

    def add(self, step: StepFigures) -> None:
        """Take a step."""
        if step.losses.get("entropy") is not None and len(self._first_entropies) < _FIRST:
            self._first_entropies.append(step.loss("entropy"))
        if step.reward is not None and len(self._first_rewards) < _FIRST:
            self._first_rewards.append(step.reward)
        if step.reward is not None:
            self._last_rewards.append(step.reward)
            if len(self._last_rewards) == WINDOW:
                last = Window.of(self._last_rewards, step.step)
                self.best = last if self.best is None or last.mean > self.best.mean else self.best
        for reward in (step.reward, step.reward_min, step.reward_max):
            if reward is not None:
                self.lowest, self.highest = min(self.lowest, reward), max(self.highest, reward)

    @property
    def first_entropy(self) -> float:
        """Median entropy of the first steps."""
        return statistics.median(self._first_entropies)

    @property
    def first_reward(self) -> float:
        """Median reward of the first steps."""
        return statistics.median(self._first_rewards)


_FIRST = 3
"""Number of the first steps that have a figure."""


def surely(count: int, total: int) -> float:
    """Return the share that `count` of `total` surely exceeds: the lower end of Wilson's 95 % interval, 0 of nothing.

    E. B. Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    if not total:
        return 0.0
    share, z = count / total, 1.96
    center = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    return (center - spread) / (1 + z * z / total)


def totals(counts: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    found: dict[str, Number] = {}
    for count in counts:
        for name, number in count.items():
            found[name] = found[name] + number if name in found else number
    return found


def describe_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
