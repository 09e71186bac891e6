"""Replicas on two nodes of a Ray cluster, one of which is killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import PROMPT, assert_ended, processes_of, run
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from verl.workers.rollout.llm_server import LLMServerManager

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": True}


@pytest.fixture
def cluster(ray_folder: str) -> Iterator[Cluster]:
    """Two nodes with a GPU each that does not exist. The first one also runs the driver."""
    node = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 80 << 20}
    head = node | {"include_dashboard": False, "temp_dir": ray_folder}
    # Whatever `temp_dir` says, a Cluster writes its address into this folder, and does not make it.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_node_is_killed(cluster: Cluster, make_config: Callable[..., Any]) -> None:
    """The rollout on the killed node fails with Ray's error, the other replica serves on, no process is left."""
    worker = cluster.add_node(num_cpus=8, num_gpus=1, object_store_memory=80 << 20)
    cluster.wait_for_nodes()
    manager = LLMServerManager.create(config=make_config(nnodes=2, n_gpus_per_node=1))
    handles = manager.server_handles
    nodes = [ray.get(h.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id())) for h in handles]
    assert len(set(nodes)) == 2
    lost = nodes.index(worker.node_id)
    gone, kept = handles[lost], handles[1 - lost]
    servers, others = processes_of(gone), processes_of(kept)
    ray.get([handle.abort_all_requests.remote() for handle in handles], timeout=60)
    waiting = gone.generate.remote(PROMPT, GREEDY, "x")

    cluster.remove_node(worker, allow_graceful=False)
    with pytest.raises(RayActorError, match="actor"):  # Ray does not know yet that the whole node is gone
        ray.get(waiting, timeout=120)
    with pytest.raises(ActorDiedError, match="node"):
        _generate_until_dead(gone)
    assert_ended(servers)
    with pytest.raises(RayActorError):  # verl's client passes the error on
        run(_generate_until_lost(manager))

    ray.get(kept.resume_generation.remote(), timeout=60)
    assert len(ray.get(kept.generate.remote(PROMPT, GREEDY, "x"), timeout=60).token_ids) == 8
    for replica in manager.get_replicas():
        ray.kill(replica.server_handle)
    assert_ended(others)


def _generate_until_dead(actor: Any) -> None:
    """Send requests until Ray's health check has ended the actor."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            ray.get(actor.generate.remote(PROMPT, GREEDY, "x"), timeout=60)
        except ActorUnavailableError:
            time.sleep(0.2)


async def _generate_until_lost(manager: LLMServerManager) -> None:
    """Send requests of new ids until the balancer chooses the lost server."""
    client, deadline = manager.get_client(), time.monotonic() + 60
    while time.monotonic() < deadline:
        await client.generate(str(time.monotonic_ns()), prompt_ids=PROMPT, sampling_params=GREEDY)
