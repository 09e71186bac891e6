"""Weights from verl's trainer ranks to servers on other GPUs, driven by verl's own CheckpointEngineManager."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from separate_ranks import Replica, RolloutRank, TrainerRank, full_weights
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.integrations.verl.checkpoint_engine import (
    RolloutServer,
    VerlServerCheckpointEngine,
    _Rollout,
    _Trainer,
)
from verl_server.models.tiny import make_model_folder

BUCKET_MEGABYTES = 1
GREEDY = {"temperature": 0, "max_new_tokens": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("tiny"), "qwen3", vocab_size=5000)  # three buckets


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[HttpServerEngineAdapter]]:
    engines = [
        HttpServerEngineAdapter(model_path=str(folder), device="cpu", port=0, max_total_tokens=512, random_seed=seed)
        for seed in range(2)
    ]
    yield engines
    for engine in engines:
        engine.shutdown()


def start_workers(cls: type, count: int, **kwargs: Any) -> RayWorkerGroup:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(cls), **kwargs), use_gpu=False, device_name="cpu")


class Job:
    """Two trainer ranks, two replicas, and verl's manager between them."""

    def __init__(self, folder: Path, servers: list[HttpServerEngineAdapter], transport: str) -> None:
        self.config = CheckpointEngineConfig(
            backend="verl_server",
            update_weights_bucket_megabytes=BUCKET_MEGABYTES,
            engine_kwargs={"verl_server": {"transport": transport}},
        )
        self.is_group = transport == "group"
        self.folder, self.servers = folder, servers
        self.trainer = start_workers(TrainerRank, 2, folder=folder, config=self.config)
        rollout = RolloutConfig(name="verl_server", mode="async", checkpoint_engine=self.config)
        self.rollout = start_workers(RolloutRank, len(servers), config=rollout)
        self.replicas = [
            Replica(rank, server, [worker])
            for rank, (server, worker) in enumerate(zip(servers, self.rollout.workers, strict=True))
        ]
        self.manager = CheckpointEngineManager(self.config, self.trainer, self.replicas)

    def push(self, seed: int, global_steps: int | None) -> None:
        self.trainer.fill(seed)
        self.manager.update_weights(global_steps=global_steps)

    def push_that_fails(self, global_steps: int) -> list[Exception]:
        """Push without the manager, and return the error of every trainer rank."""
        workers = [worker for replica in self.manager.replicas for worker in replica.workers]
        init = RayClassWithInitArgs(ray.remote(RolloutRank))
        self.manager.build_process_group(RayWorkerGroup(worker_handles=workers, ray_cls_with_init=init))
        errors = []
        for result in self.trainer.update_weights(global_steps=global_steps, mode="verl_server"):
            with pytest.raises(Exception) as caught:  # Ray adds its own type to the error's
                ray.get(result, timeout=60)
            errors.append(caught.value)
        return errors

    def check_served(self, seed: int, version: str) -> None:
        """Check that every server serves the weights of `seed` as `version`, in every parameter."""
        expected = full_weights(self.folder, seed)
        for replica in self.manager.replicas:
            server = replica.server
            assert server.get_server_info()["weight_version"].partition("@")[0] == version
            for name, tensor in expected.items():
                served = torch.tensor(server.get_weights_by_name(name, truncate_size=8192))
                torch.testing.assert_close(served, tensor.detach(), msg=lambda text, name=name: f"{name}: {text}")
            assert server.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)["meta_info"]["weight_versions"]

    def kill(self) -> None:
        for worker in [*self.trainer.workers, *self.rollout.workers]:
            ray.kill(worker)


@pytest.fixture(scope="module", params=["auto", "group"])
def job(
    request: pytest.FixtureRequest, local_ray: None, folder: Path, servers: list[HttpServerEngineAdapter]
) -> Iterator[Job]:
    job = Job(folder, servers, request.param)
    yield job
    job.kill()


@pytest.mark.parametrize("yields", ["shards", "moved", "full"])
def test_every_push_reaches_every_server_exactly(job: Job, yields: str) -> None:
    job.trainer.prepare_push(yields)
    for step in range(1, 4):
        job.push(seed=step, global_steps=step)
        job.check_served(seed=step, version=str(step))


def test_connections_serve_many_pushes(job: Job) -> None:
    job.trainer.prepare_push()
    job.push(seed=1, global_steps=1)
    before = job.trainer.servers_id()
    job.push(seed=2, global_steps=2)
    assert job.trainer.servers_id() == before


def test_an_error_of_one_rank_is_raised_on_all_and_the_old_weights_stay(job: Job) -> None:
    if job.is_group:
        pytest.skip("the other rank waits in a collective then, which a later test covers")
    job.trainer.prepare_push()
    job.push(seed=1, global_steps=1)
    job.trainer.prepare_push("moved", failing_rank=1)
    errors = job.push_that_fails(2)
    assert all("ran out of luck" in str(error) for error in errors), errors
    job.check_served(seed=1, version="1")


def test_missing_parameters_are_refused_on_all_ranks_and_never_served(job: Job) -> None:
    job.trainer.prepare_push("full")
    job.push(seed=1, global_steps=1)
    job.trainer.fill(2)
    job.trainer.prepare_push("full", without="down_proj")
    errors = job.push_that_fails(2)
    assert all("down_proj" in str(error) for error in errors), errors
    for server in job.servers:
        with pytest.raises(ServerUnavailableError, match="torn"):
            server.generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    job.trainer.prepare_push()
    job.push(seed=3, global_steps=3)
    job.check_served(seed=3, version="3")


def test_missing_shards_leave_the_old_weights(job: Job) -> None:
    if job.is_group:
        pytest.skip("shards are gathered for the group")
    job.trainer.prepare_push()
    job.push(seed=1, global_steps=1)
    job.trainer.fill(2)
    job.trainer.prepare_push("shards", without="down_proj")
    errors = job.push_that_fails(2)
    assert all("down_proj" in str(error) for error in errors), errors
    job.trainer.fill(1)
    job.check_served(seed=1, version="1")


def test_dead_servers_and_failed_trainers_end_a_push_and_nothing_hangs(local_ray: None, folder: Path) -> None:
    engines = [
        HttpServerEngineAdapter(model_path=str(folder), device="cpu", port=0, max_total_tokens=512) for _ in range(2)
    ]
    job = Job(folder, engines, "auto")
    try:
        job.push(seed=1, global_steps=1)
        assert engines[1].pid is not None
        os.kill(engines[1].pid, 9)
        errors = job.push_that_fails(2)
        assert all(engines[1].url in str(error) for error in errors), errors

        job.manager.remove_replicas(job.manager.replicas[1:])
        job.push(seed=3, global_steps=3)
        job.check_served(seed=3, version="3")

        # Rank 0 waits for rank 1 in a collective of the trainer, in its second bucket: the first one is written.
        job.trainer.prepare_push("full", failing_rank=1, fails_at=20)
        errors = job.push_that_fails(4)
        assert all("ran out of luck" in str(error) for error in errors), errors
        with pytest.raises(ServerUnavailableError, match="torn"):
            engines[0].generate(input_ids=[5, 6, 7], sampling_params=GREEDY)
    finally:
        job.kill()
        for engine in engines:
            engine.shutdown()


def trainer_report(node: str, connected: Any = None, transport: Any = "auto") -> _Trainer:
    return _Trainer(node, "10.0.0.1", transport, connected)


def rollout_report(node: str, rank: int) -> _Rollout:
    return _Rollout(node, RolloutServer(rank, f"http://{node}:{rank}", "key"))


def test_a_server_reads_memory_only_if_all_trainers_are_on_its_host() -> None:
    reports = [trainer_report("a"), trainer_report("a")]
    reports += [rollout_report("a", 0), rollout_report("a", 0), rollout_report("b", 1)]
    trainer, rollout = VerlServerCheckpointEngine.build_topology(2, 3, reports)
    targets = trainer["targets"][0]
    assert [(target.url, target.reads_memory) for target in targets] == [("http://a:0", True), ("http://b:1", False)]
    assert trainer["targets"][1] == targets and trainer["reconnect"] == [True, True] and rollout == {}
    reports[:2] = [trainer_report("a"), trainer_report("b")]
    trainer, _ = VerlServerCheckpointEngine.build_topology(2, 3, reports)
    assert not any(target.reads_memory for target in trainer["targets"][0])


def test_all_ranks_reconnect_if_one_lost_its_connection_or_the_servers_changed() -> None:
    rollouts = [rollout_report("a", 0), rollout_report("a", 1)]
    trainer, _ = VerlServerCheckpointEngine.build_topology(2, 2, [trainer_report("a")] * 2 + rollouts)
    targets = trainer["targets"][0]
    kept = trainer_report("a", targets)
    assert VerlServerCheckpointEngine.build_topology(2, 2, [kept, kept, *rollouts])[0]["reconnect"] == [False] * 2
    lost = trainer_report("a")
    assert VerlServerCheckpointEngine.build_topology(2, 2, [kept, lost, *rollouts])[0]["reconnect"] == [True] * 2
    assert VerlServerCheckpointEngine.build_topology(2, 1, [kept, kept, rollouts[0]])[0]["reconnect"] == [True] * 2


def test_replicas_that_announced_no_server_are_refused_by_name() -> None:
    with pytest.raises(BadRequestError, match=r"rollout\.name=verl_server"):
        VerlServerCheckpointEngine.build_topology(1, 1, [trainer_report("a"), trainer_report("a")])


def test_an_unknown_transport_is_refused_by_name() -> None:
    with pytest.raises(BadRequestError, match="transport='pigeon'"):
        VerlServerCheckpointEngine(bucket_size=1, transport="pigeon")  # type: ignore[arg-type]


def test_the_admin_key_is_not_printed() -> None:
    assert "secret" not in repr(RolloutServer(0, "http://a:0", "secret"))
