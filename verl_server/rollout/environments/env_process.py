"""The process that serves an environment: `verl-server env serve`, or the child of an `EnvServer`.

The process prints its URL, or reports it to its parent, when it answers. It ends on SIGTERM, on Ctrl-C or with its
parent. `python -m verl_server.rollout.environments.env_process` is the same command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.command_options import parse_options
from verl_server.files.json_files import parse_json
from verl_server.ipc.child_process import child_main
from verl_server.ipc.descriptors import DESCRIPTOR_SLACK, raise_descriptor_limit
from verl_server.ipc.sockets import bind_socket
from verl_server.rollout.environment import KEY_VARIABLE
from verl_server.rollout.environments.env_door import check_address
from verl_server.rollout.environments.env_factory import load_factory
from verl_server.rollout.environments.env_server import create_env_app, make_server
from verl_server.web.key_files import read_key_file


@dataclass(frozen=True)
class EnvServerArgs:
    """Serve an environment with OpenEnv's protocol, one environment for each connection, until SIGTERM or Ctrl-C.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 if the environment cannot be loaded, 2 for wrong options.
    """

    environment: Positional[str]
    """MODULE:CLASS or FILE.py:CLASS. The module is searched in the current folder first. In place of the class, a
    function that returns an environment can be named."""
    kwargs: str = "{}"
    """JSON object with the keyword arguments of the class."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that is not loopback needs a key or --allow-unauthenticated."""
    port: int = 8000
    """TCP port. 0 selects a free one."""
    max_concurrent_envs: int = 1024
    """Most connections at one time, each with an environment of its own."""
    idle_timeout: float = 3600.0
    """Seconds without a message after which a connection, or a session at /mcp, is closed."""
    tool_timeout: float = 30.0
    """Seconds for one tool call of a client."""
    api_key_file: Path | None = None
    """File with the key that clients send as `Authorization: Bearer KEY`. VERL_ENV_API_KEY of the environment is the
    key without a file; clients of this package send theirs."""
    allow_unauthenticated: bool = False
    """Permit an address that is not loopback without a key."""


_PLAIN_CONNECTIONS = 256
"""Connections beside those that own environments: plain HTTP, and clients that learn that the server is full."""


def serve(args: EnvServerArgs, api_key: str | None, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM, Ctrl-C or the end of the parent. `on_ready(url)` is called when the server answers."""
    check_address(args.host, api_key, args.allow_unauthenticated)
    factory = load_factory(args.environment, _keyword_arguments(args.kwargs))
    app = create_env_app(
        factory,
        max_concurrent_envs=args.max_concurrent_envs,
        idle_timeout=args.idle_timeout,
        tool_timeout=args.tool_timeout,
        host=args.host,
        api_key=api_key,
    )
    connections = args.max_concurrent_envs + _PLAIN_CONNECTIONS
    limit = raise_descriptor_limit(connections, f"max_concurrent_envs={args.max_concurrent_envs}")
    with bind_socket(args.host, args.port) as sock:
        url = f"http://{args.host}:{sock.getsockname()[1]}"
        server = make_server(app, max(limit - DESCRIPTOR_SLACK, limit // 2))
        server.on_started = lambda: on_ready(url)
        server.run([sock])


def _child(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    argument["kwargs"] = json.dumps(argument["kwargs"])
    api_key = argument.pop("api_key")
    serve(EnvServerArgs(**argument), api_key, lambda url: ready({"url": url}))


def _api_key(args: EnvServerArgs) -> str | None:
    if args.api_key_file is None:
        return os.environ.get(KEY_VARIABLE) or None
    return read_key_file(args.api_key_file, "--api-key-file")


def _keyword_arguments(text: str) -> dict[str, Any]:
    try:
        kwargs = parse_json(text, "--kwargs")
    except BadRequestError as error:
        raise BadRequestError(f"{error}. Write it as '{{\"NAME\": VALUE}}'.") from None
    if not isinstance(kwargs, dict):
        raise BadRequestError(f"--kwargs must be a JSON object, not {text:.200}. Write it as '{{\"NAME\": VALUE}}'.")
    return kwargs


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_options(EnvServerArgs, argv, "verl-server env serve")
    serve(args, _api_key(args), lambda url: print(f"Ready: {url}", file=sys.stderr, flush=True))


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        child_main(_child)  # started by EnvServer, with file descriptors
    else:
        try:
            main()
        except VerlServerError as error:
            sys.exit(f"verl-server env serve: {error}")
