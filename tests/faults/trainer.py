"""Trainer ranks that tests kill, stop and misuse, each with a `VerlEngine` and FSDP-like shards of all parameters.

`Ranks` starts the ranks as processes and sends them calls through pipes. `_Rank` runs in each process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.faults.judge import weights_of
from tests.faults.server import SETTINGS, holdable
from verl_server import HttpServerEngineAdapter, VerlEngine
from verl_server.engine import placement

BOUND = 10.0
"""Seconds within which every rank must know the outcome."""
MEET_TIMEOUT = 3.0
"""Seconds that ranks wait for each other, instead of half an hour."""
SILENCE_TIMEOUT = 4.0
"""Seconds without a sign of life from the rank that acts, which are two of its heartbeats."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])  # torch is imported once, not in each rank


class Answer:
    """The result of a call on one rank."""

    def __init__(self, value: Any, error: str, text: str) -> None:
        self.value, self.error, self.text = value, error, text
        """The name of the exception's type in `error`, or "" after success."""

    def __repr__(self) -> str:
        return f"{self.error}({self.text})" if self.error else repr(self.value)


class Ranks:
    """Trainer ranks, each in its own process. All of them make the same calls."""

    def __init__(self, model: Path, folder: Path, url: str | None, size: int = 2, **settings: Any) -> None:
        """Push to the server at `url`, or let the first rank launch a server with `settings` if `url` is None."""
        self._pipes: list[Connection] = []
        self.processes = []
        meeting = folder / f"ranks-{time.monotonic_ns()}"
        for rank in range(size):
            mine, theirs = _context.Pipe()
            arguments = (rank, size, str(model), str(folder), str(meeting), url, settings, theirs)
            process = _context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)
        self.alive = list(range(size))
        self.url = self.answers(60)[0].value

    def call(self, method: str, **arguments: Any) -> None:
        """Start a call of `_Rank`, or else of its `VerlEngine`, on every rank that is alive."""
        for rank in self.alive:
            self._pipes[rank].send((method, arguments))

    def answer(self, rank: int, seconds: float = BOUND) -> Answer:
        """Return the answer of one rank. Raise AssertionError if there is none within `seconds`."""
        if not self._pipes[rank].poll(seconds):
            raise AssertionError(f"rank {rank} had no answer within {seconds:g} s")
        answer: Answer = self._pipes[rank].recv()
        return answer

    def answers(self, seconds: float = BOUND) -> list[Answer]:
        return [self.answer(rank, seconds) for rank in self.alive]

    def done(self, method: str, **arguments: Any) -> None:
        """Make a call that must succeed on every rank."""
        self.call(method, **arguments)
        failed = [answer for answer in self.answers(30) if answer.error]
        assert not failed, failed

    def kill(self, rank: int) -> None:
        os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].join(10)
        self.alive.remove(rank)

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join(10)
            pipe.close()


@contextlib.contextmanager
def ranks(model: Path, folder: Path, url: str | None, size: int = 2, **settings: Any) -> Iterator[Ranks]:
    started = Ranks(model, folder, url, size, **settings)
    try:
        yield started
    finally:
        started.end()


# -- in the process of a rank ---------------------------------------------------------------------------------------


class _Rank:
    def __init__(self, size: int, model: Path, folder: Path, url: str | None, settings: dict[str, Any]) -> None:
        self._model = model
        self._mesh = init_device_mesh("cpu", (size,))
        self.engine = self._start(folder, url, settings)
        self._shards = {
            name: distribute_tensor(full, self._mesh, [Shard(0)], src_data_rank=None)
            for name, full in weights_of(model, 0).items()
        }

    def _start(self, folder: Path, url: str | None, settings: dict[str, Any]) -> VerlEngine:
        with contextlib.ExitStack() as patches:
            if url is None:
                patches.enter_context(holdable(folder))
            else:
                settings = {"rank_timeout": MEET_TIMEOUT} | settings
                key = SETTINGS["admin_api_key"]
                attach = mock.Mock(side_effect=lambda server_args: HttpServerEngineAdapter.attach(url, None, key))
                patches.enter_context(mock.patch.object(placement, "HttpServerEngineAdapter", attach))
            settings = SETTINGS | {"sync_timeout": SILENCE_TIMEOUT} | settings
            return VerlEngine(self._mesh, launch_server=True, model_path=str(self._model), **settings)

    def write(self, seed: int) -> None:
        """Write the weights of training step `seed` in place."""
        for name, full in weights_of(self._model, seed).items():
            mine = distribute_tensor(full, self._mesh, [Shard(0)], src_data_rank=None)
            self._shards[name].to_local().copy_(mine.to_local())

    def register(self) -> None:
        self.engine.register_weights(lambda: self._shards.items())

    def push(self, seed: int, **options: Any) -> Any:
        """Write a training step, and push the registered tensors."""
        self.write(seed)
        return self.engine.push_weights(**options)

    def update(self, seed: int, without: str = "", dtype: str = "float32", **options: Any) -> Any:
        """Write a training step, and push copies of the shards, which are not registered and sent as a description."""
        self.write(seed)
        kind = getattr(torch, dtype)
        copies = [(name, _converted(shard, kind)) for name, shard in self._shards.items() if name != without]
        return self.engine.update_weights_from_tensor(copies, **options)


def _converted(shard: DTensor, dtype: torch.dtype) -> DTensor:
    local = shard.to_local().to(dtype, copy=True)
    return DTensor.from_local(local, shard.device_mesh, shard.placements, shape=shard.shape, stride=shard.stride())


def _run(
    rank: int,
    size: int,
    model: str,
    folder: str,
    meeting: str,
    url: str | None,
    settings: dict[str, Any],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    mine = _Rank(size, Path(model), Path(folder), url, settings)
    pipe.send(Answer(mine.engine.url, "", ""))
    while True:
        method, arguments = pipe.recv()
        try:
            owner = mine if hasattr(mine, method) else mine.engine
            pipe.send(Answer(getattr(owner, method)(**arguments), "", ""))
        except Exception as error:
            pipe.send(Answer(None, type(error).__name__, str(error)))
