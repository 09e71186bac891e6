"""The page of `benchmarks.async_waits table --report`: how runs of several largest ages compare, drawn.

The drawings show each run, that is each seed. A color is a setting: its largest age, and its loss if several were run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.async_tables import (
    Line,
    by_setting,
    largest_age,
    loss_name,
    median_seconds,
    synchronous_seconds,
    totals,
    trainer_name,
)
from verl_server.watch import charts
from verl_server.watch.page import legend, page, section, tiles

_AGE_COLORS = {0: charts.INK, 1: "#2a9db0", 2: charts.BLUE, 4: "#b8429b", 8: "#8a7a2a"}
"""Largest age -> color of its first setting. The parts of the trainer's time have other colors."""
_OTHER_COLORS = ("#6a4fc0", "#7d8597", "#5b7f3a", "#9a5a3a", "#3f6f8f", "#a8577a")
_WORK, _REST = "training and weight sync", "other work"
_COLORS = {
    _WORK: charts.GREEN,
    "episodes": charts.AMBER,
    "deadline": charts.RED,
    "servers": "#b9c0cc",
    _REST: charts.GRID,
}
"""Part of the trainer's time -> its color. The others are causes of a wait."""
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
"""Lines of the seeds 0, 1, 2, and of all further ones."""


@dataclass(frozen=True)
class Setting:
    """The runs of one setting, which differ in their seeds."""

    name: str
    color: str
    lines: list[Line]

    @property
    def age(self) -> int:
        return largest_age(self.lines[0])


def report(lines: Sequence[Line], target: float, in_a_row: int) -> str:
    """Return the page as HTML.

    `target` is the held-out success whose time was measured, as the mean of `in_a_row` evaluations.
    """
    settings = _settings(lines)
    parts = [_head(settings, target), _curves(settings, target, in_a_row)]
    if any(setting.age for setting in settings):
        parts.append(_ages([setting for setting in settings if setting.age]))
    return page("Synchronous and asynchronous training", "".join([*parts, _time(settings)]))


def _settings(lines: Sequence[Line]) -> list[Setting]:
    """Return the settings, sorted by their largest age. Each has a color of its own, as long as there are colors."""

    def order(runs: list[Line]) -> tuple[float, int, str]:
        return runs[0]["settings"]["latency"], largest_age(runs[0]), loss_name(runs[0])

    others, taken, found = list(_OTHER_COLORS), set[str](), []
    for runs in sorted(by_setting(lines), key=order):
        color = _AGE_COLORS.get(largest_age(runs[0]), charts.MUTED)
        if color in taken or color == charts.MUTED:
            color = others.pop(0) if others else charts.MUTED
        taken.add(color)
        found.append(Setting(_name(runs[0], lines), color, runs))
    return found


def _name(line: Line, lines: Sequence[Line]) -> str:
    """Return the name of a line's setting. It names the options that differ among `lines`."""
    names = [trainer_name(line), loss_name(line)]
    for option, text in (("latency", "waits {:g} s"), ("steps", "{} steps")):
        if len({each["settings"][option] for each in lines}) > 1:
            names.append(text.format(line["settings"][option]))
    return ", ".join(names)


# -- the head ----------------------------------------------------------------------------------------------------------


def _head(settings: Sequence[Setting], target: float) -> str:
    lines = [line for setting in settings for line in setting.lines]
    of_all = lines[0]["settings"]
    waits = " and ".join(f"{wait:g} s" for wait in sorted({line["settings"]["latency"] for line in lines}))
    episodes = f"{of_all['grpo']['groups']} groups of {of_all['grpo']['group_size']} a step"
    lead = (
        f"The demo's game, whose environment waits {waits} in the median before each answer. "
        f"{of_all['max_concurrency']} episodes play at one time, {episodes}. K is the largest age of what is trained, "
        f"in weight pushes. {len(lines)} runs, on {of_all['cpus']} CPU cores."
    )
    base = synchronous_seconds([setting.lines for setting in settings])
    figures = [_tile(setting, base.get(setting.lines[0]["settings"]["latency"]), target) for setting in settings]
    return (
        "<p class='kicker'>benchmarks.async_waits</p><h1>Training that waits, and training that does not</h1>"
        f"<p class='lead'>{lead}</p>{tiles(figures)}"
    )


def _tile(setting: Setting, synchronous: float | None, target: float) -> tuple[str, str, str]:
    """Return (value, name, note) of a setting's tile: the median of the seconds to the target."""
    median = median_seconds(setting.lines)
    seconds = [line["seconds_to_target"] for line in setting.lines]
    seeds = " / ".join("-" if each is None else f"{each:,.0f}" for each in seconds)
    note = f"to {target:g} held out, by seed: {seeds}"
    if median is None:
        return "-", setting.name, f"{note} (no median)"
    if setting.age and synchronous is not None:
        note = f"{synchronous / median:.1f} times as fast, {note}"
    return f"{median:,.0f} s", setting.name, note


# -- held-out success --------------------------------------------------------------------------------------------------


def _curves(settings: Sequence[Setting], target: float, in_a_row: int) -> str:
    """Return the section about held-out success as HTML."""
    names = legend([(setting.name, setting.color) for setting in settings])
    wide = _success(settings, target, in_a_row, 0, "seconds of training", (1060.0, 400.0))
    steps = _success(settings, target, in_a_row, 1, "training steps", (520.0, 270.0))
    speed = _dots(
        settings,
        lambda line: line["episodes_per_s"],
        "episodes that were trained in a second",
        row=min(56.0, 226.0 / len(settings)),
    )
    seeds = sorted({line["settings"]["grpo"]["seed"] for setting in settings for line in setting.lines})
    kinds = ("solid", "dashed", "dotted", "dash and dot")
    dashes = ", ".join(f"seed {seed} {kinds[min(i, len(kinds) - 1)]}" for i, seed in enumerate(seeds))
    note = (
        f"Above: held-out success against the clock, one line a seed ({dashes}). A line is the mean of {in_a_row} "
        f"evaluations in a row, the faint line behind it each evaluation. A ring marks the time at which the mean "
        f"reaches {target:g}; runs without a ring did not. Below: the same runs by their steps, and their pace. Older "
        "samples teach less, so an asynchronous run needs more steps, and has them sooner."
    )
    pair = f"<div class='two apart'><div>{steps}</div><div>{speed}</div></div>"
    return section("Held-out success", names + wide + pair, note)


def _success(
    settings: Sequence[Setting], target: float, in_a_row: int, axis: int, label: str, size: tuple[float, float]
) -> str:
    """Draw held-out success over the seconds (`axis` 0) or the steps (1) of the curves."""
    width, height = size
    left, right, top, bottom = 44.0, 14.0, 12.0, 40.0
    runs = [(setting, line) for setting in settings for line in setting.lines]
    seeds = sorted({line["settings"]["grpo"]["seed"] for _, line in runs})
    marks = charts.ticks(max((point[axis] for _, line in runs for point in line["curve"]), default=1), 8)

    def at(x: float, success: float) -> tuple[float, float]:
        return left + (width - left - right) * x / marks[-1], height - bottom - (height - top - bottom) * success

    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = at(0, value)[1]
        parts += [charts.line(left, y, width - right, y), charts.text(left - 8, y + 4, f"{value:.2f}", anchor="end")]
    for mark in marks:
        parts.append(charts.text(at(mark, 0)[0], height - bottom + 17, f"{mark:g}", anchor="middle"))
    parts.append(charts.text((left + width - right) / 2, height - 4, label, anchor="middle"))
    y = at(0, target)[1]
    parts.append(charts.line(left, y, width - right, y, stroke=charts.MUTED, width=1.2, dash="5 4"))
    parts.append(charts.text(left + 6, y - 6, f"{target:g}"))
    front = []
    for setting, line in runs:
        curve, name = line["curve"], _run_name(setting, line)
        dash = _DASHES[min(seeds.index(line["settings"]["grpo"]["seed"]), len(_DASHES) - 1)]
        means = _means([success for _, _, success in curve], in_a_row)
        raw = [at(point[axis], point[2]) for point in curve]
        parts.append(charts.polyline(raw, setting.color, 1, opacity=0.2))
        points = [at(point[axis], mean) for point, mean in zip(curve, means, strict=True)]
        parts.append(charts.polyline(points, setting.color, 2, dash=dash))
        if points:
            front.append(charts.dot(*points[-1], setting.color, 3, f"{name}: {means[-1]:.2f} at the end"))
        reached = [point for point in curve if point[0] == line["seconds_to_target"]]
        if reached:
            hint = f"{name}: {target:g} after {reached[0][0]:.0f} s and {reached[0][1]} steps"
            x, mean = reached[0][axis], means[curve.index(reached[0])]
            front += [charts.dot(*at(x, mean), setting.color, 6.5), charts.dot(*at(x, mean), "#fff", 4, hint)]
    return charts.svg(width, height, "".join(parts + front), f"held-out success over {label}")


def _means(values: Sequence[float], in_a_row: int) -> list[float]:
    """Return, for each value, the mean of it and those before it, `in_a_row` in all."""
    return [statistics.mean(values[max(0, last + 1 - in_a_row) : last + 1]) for last in range(len(values))]


def _run_name(setting: Setting, line: Line) -> str:
    return f"{setting.name}, seed {line['settings']['grpo']['seed']}"


# -- ages --------------------------------------------------------------------------------------------------------------


def _ages(settings: Sequence[Setting]) -> str:
    """Return the section about the ages of asynchronous settings as HTML."""
    ages = _bars(settings, "ages", "age of the trained episodes, in weight pushes")
    spans = _bars(settings, "spans", "weight versions that sampled an episode")
    names = legend([(f"{setting.name}: mean age {_mean_age(setting):.1f}", setting.color) for setting in settings])
    groups = totals([line for setting in settings for line in setting.lines], "groups")
    note = (
        "Shares of the episodes that were trained, all seeds together. The age is the version that was trained, minus "
        "the version that sampled an episode's oldest token; it is never more than K. An episode goes on while weights "
        f"are pushed, so that some are of several versions. Of {groups['started']:,} groups that began, "
        f"{groups.get('trained', 0):,} were trained, {groups.get('undone', 0):,} still played or waited at the end, "
        f"and {groups.get('lost', 0)} were lost."
    )
    return section(
        "How old the episodes were", f"{names}<div class='two'><div>{ages}</div><div>{spans}</div></div>", note
    )


def _mean_age(setting: Setting) -> float:
    ages = totals(setting.lines, "ages")
    return float(sum(int(age) * count for age, count in ages.items()) / max(1, sum(ages.values())))


def _bars(settings: Sequence[Setting], name: str, label: str) -> str:
    """Draw the histograms `name` of all settings: for each number, one bar for each setting."""
    width, height, left, top, bottom = 520.0, 240.0, 44.0, 18.0, 38.0
    counts = [totals(setting.lines, name) for setting in settings]
    numbers = sorted({int(number) for count in counts for number in count})
    shares = [{n: count.get(str(n), 0) / max(1, sum(count.values())) for n in numbers} for count in counts]
    marks = charts.ticks(max((share for each in shares for share in each.values()), default=1.0))
    up, group = height - top - bottom, (width - left - 8) / max(1, len(numbers))
    wide = min(34.0, group * 0.78 / len(settings))
    parts = []
    for mark in marks:
        y = height - bottom - up * mark / marks[-1]
        parts += [charts.line(left, y, width - 8, y), charts.text(left - 8, y + 4, f"{mark:.0%}", anchor="end")]
    for place, number in enumerate(numbers):
        center = left + group * (place + 0.5)
        x = center - wide * len(settings) / 2
        for setting, share in zip(settings, shares, strict=True):
            high = up * share[number] / marks[-1]
            if share[number] > 0:
                hint = f"{setting.name}: {share[number]:.1%} have {number}"
                parts.append(charts.rect(x + 1, height - bottom - high, wide - 2, high, setting.color, hint, 1))
            if share[number] >= 0.005 and wide >= 26:
                text = f"{share[number]:.0%}"
                parts.append(charts.text(x + wide / 2, height - bottom - high - 5, text, anchor="middle"))
            x += wide
        parts.append(charts.text(center, height - bottom + 16, f"{number}", anchor="middle"))
    parts.append(charts.text(left + (width - left - 8) / 2, height - 4, label, anchor="middle"))
    return charts.svg(width, height, "".join(parts), label)


# -- waits and idle shares ---------------------------------------------------------------------------------------------


def _time(settings: Sequence[Setting]) -> str:
    """Return the section about the trainer's time and about idle shares as HTML."""
    parts = [_parts(setting.lines) for setting in settings]
    causes = dict.fromkeys([*_COLORS, *(cause for each in parts for cause in each)])
    present = [cause for cause in causes if any(each.get(cause, 0.0) >= 0.0005 for each in parts)]
    names = {cause: cause if cause in (_WORK, _REST) else f"waiting: {cause}" for cause in present}
    shown = legend([(names[cause], _COLORS.get(cause, charts.MUTED)) for cause in present])
    bars = _time_bars(settings, parts, present)
    trainer = _dots(settings, lambda line: line["idle"]["trainer"], "trainer idle", is_share=True)
    server = _dots(settings, lambda line: line["idle"]["server"], "server idle", is_share=True)
    note = (
        "Above: the trainer's wall time, all seeds together. It waits for episodes if too few groups have finished, "
        "and for a deadline if a group would become older than K; the synchronous trainer waits for the slowest "
        "episode of each step. Below: the share of the time in which the trainer did not train or push, and in which "
        "the server generated for nobody: a dot for each seed, a line at the mean."
    )
    pair = f"<div class='two apart'><div>{trainer}</div><div>{server}</div></div>"
    return section("Where the time went", shown + bars + pair, note)


def _parts(lines: Sequence[Line]) -> dict[str, float]:
    """Return the share of each part of the trainer's time."""
    seconds = sum(line["seconds"] for line in lines) or 1.0
    work = sum((1 - line["idle"]["trainer"]) * line["seconds"] for line in lines) / seconds
    waits = {cause: waited / seconds for cause, waited in totals(lines, "waits").items()}
    return {_WORK: work, **waits, _REST: max(0.0, 1 - work - sum(waits.values()))}


def _time_bars(settings: Sequence[Setting], parts: Sequence[Mapping[str, float]], present: Sequence[str]) -> str:
    """Draw a bar for each setting, divided into the shares of the causes that are `present`."""
    width, left, row = 1060.0, 210.0, 34.0
    body = []
    for place, (setting, shares) in enumerate(zip(settings, parts, strict=True)):
        y, x = place * row, left
        body += [charts.rect(0, y + 6, 12, 12, setting.color, radius=3), charts.text(19, y + 17, setting.name)]
        whole = max(1.0, sum(shares.values()))
        for cause in present:
            share = shares.get(cause, 0.0) / whole
            across = (width - left) * share
            if share > 0:
                body.append(
                    charts.rect(x, y, across - 1.5, 24, _COLORS.get(cause, charts.MUTED), f"{cause}: {share:.1%}", 2)
                )
            if across > 44:
                fill = charts.INK if cause in ("episodes", "servers", _REST) else "#fff"
                body.append(charts.text(x + across / 2, y + 16.5, f"{share:.0%}", fill=fill, anchor="middle"))
            x += across
    return charts.svg(width, len(settings) * row, "".join(body), "where the trainer's time went")


def _dots(
    settings: Sequence[Setting], of: Callable[[Line], float], title: str, *, is_share: bool = False, row: float = 34.0
) -> str:
    """Draw a row for each setting: a dot for the value of each seed, a line at their mean. Shares end at 100 %."""
    width, right, head = 520.0, 46.0, 26.0
    left = 7.0 * max(len(setting.name) for setting in settings) + 10
    marks = charts.ticks(1.0 if is_share else max(of(line) for setting in settings for line in setting.lines))
    bottom = head + row * len(settings)

    def at(value: float) -> float:
        return left + (width - left - right) * value / marks[-1]

    parts = [charts.text(0, 11, title, fill=charts.INK, weight=600)]
    for mark in marks:
        name = f"{mark:.0%}" if is_share else f"{mark:g}"
        parts += [
            charts.line(at(mark), head, at(mark), bottom),
            charts.text(at(mark), bottom + 15, name, anchor="middle"),
        ]
    for place, setting in enumerate(settings):
        y, values = head + row * (place + 0.5), [of(line) for line in setting.lines]
        mean, color = statistics.mean(values), setting.color
        shown = [f"{value:.0%}" if is_share else f"{value:.1f}" for value in (*values, mean)]
        parts += [charts.text(0, y + 4, setting.name), charts.line(at(0), y, at(mean), y, stroke=color, width=2)]
        parts.append(charts.line(at(mean), y - 9, at(mean), y + 9, stroke=color, width=2))
        for line, value, text in zip(setting.lines, values, shown, strict=False):
            parts.append(charts.dot(at(value), y, color, 4, f"{_run_name(setting, line)}: {text}"))
        parts.append(charts.text(width, y + 4, shown[-1], fill=color, anchor="end", weight=600))
    return charts.svg(width, bottom + 20, "".join(parts), title)
