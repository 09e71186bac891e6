"""Starts and stops a server: scheduler processes, TokenizerManager and HTTP, which all end together.

`launch_server` runs a whole server in this process. `HttpServerEngineAdapter` starts a server as a child process, with
`python -m verl_server.server.launch`. `EngineProcesses` is the part that `Engine` uses too.
`launch_server_from_verl_engine` serves HTTP on the event loop of a running engine. If one process dies, all processes
end, and the error contains the traceback of the process that died.

Functions import the modules for HTTP and text after they have started the scheduler processes. The imports of the
scheduler processes take seconds, and this process does its own imports during that time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import http.client
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from verl_server.errors import BadRequestError, ServerDiedError, ServerLaunchError
from verl_server.files.run_output import check_folder
from verl_server.ipc.child_process import ChildProcess, child_main, describe_exit
from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.sockets import bind_socket
from verl_server.messages.results import SchedulerInfo
from verl_server.server.text.tokenizer import ModelText
from verl_server.server_args import ServerArgs

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from verl_server.server.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_STOP_GRACE = 10.0
"""Seconds after which child processes that have not ended by themselves are killed."""

_SEED_BITS = 53
"""Size of a drawn seed in bits. Every JSON reader represents an integer of this size exactly."""

Check = Callable[[], None]
"""A function that is called repeatedly during a wait. It raises an exception to end the wait."""


class EngineProcesses:
    """The scheduler processes of this node and, on node 0, the TokenizerManager."""

    def __init__(self, server_args: ServerArgs, on_death: Callable[[Exception], None] | None = None) -> None:
        """Start all processes without waiting for them. Call `wait_ready` next."""
        self.server_args = server_args = with_random_seed(server_args)
        """The settings of the caller. If they have no random seed, a drawn seed is set."""
        self.manager: TokenizerManager | None = None
        self.children: list[ChildProcess] = []
        self._model_text = ModelText(server_args)  # before any process is started, because it raises for a wrong path
        if server_args.node_rank == 0:
            check_output_folders(server_args)
            logger.info("random_seed=%d seeds the requests without a sampling_seed.", server_args.random_seed)
        self._folder = tempfile.mkdtemp(prefix="verl-server-")  # private (mode 0700): for the ranks' rendezvous file
        try:
            messages, schedulers_end = MessageSocket.pair()
            with schedulers_end:  # only the child keeps this end open, so the connection closes when the child ends
                self._start_children(schedulers_end)
            if server_args.node_rank == 0:
                from verl_server.server.tokenizer_manager import TokenizerManager

                self.manager = TokenizerManager(server_args, messages, on_death)
            else:
                messages.close()
        except BaseException:
            self.shutdown()
            raise

    def _start_children(self, schedulers_end: socket.socket) -> None:
        args = self.server_args
        init_addr = args.dist_init_addr
        if init_addr is None and args.tp_size > 1:
            init_addr = f"file://{self._folder}/ranks"  # a TCP store would listen on every interface
        first, count = args.node_rank * args.ranks_per_node, args.ranks_per_node
        module = "verl_server.scheduler.process"
        if args.engine != "embedded":  # one process, which starts the workers of the engine itself
            first, count, module = 0, 1, f"verl_server.backends.{args.engine}.main"
        for tp_rank in range(first, first + count):
            argument = {
                "server_args": args.to_json(),
                "tp_rank": tp_rank,
                "init_addr": init_addr,
                "socket": schedulers_end.fileno(),
                "leftovers": [self._folder],
            }
            fds = (schedulers_end.fileno(),) if tp_rank == 0 else ()
            name = f"scheduler-tp{tp_rank}" if args.engine == "embedded" else args.engine
            self.children.append(ChildProcess(name, module, argument, pass_fds=fds))

    def wait_ready(self, check: Check | None = None) -> SchedulerInfo:
        """Load the tokenizer, then wait until all child processes are ready. Return the first child's scheduler_info.

        Raise ServerLaunchError if a child ends or is not ready within `startup_timeout`. Errors of `check` pass
        through.
        """
        deadline = time.monotonic() + self.server_args.startup_timeout
        if self.manager is not None:
            self._model_text.load_tokenizer()
        infos: list[SchedulerInfo] = []
        for child in self.children:
            left = max(0.0, deadline - time.monotonic())
            info = child.wait_ready(left, also=functools.partial(self._check, child, check))
            infos.append(cast(SchedulerInfo, info))
        if self.manager is not None:
            self.manager.start(self._model_text, infos[0], self.children)
        return infos[0]

    def _check(self, waiting_for: ChildProcess, check: Check | None) -> None:
        """Raise the error of `check`, or an error if another child than `waiting_for` has failed during the wait."""
        if check is not None:
            check()
        for child in self.children:
            if child is not waiting_for and (code := child.poll()) not in (None, 0):
                child.wait_ready(1.0)  # raises what the child reported
                raise ServerLaunchError(
                    f"{child.name} ended with {describe_exit(code)} while starting.{child.log_tail()}"
                )

    def shutdown(self) -> None:
        """End requests, HTTP and child processes within a bounded time. Idempotent."""
        if self.manager is not None:
            self.manager.shutdown()
        threads = [threading.Thread(target=child.terminate, args=(_STOP_GRACE,)) for child in self.children]
        for thread in threads:  # end all children at the same time, because ranks wait for each other
            thread.start()
        for thread in threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def with_random_seed(server_args: ServerArgs) -> ServerArgs:
    """Return `server_args` with a `random_seed`: the given seed, or else one from the operating system.

    Trainer ranks seed the generators of Python and torch alike, so a seed from these generators would be the same for
    all replicas. Only the first node draws a seed, because only the scheduler's rank 0 uses it.
    """
    if server_args.random_seed is not None or server_args.node_rank > 0:
        return server_args
    return server_args.replace(random_seed=secrets.randbits(_SEED_BITS))


def launch_server(
    server_args: ServerArgs,
    pipe_finish_writer: Connection | None = None,
    launch_callback: Callable[[], None] | None = None,
) -> None:
    """Run a server in this process until SIGTERM or SIGINT. Raise ServerDiedError if one of its child processes dies.

    After the warm-up request was answered, "ready" is sent on `pipe_finish_writer`, and `launch_callback` is called. If
    the start fails, the text of the error is sent on the pipe, and the error is raised.
    """

    def on_ready(_: ServerArgs) -> None:
        _announce(pipe_finish_writer, launch_callback)

    try:
        run_server(server_args, on_ready)
    except Exception as error:
        _send(pipe_finish_writer, str(error) or repr(error))
        raise


def run_server(server_args: ServerArgs, on_ready: Callable[[ServerArgs], None]) -> None:
    """Run a server as `launch_server` does. `on_ready` is called with the resolved settings, which include the port."""
    if server_args.node_rank > 0:
        _run_followers(server_args, on_ready)
        return
    with _StopRequest() as stop, contextlib.ExitStack() as cleanup:
        sock = bind_socket(server_args.host, server_args.port)
        cleanup.callback(sock.close)
        server_args = server_args.replace(port=sock.getsockname()[1])
        processes = EngineProcesses(server_args, on_death=stop.die)
        cleanup.callback(processes.shutdown)
        server_args = processes.server_args
        assert processes.manager is not None
        from verl_server.server.http_process import HttpServer

        server = HttpServer(processes.manager, server_args, sock)
        server.start()  # answer 503 from now on, so that clients can tell a starting server from a missing one
        try:
            processes.wait_ready(stop.check)
            server.open_sessions()
            _warm_up(server_args, stop.check)
            processes.manager.ready = True
            logger.info("Serving %s at %s", server_args.model_path, server_args.url)
            on_ready(server_args)
            stop.wait()
        except _StopRequestedError:
            logger.info("Stopping.")


def _run_followers(server_args: ServerArgs, on_ready: Callable[[ServerArgs], None]) -> None:
    """Run a node that is not the first: only scheduler ranks, which end when the first node's ranks end."""
    with _StopRequest() as stop, contextlib.ExitStack() as cleanup:
        processes = EngineProcesses(server_args)
        cleanup.callback(processes.shutdown)
        try:
            processes.wait_ready(stop.check)
            on_ready(server_args)
            wait_for_followers(processes, stop.check)
        except _StopRequestedError:
            logger.info("Stopping.")


def wait_for_followers(processes: EngineProcesses, check: Check | None = None) -> None:
    """Block until a child process ends. Raise ServerDiedError if its exit status is not 0."""
    while True:
        if check is not None:
            check()
        for child in processes.children:
            if (code := child.poll()) is not None:
                if code != 0:
                    raise ServerDiedError(f"{child.name} ended with {describe_exit(code)}.{child.log_tail()}")
                return
        time.sleep(0.1)


def launch_server_from_verl_engine(
    tokenizer_manager: TokenizerManager,
    scheduler_info: dict[str, Any],
    server_args: ServerArgs,
    pipe_finish_writer: Connection | None = None,
    launch_callback: Callable[[], None] | None = None,
) -> None:
    """Serve HTTP for a running in-process engine, on the event loop of its TokenizerManager. Call it in a thread.

    Block until the engine shuts down or `tokenizer_manager.stop_http()` is called. Other threads can use the engine at
    the same time, because their calls run on the same loop. (With a second loop, as in an earlier design, the second
    weight update never returned: docs/design-history.md.)

    `pipe_finish_writer` and `launch_callback` are used as in `launch_server`; `scheduler_info` is not used.
    """
    del scheduler_info  # part of the earlier design's signature; the manager has the same information
    from verl_server.server.http_process import HttpServer

    try:
        sock = bind_socket(server_args.host, server_args.port)
        seed = tokenizer_manager.server_args.random_seed
        server_args = server_args.replace(port=sock.getsockname()[1], random_seed=seed)
        server = HttpServer(tokenizer_manager, server_args, sock)
        try:
            server.start()
            server.open_sessions()
            if not tokenizer_manager.ready:
                _warm_up_live(tokenizer_manager, server_args)
                tokenizer_manager.ready = True
            _announce(pipe_finish_writer, launch_callback)
            server.join()
        finally:
            server.end()
            sock.close()
    except Exception as error:
        _send(pipe_finish_writer, str(error) or repr(error))
        raise


# -- warm-up and announcements ------------------------------------------------------------------------------


def _warm_up(server_args: ServerArgs, check: Check) -> None:
    """Send one request through all processes, including HTTP. Raise ServerLaunchError if the answer is not 200."""
    headers = {"Content-Type": "application/json"}
    if server_args.api_key:
        headers["Authorization"] = f"Bearer {server_args.api_key}"
    sampling_params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    # A prompt of one token ends vLLM 0.32 on a CPU if the model has linear attention.
    body = json.dumps({"input_ids": [0, 0], "sampling_params": sampling_params})
    outcome: list[tuple[int, bytes] | Exception] = []

    def post() -> None:
        url = urlsplit(server_args.url)
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=server_args.startup_timeout)
        try:
            connection.request("POST", "/generate", body, headers)
            response = connection.getresponse()
            outcome.append((response.status, response.read()))
        except Exception as error:
            outcome.append(error)
        finally:
            connection.close()

    thread = threading.Thread(target=post, name="warm-up", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.2)
        check()
    answer = outcome[0]
    if isinstance(answer, Exception):
        raise ServerLaunchError(f"The warm-up request to {server_args.url} failed: {answer!r}")
    status, text = answer
    if status != 200:
        raise ServerLaunchError(f"The warm-up request was answered {status}: {text.decode(errors='replace')}")


def _warm_up_live(manager: TokenizerManager, server_args: ServerArgs) -> None:
    """Send the warm-up request to a running engine.

    The owner may have paused the engine, or released its memory. So nothing is sent during a pause, and a failure is
    only logged.
    """
    if manager.controls.is_paused:
        return
    try:
        _warm_up(server_args, manager.check_serving)
    except ServerLaunchError as error:
        logger.warning("HTTP is up, but the engine cannot generate now: %s", error)


def _announce(pipe: Connection | None, callback: Callable[[], None] | None) -> None:
    _send(pipe, "ready")
    if callback is not None:
        callback()


def _send(pipe: Connection | None, text: str) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError, OSError):  # the reader has closed the pipe
            pipe.send(text)


# -- stopping -----------------------------------------------------------------------------------------------


class _StopRequestedError(Exception):
    """The process received SIGTERM or SIGINT."""


class _StopRequest:
    """Ends the wait of a serving process when it receives a signal (in the main thread) or when a child dies."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._death: Exception | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._event.set()

    def die(self, error: Exception) -> None:
        self._death = error
        self._event.set()

    def check(self) -> None:
        """If the server must end, raise the reason: the error of `die`, or _StopRequestedError after a signal."""
        if self._death is not None:
            raise self._death
        if self._event.is_set():
            raise _StopRequestedError

    def wait(self) -> None:
        """Block until a signal, a call of `die`, or the end of the main thread. Then raise as `check` does."""
        while not self._event.wait(0.5):
            if not threading.main_thread().is_alive():
                self._event.set()
        self.check()


# -- as a child process -------------------------------------------------------------------------------------


def configure_logging(server_args: ServerArgs) -> None:
    """Configure logging in a process of the server. An in-process engine leaves logging to the caller's program."""
    logging.basicConfig(
        level=server_args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for name in ("httpx", "httpx2", "httpcore"):  # HTTP clients of this package and of the Hugging Face hub
        logging.getLogger(name).setLevel(logging.WARNING)


def _serve_child(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    server_args = ServerArgs.from_json(argument["server_args"])
    configure_logging(server_args)

    def on_ready(resolved: ServerArgs) -> None:
        gc.freeze()  # modules and tokenizer live as long as the process: exclude them from garbage collections
        ready({"url": resolved.url, "port": resolved.port, "pid": os.getpid()})

    run_server(server_args, on_ready)


def check_output_folders(server_args: ServerArgs) -> None:
    """Create the folders to which a server writes, and test that they are writable, before a model is loaded.

    Raise BadRequestError, which names the setting, the folder and the reason.
    """
    for name in ("session_store", "profile_folder"):
        folder = getattr(server_args, name)
        if folder is not None:
            if not folder.strip():
                raise BadRequestError(f"ServerArgs.{name} is empty: name a folder, or leave the setting out.")
            try:
                check_folder(Path(folder))
            except BadRequestError as error:
                raise BadRequestError(f"ServerArgs.{name}: {error}") from None


if __name__ == "__main__":
    child_main(_serve_child)
