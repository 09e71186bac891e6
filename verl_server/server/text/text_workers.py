"""`TextWorkers`: processes that render templates and tokenize text, and that are killed if a job takes too long.

`TextService` owns it and uses it on the TokenizerManager's event loop only. Each process runs one job at a time. A
worker is started when a job waits and no worker is idle. A job may wait for a bounded time, and run for the same
bounded time. A template or a tokenizer cannot be interrupted, so a worker that exceeds the bound is killed, and the
next job starts another worker. When the caller of a job gives up, a waiting job is dropped, and a running job continues
until it ends or exceeds the bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from verl_server.errors import (
    BadRequestError,
    ServerLaunchError,
    ServerUnavailableError,
    VerlServerError,
    error_for_status,
)
from verl_server.ipc.child_process import ChildProcess, describe_exit
from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.readiness import wait_writable
from verl_server.server.text.text_tools import Answer, Job, TextSetup
from verl_server.web.json_body import MalformedBodyError

logger = logging.getLogger(__name__)
R = TypeVar("R")

_MODULE = "verl_server.server.text_worker"
_START_SECONDS = 120.0
"""Seconds within which a worker must be ready. The import of transformers takes several seconds on a busy machine."""


class JobKilledError(BadRequestError):
    """A job took too long, or its process ended. On a busy machine, the same job may succeed later."""


@dataclass(frozen=True)
class Purpose:
    """The kind of jobs that workers run, for error messages."""

    slow: str
    """Error of a job that exceeds the bound, with `{timeout}` in seconds."""
    died: str | None
    """Error (400) of a job whose process ended, with `{exit}`. None: the request did not cause the end (503)."""
    bound: str
    """Name of the setting that bounds jobs."""


TEXT = Purpose(
    slow="The chat template or the tokenizer took longer than {timeout:g} s for this request (text_timeout).",
    died=None,
    bound="text_timeout",
)


@dataclass(eq=False, repr=False)
class _Work:
    """A job and the future of its answer, which the caller awaits."""

    job: str
    body: bytes
    answer: asyncio.Future[Answer]


class TextWorkers:
    def __init__(
        self, setup: Callable[[], TextSetup], count: int, timeout: float, niceness: int, purpose: Purpose = TEXT
    ) -> None:
        """Start no process yet, and later at most `count` processes.

        `timeout` is the longest time in seconds that a job may wait, and also the longest time that it may run.
        """
        self._setup = setup
        self._count = count
        self._timeout = timeout
        self._niceness = niceness
        self._purpose = purpose
        self._waiting: deque[_Work] = deque()
        self._workers: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(self, job: Job[R], body: bytes) -> R:
        """Return the result of `job`. Raise the job's error, and BadRequestError if the job took too long.

        Raise ServerUnavailableError if no worker was free in time, or if the worker died.
        """
        if self._closed:
            raise ServerUnavailableError("The server is shutting down.")
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        work = _Work(job.name, body, answer)
        self._waiting.append(work)
        self._dispatch()
        expired = asyncio.get_running_loop().call_later(self._timeout, self._give_up_waiting, work)
        try:
            done = await work.answer
        finally:
            expired.cancel()
            answer.cancel()
            if work in self._waiting:
                self._waiting.remove(work)
        if done.status != 200:
            message = bytes(done.data).decode()
            if done.is_malformed:
                raise MalformedBodyError(message)
            raise error_for_status(done.status, message, code=done.code)
        return msgspec.msgpack.decode(done.data, type=job.result)

    async def close(self) -> None:
        """Fail all waiting and running jobs, and end all workers. Idempotent."""
        self._closed = True
        for work in self._waiting:
            _fail(work, ServerUnavailableError("The server is shutting down."))
        self._waiting.clear()
        for worker in list(self._workers):
            self._end(worker, ServerUnavailableError("The server is shutting down."))
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*self._ending, return_exceptions=True)

    @property
    def pids(self) -> list[int]:
        return [worker.child.pid for worker in self._workers]

    # -- assigning jobs -------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        while self._waiting and self._idle:
            self._idle.pop().begin(self._waiting.popleft(), self._timeout)
        missing = min(len(self._waiting) - len(self._starting), self._count - len(self._workers) - len(self._starting))
        for _ in range(missing if not self._closed else 0):
            self._starting.add(asyncio.ensure_future(self._start_worker()))

    def _give_up_waiting(self, work: _Work) -> None:
        if work in self._waiting:
            self._waiting.remove(work)
            _fail(
                work,
                ServerUnavailableError(
                    f"All {self._count} text workers were busy for {self._timeout:g} s (settings text_workers, "
                    f"{self._purpose.bound}). Try again later."
                ),
            )

    def _on_idle(self, worker: _Worker) -> None:
        self._idle.append(worker)
        self._dispatch()

    # -- processes ------------------------------------------------------------------------------------------

    async def _start_worker(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            worker = await asyncio.to_thread(
                _Worker.start, self._setup(), self._niceness, self._purpose, lambda: self._closed
            )
        except (VerlServerError, OSError) as error:
            self._starting.discard(task)
            self._on_failed_start(error)
            return
        self._starting.discard(task)
        self._workers.add(worker)
        worker.attach(self._on_idle, self._end)
        if self._closed:
            self._end(worker, ServerUnavailableError("The server is shutting down."))
        else:
            self._on_idle(worker)

    def _on_failed_start(self, error: Exception) -> None:
        """Fail all waiting jobs if there is no other worker. Another start would fail as well."""
        if not self._closed:
            logger.error("A text worker could not be started: %s", error)
        while self._waiting and not self._workers:
            _fail(self._waiting.popleft(), ServerUnavailableError(f"No text worker could be started: {error}"))

    def _end(self, worker: _Worker, error: VerlServerError | None) -> None:
        """Kill a worker. Its job fails with `error` or, if that is None, with the exit status of the process."""
        if worker not in self._workers:
            return
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        task = asyncio.ensure_future(worker.end(error))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        self._dispatch()


class _Worker:
    """One worker process, and the parent's end of its socket."""

    def __init__(self, child: ChildProcess, messages: MessageSocket, purpose: Purpose) -> None:
        self.child = child
        self._purpose = purpose
        self._messages = messages
        self._work: _Work | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @classmethod
    def start(cls, setup: TextSetup, niceness: int, purpose: Purpose, is_unwanted: Callable[[], bool]) -> _Worker:
        """Start a process, and block until it is ready. Do not call it on the loop.

        Raise ServerLaunchError if the process ends, if it is not ready in time, or as soon as `is_unwanted` returns
        True.
        """
        messages, worker_end = MessageSocket.pair()
        with worker_end:
            argument = {"socket": worker_end.fileno(), "niceness": niceness}
            environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
            child = ChildProcess("text-worker", _MODULE, argument, environment, pass_fds=(worker_end.fileno(),))

        def check() -> None:
            if is_unwanted():
                raise ServerLaunchError("The server is shutting down.")

        try:
            messages.send(msgspec.msgpack.encode(setup))
            while messages.unsent:  # until the child has read it or has ended; then `wait_ready` raises the reason
                check()
                wait_writable(messages, 0.2)
                messages.flush()
            child.wait_ready(_START_SECONDS, also=check)
        except BaseException:
            child.terminate(grace=0)
            messages.close()
            raise
        return cls(child, messages, purpose)

    def attach(
        self, on_idle: Callable[[_Worker], None], on_end: Callable[[_Worker, VerlServerError | None], None]
    ) -> None:
        """Watch the socket on the running loop. At the end `on_end` is called.

        Its argument is the error because of which the worker must be killed, or None if the worker has died.
        """
        self._on_idle, self._on_end = on_idle, on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._messages.fileno(), self._on_readable)

    def begin(self, work: _Work, timeout: float) -> None:
        """Send a job to the process, which may run for `timeout` seconds."""
        self._work = work
        self._deadline = self._loop.call_later(timeout, self._on_timeout, timeout)
        self._messages.send(work.job.encode())
        self._messages.send(work.body)
        if self._messages.unsent:
            self._loop.add_writer(self._messages.fileno(), self._on_writable)

    async def end(self, error: VerlServerError | None) -> None:
        """Kill the process. Its job fails with `error` or, if that is None, with the exit status of the process."""
        self._loop.remove_reader(self._messages.fileno())
        self._loop.remove_writer(self._messages.fileno())
        self._messages.close()
        if self._deadline is not None:
            self._deadline.cancel()
        work, self._work = self._work, None
        if work is not None and error is not None:
            _fail(work, error)
        code = await asyncio.to_thread(self.child.terminate, 0.0)
        if work is not None and error is None:
            message = f"The text worker ended with {describe_exit(code)} while it worked on this request."
            logger.error("%s%s", message, self.child.log_tail())
            died = self._purpose.died
            if died is not None:
                _fail(work, JobKilledError(died.format(exit=describe_exit(code))))
            else:
                _fail(work, ServerUnavailableError(message))

    def _on_timeout(self, timeout: float) -> None:
        message = self._purpose.slow.format(timeout=timeout)
        logger.warning("%s The text worker is killed.", message)
        self._on_end(self, JobKilledError(message))

    def _on_writable(self) -> None:
        self._messages.flush()
        if not self._messages.unsent:
            self._loop.remove_writer(self._messages.fileno())

    def _on_readable(self) -> None:
        answers = self._messages.receive()
        for data in answers:
            work, self._work = self._work, None
            if self._deadline is not None:
                self._deadline.cancel()
            if work is not None and not work.answer.done():
                work.answer.set_result(_ANSWER.decode(data))
        if self._messages.is_closed:
            self._on_end(self, None)
        elif answers:
            self._on_idle(self)


_ANSWER = msgspec.msgpack.Decoder(Answer)


def _fail(work: _Work, error: VerlServerError) -> None:
    if not work.answer.done():
        work.answer.set_exception(error)
