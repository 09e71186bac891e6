"""`RolloutProcess`: the trainer's side of the process that plays groups (`group_player`).

Rank 0 of `async_grpo` starts groups and takes finished ones. A thread receives: it writes the lines of episodes to the
run's folder when they end, hands finished groups to the journal, and keeps them until the trainer asks. If the process
ends, it is launched again, and the groups that it played start anew.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from verl_server.errors import ServerLaunchError, VerlServerError
from verl_server.ipc.child_process import ChildProcess, describe_exit
from verl_server.train.held_out import HELD_OUT
from verl_server.train.journal import GroupJournal
from verl_server.train.options import AsyncTrainArgs
from verl_server.train.rollouts.group_messages import (
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
    encode_args,
)
from verl_server.train.run import RunParts

logger = logging.getLogger(__name__)

_MODULE = "verl_server.train.rollouts.group_player"
_START_SECONDS = 300.0
"""Seconds that the process may take to import, load the tokenizer or the agent, and connect."""
_END_SECONDS = 10.0
"""Seconds that the episodes have to close their environments at the end."""
_SILENCE_SECONDS = 120.0
"""Seconds without a sign of life, or for which it reads nothing, after which the process is ended and launched again.
"""
_DRAIN_SECONDS = 10.0
"""Seconds to write the episodes that a process sent before it ended."""
_MAX_RELAUNCHES = 3
"""Launches of a process that ended, between two groups that finished."""


class RolloutProcessError(VerlServerError):
    """The episodes of a run cannot be played: the process that plays them ends again and again, or a group raised."""


class RolloutProcess:
    """A running rollout process. One thread calls it."""

    def __init__(
        self,
        setup: PlayerSetup,
        on_episode: Callable[[bytes, tuple[Any, ...]], None],
        also: Callable[[], None] | None = None,
        journal: GroupJournal | None = None,
        *,
        environment_url: str = "",
        is_agent: bool = False,
    ) -> None:
        """Start the process, and wait until it is ready.

        `on_episode` is called in another thread with the line and the row of each episode that ends. `journal` takes
        each group there, and the turns of groups that go on. `also` is called several times a second during the start,
        and may raise to give it up. Raise ServerLaunchError if the process cannot start; the error has the reason (a
        wrong agent, say).
        """
        self._setup = setup
        self._on_episode = on_episode
        self._journal = journal
        self._also = also
        self.environment_url = environment_url
        self.is_agent = is_agent
        self._served: NowServed | None = None
        self._playing: dict[int, PlayGroup] = {}
        self._relaunches_left = _MAX_RELAUNCHES
        self._has_ended = False
        self._launch()

    def serve(self, served: NowServed) -> None:
        """Tell the weights that groups begin with from now on."""
        self._served = served
        self._send(served)

    def play(self, group: PlayGroup) -> None:
        """Play a group as soon as there is room for it."""
        self._playing[group.group] = group
        self._send(group)

    def cancel(self, group: int) -> None:
        """Stop to play a group. What has ended of it stays recorded."""
        if self._playing.pop(group, None) is not None:
            self._send(CancelGroup(group=group))

    def news(self, timeout: float) -> list[GroupBegan | GroupEnded]:
        """Return the groups that have begun and finished since the last call, in order.

        Wait for the first, at most `timeout` seconds. A process that has ended, or hangs, is launched again by the next
        call, and plays the groups again that it had not finished. Raise RolloutProcessError if it ends again and again,
        or if a group of the training could not be played at all, and the error of `on_episode`.
        """
        if self._has_ended:
            self._relaunch()
        if self._has_ended:
            time.sleep(timeout)
            return []
        found = self._take(timeout)
        for group in found:
            if isinstance(group, GroupEnded):
                if group.error is not None and group.group < HELD_OUT:
                    raise RolloutProcessError(f"The episodes of group {group.group} could not be played: {group.error}")
                self._relaunches_left = _MAX_RELAUNCHES
        return found

    def _take(self, timeout: float) -> list[GroupBegan | GroupEnded]:
        found: list[GroupBegan | GroupEnded] = []
        with contextlib.suppress(queue.Empty):
            while not self._has_ended:
                message = self._inbox.groups.get(timeout=0 if found else timeout)
                if isinstance(message, Exception):
                    raise message
                # The caller looks after the servers before the next call, which launches the process again: it connects
                # to them.
                self._has_ended = message is None
                if message is None or message.group not in self._playing:  # it was cancelled
                    continue
                found.append(message)
                if isinstance(message, GroupEnded):
                    del self._playing[message.group]
        if not found and not self._has_ended and self._inbox.silence() > _SILENCE_SECONDS:
            logger.warning("The rollout process was silent for %d s, and is ended.", _SILENCE_SECONDS)
            self._has_ended = True
        return found

    def close(self) -> None:
        """End the process. Episodes that play are cancelled, and close their environments first."""
        self._end(_END_SECONDS)

    def _end(self, grace: float) -> int | None:
        """End the process with SIGTERM, after `grace` seconds with SIGKILL, and return its exit code."""
        code = self._child.terminate(grace)
        # The thread of the inbox reads until the end that the process leaves. A descriptor that is closed under a read
        # may be that of another file when the read goes on.
        if self._inbox.join(_DRAIN_SECONDS):
            self._connection.close()
        return code

    def _send(self, message: ToPlayer) -> None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except BlockingIOError:
            logger.warning("The rollout process has read nothing for %d s, and is ended.", _SILENCE_SECONDS)
            self._has_ended = True
        except OSError:
            logger.debug("The rollout process has ended; `finished` launches it again.")

    def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        # A process that hangs must not hang the trainer, who sends.
        seconds, rest = divmod(_SILENCE_SECONDS, 1)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
        with theirs:
            self._child = ChildProcess("rollout", _MODULE, {"socket": theirs.fileno()}, pass_fds=(theirs.fileno(),))
        self._connection = Connection(ours.detach())
        try:
            with contextlib.suppress(OSError):  # it has ended: `wait_ready` has the reason
                self._connection.send_bytes(msgspec.msgpack.encode(self._setup))
            self._child.wait_ready(_START_SECONDS, self._also)
        except BaseException:
            self._connection.close()
            self._child.terminate(grace=0)
            raise
        self._inbox = _Inbox(self._connection, self._on_episode, self._journal)
        self._has_ended = False

    def _relaunch(self) -> None:
        """Launch the process again, which has ended, and start its groups again."""
        code = self._end(grace=1.0)
        report = f"The rollout process ended with {describe_exit(code)}."
        if self._relaunches_left == 0:
            raise RolloutProcessError(
                f"{report} It is not launched again: it ended {_MAX_RELAUNCHES + 1} times without finishing a group."
                f"{self._child.log_tail()}"
            )
        self._relaunches_left -= 1
        logger.warning("%s It is launched again, and plays %d groups anew.", report, len(self._playing))
        try:
            self._launch()
        except ServerLaunchError as error:
            # It started once, so what stops it now may pass: a kill while it starts, or a server that is away.
            logger.warning("It could not be launched, and the next call tries again: %s", error)
            return
        if self._served is not None:
            self._send(self._served)
        for group in self._playing.values():
            self._send(group)


class _Inbox:
    """The thread that receives what a rollout process sends."""

    def __init__(
        self,
        connection: Connection,
        on_episode: Callable[[bytes, tuple[Any, ...]], None],
        journal: GroupJournal | None,
    ) -> None:
        self.groups: queue.SimpleQueue[GroupBegan | GroupEnded | Exception | None] = queue.SimpleQueue()
        """The groups that have begun and ended; an error of `on_episode`; None when the process has ended."""
        self._connection = connection
        self._on_episode = on_episode
        self._journal = journal
        self._begun: dict[int, GroupBegan] = {}
        self._heard = time.monotonic()
        self._thread = threading.Thread(target=self._receive, name="rollout-inbox", daemon=True)
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until everything is read that a process sent which has ended. Return False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def silence(self) -> float:
        """Return the seconds since the last message."""
        return time.monotonic() - self._heard

    def _receive(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):  # OSError: the process was killed in the middle of a message
                self.groups.put(None)
                return
            self._heard = time.monotonic()
            try:
                message = msgspec.msgpack.decode(data, type=FromPlayer)
                if isinstance(message, EpisodeEnded):
                    self._on_episode(message.line, message.row)
                elif isinstance(message, GroupBegan):
                    self._begun[message.group] = message
                elif isinstance(message, EpisodeWentOn):
                    self._note_progress(message)
                elif isinstance(message, GroupEnded):
                    self._hand_on(message)
            except Exception as error:  # a full disk, say
                self.groups.put(error)
                return
            if isinstance(message, GroupBegan | GroupEnded):
                self.groups.put(message)

    def _hand_on(self, ended: GroupEnded) -> None:
        """Hand a finished group on before the trainer takes it, who changes the episodes that it leaves out."""
        begun = self._begun.pop(ended.group, None)
        is_trained = ended.group < HELD_OUT
        if self._journal is not None and is_trained and begun is not None and ended.rollout is not None:
            self._journal.put(ended.group, begun.version, begun.step, ended.rollout)

    def _note_progress(self, message: EpisodeWentOn) -> None:
        begun = self._begun.get(message.group)
        if self._journal is not None and begun is not None:
            self._journal.progress(message.group, begun.version, begun.step, message.progress)


@contextlib.contextmanager
def open_rollouts(args: AsyncTrainArgs, parts: RunParts, journal: GroupJournal) -> Iterator[RolloutProcess]:
    """Yield the rollout process of a run. Rank 0 calls it when the servers are up."""
    setup = PlayerSetup(args=encode_args(args), urls=parts.urls, keys=parts.keys, incarnation=parts.incarnation)
    rollouts = RolloutProcess(
        setup,
        parts.files.record_line,
        parts.stop.check,
        journal,
        environment_url=args.env_url or args.tasks or "",
        is_agent=args.is_played_by_agent,
    )
    with contextlib.closing(rollouts):
        yield rollouts
