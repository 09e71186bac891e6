"""Measures the parts of an update inside verl's processes, for every rollout alike.

`verl_run` names this module in `VERL_USE_EXTERNAL_MODULES` after the rollout's own, so that verl imports the module in
every process. The rollout class of the worker is replaced by a subclass that appends one JSON line per call to the file
`VERL_SPANS`: the call, its start (Unix time in seconds) and its length in seconds. Each worker also measures the lower
limit of a push, a copy on its GPU of the bytes that one rank of a server holds. verl looks for finished answers every
2 s, which would hide how long a rollout takes: here it looks every 20 ms.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.workers.rollout import base

_CALLS = ("resume", "update_weights", "release")
_NAMES = ("verl_server", "vllm", "sglang")
_OWN = {name: path for name in _NAMES if (path := base._ROLLOUT_REGISTRY.get((name, "async")))}


def timed_class(name: str) -> type:
    """Return a subclass of the rollout `name` whose calls are recorded."""
    module, own_name = _OWN[name].rsplit(".", 1)
    own = getattr(importlib.import_module(module), own_name)
    return type(own_name, (own,), {call: _timed(call, getattr(own, call)) for call in _CALLS})


def record(call: str, start: float, **more: Any) -> None:
    """Append one line to the file `VERL_SPANS`."""
    line = {"call": call, "start": start, "seconds": time.time() - start, "pid": os.getpid()} | more
    with open(os.environ["VERL_SPANS"], "a") as file:
        file.write(json.dumps(line) + "\n")


def _timed(call: str, own: Callable[..., Any]) -> Callable[..., Any]:
    async def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.time()
        result = await own(self, *args, **kwargs)
        record(call, start, tags=kwargs.get("tags", []))
        if call == "update_weights" and torch.cuda.is_available():
            _record_copy(int(os.environ["VERL_SPANS_PARAMETERS"]))
        return result

    return timed


def _timed_sleep(own: Callable[..., Any]) -> Callable[..., Any]:
    async def awaited(result: Any, start: float) -> None:
        await result
        record("sleep", start)

    def sleep(self: Any) -> Any:
        start = time.time()
        result = own(self)
        if inspect.isawaitable(result):
            return awaited(result, start)
        record("sleep", start)
        return result

    return sleep


def _polling_fast(own: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.poll_interval = 0.02

    return init


def _record_copy(numel: int) -> None:
    """Record a flat copy of `numel` float32 parameters to bfloat16 on this GPU: the best of five."""
    source = torch.zeros(numel, dtype=torch.float32, device="cuda")
    target = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    record("flat_copy", time.time(), best=min(seconds))


for _name in _OWN:
    base._ROLLOUT_REGISTRY[(_name, "async")] = f"{__name__}.{_name}"
CheckpointEngineManager.sleep_replicas = _timed_sleep(CheckpointEngineManager.sleep_replicas)

ReplayBuffer.__init__ = _polling_fast(ReplayBuffer.__init__)


def __getattr__(name: str) -> type:
    """verl finds a rollout by the path of its class."""
    if name in _OWN:
        return timed_class(name)
    raise AttributeError(name)
