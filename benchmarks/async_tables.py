"""Markdown tables of the lines of `benchmarks.async_waits`, and what its report shares with them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Line = dict[str, Any]
_LOSS_OPTIONS = ("clip_low", "clip_high", "tis_bound", "token_mask", "sequence_mask", "epochs", "minibatches")
_DEFAULTS: Line = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "tis_bound": 2.0,
    "token_mask": None,
    "sequence_mask": None,
    "epochs": 2,
    "minibatches": 4,
}


def tables(lines: Sequence[Line]) -> str:
    """Return the tables: the time to the target, what became of the episodes, and ages x losses."""
    runs = by_setting(lines)
    return "\n\n".join([_times(runs), _episodes(runs), _losses(runs)])


def by_setting(lines: Sequence[Line]) -> list[list[Line]]:
    """Return the lines of each setting, sorted by seed."""
    found: dict[tuple[Any, ...], list[Line]] = {}
    for line in sorted(lines, key=_order):
        found.setdefault(_order(line)[:-1], []).append(line)
    return list(found.values())


def _order(line: Line) -> tuple[Any, ...]:
    """Return the setting of a line, by which rows are sorted, and its seed."""
    settings = line["settings"]
    return (
        settings["latency"],
        ("grpo", "async_grpo", "delayed").index(settings["trainer"]),
        loss_name(line),
        largest_age(line),
        settings["grpo"]["groups"],
        settings["steps"],
        settings["grpo"]["seed"],
    )


def largest_age(line: Line) -> int:
    """Return the largest age that the setting of a line allows, 0 for the synchronous trainer."""
    settings = line["settings"]
    return 0 if settings["trainer"] == "grpo" else int(settings["max_staleness"])


def loss_name(line: Line) -> str:
    """Return the name of the loss, with the options that differ from the defaults."""
    options = line["settings"]["grpo"]
    others = [f"{name} {options[name]}" for name in _LOSS_OPTIONS if options[name] != _DEFAULTS[name]]
    return " ".join([options["loss"], *others])


def trainer_name(line: Line) -> str:
    """Return the name of the trainer and its largest age, and the number of groups if it is not the usual one."""
    settings = line["settings"]
    age = settings["max_staleness"]
    trainer = {"grpo": "synchronous", "async_grpo": f"K = {age}", "delayed": f"age {age}"}[settings["trainer"]]
    groups = settings["grpo"]["groups"]
    return f"{trainer}{'' if groups == 32 else f', {groups} groups'}"


def _name(line: Line) -> str:
    return f"{trainer_name(line)}, {line['settings']['latency']:g} s"


def synchronous_seconds(runs: Sequence[list[Line]]) -> dict[float, float]:
    """Return the median of the seconds to the target of the synchronous trainer, for each median wait."""
    base: dict[float, float] = {}
    for lines in runs:
        if lines[0]["settings"]["trainer"] == "grpo" and (found := median_seconds(lines)) is not None:
            base.setdefault(lines[0]["settings"]["latency"], found)
    return base


def _times(runs: Sequence[list[Line]]) -> str:
    """Return the table of the seconds to the target. Ratios are those of medians, over the same waits and loss."""
    base = synchronous_seconds(runs)
    rows = []
    for lines in runs:
        times = ", ".join("-" if (t := line["seconds_to_target"]) is None else f"{t:.0f}" for line in lines)
        median, first = median_seconds(lines), base.get(lines[0]["settings"]["latency"])
        rows.append(
            (
                _name(lines[0]),
                loss_name(lines[0]),
                times,
                "-" if median is None else f"{median:.0f}",
                "-" if median is None or first is None else f"{first / median:.2f} x",
                f"{_mean(lines, 'steps'):.0f}",
                f"{_mean(lines, 'episodes_per_s'):.1f}",
                *(f"{statistics.mean(line['idle'][who] for line in lines):.0%}" for who in ("trainer", "server")),
            )
        )
    head = ("run", "loss", "s to 0.9 (seeds)", "median", "faster", "steps", "episodes/s", "trainer idle", "server idle")
    return _table(head, rows)


def _episodes(runs: Sequence[list[Line]]) -> str:
    rows = []
    for lines in runs:
        waits = totals(lines, "waits")
        seconds = sum(line["seconds"] for line in lines)
        groups, slowest = totals(lines, "groups"), totals(lines, "slowest")
        fates = (f"{groups.get(name, 0)}" for name in ("started", "trained", "undone", "lost"))
        in_loss = slowest["in_loss"] / max(1, slowest["trained"])
        rows.append(
            (
                _name(lines[0]),
                loss_name(lines[0]),
                _histogram(totals(lines, "ages")),
                *(f"{_mean(lines, name):.0%}" for name in ("span_2", "span_3")),
                ", ".join(f"{cause} {waited / seconds:.0%}" for cause, waited in waits.items()),
                " / ".join(fates) if "trained" in groups else "-",
                f"{slowest['trained']} + {slowest['undone']} of {slowest['episodes']}",
                f"{in_loss:.0%} ({slowest['all_in_loss'] / max(1, slowest['all_trained']):.0%})",
            )
        )
    head = (
        "run",
        "loss",
        "ages",
        "2 versions or more",
        "3 or more",
        "trainer waits for",
        "groups: started / trained / undone / lost",
        "slowest 1 %: trained + undone",
        "of them in the loss (of all)",
    )
    return _table(head, rows)


def _losses(runs: Sequence[list[Line]]) -> str:
    rows = []
    for lines in runs:
        successes = ", ".join(f"{line['final_success']:.2f}" for line in lines)
        means = {
            name: statistics.mean(line["losses"].get(name, float("nan")) for line in lines)
            for name in (
                "effective_sample_size",
                "behaviour_kl",
                "clip_fraction",
                "truncated_fraction",
                "masked_fraction",
                "entropy",
            )
        }
        rows.append(
            (
                loss_name(lines[0]),
                _name(lines[0]),
                f"{_mean_age(lines):.1f}",
                f"{_mean(lines, 'steps'):.0f}",
                f"{_mean(lines, 'final_success'):.3f}",
                successes,
                *("-" if value != value else f"{value:.3g}" for value in means.values()),
            )
        )
    head = (
        "loss",
        "run",
        "mean age",
        "steps",
        "held-out success at the end",
        "seeds",
        "effective sample size",
        "KL to behaviour",
        "clipped",
        "truncated",
        "masked",
        "entropy",
    )
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def median_seconds(lines: Sequence[Line]) -> float | None:
    """Return the median of the seconds to the target. A run that did not reach it counts as endless."""
    median: float = statistics.median(
        float("inf") if line["seconds_to_target"] is None else line["seconds_to_target"] for line in lines
    )
    return None if median == float("inf") else median


def _mean(lines: Sequence[Line], name: str) -> float:
    return float(statistics.mean(line[name] for line in lines))


def totals(lines: Sequence[Line], name: str) -> dict[str, Any]:
    """Return the sums, over the lines, of the numbers in the dict `name`."""
    sums: dict[str, Any] = {}
    for line in lines:
        for key, value in line[name].items():
            sums[key] = sums.get(key, 0) + value
    return sums


def _histogram(ages: dict[str, int]) -> str:
    total = max(1, sum(ages.values()))
    return ", ".join(f"{age}: {ages[age] / total:.0%}" for age in sorted(ages, key=int))


def _mean_age(lines: Sequence[Line]) -> float:
    ages = totals(lines, "ages")
    return float(sum(int(age) * count for age, count in ages.items()) / max(1, sum(ages.values())))
