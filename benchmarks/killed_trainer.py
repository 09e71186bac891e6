"""`python -m benchmarks.killed_trainer POINT MARK TRAINER [options of the trainer]`: dies inside of a function.

`kill_case` starts it. The functions are patched in this process only, and the process sends SIGKILL to itself in the
call that `POINTS` names. Before that it creates the file MARK, so that a point which is never reached is seen. With the
point `none`, it trains. Under torchrun, the last rank dies, or rank 0 where only rank 0 does the work.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from verl_server.engine.verl_engine import VerlEngine
from verl_server.files import durable, record_file
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.train import async_grpo, grpo
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.rollouts.group_messages import GroupEnded
from verl_server.train.rollouts.held_out_play import HeldOutPlay
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import Evaluation, EvaluationEnded, RunEvent

SYNC, ASYNC = "grpo", "async_grpo"


@dataclass(frozen=True)
class Point:
    about: str
    """What is done, and what is not, when the trainer dies."""
    call: int
    """The call in which it dies, counted from 1: in its third or fourth step, or its second evaluation."""
    first_rank: tuple[str, ...] = (SYNC, ASYNC)
    """Trainers whose rank 0 does the work. Of the others, the last rank dies."""
    trainers: tuple[str, ...] = (SYNC, ASYNC)
    """Trainers that have the point."""
    async_call: int | None = None
    """`call` of the asynchronous trainer, if it is another one."""

    evaluates: bool = False
    """True if it is inside of an evaluation."""

    def call_of(self, trainer: str) -> int:
        return self.async_call if trainer == ASYNC and self.async_call is not None else self.call


POINTS = {
    "save": Point("the checkpoint's data are written, its metadata and run.json are not", 3),
    "before rename": Point("all of the checkpoint is written and flushed under its temporary name", 3),
    "after rename": Point("the checkpoint has its name; older ones are there, and the folder is not flushed", 3),
    "push": Point("half of the weights are on their way to the server", 4, first_rank=()),
    # The asynchronous trainer has played the groups of three steps before its first one ends.
    "journal": Point("half of a group's record is written", 19, first_rank=(ASYNC,), async_call=30),
    "compaction": Point("the journal without the groups that are done is written aside", 2, first_rank=(ASYNC,)),
    "optimizer": Point("between two optimizer steps of a step", 14, first_rank=()),
    "evaluation": Point("half of the held-out episodes have ended", 2, first_rank=(ASYNC,), evaluates=True),
    "held push": Point(
        "the evaluation lacks an episode, and a push waits for it", 2, first_rank=(), trainers=(ASYNC,), evaluates=True
    ),
    "evaluation line": Point("half of the line of evaluations.jsonl is written", 2, evaluates=True),
    "evaluation event": Point("the evaluation has its line, and its event is not written", 2, evaluates=True),
}


class Countdown:
    """Counts calls of a function."""

    def __init__(self, call: int) -> None:
        self._left = call

    def is_now(self) -> bool:
        """Count a call, and return True if it is the one in which the process dies."""
        self._left -= 1
        return self._left == 0


def patch(point: str, countdown: Countdown, die: Callable[[], None]) -> None:
    """Patch the function of a point. `die` kills the process."""

    def counted(*_: Any) -> None:
        if countdown.is_now():
            die()

    match point:
        case "save":
            _before(FileSystemWriter, "finish", counted)
        case "before rename" | "after rename":
            _patch_rename("checkpoint-", countdown, die, after=point == "after rename")
        case "compaction":
            _patch_rename("journal-", countdown, die, after=False)
        case "push":
            _patch_push(countdown, die)
        case "journal":
            _patch_journal(countdown, die)
        case "optimizer":
            _before(PolicyTrainer, "_optimizer_step", counted)
        case "evaluation":
            _patch_episodes(countdown, die)
        case "held push":
            _patch_held_push(countdown, die)
        case "evaluation line":

            def recording(writer: RunWriter, _: Evaluation) -> None:
                if countdown.is_now():
                    _cut(writer, die)

            _before(RunWriter, "record_evaluation", recording)
        case "evaluation event":

            def noting(_: RunWriter, event: RunEvent) -> None:
                if isinstance(event, EvaluationEnded) and countdown.is_now():
                    die()

            _before(RunWriter, "note", noting)
        case _:
            raise SystemExit(f"There is no point {point!r}. Choose from {', '.join(POINTS)}.")


def _before(owner: Any, name: str, call: Callable[..., object]) -> None:
    """Call `call` with the positional arguments of each call of a method, before the method."""
    method = getattr(owner, name)

    def called(*arguments: Any, **options: Any) -> Any:
        call(*arguments)
        return method(*arguments, **options)

    setattr(owner, name, called)


def _patch_rename(prefix: str, countdown: Countdown, die: Callable[[], None], *, after: bool) -> None:
    replace = os.replace

    def renaming(source: Any, target: Any) -> None:
        is_now = Path(target).name.startswith(prefix) and countdown.is_now()
        if is_now and not after:
            die()
        replace(source, target)
        if is_now:
            die()

    durable.os.replace = renaming  # type: ignore[attr-defined]


def _patch_push(countdown: Countdown, die: Callable[[], None]) -> None:
    update = VerlEngine.update_weights_from_tensor

    def half(named: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from named[: len(named) // 2]
        die()

    def pushing(engine: VerlEngine, named: Any, **options: Any) -> Any:
        return update(engine, half(list(named)) if countdown.is_now() else named, **options)

    VerlEngine.update_weights_from_tensor = pushing  # type: ignore[method-assign, assignment]


def _patch_journal(countdown: Countdown, die: Callable[[], None]) -> None:
    write, append = os.write, record_file.RecordFile.append

    def appending(file: record_file.RecordFile, payload: bytes) -> Any:
        if countdown.is_now():
            record_file.os.write = lambda fd, data: (write(fd, data[: len(data) // 2]), die())  # type: ignore
        return append(file, payload)

    record_file.RecordFile.append = appending  # type: ignore[method-assign, assignment]


def _cut(writer: RunWriter, die: Callable[[], None]) -> None:
    """Let the next write to evaluations.jsonl write half of its line."""
    file = writer._evaluations

    def half(data: bytes) -> None:
        os.write(file._descriptor, data[: len(data) // 2])
        die()

    file._write = half  # type: ignore[method-assign]


def _patch_episodes(countdown: Countdown, die: Callable[[], None]) -> None:
    """Die when half of the episodes of an evaluation have ended: those of this rank, or of the rollout process."""
    start = AgentLoop.start

    def starting(loop: AgentLoop, tasks: Sequence[Any], on_finish: Any = None, **options: Any) -> Any:
        if options.get("replaces", True) or not countdown.is_now():
            return start(loop, tasks, on_finish, **options)
        ended: list[Any] = []

        def finishing(trajectory: Any) -> None:
            on_finish(trajectory)
            ended.append(trajectory)
            if len(ended) >= len(tasks) // 2:
                die()

        return start(loop, tasks, finishing, **options)

    AgentLoop.start = starting  # type: ignore[method-assign, assignment]
    dies = _at_the_evaluation(countdown)

    def taking(play: HeldOutPlay, news: Any) -> None:
        if dies() and play._playing is not None and 2 * len(play._playing._open) <= play._playing._held_out.episodes:
            die()

    _before(HeldOutPlay, "take", taking)


def _patch_held_push(countdown: Countdown, die: Callable[[], None]) -> None:
    """Withhold the last episode of an evaluation, and die in the push that waits for it.

    All ranks are patched, because rank 0 has the episodes. `die` does nothing on those that survive.
    """
    holds, take, wait = _at_the_evaluation(countdown), HeldOutPlay.take, HeldOutPlay.wait

    def taking(play: HeldOutPlay, news: Any) -> bool:
        is_last = play._playing is not None and play._playing._open == {news.group}
        return True if holds() and is_last and isinstance(news, GroupEnded) else take(play, news)

    def waiting(play: HeldOutPlay, *, before_push: bool = False) -> float:
        if before_push and play._is_open and holds():
            die()
        return wait(play, before_push=before_push)

    HeldOutPlay.take, HeldOutPlay.wait = taking, waiting  # type: ignore[method-assign, assignment]


def _at_the_evaluation(countdown: Countdown) -> Callable[[], bool]:
    """Return a function that returns True while the evaluation plays that the countdown names."""
    reached = [False]

    def beginning(*_: Any) -> None:
        reached[0] = countdown.is_now()

    _before(HeldOutPlay, "begin", beginning)
    return lambda: reached[0]


def main() -> int:
    point, mark, trainer, *options = sys.argv[1:]
    if point != "none":
        if point not in POINTS:
            raise SystemExit(f"There is no point {point!r}. Choose from {', '.join(POINTS)}.")
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        victim = 0 if trainer in POINTS[point].first_rank else ranks - 1

        def die() -> None:
            if rank == victim:
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)

        if rank == victim or point == "held push":
            patch(point, Countdown(POINTS[point].call_of(trainer)), die)
    return {SYNC: grpo.main, ASYNC: async_grpo.main}[trainer](options)


if __name__ == "__main__":
    sys.exit(main())
