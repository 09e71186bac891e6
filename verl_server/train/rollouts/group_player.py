"""The rollout process: plays groups of episodes and never waits for the trainer.

`rollout_process` starts it on rank 0. In a process of its own, the interpreter's lock of the trainer does not slow the
episodes, nor they the training. A group begins when the trainer sends it. Its episodes go on while weights are pushed,
and the tokens name their versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec
import uvloop

from verl_server.errors import ServerDiedError, ServerRestartedError, ServerUnavailableError, VerlServerError
from verl_server.files.json_values import jsonable
from verl_server.ipc.child_process import child_main
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.agents.own_memory import memory_hidden
from verl_server.rollout.recorded_turns import EpisodeProgress, Recording
from verl_server.rollout.trajectory import Task, Trajectory, labelled
from verl_server.train.agent_groups import AgentGroups
from verl_server.train.players import open_player
from verl_server.train.rollouts.group_messages import (
    Alive,
    CancelGroup,
    EpisodeEnded,
    EpisodeWentOn,
    FromPlayer,
    GroupBegan,
    GroupEnded,
    NowServed,
    PlayerSetup,
    PlayGroup,
    ToPlayer,
    decode_args,
)
from verl_server.train.rollouts.places import GroupPlaces, Places
from verl_server.watch.index.line_rows import trajectory_row
from verl_server.watch.run_records import Label
from verl_server.weight_version import WeightVersion, at_least

logger = logging.getLogger(__name__)

_ALIVE_SECONDS = 2.0
"""Seconds between two signs of life."""
_RETRY_PAUSE = 1.0
"""Seconds before a group begins again that no server could begin."""


class GroupsOf(Protocol):
    """An `AgentLoop` or `AgentGroups`."""

    async def arun(
        self,
        tasks: list[Task],
        on_finish: Callable[[Trajectory], None] | None = None,
        *,
        version: str | None = None,
        slots: AbstractAsyncContextManager[object] | None = None,
        replaces: bool = True,
        recording: Recording | None = None,
    ) -> Rollout:
        """Play the tasks of a group. `slots` bounds the episodes of all groups together.

        Without `replaces`, no episode replaces another one. An agent has no `recording`.
        """


class GroupPlayer:
    """Plays groups on the running event loop, and hands on what begins and ends.

    A group begins when there are places for all of its episodes, so that its age does not grow while it waits. The
    episodes of an evaluation have the first claim on a quarter of the places, and no claim on the others: an evaluation
    does not wait for the groups that wait, and does not stop them.
    """

    def __init__(
        self,
        player: GroupsOf,
        send: Callable[[FromPlayer], None],
        incarnation: str,
        max_concurrency: int | None = None,
        records_turns: bool = False,
    ) -> None:
        """`send` takes each message; it must not block. `max_concurrency` bounds the episodes of all groups.

        With `records_turns`, each turn is sent (`EpisodeWentOn`).
        """
        self._player = player
        self._send = send
        self._incarnation = incarnation
        self._records_turns = records_turns
        self._places = Places(max_concurrency, self._begin)
        self._held_out_most = max(1, (max_concurrency or 2**30) // 4)
        self._served = NowServed(version="", step=0)
        self._waiting: dict[int, PlayGroup] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._held_out_waiting: dict[int, PlayGroup] = {}
        self._held_out_playing: dict[int, GroupPlaces] = {}

    def handle(self, message: ToPlayer) -> None:
        """Take a message of the trainer."""
        match message:
            case NowServed():
                self._served = message
            case PlayGroup():
                waiting = self._waiting if message.held_out is None else self._held_out_waiting
                waiting[message.group] = message
                self._begin()
            case CancelGroup():
                self._waiting.pop(message.group, None)
                self._held_out_waiting.pop(message.group, None)
                if (task := self._playing.get(message.group)) is not None:
                    task.cancel()

    def _begin(self) -> None:
        """Begin the groups that came first, as long as there are places."""
        while self._held_out_waiting and self._held_out_left() and self._places.have(1):
            self._begin_first(self._held_out_waiting)
        kept = min(len(self._held_out_waiting), self._held_out_left())
        while self._waiting:
            group = next(iter(self._waiting.values()))
            is_only = len(self._playing) == len(self._held_out_playing)
            if not is_only and not self._places.have(len(group.tasks) + kept):
                return
            self._begin_first(self._waiting)

    def _held_out_left(self) -> int:
        """Return the number of places that held-out episodes may have and do not have."""
        return self._held_out_most - sum(places.taken for places in self._held_out_playing.values())

    def _begin_first(self, waiting: dict[int, PlayGroup]) -> None:
        group = waiting.pop(next(iter(waiting)))
        begun = GroupBegan(group=group.group, version=self._served.version, step=self._served.step)
        self._send(begun)
        places = self._places.take(len(group.tasks))
        if group.held_out is not None:
            self._held_out_playing[group.group] = places
        task = asyncio.ensure_future(self._play(group, begun, places))
        self._playing[group.group] = task
        task.add_done_callback(functools.partial(self._ended, group.group))

    def _ended(self, group: int, task: asyncio.Task[None]) -> None:
        if self._playing.get(group) is task:
            del self._playing[group]
            self._held_out_playing.pop(group, None)
        self._begin()

    async def _play(self, group: PlayGroup, begun: GroupBegan, places: GroupPlaces) -> None:
        kind, step = ("trajectory", begun.step) if group.held_out is None else ("held-out", group.held_out)

        def record(trajectory: Trajectory) -> None:
            label = Label(step=step, rank=0, incarnation=self._incarnation, time=time.time())
            (values,) = labelled([trajectory], **msgspec.structs.asdict(label))
            line = msgspec.json.encode(values, enc_hook=jsonable) + b"\n"
            self._send(EpisodeEnded(line=line, row=trajectory_row(kind, label, trajectory)))

        version = WeightVersion.parse(begun.version)
        demand = begun.version if version is None else at_least(version)
        try:
            rollout = await self._arun(group, record, demand, places)
        except Exception as error:
            # The trainer ends the run with it: a wrong task file, say, or tokens without known log-probabilities.
            name = "" if isinstance(error, VerlServerError) else f"{type(error).__name__}: "
            self._send(GroupEnded(group=group.group, error=f"{name}{error}", time=time.time()))
        else:
            self._send(GroupEnded(group=group.group, rollout=rollout, time=time.time()))
        finally:
            places.leave()

    async def _arun(
        self, group: PlayGroup, record: Callable[[Trajectory], None], demand: str, places: GroupPlaces
    ) -> Rollout:
        """Play a group. While no server can begin it, wait: the trainer brings one back, or ends the run."""
        level, replaces, recording = logging.WARNING, group.held_out is None, self._recording(group)
        while True:
            try:
                return await self._player.arun(
                    group.tasks, record, version=demand, slots=places, replaces=replaces, recording=recording
                )
            except (ServerUnavailableError, ServerDiedError, ServerRestartedError) as error:
                logger.log(level, "Group %d waits for a server and begins again: %s", group.group, error)
            level = logging.DEBUG  # once for each group
            await asyncio.sleep(_RETRY_PAUSE)

    def _recording(self, group: PlayGroup) -> Recording | None:
        if not self._records_turns or group.held_out is not None:
            return None

        def went_on(number: int, progress: EpisodeProgress) -> None:
            self._send(EpisodeWentOn(group=number, progress=progress))

        return Recording(went_on, {(group.group, episode.member): episode for episode in group.earlier})

    async def close(self) -> None:
        """Cancel all groups, and wait until their episodes have closed their environments."""
        self._waiting.clear()
        self._held_out_waiting.clear()
        tasks = list(self._playing.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Wire:
    """The connection to the trainer. One thread reads and one writes, so that the event loop never blocks."""

    def __init__(self, fd: int) -> None:
        self._connection = Connection(fd)
        self._outgoing: queue.SimpleQueue[FromPlayer] = queue.SimpleQueue()
        self.send = self._outgoing.put

    def setup(self) -> PlayerSetup:
        return msgspec.msgpack.decode(self._connection.recv_bytes(), type=PlayerSetup)

    def serve(self, handle: Callable[[ToPlayer], None], loop: asyncio.AbstractEventLoop, end: asyncio.Event) -> None:
        """Call `handle` on the loop for each message; set `end` when the trainer has closed the connection."""

        def read() -> None:
            with contextlib.suppress(EOFError, OSError, RuntimeError):  # RuntimeError: the loop is closed
                while True:
                    message = msgspec.msgpack.decode(self._connection.recv_bytes(), type=ToPlayer)  # type: ignore[arg-type]
                    loop.call_soon_threadsafe(handle, message)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end.set)

        def write() -> None:
            with contextlib.suppress(OSError):
                while True:
                    self._connection.send_bytes(msgspec.msgpack.encode(self._outgoing.get(), enc_hook=jsonable))

        for work in (read, write):
            threading.Thread(target=work, name=f"trainer-{work.__name__}", daemon=True).start()


async def _run(wire: _Wire, setup: PlayerSetup, ready: Callable[[dict[str, Any]], None]) -> None:
    args, end, loop = decode_args(setup.args), asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    with contextlib.ExitStack() as stack:
        if args.is_played_by_agent:
            stack.enter_context(memory_hidden())  # the agents' programs must not read the owner's keys
        player = stack.enter_context(open_player(args, setup.urls, setup.keys))
        most = args.max_concurrency or (player.most_at_once if isinstance(player, AgentGroups) else None)
        groups = GroupPlayer(player, wire.send, setup.incarnation, most, args.replay_actions)
        wire.serve(groups.handle, loop, end)
        ready({})
        while not end.is_set():
            wire.send(Alive())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), _ALIVE_SECONDS)
        await groups.close()


def _main(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    wire = _Wire(argument["socket"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(wire, wire.setup(), ready))


if __name__ == "__main__":
    child_main(_main)
