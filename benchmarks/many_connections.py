"""Thousands of concurrent `/generate` requests to a server that was started with few file descriptors.

    python -m benchmarks.many_connections --requests 4000 --soft-limit 256

Starts `verl-server serve` on the CPU with random weights of a tiny shape. This process is the client, through an
adapter. Both have the soft limit of open files. Prints one JSON line with the number of answered requests and the
errors of the others. The exit status is 1 unless all requests were answered. `--hard-limit` lowers the server's hard
limit as well; connections beyond it wait until others end.
"""

from __future__ import annotations

import asyncio
import collections
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder


@dataclass(frozen=True)
class Options:
    """Send thousands of concurrent requests under a low soft limit of open files."""

    requests: int = 4000
    """Number of concurrent requests."""
    soft_limit: int = 256
    """Soft limit of open files of the server and of the client."""
    hard_limit: int | None = None
    """Hard limit of open files of the server. The default is the limit of this process."""
    new_tokens: int = 8
    """Tokens of each answer."""


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model_folder(Path(folder), weights=False)
        command = [sys.executable, "-m", "verl_server", "serve", "--model-path", str(model), "--load-format", "dummy"]
        command += ["--device", "cpu", "--port", "0", "--skip-tokenizer-init", "--kv-cache-gib", "0.1"]
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

        def limit_files() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (options.soft_limit, options.hard_limit or hard))

        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit_files) as server:
            try:
                url = _ready_url(server)
                resource.setrlimit(resource.RLIMIT_NOFILE, (options.soft_limit, hard))
                with HttpServerEngineAdapter.attach(url) as adapter:
                    line = asyncio.run(_measure(adapter, options))
            finally:
                server.terminate()
    print(json.dumps(line), flush=True)
    sys.exit(line["answered"] != options.requests)


def _ready_url(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for text in server.stderr:
        sys.stderr.write(text)
        if text.startswith("Ready: "):
            return text.removeprefix("Ready: ").strip()
    sys.exit("The server did not start.")


async def _measure(adapter: HttpServerEngineAdapter, options: Options) -> dict[str, object]:
    sampling = {"max_new_tokens": options.new_tokens, "ignore_eos": True}

    async def one(number: int) -> str:
        try:
            await adapter.async_generate(input_ids=[1 + number % 100], sampling_params=sampling)
            return "answered"
        except Exception as error:
            return type(error).__name__

    began = time.monotonic()
    outcomes = collections.Counter(await asyncio.gather(*(one(i) for i in range(options.requests))))
    seconds = time.monotonic() - began
    answered = outcomes.pop("answered", 0)
    return {
        "benchmark": "many_connections",
        "requests": options.requests,
        "soft_limit": options.soft_limit,
        "hard_limit": options.hard_limit,
        "answered": answered,
        "errors": dict(outcomes),
        "seconds": round(seconds, 2),
    }


if __name__ == "__main__":
    main()
