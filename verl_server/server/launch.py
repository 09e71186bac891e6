"""Starting and stopping a server: scheduler children, TokenizerManager, HTTP, and one end for all of them.

`launch_server` is a whole server process (`python -m verl_server.server.launch` is its child form, used by
`HttpServerEngineAdapter`). `EngineProcesses` is the part that `Engine` shares. `launch_server_from_verl_engine`
serves HTTP on a live engine's own loop. One process dies, all die, and the error carries its traceback.

What this process needs for HTTP and text is imported in functions, after its scheduler processes were started: their
imports take seconds, and so everything else happens meanwhile.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from verl_server.errors import ServerDiedError, ServerLaunchError
from verl_server.ipc.child_process import ChildProcess, child_main, describe_exit
from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.sockets import bind_socket
from verl_server.server.tokenizer import ModelText
from verl_server.server_args import ServerArgs

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from verl_server.server.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_STOP_GRACE = 10.0
"""Seconds that children and open connections get to end by themselves."""

_SEED_BITS = 53
"""Every JSON reader keeps such an integer exactly."""

Check = Callable[[], None]


class EngineProcesses:
    """The scheduler processes of this node and, on node 0, the TokenizerManager in front of them."""

    def __init__(self, server_args: ServerArgs, on_death: Callable[[Exception], None] | None = None) -> None:
        """Start everything without waiting; `wait_ready` follows."""
        self.server_args = server_args = with_random_seed(server_args)
        """The given settings, with the seed that was drawn where none was given."""
        self.manager: TokenizerManager | None = None
        self.children: list[ChildProcess] = []
        self._model_text = ModelText(server_args)  # first: a wrong path is known before anything is started
        if server_args.node_rank == 0:
            logger.info("Requests without a sampling_seed draw theirs from random_seed=%d.", server_args.random_seed)
        self._folder = tempfile.mkdtemp(prefix="verl-server-")  # private (mode 0700): where the ranks meet
        try:
            messages, schedulers_end = MessageSocket.pair()
            with schedulers_end:  # closed here when the child has it: then its end shows
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
        first = args.node_rank * args.ranks_per_node
        for tp_rank in range(first, first + args.ranks_per_node):
            argument = {
                "server_args": args.to_json(),
                "tp_rank": tp_rank,
                "init_addr": init_addr,
                "socket": schedulers_end.fileno(),
                "leftovers": [self._folder],
            }
            fds = (schedulers_end.fileno(),) if tp_rank == 0 else ()
            module = "verl_server.scheduler.process"
            self.children.append(ChildProcess(f"scheduler-tp{tp_rank}", module, argument, pass_fds=fds))

    def wait_ready(self, check: Check | None = None) -> dict[str, Any]:
        """Load the tokenizer meanwhile, wait for all children; returns the first one's scheduler_info."""
        deadline = time.monotonic() + self.server_args.startup_timeout
        if self.manager is not None:
            self._model_text.load_tokenizer()
        infos = []
        for child in self.children:
            left = max(0.0, deadline - time.monotonic())
            infos.append(child.wait_ready(left, also=functools.partial(self._check, child, check)))
        if self.manager is not None:
            self.manager.start(self._model_text, infos[0], self.children)
        return infos[0]

    def _check(self, waiting_for: ChildProcess, check: Check | None) -> None:
        """While one child is waited for, another may die: then the wait would be for nothing."""
        if check is not None:
            check()
        for child in self.children:
            if child is not waiting_for and (code := child.poll()) not in (None, 0):
                child.wait_ready(1.0)  # raises what the child reported
                raise ServerLaunchError(
                    f"{child.name} ended with {describe_exit(code)} while starting.{child.log_tail()}"
                )

    def shutdown(self) -> None:
        """End requests, HTTP, children; bounded, idempotent."""
        if self.manager is not None:
            self.manager.shutdown()
        threads = [threading.Thread(target=child.terminate, args=(_STOP_GRACE,)) for child in self.children]
        for thread in threads:  # all at once: ranks wait for each other
            thread.start()
        for thread in threads:
            thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def with_random_seed(server_args: ServerArgs) -> ServerArgs:
    """`server_args` with a `random_seed`: the given one, else one from the operating system.

    Trainer ranks seed Python's and torch's generators alike, so a seed from there would be the same for all replicas.
    It is drawn on the first node, where the scheduler's rank 0 is the only one that uses it.
    """
    if server_args.random_seed is not None or server_args.node_rank > 0:
        return server_args
    return server_args.replace(random_seed=secrets.randbits(_SEED_BITS))


def launch_server(
    server_args: ServerArgs,
    pipe_finish_writer: Connection | None = None,
    launch_callback: Callable[[], None] | None = None,
) -> None:
    """Run a server; blocks until it is told to stop (SIGTERM, SIGINT) or dies (raises ServerDiedError).

    After the warm-up request was answered, "ready" is sent on the pipe and the callback is called. If the start
    fails, the pipe gets the text of the error, and the error is raised.
    """

    def on_ready(_: ServerArgs) -> None:
        _announce(pipe_finish_writer, launch_callback)

    try:
        run_server(server_args, on_ready)
    except Exception as error:
        _send(pipe_finish_writer, str(error) or repr(error))
        raise


def run_server(server_args: ServerArgs, on_ready: Callable[[ServerArgs], None]) -> None:
    """`launch_server` with a callback that learns the resolved settings (the port)."""
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
        server.start()  # answers 503 from now on: a starting server is not a missing one
        try:
            processes.wait_ready(stop.check)
            _warm_up(server_args, stop.check)
            processes.manager.ready = True
            logger.info("Serving %s at %s", server_args.model_path, server_args.url)
            on_ready(server_args)
            stop.wait()
        except _StopRequestedError:
            logger.info("Stopping.")


def _run_followers(server_args: ServerArgs, on_ready: Callable[[ServerArgs], None]) -> None:
    """A node other than the first: only scheduler ranks, which end when the first node's do."""
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
    """Block until a child ends; raises ServerDiedError unless it ended well."""
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
    """Serve HTTP over a live in-process engine, on its TokenizerManager's own loop. Call it in a thread.

    Blocks until the engine shuts down or `tokenizer_manager.stop_http()` is called. The engine stays usable from
    other threads all the while: they submit to the same loop. (The original ran a second loop here, and the second
    weight update hung.)
    """
    del scheduler_info  # the manager has it; the argument is the original's
    from verl_server.server.http_process import HttpServer

    try:
        sock = bind_socket(server_args.host, server_args.port)
        seed = tokenizer_manager.server_args.random_seed
        server_args = server_args.replace(port=sock.getsockname()[1], random_seed=seed)
        server = HttpServer(tokenizer_manager, server_args, sock)
        try:
            server.start()
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
    """One request through the whole chain, HTTP included; raises ServerLaunchError if it is not answered."""
    headers = {"Content-Type": "application/json"}
    if server_args.api_key:
        headers["Authorization"] = f"Bearer {server_args.api_key}"
    sampling_params = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    body = json.dumps({"input_ids": [0], "sampling_params": sampling_params})
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
    """As `_warm_up`, on an engine that its owner may have paused or put to sleep: then nothing can be asked."""
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
        with contextlib.suppress(BrokenPipeError, OSError):  # the launcher stopped listening
            pipe.send(text)


# -- stopping -----------------------------------------------------------------------------------------------


class _StopRequestedError(Exception):
    """SIGTERM or SIGINT came."""


class _StopRequest:
    """Turns signals (in the main thread) and the death of a child into the end of the main wait."""

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
        """Raise what ended the server, if anything did."""
        if self._death is not None:
            raise self._death
        if self._event.is_set():
            raise _StopRequestedError

    def wait(self) -> None:
        """Block until a stop, a death, or the end of the program whose thread this is."""
        while not self._event.wait(0.5):
            if not threading.main_thread().is_alive():
                self._event.set()
        self.check()


# -- as a child process -------------------------------------------------------------------------------------


def configure_logging(server_args: ServerArgs) -> None:
    """For processes that are ours alone; an in-process engine leaves logging to its program."""
    logging.basicConfig(
        level=server_args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    for name in ("httpx", "httpx2", "httpcore"):  # ours and the hub client's
        logging.getLogger(name).setLevel(logging.WARNING)


def _serve_child(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    server_args = ServerArgs.from_json(argument["server_args"])
    configure_logging(server_args)

    def on_ready(resolved: ServerArgs) -> None:
        gc.freeze()  # imports and tokenizer live as long as the process: keep them out of every collection
        ready({"url": resolved.url, "port": resolved.port, "pid": os.getpid()})

    run_server(server_args, on_ready)


if __name__ == "__main__":
    child_main(_serve_child)
