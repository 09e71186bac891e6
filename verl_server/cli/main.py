"""The command line: `verl-server serve | warm-up | router | rollout | watch | trajectories | env | demo | bench`.

Each command imports its modules when it runs, so that `--help` is fast. The options of `serve` are the fields of
`ServerArgs`, and the docstrings of the fields are their help.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_server._version import __version__

if TYPE_CHECKING:
    from verl_server.server_args import ServerArgs

USAGE = """\
usage: verl-server [--help] [--version] COMMAND [OPTIONS]

The rollout server for agentic RL: serve a policy over HTTP, roll it out, train it, push the weights back.

commands:
  serve     serve a model:           verl-server serve --model-path FOLDER_OR_HUB_ID --port 30000
  warm-up   compile a server's kernels before its first start, for container images; takes the options of serve
  router    many servers behind one address:  verl-server router --server URL --server URL
  rollout   run agents in environments, with a server's policy; with --agent, any function or program
  trajectories  list, show, count, index and export what a rollout recorded:  verl-server trajectories ls | show ...
  env       serve an environment:    verl-server env serve MODULE:CLASS --port 8000
  demo      train a tiny policy on a multi-turn game, with all processes on this machine
  bench     measure the engine:      verl-server bench offline --device cpu --shape tiny

`verl-server COMMAND --help` lists a command's options and exit statuses. `python -m verl_server` is the same program.
Policies are trained by others:  python -m verl_server.train.grpo --help, also train.async_grpo and train.ppo
"""


@dataclass(frozen=True)
class WarmUpArgs:
    """Compile the kernels of a server into the Triton cache (TRITON_CACHE_DIR), and end.

    The options are those of serve, and two more: without a GPU, name the one on which the server will run with
    --gpu-capability and --gpu-multiprocessors. They are 9.0 and 132 for H100 SXM and H200, 8.0 and 108 for A100, 8.6
    and 82 for RTX 3090, 8.9 and 128 for RTX 4090, 10.0 and 148 for B200, 12.0 and 170 for RTX 5090.

    Exit status: 0 when the kernels are in the cache, 1 after an error, 2 for wrong options.
    """

    gpu_capability: float | None = None
    """CUDA capability of the GPU. None: that of the GPU of this machine."""
    gpu_multiprocessors: int | None = None
    """Number of multiprocessors of the GPU. None: that of the GPU of this machine."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status. A VerlServerError is printed as a message without a traceback."""
    args = list(sys.argv[1:] if argv is None else argv)
    commands: dict[str, Callable[[list[str]], int]] = {
        "serve": _serve,
        "warm-up": _warm_up,
        "router": _router,
        "rollout": _rollout,
        "watch": _watch,
        "trajectories": _trajectories,
        "env": _env,
        "demo": _demo,
        "bench": bench,
    }
    if not args or args[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if args else 2
    if args[0] in ("-V", "--version"):
        print(f"verl-server {__version__}")
        return 0
    if args[0] not in commands:
        print(f"verl-server: unknown command {args[0]!r}; commands: {', '.join(commands)}", file=sys.stderr)
        return 2
    from verl_server import lora
    from verl_server.errors import VerlServerError

    try:
        lora.refuse_options(args)
        return commands[args[0]](args[1:])
    except VerlServerError as error:
        print(f"verl-server {args[0]}: {error}", file=sys.stderr)
        return int(getattr(error, "exit_status", 1))
    except KeyboardInterrupt:
        return 130


def _serve(args: list[str]) -> int:
    def serve(server_args: ServerArgs) -> None:
        from verl_server.server.launch import run_server

        _warn_of_visible_keys(args)
        run_server(server_args, lambda resolved: print(f"Ready: {resolved.url}", file=sys.stderr, flush=True))

    return _with_server_args("serve", args, SERVE_HELP, serve)


def _warm_up(args: list[str]) -> int:
    import tyro

    gpu, others = tyro.cli(WarmUpArgs, args=args, return_unknown_args=True, add_help=False)

    def warm_up(server_args: ServerArgs) -> None:
        from verl_server.worker.startup.warm_up import warm_up

        print(warm_up(server_args, gpu.gpu_capability, gpu.gpu_multiprocessors))

    return _with_server_args("warm-up", others, inspect.getdoc(WarmUpArgs) or "", warm_up)


def _with_server_args(command: str, args: list[str], description: str, run: Callable[[ServerArgs], None]) -> int:
    """Parse the options of `ServerArgs`, configure logging, and call `run`. Errors name flags instead of fields."""
    import tyro

    from verl_server.cli.option_names import with_flags
    from verl_server.errors import VerlServerError
    from verl_server.files.json_options import JSON_OPTIONS
    from verl_server.server_args import ServerArgs

    given = [*_keys_of_environment(), *(_ALIASES.get(arg, arg) for arg in args)]
    parsed = tyro.cli(
        _unchecked(ServerArgs),
        prog=f"verl-server {command}",
        args=given,
        description=description,
        registry=JSON_OPTIONS,
    )
    try:
        server_args = ServerArgs(**vars(parsed))
        from verl_server.server.launch import configure_logging

        configure_logging(server_args)
        run(server_args)
    except VerlServerError as error:
        message, *details = str(error).split("\n\n", 1)
        raise VerlServerError("\n\n".join([with_flags(message, list(vars(parsed))), *details])) from None
    return 0


def _unchecked(settings: type[ServerArgs]) -> type[ServerArgs]:
    """Return a class with the same options and no checks. tyro would wrap the errors of the checks.

    `_serve` checks the options after tyro has parsed all of them.
    """
    return type(settings.__name__, (settings,), {"__post_init__": _nothing, "__doc__": settings.__doc__})


def _nothing(settings: object) -> None: ...


SERVE_HELP = (
    "Serve a policy over HTTP until SIGTERM or Ctrl-C. The routes are those of SGLang, OpenAI, Anthropic and vLLM."
    "\n\nExit status: 0 after SIGTERM or Ctrl-C, 1 if the server cannot start or its scheduler ended, 2 for wrong "
    "options."
)
_ALIASES = {"--stream-output": "--incremental-streaming-output"}
"""Older names of SGLang's flags."""
_KEY_FLAGS = {"VERL_SERVER_API_KEY": "--api-key", "VERL_SERVER_ADMIN_API_KEY": "--admin-api-key"}


def _keys_of_environment() -> list[str]:
    """Return the keys in the environment as flags, and remove them from the environment, which children inherit."""
    given = [(flag, os.environ.pop(name, "")) for name, flag in _KEY_FLAGS.items()]
    return [f"{flag}={key}" for flag, key in given if key]


def _warn_of_visible_keys(args: list[str]) -> None:
    for name, flag in _KEY_FLAGS.items():
        if any(arg.replace("_", "-").split("=")[0] == flag for arg in args):
            logging.getLogger(__name__).warning(
                "Every user of this host can read the value of %s on the command line. Set %s, or use %s-file.",
                flag,
                name,
                flag,
            )


def _rollout(args: list[str]) -> int:
    from verl_server.files.command_options import OptionError

    args = [re.sub(r"^--env-timeouts\.", "--env.", arg) for arg in args]  # an older name
    if any(arg.split("=")[0] == "--episodes" for arg in args):
        raise OptionError(
            "--episodes was removed. Use --groups N for N seeds or tasks, and --group-size for the episodes of each "
            "(1 by default)."
        )
    if any(arg.split("=")[0] == "--agent" or arg.removeprefix("--tasks=").startswith("verifiers:") for arg in args):
        return _delegate("rollout", "verl_server.cli.agents", args)
    return _delegate("rollout", "verl_server.cli.rollout", args)


def _router(args: list[str]) -> int:
    return _delegate("router", "verl_server.fleet.process", args)


def _watch(args: list[str]) -> int:
    return _delegate("watch", "verl_server.cli.watch", args)


def _trajectories(args: list[str]) -> int:
    if args[:1] == ["repair"]:
        return _delegate("trajectories repair", "verl_server.server.sessions.journal_repair", args[1:])
    return _delegate("trajectories", "verl_server.cli.trajectories", args)


def _env(args: list[str]) -> int:
    if args[:1] != ["serve"]:
        asked = args[:1] in (["-h"], ["--help"])
        usage = "usage: verl-server env serve MODULE:CLASS [OPTIONS]   (`verl-server env serve --help` lists them)"
        print(usage, file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return _delegate("env", "verl_server.rollout.environments.env_process", args[1:])


def _demo(args: list[str]) -> int:
    return _delegate("demo", "verl_server.train.demo", args)


def _delegate(command: str, module: str, args: list[str]) -> int:
    """Run `main(args)` of a module that an installation may lack."""
    if importlib.util.find_spec(module) is None:
        print(f"verl-server {command}: {module} is not part of this installation.", file=sys.stderr)
        return 2
    status = importlib.import_module(module).main(args)
    return int(status or 0)


def bench(args: list[str]) -> int:
    """Run `benchmarks.NAME` for `verl-server bench NAME OPTIONS`, in the folder of a checkout.

    `verl-server bench` lists the names, and `verl-server bench NAME --help` the options of one.

    Exit status: that of the benchmark, 2 for an unknown name or outside of a checkout.
    """
    name = args[0] if args and not args[0].startswith("-") else ""
    sys.path.insert(0, "")
    if importlib.util.find_spec("benchmarks") is None:
        print("verl-server bench: run this in a checkout; benchmarks are not installed.", file=sys.stderr)
        return 2
    if not name or importlib.util.find_spec(f"benchmarks.{name}") is None:
        print(_bench_usage(name), file=sys.stderr)
        return 0 if not name and ("--help" in args or "-h" in args) else 2
    sys.argv = [f"verl-server bench {name}", *args[1:]]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return 0


def _bench_usage(name: str) -> str:
    """Return the usage of `bench`, with the names of all benchmarks. `name` is a name that is none of them, or ""."""
    folder = importlib.import_module("benchmarks").__path__[0]
    found = [path for path in sorted(Path(folder).glob("*.py")) if '__name__ == "__main__"' in path.read_text("utf-8")]
    wrong = f"verl-server bench: there is no benchmark {name!r}.\n" if name else ""
    names = ", ".join(["gates", *(path.stem for path in found)])
    return f"{wrong}usage: verl-server bench NAME [OPTIONS]\n\nNAME: " + textwrap.fill(
        names, 100, subsequent_indent="      "
    )
