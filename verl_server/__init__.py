"""The rollout server for agentic RL: serve a policy over HTTP, roll it out, train it, push the weights back.

The names in `__all__` are the public API. Each name is imported at its first use, so that `import verl_server` and
`verl-server --help` do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl_server._version import __version__ as __version__

if TYPE_CHECKING:
    from verl_server.engine.base import EngineBase
    from verl_server.engine.http import HttpServerEngineAdapter
    from verl_server.engine.in_process import Engine
    from verl_server.engine.verl_engine import VerlEngine
    from verl_server.errors import (
        BadRequestError,
        ContextLengthError,
        ControlTimeoutError,
        ServerDiedError,
        ServerLaunchError,
        ServerRestartedError,
        ServerStoppingError,
        ServerUnavailableError,
        UnansweredError,
        UnknownRegistrationError,
        UpdateConflictError,
        VerlServerError,
        VersionBehindError,
        VersionSupersededError,
        WeightUpdateError,
        WeightVersionError,
    )
    from verl_server.sampling_params import SamplingParams
    from verl_server.server.launch import launch_server, launch_server_from_verl_engine
    from verl_server.server_args import ServerArgs
    from verl_server.weight_sync.handles import LocalSerializedTensor
    from verl_server.weight_sync.trainer.shards import TensorShard
    from verl_server.weight_version import WeightVersion, new_incarnation

__all__ = [
    "BadRequestError",
    "ContextLengthError",
    "ControlTimeoutError",
    "Engine",
    "EngineBase",
    "HttpServerEngineAdapter",
    "LocalSerializedTensor",
    "SamplingParams",
    "ServerArgs",
    "ServerDiedError",
    "ServerLaunchError",
    "ServerRestartedError",
    "ServerStoppingError",
    "ServerUnavailableError",
    "TensorShard",
    "UnansweredError",
    "UnknownRegistrationError",
    "UpdateConflictError",
    "VerlEngine",
    "VerlServerError",
    "VersionBehindError",
    "VersionSupersededError",
    "WeightUpdateError",
    "WeightVersion",
    "WeightVersionError",
    "launch_server",
    "launch_server_from_verl_engine",
    "new_incarnation",
]

_MODULES = {
    "Engine": "verl_server.engine.in_process",
    "EngineBase": "verl_server.engine.base",
    "HttpServerEngineAdapter": "verl_server.engine.http",
    "LocalSerializedTensor": "verl_server.weight_sync.handles",
    "SamplingParams": "verl_server.sampling_params",
    "ServerArgs": "verl_server.server_args",
    "TensorShard": "verl_server.weight_sync.trainer.shards",
    "VerlEngine": "verl_server.engine.verl_engine",
    "WeightVersion": "verl_server.weight_version",
    "launch_server": "verl_server.server.launch",
    "launch_server_from_verl_engine": "verl_server.server.launch",
    "new_incarnation": "verl_server.weight_version",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'verl_server' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "verl_server.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
