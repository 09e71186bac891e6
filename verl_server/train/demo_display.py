"""The display of the demo while it runs: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from verl_server.rollout.listing import Listing, Row
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.metrics import StepMetrics

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60


class DemoDisplay:
    """A context manager that shows the progress of a demo. The demo calls its methods at each event."""

    def __init__(self, console: Console, best_without_feedback: float) -> None:
        self._console = console
        self._best = best_without_feedback
        self._history: list[StepMetrics] = []
        self._phase = ""
        self._game = Text("")
        self._evaluations: list[str] = []
        self._started = time.monotonic()
        self._live = (
            Live(console=console, refresh_per_second=8, get_renderable=self._panel) if console.is_terminal else None
        )

    def __enter__(self) -> DemoDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, name: str) -> None:
        self._phase = name
        if self._live is None:
            self._log(name)

    def evaluated(self, name: str, success: float) -> None:
        self._evaluations.append(f"{name} {success:.3f}")
        if self._live is None:
            self._log(f"success {name}: {success:.3f}")

    def step(self, metrics: StepMetrics, trajectories: Sequence[Trajectory]) -> None:
        self._phase = "training"
        self._history.append(metrics)
        self._game = dialogue(trajectories[0])
        if self._live is None and metrics.step % 5 == 0:
            if metrics.age is None:
                rollout = f"rollout {metrics.rollout_seconds:.2f} s (env {self._env_share(metrics):.0%})"
            else:
                rollout = "  ".join(f"{name} {value}" for name, value in _age_figures(metrics))
            self._log(
                f"step {metrics.step:3d}  success {metrics.success:.2f}  reward {metrics.reward or 0:.2f}  "
                f"{metrics.tokens_per_s:4.0f} tok/s  {rollout}  train {metrics.train_seconds:.2f} s  "
                f"sync {metrics.sync_seconds * 1e3:.0f} ms  logprob gap {metrics.logprob_gap or 0:.1e}"
            )

    def result(self, summary: dict[str, Any], out: Path) -> None:
        """Print the main figures of the finished demo."""
        if self._live is not None:
            self._live.stop()
        table = Table(box=None, show_header=False, padding=(0, 2))
        rows = (
            (
                "success on held-out seeds",
                f"{summary['eval_success_before']:.3f} → {summary['eval_success_after']:.3f}",
            ),
            (
                "best policy that ignores feedback",
                f"{summary['best_without_feedback']:.3f} ({summary['best_without_feedback_hindsight']:.3f} with "
                "hindsight on these seeds)",
            ),
            (
                "lock step / own pace",
                f"{summary['lockstep_seconds']:.2f} s / {summary['own_pace_seconds']:.2f} s = "
                f"{summary['lockstep_ratio']:.2f}x (ideal schedule {summary['ideal_seconds']:.2f} s, "
                f"{summary['ideal_ratio']:.2f}x)",
            ),
            (
                "weight pushes",
                f"{summary['weight_pushes']}, median {summary['push_ms_median']:.1f} ms; "
                f"largest logprob gap {summary['max_logprob_gap']:.1e}",
            ),
            ("training", f"{summary['steps']} steps in {summary['train_seconds']:.0f} s"),
            *_async_rows(summary["asynchronous"]),
            ("whole demo", f"{summary['seconds']:.0f} s"),
            ("report", str(out / "report.html")),
        )
        for name, value in rows:
            table.add_row(name, value)
        self._console.print(table)

    # -- the live panel -------------------------------------------------------------------------------------

    def _panel(self) -> Panel:
        lines: list[Any] = [Text.assemble((f"{time.monotonic() - self._started:5.0f} s  ", "dim"), self._phase)]
        if self._evaluations:
            lines.append(Text("success on held-out seeds: " + "  ".join(self._evaluations), style="bold"))
        if self._history:
            last = self._history[-1]
            ages = [] if last.age is None else [_listing(_age_figures(last))]
            lines += [self._curve(), self._figures(last), *ages, self._game]
        return Panel(Group(*lines), title="verl-server demo", border_style="blue", width=min(100, self._console.width))

    def _curve(self) -> Text:
        values = [m.success or 0.0 for m in self._history][-_WIDTH:]
        curve = Text("success ")
        for value in values:
            bar = _BARS[min(len(_BARS) - 1, int(value * len(_BARS)))]
            curve.append(bar, "green" if value > self._best else "yellow")
        return curve.append(f" {values[-1]:.2f}", "bold").append(
            f"  (without feedback at best {self._best:.2f})", "dim"
        )

    def _figures(self, m: StepMetrics) -> Listing:
        env = self._env_share(m)
        cells = (
            ("step", f"{m.step}"),
            ("weights", m.weight_version),
            ("reward", f"{m.reward or 0:.2f}"),
            ("tokens/s", f"{m.tokens_per_s:.0f}"),
            ("rollout" if m.age is None else "waited", f"{m.rollout_seconds:.2f} s"),
            ("of it env / gen" if m.age is None else "episodes env / gen", f"{env:.0%} / {1 - env:.0%}"),
            ("train", f"{m.train_seconds:.2f} s"),
            ("sync", f"{m.sync_seconds * 1e3:.0f} ms"),
            ("logprob gap", f"{m.logprob_gap or 0:.1e}"),
        )
        return _listing(cells)

    @staticmethod
    def _env_share(m: StepMetrics) -> float:
        return m.env_seconds / max(1e-9, m.env_seconds + m.generate_seconds)

    def _log(self, text: str) -> None:
        """Print a message on one line, which a narrow console does not wrap."""
        line = f"[{time.monotonic() - self._started:6.1f} s] {text}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _listing(cells: Sequence[tuple[str, str]]) -> Listing:
    """Return a table of one row. Each cell is (name, value)."""
    return Listing([name for name, _ in cells], [Row(tuple(value for _, value in cells))], left=0)


def _age_figures(m: StepMetrics) -> list[tuple[str, str]]:
    """Return (name, value) of the figures that only an asynchronous step has."""
    episodes = max(1, sum(m.version_spans.values()))
    several = sum(count for versions, count in m.version_spans.items() if int(versions) > 1) / episodes
    waits = ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in m.waits.items() if seconds >= 0.05)
    idle = " / ".join(f"{m.idle[name]:.0%}" if name in m.idle else "-" for name in ("trainer", "servers"))
    return [
        ("age / oldest", f"{m.age or 0:.1f} / {m.age_max}"),
        ("2+ versions", f"{several:.0%}"),
        ("waited for", waits or "nothing"),
        ("idle trainer / server", idle),
    ]


def _async_rows(ages: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return rows of the result about an asynchronous run (`asynchronous` of summary.json)."""
    if ages is None:
        return []
    episodes = max(1, sum(ages["ages"].values()))
    counts = ", ".join(f"{count / episodes:.0%} of age {age}" for age, count in ages["ages"].items())
    several = sum(count for versions, count in ages["version_spans"].items() if int(versions) > 1) / episodes
    waits = ", ".join(f"{cause} {seconds:.0f} s" for cause, seconds in ages["waits"].items())
    idle = ", ".join(f"{name} {share:.0%}" for name, share in ages["idle"].items())
    return [
        ("ages of the episodes", f"{counts}; {several:.0%} were sampled by several versions"),
        ("the trainer waited for", f"{waits or 'nothing'}; idle: {idle}"),
    ]


def dialogue(trajectory: Trajectory) -> Text:
    """Return the guesses and answers of an episode on one line."""
    text = Text("a game  ", style="dim")
    answers = [turn.observation.get("text", "") for turn in trajectory.turns[1:]]
    answers.append((trajectory.final_observation or {}).get("text", ""))
    for turn, answer in zip(trajectory.turns, answers, strict=False):  # an episode that could not begin has no turn
        guess = (turn.action or {}).get("text", "")
        text.append(f"{guess} ", "bold").append(f"{answer}   ", "green" if answer == "correct" else "")
    return text
