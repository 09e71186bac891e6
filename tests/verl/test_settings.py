"""verl's settings as settings of the server: translated, refused by name, or known to have no effect."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from conftest import run
from omegaconf import DictConfig, OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_server.errors import BadRequestError
from verl_server.integrations.verl import settings as module
from verl_server.integrations.verl import versions
from verl_server.integrations.verl.replica import VerlServerReplica, WorkerPlace
from verl_server.integrations.verl.settings import (
    Mode,
    check_supported,
    server_settings,
    serving_options,
)
from verl_server.server_args import ServerArgs

Make = Callable[..., DictConfig]


def translated(config: DictConfig, mode: Any = "hybrid", rank: int = 0, gpus: tuple[str, ...] = ()) -> dict[str, Any]:
    section = config.actor_rollout_ref
    rollout = omega_conf_to_dataclass(section.rollout)
    return server_settings(rollout, section.model, mode, rank, gpus)


def test_every_field_of_verl_has_one_place() -> None:
    """A new field of a later verl fails here until somebody has read what it does."""
    places = [module.TRANSLATED, module.READ_BY_VERL, module.WITHOUT_EFFECT, {n.split(".")[0] for n in module.REFUSED}]
    names = [name for place in places for name in place]
    assert len(names) == len(set(names))
    assert set(names) == {field.name for field in dataclasses.fields(RolloutConfig)} - {"_target_"}


def test_the_names_lead_to_the_classes() -> None:
    assert RolloutReplicaRegistry.get("verl_server") is VerlServerReplica
    assert get_rollout_class("verl_server", "async").__name__.endswith("Adapter")


def test_translation(make_config: Make) -> None:
    """Each setting of verl arrives under the server's name, and the server accepts all of them."""
    config = make_config(
        dtype="half",
        enforce_eager=True,
        cudagraph_capture_sizes=[1, 8, 4],
        tensor_model_parallel_size=2,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        load_format="dummy",
    )
    settings = translated(config, gpus=("a", "b"))
    expected = {
        "model_path": config.actor_rollout_ref.model.path,
        "load_format": "dummy",
        "dtype": "float16",
        "context_length": 256,
        "device": "cuda",
        "gpu_uuids": ("a", "b"),
        "tp_size": 2,
        "max_running_requests": 64,
        "chunked_prefill_size": 512,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
        "cuda_graph_max_bs": 8,
        "enable_weights_cpu_backup": False,
        "kv_cache_gib": 0.02,  # from engine_kwargs.verl_server
    }
    assert {name: settings[name] for name in expected} == expected
    assert ServerArgs.from_kwargs(**settings).tp_size == 2
    assert "mem_fraction_static" not in settings  # the actor knows it when the server starts
    assert translated(config, "colocated", gpus=("a", "b"))["enable_weights_cpu_backup"]
    assert translated(make_config())["device"] == "cpu"


def test_replicas_have_seeds_of_their_own(make_config: Make) -> None:
    """The first replica keeps the given seed; a run repeats, because the others derive theirs from it."""
    seeds = [translated(make_config(seed=7), rank=rank)["random_seed"] for rank in range(4)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert seeds == [translated(make_config(seed=7), rank=rank)["random_seed"] for rank in range(4)]


def test_options_of_the_actor(make_config: Make) -> None:
    config = make_config(free_cache_engine=False, ignore_eos=True, full_determinism=True, seed=3)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    options = serving_options(rollout, config.actor_rollout_ref.model, "hybrid")
    assert (options.mode, options.free_cache_engine, options.ignore_eos) == ("hybrid", False, True)
    assert (options.prompt_length, options.response_length, options.deterministic_seed) == (64, 32, 3)


def test_the_share_of_gpu_memory(make_config: Make) -> None:
    section = make_config(gpu_memory_utilization=0.6, standalone_gpu_memory_utilization=0.8).actor_rollout_ref
    rollout = omega_conf_to_dataclass(section.rollout)
    shares = {mode: serving_options(rollout, section.model, mode).gpu_memory_utilization for mode in get_args(Mode)}
    assert shares == {"hybrid": 0.6, "colocated": 0.6, "standalone": 0.8}
    rollout = omega_conf_to_dataclass(make_config(gpu_memory_utilization=60.0).actor_rollout_ref.rollout)
    with pytest.raises(BadRequestError, match="gpu_memory_utilization must be in"):
        serving_options(rollout, section.model, "hybrid")


REFUSED_ROLLOUT = {
    "data_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "expert_parallel_size": 2,
    "moe_tensor_parallel_size": 2,
    "quantization": "fp8",
    "quantization_config_file": "file.json",
    "qat": {"enable": True},
    "mtp": {"enable_rollout": True},
    "disaggregation": {"enabled": True},
    "enable_rollout_routing_replay": True,
    "logprobs_mode": "raw_logits",
    "load_format": "dummy_dtensor",
}


@pytest.mark.parametrize("name", REFUSED_ROLLOUT)
def test_a_rollout_setting_is_refused_by_name(make_config: Make, name: str) -> None:
    section = make_config(**{name: REFUSED_ROLLOUT[name]}).actor_rollout_ref
    with pytest.raises(BadRequestError, match=rf"rollout\.{name}.*verl_server"):
        check_supported(section.rollout, section.model)


REFUSED_MODEL = {
    "lora_rank": ({"lora_rank": 8}, "model.lora_rank=8"),
    "lora.rank": ({"lora": {"rank": 8, "merge": False}}, "model.lora_rank=8"),
    "mtp": ({"mtp": {"enable_rollout": True}}, "model.mtp.enable_rollout"),
    "override": ({"override_config": {"rope_theta": 1e6}}, "model.override_config sets rope_theta"),
    "nested override": (
        {"override_config": {"model_config": {"num_hidden_layers": 1}}},
        "model.override_config sets num_hidden_layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MODEL)
def test_a_model_setting_is_refused_by_name(make_config: Make, case: str) -> None:
    given, message = REFUSED_MODEL[case]
    section = make_config().actor_rollout_ref
    model = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(section.model)), given)
    with pytest.raises(BadRequestError, match=re.escape(message)):
        check_supported(section.rollout, model)


def test_the_way_to_train_an_adapter_comes_first(make_config: Make) -> None:
    section = make_config().actor_rollout_ref
    section.model.lora_rank = 8
    with pytest.raises(BadRequestError, match=r"^Set .*\.lora\.merge=True.*docs/weight-sync\.md.*not served"):
        check_supported(section.rollout, section.model)


def test_merged_lora_is_accepted(make_config: Make) -> None:
    section = make_config().actor_rollout_ref
    section.model.lora_rank, section.model.lora.merge = 8, True
    check_supported(section.rollout, section.model)


@pytest.mark.parametrize("name", module._CHOSEN_BY_REPLICA)
def test_a_setting_that_the_replica_chooses_is_refused(make_config: Make, name: str) -> None:
    with pytest.raises(BadRequestError, match=rf"engine_kwargs\.verl_server\.{name} cannot be set: "):
        translated(make_config(server={name: 1}))


def test_an_unknown_server_setting_is_refused(make_config: Make) -> None:
    with pytest.raises(BadRequestError, match="mem_fraction"):
        ServerArgs.from_kwargs(**translated(make_config(server={"mem_fraction": 0.5})))


def test_settings_without_effect_are_logged(make_config: Make, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config(scheduling_policy="priority").actor_rollout_ref.rollout
    config.engine_kwargs.vllm = {"seed": 1}
    with caplog.at_level(logging.WARNING):
        module.log_without_effect(config)
    assert "engine_kwargs.vllm has no effect" in caplog.text
    assert "scheduling_policy has no effect" in caplog.text
    assert "verl_server has no effect" not in caplog.text


def replica(config: DictConfig, gpus_per_node: int) -> VerlServerReplica:
    section = config.actor_rollout_ref
    return VerlServerReplica(0, section.rollout, section.model, gpus_per_node=gpus_per_node)


def test_a_replica_of_two_nodes_is_refused(make_config: Make) -> None:
    with pytest.raises(BadRequestError, match="tensor_model_parallel_size=4 needs 2 nodes of 2 GPUs"):
        replica(make_config(tensor_model_parallel_size=4), gpus_per_node=2)


def test_control_calls_do_not_wait_for_generate_calls(make_config: Make) -> None:
    """Paused generate calls may outnumber `max_num_seqs`; `resume_generation` must still be run."""
    assert replica(make_config(), gpus_per_node=1).max_concurrency > 10_000


def test_an_untested_verl_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    versions.check_version()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.8.0")
    with pytest.raises(ImportError, match=re.escape("verl 0.8.0 was not tested with verl-server; verl 0.9.1 works")):
        versions.check_version()
    monkeypatch.setenv(versions.ALLOW_UNTESTED, "1")
    versions.check_version()
    assert "verl 0.8.0 was not tested" in caplog.text


def test_a_missing_verl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match=re.escape("pip install 'verl-server[verl]'")):
        versions.check_version()


class Worker:
    """A worker on a node, in the place of an actor of Ray."""

    def __init__(self, node_id: str) -> None:
        self._place = WorkerPlace(node_id, "")
        self.__ray_call__ = SimpleNamespace(remote=self._call)

    async def _call(self, function: Any) -> WorkerPlace:
        return self._place


def test_workers_on_two_nodes_are_refused(make_config: Make) -> None:
    """verl may have been told that a node has more GPUs than it has."""
    refused = replica(make_config(tensor_model_parallel_size=2), gpus_per_node=8)
    refused.workers = [Worker("first"), Worker("second")]
    with pytest.raises(BadRequestError, match=r"in the order of the ranks: \['first', 'second'\]"):
        run(refused.launch_servers())
