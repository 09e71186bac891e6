"""The process that serves an environment: child of `EnvServer`, or `python -m verl_server.rollout.env_process`.

Prints or reports its URL when it answers, and ends on SIGTERM, on Ctrl-C or with its parent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tyro
import uvicorn
from tyro.conf import Positional

from verl_server.ipc.child_process import child_main
from verl_server.ipc.sockets import bind_socket
from verl_server.rollout.env_server import create_env_app, load_factory, uvicorn_config


@dataclass(frozen=True)
class EnvServerArgs:
    """Serve an environment class with OpenEnv's protocol."""

    environment: Positional[str]
    """MODULE:CLASS."""
    kwargs: str = "{}"
    """JSON object of keyword arguments of the class."""
    host: str = "127.0.0.1"
    """Bind address. Anyone who reaches it can play, so loopback unless the network is trusted."""
    port: int = 8000
    """TCP port; 0 picks a free one."""
    max_concurrent_envs: int = 1024
    """Most concurrent connections, each with an environment of its own."""
    idle_timeout: float = 3600.0
    """Seconds without a message after which a connection is closed."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()


def serve(args: EnvServerArgs, on_ready: Callable[[str], None]) -> None:
    """Serve until told to stop; `on_ready(url)` is called when connections are answered."""
    factory = load_factory(args.environment, json.loads(args.kwargs))
    app = create_env_app(factory, max_concurrent_envs=args.max_concurrent_envs, idle_timeout=args.idle_timeout)
    with bind_socket(args.host, args.port) as sock:
        url = f"http://{args.host}:{sock.getsockname()[1]}"
        _Server(uvicorn_config(app), lambda: on_ready(url)).run([sock])


def _child(argument: dict[str, Any], ready: Callable[[dict[str, Any]], None]) -> None:
    argument["kwargs"] = json.dumps(argument.get("kwargs", {}))
    serve(EnvServerArgs(**argument), lambda url: ready({"url": url}))


def main() -> None:
    serve(
        tyro.cli(EnvServerArgs, description="Serve an environment class with OpenEnv's protocol."),
        lambda url: print(f"Ready: {url}", file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        child_main(_child)  # started by EnvServer, with file descriptors
    else:
        main()
