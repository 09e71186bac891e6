"""slime's engine client. slime is on no package registry: VERL_SERVER_SLIME names a checkout, else nothing runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Server, free_port
from safetensors.torch import load_file

import verl_server.compat.sglang

CHECKOUT = os.environ.get("VERL_SERVER_SLIME")
pytestmark = [
    pytest.mark.client("slime", None),
    pytest.mark.skipif(CHECKOUT is None, reason="slime is on no package registry; set VERL_SERVER_SLIME to a checkout"),
]

PROMPT = [70, 71, 72, 73]


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Any]:
    """slime's `SGLangEngine` that launched its own server."""
    assert CHECKOUT is not None
    verl_server.compat.sglang.install()
    sys.path.insert(0, CHECKOUT)
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine
    from slime.utils import accelerator

    if not torch.cuda.is_available():
        accelerator.resolve_visible_device_id = lambda device: device  # slime knows no accelerator on the CPU
    args = SimpleNamespace(
        hf_checkpoint=str(tiny_model),
        seed=1,
        offload_rollout=True,
        colocate=False,
        debug_rollout_only=True,
        rollout_external=False,
        rollout_num_gpus_per_engine=1,
        num_gpus_per_node=1,
        actor_num_gpus_per_node=0,
        actor_num_nodes=0,
        sglang_dp_size=1,
        sglang_pp_size=1,
        sglang_ep_size=1,
        sglang_router_ip=None,
        sglang_router_port=None,
        sglang_kv_cache_gib=0.05,
        use_rollout_routing_replay=False,
        use_rollout_indexer_replay=False,
        fp16=False,
    )
    engine = SGLangEngine(args, rank=0, base_gpu_id=0)
    engine.init("127.0.0.1:1", free_port(), None, host="127.0.0.1")
    yield engine
    engine.shutdown()


def test_engine(engine: Any, server: Server, tiny_model: Path) -> None:
    """`SGLangEngine`, launched by its own path: health, version, pause, memory, a push in a flattened bucket."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    assert engine.health_generate(timeout=20)
    assert engine.get_weight_version() == "default"
    engine.pause_generation()
    engine.flush_cache()
    tensors = list(load_file(tiny_model / "model.safetensors").items())
    bucket = FlattenedTensorBucket(named_tensors=tensors)
    data = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    payload = MultiprocessingSerializer.serialize(data, output_str=True)
    answer = engine.update_weights_from_tensor([payload], load_format="flattened_bucket", weight_version="7")
    assert answer["success"] and engine.get_weight_version() == "7"
    engine.continue_generation()
    assert engine.check_weights("checksum")["success"]
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights", "kv_cache"])
