"""Starts SGLang's scheduler processes without its tokenizer and detokenizer.

`SglangDriver` calls `launch`. SGLang's `Engine` lets a subclass choose the function that each scheduler process runs
(`run_scheduler` here), and replaces classes through its plugin hooks before a process constructs them.
"""

from __future__ import annotations

import multiprocessing
from typing import Any, NamedTuple

from verl_server.backends.sglang.settings import GRAMMARS
from verl_server.errors import BadRequestError


class Launched(NamedTuple):
    to_scheduler: Any
    """zmq socket (PUSH) to rank 0, which sends each message on to all ranks."""
    outputs: Any
    """zmq socket (PULL) with the messages of `outputs`, in the order in which rank 0 sent them."""
    info: dict[str, Any]
    """What `HeldScheduler.get_init_info` returns on rank 0."""
    processes: list[Any]


def launch(settings: dict[str, Any]) -> Launched:
    """Start the schedulers with `settings`, arguments of SGLang's `ServerArgs`, and wait until all are ready.

    Call it in the main thread. If a scheduler fails during the start, SGLang raises RuntimeError.
    """
    import zmq
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import PortArgs
    from sglang.srt.server_args import ServerArgs as SglangServerArgs
    from sglang.srt.utils.network import get_zmq_socket

    class Schedulers(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

    class Sockets:
        """Takes the place of SGLang's `TokenizerManager`."""

        def __init__(self, _: Any, ports: Any) -> None:
            context = zmq.Context(2)
            self.to_scheduler = get_zmq_socket(context, zmq.PUSH, ports.scheduler_input_ipc_name, True)
            self.outputs = get_zmq_socket(context, zmq.PULL, ports.tokenizer_ipc_name, True)
            self.max_req_input_len = 0

    try:
        args = SglangServerArgs(**settings, custom_sigquit_handler=_leave_to_the_driver)
    except TypeError as error:  # an unknown name
        raise BadRequestError(f"engine_args has a name that SGLang's ServerArgs lacks: {error}") from None
    ports = PortArgs.init_new(args)
    ports.detokenizer_ipc_name = ports.tokenizer_ipc_name
    sockets, _, _, started, watchdog = Schedulers._launch_subprocesses(
        server_args=args,
        init_tokenizer_manager_func=lambda *given: (Sockets(*given), None),
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=_leave_to_the_driver,
        port_args=ports,
    )
    watchdog.stop()  # it would send SIGQUIT; the driver waits for the end of each process itself
    children = {process.pid: process for process in multiprocessing.active_children()}
    processes = [children[pid] for pid in started.all_child_pids if pid in children]
    return Launched(sockets.to_scheduler, sockets.outputs, started.scheduler_infos[0], processes)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, with the classes of this package in place of SGLang's."""
    from sglang.srt.constrained.base_grammar_backend import register_grammar_backend
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from verl_server.backends.sglang import draws
    from verl_server.backends.sglang.grammars import make_grammars
    from verl_server.backends.sglang.scheduler import HeldScheduler

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler", HeldScheduler, HookType.REPLACE)
    HookRegistry.register(draws.BATCH_INFO, draws.with_seeds, HookType.AROUND)
    HookRegistry.register(draws.SAMPLE, draws.sample, HookType.REPLACE)
    register_grammar_backend(GRAMMARS, make_grammars)
    run_scheduler_process(*args, **kwargs)  # it loads the plugins, which applies the hooks


def _leave_to_the_driver(*_: Any) -> None:
    """Do nothing on SIGQUIT, which a failed scheduler sends: its end is noticed."""
