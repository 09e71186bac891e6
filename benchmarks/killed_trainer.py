"""`python -m benchmarks.killed_trainer POINT CALL TRAINER [options of the trainer]`: dies inside of a function.

`kill_points` starts it. The functions are patched in this process only, and the process sends SIGKILL to itself at the
CALL-th call, counted from 1. With the point `none`, it trains. `POINTS` describes the others. Under torchrun, the last
rank dies, or rank 0 where only rank 0 does the work.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from verl_server.engine.verl_engine import VerlEngine
from verl_server.files import durable, record_file
from verl_server.train import async_grpo, grpo
from verl_server.train.grpo import PolicyTrainer

POINTS = {
    "save": "the checkpoint's data are written, its metadata and run.json are not",
    "before rename": "all of the checkpoint is written and flushed under its temporary name",
    "after rename": "the checkpoint has its name; older ones are there, and the folder is not flushed",
    "push": "half of the weights are on their way to the server",
    "journal": "half of a group's record is written",
    "compaction": "the journal without the groups that are done is written aside",
    "optimizer": "between two optimizer steps of a step",
}


class Countdown:
    """Kills this process at the `call`-th call."""

    def __init__(self, call: int) -> None:
        self._left = call

    def is_now(self) -> bool:
        """Count a call, and return True if the process is to die in it."""
        self._left -= 1
        return self._left == 0

    def __call__(self) -> None:
        if self.is_now():
            die()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patch(point: str, countdown: Countdown) -> None:
    """Patch the function of a point."""
    replace = os.replace
    match point:
        case "save":
            _call_first(FileSystemWriter, "finish", countdown)
        case "before rename" | "after rename":

            def publishing(source: Any, target: Any) -> None:
                is_now = Path(target).name.startswith("checkpoint-") and countdown.is_now()
                if is_now and point == "before rename":
                    die()
                replace(source, target)
                if is_now:
                    die()

            durable.os.replace = publishing  # type: ignore[attr-defined]
        case "compaction":

            def compacting(source: Any, target: Any) -> None:
                if Path(target).name.startswith("journal-"):
                    countdown()
                replace(source, target)

            durable.os.replace = compacting  # type: ignore[attr-defined]
        case "push":
            update = VerlEngine.update_weights_from_tensor

            def pushing(engine: VerlEngine, named: Any, **options: Any) -> Any:
                return update(engine, _half(list(named)) if countdown.is_now() else named, **options)

            VerlEngine.update_weights_from_tensor = pushing  # type: ignore[method-assign, assignment]
        case "journal":
            write = os.write
            append = record_file.RecordFile.append

            def appending(file: record_file.RecordFile, payload: bytes) -> Any:
                if countdown.is_now():
                    record_file.os.write = lambda fd, data: (write(fd, data[: len(data) // 2]), die())  # type: ignore
                return append(file, payload)

            record_file.RecordFile.append = appending  # type: ignore[method-assign, assignment]
        case "optimizer":
            _call_first(PolicyTrainer, "_optimizer_step", countdown)
        case _:
            raise SystemExit(f"There is no point {point!r}. Choose from {', '.join(POINTS)}.")


def _call_first(owner: Any, name: str, countdown: Callable[[], None]) -> None:
    function = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        countdown()
        return function(*arguments, **options)

    setattr(owner, name, counted)


def _half(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from named[: len(named) // 2]
    die()


def main() -> int:
    point, call, trainer, *options = sys.argv[1:]
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    dies = 0 if point in ("before rename", "after rename", "save") else ranks - 1
    if trainer == "async_grpo" and point in ("journal", "compaction"):
        dies = 0
    if point != "none" and rank == dies:
        patch(point, Countdown(int(call)))
    return {"grpo": grpo.main, "async_grpo": async_grpo.main}[trainer](options)


if __name__ == "__main__":
    sys.exit(main())
