"""The fate of each group of a training run, and its evaluations, read from its files: one in the starts that go on.

`kill_case` and `async_kills` call it. A run that was killed and resumed has events of steps that were lost, which do
not count.
"""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.watch.run_files import read_evaluations, read_events, read_lineage, read_metrics
from verl_server.watch.run_records import GroupDone


def group_fates(out: Path) -> dict[str, Any]:
    """Return the figures of an asynchronous run: `groups`, `fates` -> their number, and groups `twice` and `lost`."""
    lineage = read_lineage(out)
    done = [e for e in read_events(out) if isinstance(e, GroupDone) and lineage.has(e.step, e.incarnation)]
    fates = collections.Counter(event.group for event in done)
    checkpoint = latest_checkpoint(out)
    progress = None if checkpoint is None else check_checkpoint(checkpoint)
    undone = set() if progress is None else set(progress.undone_groups or [])
    expected = set() if progress is None else set(range(progress.next_group or 0))
    return {
        "groups": len(expected),
        "fates": dict(collections.Counter(event.fate for event in done)) | {"undone": len(undone)},
        "twice": sorted(group for group, count in fates.items() if count > 1 or group in undone),
        "lost": sorted(expected - set(fates) - undone),
    }


def step_fates(out: Path, groups: int) -> dict[str, Any]:
    """Return the same figures of a synchronous run, each of whose steps uses `groups` groups, and replaces others."""
    steps = list(read_metrics(out))
    found = collections.Counter(step["step"] for step in steps)
    checkpoint = latest_checkpoint(out)
    progress = None if checkpoint is None else check_checkpoint(checkpoint)
    expected = 0 if progress is None else progress.next_step
    skipped = sum(step["skipped"] is not None for step in steps)
    fates = {"trained": (len(steps) - skipped) * groups, "skipped": skipped * groups}
    return {
        "groups": 0 if progress is None else progress.first_group(groups),
        "fates": fates | {"no_spread": sum(step.get("refilled_groups", 0) for step in steps)},
        "twice": sorted(step for step, count in found.items() if count > 1),
        "lost": sorted(set(range(expected)) - set(found)),
    }


def evaluation_counts(out: Path) -> dict[int, int]:
    """Return step -> number of the complete evaluations of its weights, which the run still has."""
    return dict(collections.Counter(e.step for e in read_evaluations(out) if e.incomplete is None))
