"""The first process of an isolated program: offers Unix sockets at ports of the sandbox, and runs the program.

`environments.isolation` starts this file inside bubblewrap as a script of its own. It imports only the standard
library, so that it starts in milliseconds under `python -I -S`. Arguments: RLIMIT_NAME=VALUE and PORT=SOCKET ... --
COMMAND. The limits hold for the program and its descendants. Each connection to 127.0.0.1:PORT of the sandbox's own
network is one connection to SOCKET, which `uplink.py` serves outside. Bytes pass unchanged, both directions close on
their own, and a slow reader stops its writer.

A line of JSON goes to the descriptor 200 for "started", "exceeded", "code" and "failed". The launcher reads it, and the
program does not have it: so the launcher knows a fault of the isolation from one of the program. SIGTERM is for the
program, to which the launcher sends it, too. The bridge ends when the program has ended, and the sandbox ends with the
bridge.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import traceback

STATUS_DESCRIPTOR = 200
_PR_SET_DUMPABLE = 4
_BUFFER = 256 * 1024
"""Most bytes that wait in one direction of a connection."""
_BACKLOG = 1024
_LOOK_SECONDS = 0.2
"""Time between two counts of the processes, where the kernel does not bound them."""
_PAUSE_SECONDS = 0.05
"""Time without accepting after the process has run out of descriptors."""


def main() -> int:
    """Run the command and return the exit status: 128 + N if signal N ended the program."""
    split = sys.argv.index("--")
    settings, argv = dict(word.split("=", 1) for word in sys.argv[1:split]), sys.argv[split + 1 :]
    limits = {name: int(value) for name, value in settings.items() if name.startswith("RLIMIT_")}
    # No process of the sandbox may read the memory and the descriptors of this one.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    with contextlib.suppress(OSError):  # a trial has no status
        os.set_inheritable(STATUS_DESCRIPTOR, False)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # a handler, because a program inherits what is ignored
    relay = _Relay(wake_r)
    for port, path in settings.items():
        if port not in limits:
            relay.listen(int(port), path)
    try:
        program = subprocess.Popen(argv, preexec_fn=lambda: _limit(limits))
    except (OSError, subprocess.SubprocessError) as error:
        text = f"{argv[0]} does not start in the sandbox: {error}"
        print(text, file=sys.stderr)
        _say({"unstarted": text})
        return 127
    _say({"started": True})
    watched = limits.get("RLIMIT_NPROC") if _is_root_outside() else None
    code = None
    while code is None:
        relay.step(None if watched is None else _LOOK_SECONDS)
        if watched is not None and _processes() > watched:
            _say({"exceeded": f"The program had more than {watched} processes (AgentLimits.processes)."})
            os.kill(-1, signal.SIGKILL)  # everything in the sandbox except for this process and the first one
        code = program.poll()
    _say({"code": code})
    return code if code >= 0 else 128 - code


def _is_root_outside() -> bool:
    """Return True if the user outside of the sandbox is root, for whom the kernel ignores RLIMIT_NPROC."""
    with open("/proc/self/uid_map") as file:
        return any(line.split()[1] == "0" for line in file)


def _processes() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def _limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (bound, bound))


def _say(status: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # a trial has no status
        os.write(STATUS_DESCRIPTOR, json.dumps(status).encode() + b"\n")


class _Way:
    """One direction of a connection: bytes that were read from `source` and not yet written to `target`."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.waiting = bytearray()
        self.ended = False
        """`source` sends no more."""
        self.closed = False
        """`target` knows it."""

    def read(self) -> None:
        try:
            data = self.source.recv(65536)
        except BlockingIOError:
            return
        self.waiting += data
        self.ended = not data
        self.write()

    def write(self) -> None:
        try:
            while self.waiting:
                del self.waiting[: self.target.send(self.waiting)]
        except BlockingIOError:
            return
        if self.ended and not self.closed:
            self.closed = True
            self.target.shutdown(socket.SHUT_WR)


class _Relay:
    """All connections of the sandbox, in one thread."""

    def __init__(self, wake: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._selector.register(wake, selectors.EVENT_READ)
        self._wake = wake
        self._listening: dict[socket.socket, str] = {}
        self._is_paused = False

    def listen(self, port: int, path: str) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(_BACKLOG)
        listening.setblocking(False)
        self._listening[listening] = path
        self._selector.register(listening, selectors.EVENT_READ)

    def step(self, seconds: float | None) -> None:
        """Wait until something can be done, at most `seconds`, and do it. A signal ends the wait."""
        done: set[int] = set()
        for key, events in self._selector.select(_PAUSE_SECONDS if self._is_paused else seconds):
            if key.fileobj == self._wake:
                os.read(self._wake, 4096)
            elif key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]
            elif id(key.data) not in done and not self._copy(key.fileobj, key.data, events):  # type: ignore[arg-type]
                done.add(id(key.data))
        if self._is_paused:
            self._listen_again()

    def _accept(self, listening: socket.socket) -> None:
        inside = outside = None
        try:
            inside = listening.accept()[0]
            outside = socket.socket(socket.AF_UNIX)
            outside.setblocking(False)
            inside.setblocking(False)
            inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            outside.connect(self._listening[listening])
        except OSError as error:  # the client sees a closed connection: outside there is nobody, or too much is open
            for one in (inside, outside):
                if one is not None:
                    one.close()
            if inside is None and not isinstance(error, BlockingIOError | ConnectionError):
                self._pause()
            return
        pair = (_Way(inside, outside), _Way(outside, inside))
        self._selector.register(inside, selectors.EVENT_READ, pair)
        self._selector.register(outside, selectors.EVENT_READ, pair)

    def _copy(self, ready: socket.socket, pair: tuple[_Way, _Way], events: int) -> bool:
        """Move what can be moved. Return False if the connection has ended."""
        try:
            for way in pair:
                if way.source is ready and events & selectors.EVENT_READ:
                    way.read()
                if way.target is ready and events & selectors.EVENT_WRITE:
                    way.write()
        except OSError:  # one side has gone: the other side sees a closed connection
            self._close(pair)
            return False
        if all(way.closed for way in pair):
            self._close(pair)
            return False
        for one in (pair[0].source, pair[1].source):
            self._watch(one, pair)
        return True

    def _watch(self, one: socket.socket, pair: tuple[_Way, _Way]) -> None:
        """Wait for what `one` can be used for now."""
        events = 0
        for way in pair:
            if way.source is one and not way.ended and len(way.waiting) < _BUFFER:
                events |= selectors.EVENT_READ
            if way.target is one and way.waiting:
                events |= selectors.EVENT_WRITE
        known = self._selector.get_map().get(one)
        if known is None:
            if events:
                self._selector.register(one, events, pair)
        elif not events:
            self._selector.unregister(one)
        elif known.events != events:
            self._selector.modify(one, events, pair)

    def _close(self, pair: tuple[_Way, _Way]) -> None:
        for one in (pair[0].source, pair[1].source):
            if one in self._selector.get_map():
                self._selector.unregister(one)
            one.close()

    def _pause(self) -> None:
        """Accept no connection for a moment, so that this process does not spin without free descriptors."""
        if self._is_paused:  # another port was ready at the same time
            return
        self._is_paused = True
        for listening in self._listening:
            self._selector.unregister(listening)

    def _listen_again(self) -> None:
        self._is_paused = False
        for listening in self._listening:
            self._selector.register(listening, selectors.EVENT_READ)


def run_main() -> None:
    """Run `main` and leave without the interpreter's cleanup. Say what failed if the bridge itself did."""
    try:
        code = main()
    except BaseException:
        _say({"failed": traceback.format_exc()[-2000:]})
        code = 125
    os._exit(code)


if __name__ == "__main__":
    run_main()
