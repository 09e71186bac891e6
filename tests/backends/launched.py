"""Genuine servers of other projects, launched by their own commands, and what transformers says about their outputs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.parity.harness import random_prompt
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter

PROMPT = random_prompt(40, seed=1)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 8}
_END_SECONDS = 60


@dataclass
class Launched:
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End all processes of the server at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(_END_SECONDS)


@contextlib.contextmanager
def launched(
    command: Sequence[str], environment: Mapping[str, str], log: Path, ready_path: str, seconds: float
) -> Iterator[Launched]:
    """Launch `command` with a free port, wait until GET `ready_path` answers 200, and end it after the block."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            env=os.environ | dict(environment),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Launched(f"http://127.0.0.1:{port}", process)
    try:
        ready = eventually(lambda: process.poll() is not None or _answers(server.url + ready_path), seconds)
        assert ready and process.poll() is None, log.read_text()[-4000:]
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
        server.kill()


def _answers(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=5).status == 200)
    except OSError:
        return False


def begin(
    adapter: HttpServerEngineAdapter, pool: ThreadPoolExecutor, rid: str, tokens: int, seconds: float = 60.0
) -> Future[Any]:
    """Return a running request that has a token. It results in its last frame."""
    started = threading.Event()
    params = GREEDY | {"max_new_tokens": tokens, "stream_interval": 50}

    def read() -> Any:
        frames = adapter.generate(
            input_ids=PROMPT, sampling_params=params, rid=rid, stream=True, return_logprob=True, timeout=seconds
        )
        last = None
        try:
            for last in frames:  # noqa: B007
                started.set()
        finally:
            started.set()
        return last

    request = pool.submit(read)
    assert started.wait(seconds), "the request got no token"
    return request


@torch.inference_mode()
def check(model: Any, prompt: list[int], result: Any, tolerance: float = 1e-3, tokens: int = 8) -> None:
    """Assert that the tokens are transformers' greedy ones, with its log-probabilities."""
    ids = result["output_ids"]
    rows = model(torch.tensor([prompt + ids])).logits[0].float().log_softmax(-1)
    for position, (value, token, _) in enumerate(result["meta_info"]["output_token_logprobs"], len(prompt) - 1):
        assert float(rows[position, token]) >= float(rows[position].max()) - tolerance
        assert abs(value - float(rows[position, token])) < tolerance
    assert len(result["meta_info"]["output_token_logprobs"]) == len(ids) == tokens
