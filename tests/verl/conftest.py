"""Fixtures for tests inside verl: a tiny model, a local Ray with GPUs that do not exist, verl's configuration.

`make test-verl` runs these tests in an environment of their own, because verl and this project's tests need different
versions of transformers.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
# Set before verl and Ray are imported: Ray's processes inherit the environment, and verl reads it on import.
os.environ |= {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform,verl_server.integrations.verl",
    "VERL_USE_EXTERNAL_PLUGINS": "none",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

import psutil  # noqa: E402
import pytest  # noqa: E402
import ray  # noqa: E402
import verl  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import DictConfig, OmegaConf, open_dict  # noqa: E402

from verl_server.integrations.verl.server_actor import ServerActor  # noqa: E402
from verl_server.integrations.verl.settings import ServingOptions  # noqa: E402
from verl_server.models.tiny import make_model_folder  # noqa: E402

T = TypeVar("T")

PROMPT = [70, 71, 72, 73]
SERVER = {
    "cpu_threads": 1,
    "cpu_kernel_choice": "torch",
    "kv_cache_gib": 0.02,
    "text_workers": 1,
    "check_invariants": True,
}
"""Settings of every server: small, and quick to start."""


def run(awaitable: Awaitable[T], timeout: float = 120.0) -> T:
    """Run an awaitable in an event loop of its own, for at most `timeout` seconds."""

    async def bounded() -> T:
        return await asyncio.wait_for(awaitable, timeout)

    return asyncio.run(bounded())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3 model with a byte-level tokenizer."""
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[str]:
    """A folder for Ray's sockets and logs. Ray's own choice may exceed the length that a socket's path may have."""
    folder = os.environ.get("VERL_SERVER_RAY_FOLDER") or tempfile.mkdtemp(prefix="vs-ray-")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def local_ray(ray_folder: str) -> Iterator[None]:
    """A Ray of one node, with two GPUs and 16 CPUs that do not exist."""
    ray.init(
        num_cpus=16,
        num_gpus=2,
        include_dashboard=False,
        _temp_dir=ray_folder,
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def make_actor(local_ray: None, tiny_model: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that returns a launched `ServerActor` without a replica. Keywords: its `ServingOptions`."""
    actors = []

    def make(server: dict[str, Any] | None = None, profiler: Any = None, **options: Any) -> Any:
        settings = {"model_path": str(tiny_model), "device": "cpu", "dtype": "float32"} | SERVER | (server or {})
        remote = ray.remote(ServerActor).options(num_cpus=0, max_concurrency=100)
        actor = remote.remote(settings, ServingOptions(**options), profiler)
        actors.append(actor)
        ray.get(actor.launch.remote(), timeout=120)
        return actor

    yield make
    for actor in actors:
        ray.kill(actor)


def processes_of(actor: Any) -> list[psutil.Process]:
    """Return the processes of an actor's server: the server and its scheduler."""
    server = psutil.Process(ray.get(actor.__ray_call__.remote(lambda self: self._server.pid), timeout=60))
    return [server, *server.children(recursive=True)]


def is_alive(process: psutil.Process) -> bool:
    """Return True while a thread of the process runs.

    The main thread is a zombie as soon as it has ended. Until the other threads have ended, too, which takes up to a
    tenth of a second, the parent gets no exit status.
    """
    try:
        return process.is_running() and not (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() == 1)
    except psutil.NoSuchProcess:
        return False


def assert_ended(processes: list[psutil.Process], timeout: float = 60.0) -> None:
    """Wait until the processes have ended. An ended process that its parent has not reaped counts, too."""
    deadline = time.monotonic() + timeout
    while alive := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline, f"These processes still run: {alive}"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def make_config(tiny_model: Path) -> Callable[..., DictConfig]:
    """Return a function that returns the configuration of verl's PPO trainer for the tiny model.

    Keywords replace entries of `actor_rollout_ref.rollout`; `server` adds to the server's settings.
    """
    folder = str(Path(verl.__file__).parent / "trainer" / "config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        defaults = compose(config_name="ppo_trainer")

    def make(server: dict[str, Any] | None = None, **rollout: Any) -> DictConfig:
        config = copy.deepcopy(defaults)
        settings: dict[str, Any] = {
            "name": "verl_server",
            "nnodes": 1,
            "n_gpus_per_node": 2,
            "tensor_model_parallel_size": 1,
            "dtype": "float32",
            "load_format": "auto",
            "max_num_seqs": 64,
            "max_model_len": 256,
            "prompt_length": 64,
            "response_length": 32,
            "calculate_log_probs": True,
            "agent": {"num_workers": 1},
            "engine_kwargs": {"verl_server": SERVER | (server or {})},
        }
        with open_dict(config):
            config.actor_rollout_ref.model.path = str(tiny_model)
            config.actor_rollout_ref.model.override_config = {"attn_implementation": "sdpa"}
            target = config.actor_rollout_ref.rollout
            for name, value in (settings | rollout).items():
                OmegaConf.update(target, name, value, merge=True, force_add=True)
        return config

    return make
