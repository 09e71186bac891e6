"""`SchedulerSockets`: the scheduler's end of the message socket, for a loop that sleeps in one `poll`.

Used by rank 0's loop (`scheduler.rank`), and by the process that drives another engine (`backends.process`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import signal
import socket
import time

import msgspec

from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.readiness import wait_writable
from verl_server.messages.io_struct import SchedulerInput, SchedulerOutput, TokenizedGenerateReq
from verl_server.messages.packed import unpack_ids

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0
"""Seconds that `SchedulerSockets.close` waits for unsent messages to be sent."""


class SchedulerSockets:
    """Rank 0's end of the message socket, and a socket pair with which signals and the stager wake the loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._messages = MessageSocket(sock)
        self._decoder = msgspec.msgpack.Decoder(SchedulerInput)
        self._encoder = msgspec.msgpack.Encoder()
        self._doorbell, self._button = socket.socketpair()
        self._doorbell.setblocking(False)
        self._button.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._doorbell, select.POLLIN)
        self._poller.register(self._messages, select.POLLIN)

    def wait(self, seconds: float | None) -> None:
        """Sleep until a message arrives, `ring` is called, or `seconds` have passed.

        Send unsent messages during the sleep.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self._watch_messages()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = dict(self._poller.poll(None if left is None else math.ceil(left * 1000.0)))
            if self._doorbell.fileno() in events:
                self._clear_doorbell()
                return
            if events.get(self._messages.fileno()) != select.POLLOUT:  # a message, a closed peer, or the deadline
                return
            self._messages.flush()

    def wake_on_signals(self) -> None:
        """Make every signal end the current or the next `wait`. Call this on the main thread.

        A Python signal handler alone is not enough: it cannot run while the main thread is in `poll`, and a signal that
        arrives just before `poll`, or at another thread, does not interrupt `poll`.
        """
        signal.set_wakeup_fd(self._button.fileno(), warn_on_full_buffer=False)

    def ring(self) -> None:
        """End the current or the next `wait`. Safe in a signal handler and in other threads."""
        with contextlib.suppress(OSError):  # the socket is full, so the loop wakes anyway, or it is closed
            self._button.send(b"!")

    def receive(self) -> list[SchedulerInput]:
        """Return all messages that have arrived. A message that cannot be decoded is logged and dropped."""
        if self._messages.unsent:
            self._messages.flush()  # `wait` flushes too, but a loop that always has work does not call it
        messages: list[SchedulerInput] = []
        for data in self._messages.receive():
            try:
                message = self._decoder.decode(data)
                if isinstance(message, TokenizedGenerateReq) and message.packed_ids:
                    message.input_ids, message.packed_ids = unpack_ids(message.packed_ids), b""
                messages.append(message)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                logger.error("Dropped a malformed message of %d bytes: %s", len(data), error)
        return messages

    def send(self, message: SchedulerOutput) -> None:
        """Send a message without blocking. If the socket has no room, the message is sent later."""
        self._messages.send(self._encoder.encode(message))

    def close(self) -> None:
        """Close the sockets when every message is sent, or after `_CLOSE_SECONDS`."""
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._messages.unsent and time.monotonic() < deadline:
            wait_writable(self._messages, deadline - time.monotonic())
            self._messages.flush()
        self._messages.close()
        self._doorbell.close()
        self._button.close()

    def _watch_messages(self) -> None:
        """Register the message socket with the poller, for reading and, if messages are unsent, for writing.

        A closed peer is not polled, because it would wake every wait. `child_main` or SIGTERM ends this process then.
        """
        if self._messages.is_closed:
            with contextlib.suppress(KeyError):
                self._poller.unregister(self._messages)
        else:
            self._poller.register(self._messages, select.POLLIN | (select.POLLOUT if self._messages.unsent else 0))

    def _clear_doorbell(self) -> None:
        """Read all bytes that `ring` wrote, because an unread byte would end every later wait at once."""
        with contextlib.suppress(BlockingIOError):
            while self._doorbell.recv(4096):
                pass
