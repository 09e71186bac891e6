"""The job ends when a server dies, although verl's asynchronous trainers go on after failed rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
from conftest import PROMPT
from ray.exceptions import RayTaskError
from verl.workers.rollout.llm_server import LLMServerManager

from verl_server.errors import ServerUnavailableError
from verl_server.integrations.verl.server_actor import actor_name


class Trainer:
    """Starts a rollout after the other and ignores their errors, in a task like that of verl's TaskRunner."""

    def run(self, config: Any, replica_rank: int) -> None:
        client = LLMServerManager.create(config=config, start_rank=replica_rank).get_client()
        while True:
            try:
                asyncio.run(client.generate("x", prompt_ids=PROMPT, sampling_params={"max_tokens": 1}))
            except Exception:
                time.sleep(0.1)


def wait_for_server(replica_rank: int) -> Any:
    """Return the actor of a replica when its server is ready."""
    deadline = time.monotonic() + 120
    while True:
        try:
            actor = ray.get_actor(actor_name(replica_rank))
            ray.get(actor.get_server_address.remote(), timeout=60)
            return actor
        except (ValueError, ServerUnavailableError):
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize(("replica_rank", "victim"), list(enumerate(["server", "actor"])))
def test_the_job_ends(local_ray: None, make_config: Callable[..., Any], replica_rank: int, victim: str) -> None:
    trainer = ray.remote(Trainer).options(num_cpus=1).remote()
    task = trainer.run.remote(make_config(n_gpus_per_node=1), replica_rank)
    actor = wait_for_server(replica_rank)
    pid = ray.get(
        actor.__ray_call__.remote(lambda self, name: self._server.pid if name == "server" else os.getpid(), victim)
    )
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayTaskError, match="TaskCancelledError"):
        ray.get(task, timeout=120)
    ray.kill(trainer)
