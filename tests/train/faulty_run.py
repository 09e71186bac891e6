"""`python -m tests.train.faulty_run FAULT RANK [grpo's arguments]`: a GRPO run in which one rank has a fault.

With arguments of `ppo` it is a run of PPO. There is neither a server nor an environment: a player makes trajectories
that are a function of the task, so a resumed run has exactly the weights of a run without a fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.loop_thread import LoopThread, Running
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train import checkpoint_writer, grpo, journal, ppo, run_end
from verl_server.train import run as run_module
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.journal import GroupJournal
from verl_server.train.loss_scaling import LossScaling
from verl_server.train.policy import Policy
from verl_server.train.run_writer import RunWriter

STEP = 2
"""The step with the fault."""


class Servers:
    """Stands for `RolloutServers`: it notes the versions that are pushed."""

    urls = ("http://nowhere",)

    def __init__(self, *_: Any, **__: Any) -> None:
        self.pushed: list[str] = []

    def push(self, _: Any, version: str) -> None:
        self.pushed.append(version)

    def ensure(self, _: Any) -> None:
        pass

    def counters(self) -> dict[str, Any]:
        return {}


class Player:
    """Plays with the newest weights of `servers` for no time at all, unless `wait` is set."""

    environment_url = "http://nowhere"
    is_agent = False
    wait: Callable[[], Any] | None = None

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._thread = LoopThread("player")

    def start(
        self,
        tasks: Sequence[Task],
        on_finish: Any = None,
        *,
        version: str | None = None,
        replaces: bool = True,
        on_group: Callable[[Rollout], None] | None = None,
        recording: None = None,
    ) -> Running[Rollout]:
        return self._thread.start(self._play(tasks, on_finish, on_group))

    def stranded(self, version: str | None = None) -> None:
        return None

    async def _play(self, tasks: Sequence[Task], on_finish: Any, on_group: Callable[[Rollout], None] | None) -> Rollout:
        if self.wait is not None:
            await self.wait()
        rollout = self.run(tasks, on_finish)
        for trajectory in rollout.trajectories:
            if on_finish is not None:
                on_finish(trajectory)
        for group in sorted({task.group for task in tasks}) if on_group is not None else []:
            on_group(Rollout(trajectories=[t for t in rollout.trajectories if t.task.group == group], seconds=0.1))
        return rollout

    def run(self, tasks: Sequence[Task], on_finish: Any = None) -> Rollout:
        return Rollout(trajectories=[_trajectory(task, self._servers.pushed[-1]) for task in tasks], seconds=0.1)


def _trajectory(task: Task, version: str) -> Trajectory:
    trajectory = Trajectory(task=task)
    seed = task.sampling_seed or 0
    length = 1 + seed % 3
    trajectory.append_observation({}, [1, 2])
    trajectory.append_output([3 + (seed * 7 + i) % 30 for i in range(length)], [-3.0] * length, [version] * length)
    trajectory.turns[0].reward = float(seed % 2)
    trajectory.finish(StopReason.DONE)
    return trajectory


def _inject(fault: str, player: Player, patch: Callable[[Any, str, Any], None]) -> None:
    """Patch what the fault needs. It happens in step `STEP`."""
    calls = {"pushes": 0, "passes": 0}
    step = {"now": -1}
    roll_out = GRPO._roll_out

    def noted(run: GRPO, *arguments: Any) -> Any:
        if run.next_step == STEP and fault != "none" and "in a save" not in fault:
            wait_for_checkpoint()  # the one before the fault is on the disk
        step["now"] = run.next_step
        return roll_out(run, *arguments)

    patch(GRPO, "_roll_out", noted)
    forward, update, push, record = Policy.forward, PolicyTrainer.update, GRPO.push, RunWriter.record

    def fails_in_a_pass(error: Callable[[], BaseException], after: int) -> None:
        def broken(policy: Policy, *arguments: Any, **settings: Any) -> Any:
            result = forward(policy, *arguments, **settings)
            if torch.is_grad_enabled() and step["now"] == STEP:
                calls["passes"] += 1
                if calls["passes"] > after:
                    raise error()
            return result

        patch(Policy, "forward", broken)

    match fault:
        case "none":
            pass
        case "error":
            fails_in_a_pass(lambda: ZeroDivisionError("a bug in a loss"), 0)
        case "memory":
            fails_in_a_pass(lambda: torch.OutOfMemoryError("CUDA out of memory"), 0)
        case "keyboard":
            fails_in_a_pass(KeyboardInterrupt, 0)
        case "late error":  # after the first of two optimizer steps
            fails_in_a_pass(lambda: ZeroDivisionError("a bug in a loss"), 1)
        case "activations":  # of one rank, in the first optimizer step and in all passes after it

            def overflows(policy: Policy, *arguments: Any, **settings: Any) -> Any:
                if torch.is_grad_enabled() and step["now"] == STEP:
                    module = policy.language_model.model.layers[1].mlp.down_proj
                    module.register_forward_hook(lambda _, __, output: output * float("inf"))
                return forward(policy, *arguments, **settings)

            patch(Policy, "forward", overflows)
        case "gradients":  # in the shard of one rank, in the first of two optimizer steps
            unscale = LossScaling.unscale

            def broken_shard(scaling: LossScaling, optimizer: torch.optim.Optimizer) -> None:
                if step["now"] == STEP and calls["passes"] == 0:
                    calls["passes"] += 1
                    optimizer.param_groups[0]["params"][0].grad.to_local()[0] = float("inf")
                unscale(scaling, optimizer)

            patch(LossScaling, "unscale", broken_shard)
        case "torn":

            def torn(trainer: PolicyTrainer, samples: Any, number: int) -> Any:
                if number == STEP:
                    trainer.optimizer.register_step_post_hook(_fail)
                return update(trainer, samples, number)

            patch(PolicyTrainer, "update", torn)
        case "first push":

            def no_push(run: GRPO) -> None:
                raise ZeroDivisionError("the first push failed")

            patch(GRPO, "push", no_push)
        case "SIGTERM in push" | "SIGINT in push":

            def signalled(run: GRPO) -> None:
                push(run)
                if run.next_step == STEP:
                    os.kill(os.getpid(), signal.Signals[fault.split()[0]])

            patch(GRPO, "push", signalled)
        case "SIGTERM in rollout" | "SIGINT in rollout" | "SIGHUP in rollout" | "SIGKILL in rollout":

            async def endless() -> None:
                if step["now"] == STEP:
                    os.kill(os.getpid(), signal.Signals[fault.split()[0]])
                    await asyncio.sleep(600)

            player.wait = endless
        case "SIGTERM, but the rollout goes on":
            patch(run_end, "_ROLLOUT_GRACE", 0.5)

            async def stubborn() -> None:
                while step["now"] == STEP:
                    if calls["passes"] == 0:
                        os.kill(os.getpid(), signal.SIGTERM)
                    calls["passes"] += 1
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.sleep(600)

            player.wait = stubborn
        case "SIGKILL in training":  # between two optimizer steps; all groups are in the journal
            journals: list[GroupJournal] = []

            class Noted(GroupJournal):
                def __init__(self, *arguments: Any, **settings: Any) -> None:
                    super().__init__(*arguments, **settings)
                    journals.append(self)

            patch(grpo, "GroupJournal", Noted)

            def killed(policy: Policy, *arguments: Any, **settings: Any) -> Any:
                if torch.is_grad_enabled() and step["now"] == STEP:
                    calls["passes"] += 1
                    if calls["passes"] == 2:
                        journals[0].close()
                        os.kill(os.getpid(), signal.SIGKILL)
                return forward(policy, *arguments, **settings)

            patch(Policy, "forward", killed)
        case "SIGTERM in a save":  # in the rollout of a step that began while a checkpoint is written
            signalled_meanwhile = hold_checkpoint(patch)

            async def told() -> None:
                if step["now"] == STEP:
                    os.kill(os.getpid(), signal.SIGTERM)
                    signalled_meanwhile.set()
                    await asyncio.sleep(600)

            player.wait = told
        case "SIGKILL in a save":  # in a step that began while a checkpoint is written; its groups are in the journal
            hold_checkpoint(patch)
            patch(journal, "_COMPACT_BYTES", 1)
            opened: list[GroupJournal] = []

            class Opened(GroupJournal):
                def __init__(self, *arguments: Any, **settings: Any) -> None:
                    super().__init__(*arguments, **settings)
                    opened.append(self)

            patch(grpo, "GroupJournal", Opened)

            def killed_meanwhile(trainer: PolicyTrainer, samples: Any, number: int) -> Any:
                if number == STEP:
                    opened[0].close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return update(trainer, samples, number)

            patch(PolicyTrainer, "update", killed_meanwhile)
        case "full disk in a save":
            full_fsync = os.fsync

            def full_meanwhile(descriptor: int) -> None:
                name = os.readlink(f"/proc/self/fd/{descriptor}")
                if (
                    threading.current_thread().name == checkpoint_writer.THREAD
                    and f".checkpoint-{STEP}.partial" in name
                ):
                    raise OSError(errno.ENOSPC, "No space left on device")
                full_fsync(descriptor)

            patch(os, "fsync", full_meanwhile)
        case "two signals":

            def signalled_twice(*_: Any) -> None:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)
                threading.Event().wait(600)

            patch(run_module, "save_policy", signalled_twice)
            fails_in_a_pass(lambda: ZeroDivisionError("a bug in a loss"), 0)
        case "disk":
            fails_in_a_pass(lambda: ZeroDivisionError("a bug in a loss"), 1)
            fsync = os.fsync

            def full(descriptor: int) -> None:
                if step["now"] == STEP:
                    raise OSError(errno.ENOSPC, "No space left on device")
                fsync(descriptor)

            patch(os, "fsync", full)
        case "unsampled":  # in every step

            def bypasses(_: Player, tasks: Sequence[Task], on_finish: Any = None) -> Rollout:
                played = [Trajectory(task=task, reward=3.0, stop_reason=StopReason.DONE) for task in tasks]
                return Rollout(trajectories=played, seconds=0.1)

            patch(Player, "run", bypasses)
            patch(Player, "is_agent", True)
        case "equal":  # in every step

            def is_constant(player: Player, tasks: Sequence[Task], on_finish: Any = None) -> Rollout:
                played = play(player, tasks, on_finish)
                for trajectory in played.trajectories:
                    trajectory.reward = 0.0
                return played

            play = Player.run
            patch(Player, "run", is_constant)
        case "record":

            def fails(folder: RunWriter, metrics: Any, *arguments: Any) -> None:
                if metrics.step == STEP:
                    raise OSError(errno.EIO, "Input/output error")
                record(folder, metrics, *arguments)

            patch(RunWriter, "record", fails)
        case _:
            raise ValueError(fault)


def hold_checkpoint(patch: Callable[[Any, str, Any], None]) -> threading.Event:
    """Let the checkpoint of `STEP` get its name when the event is set that is returned."""
    proceed, replace = threading.Event(), os.replace

    def held(source: Any, target: Any) -> None:
        if os.path.basename(target) == f"checkpoint-{STEP}":
            proceed.wait(60)
        replace(source, target)

    patch(os, "replace", held)
    return proceed


def wait_for_checkpoint() -> None:
    """Wait until a checkpoint that is being written is on the disk."""
    for thread in threading.enumerate():
        if thread.name == checkpoint_writer.THREAD:
            thread.join(60)


def _fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def main(arguments: Sequence[str]) -> int:
    fault, rank, *rest = arguments
    servers = Servers()
    player = Player(servers)

    @contextlib.contextmanager
    def serving(*_: Any) -> Iterator[tuple[list[Any], list[str], list[None]]]:
        yield [], [], []

    @contextlib.contextmanager
    def playing(*_: Any) -> Iterator[Player]:
        yield player

    mine = int(os.environ.get("RANK", "0"))
    with contextlib.ExitStack() as patches:

        def patch(owner: Any, name: str, value: Any) -> None:
            patches.enter_context(mock.patch.object(owner, name, value))

        patch(run_module, "serving", serving)
        patch(grpo, "open_player", playing)
        patch(run_module, "RolloutServers", lambda *_, **__: servers)
        patch(run_module, "check_environments", lambda *_: None)
        _inject(fault if rank == "all" or mine == int(rank) else "none", player, patch)
        is_ppo = any(argument.startswith("--ppo.") for argument in rest)
        return (ppo if is_ppo else grpo).main(rest)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    assert not dist.is_initialized()
    sys.exit(status)
