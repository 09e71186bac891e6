"""verl's adapters: launched through verl's own path, with `verl_server.compat.sglang` in the place of SGLang."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Server, free_port
from safetensors.torch import load_file

import verl_server.compat.sglang

pytestmark = pytest.mark.client("verl", "verl")

PROMPT = [70, 71, 72, 73]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapters() -> Any:
    """verl's module, imported after the stand-ins."""
    verl_server.compat.sglang.install()
    from verl.workers.rollout.sglang_rollout import http_server_engine

    return http_server_engine


@pytest.fixture(scope="module")
def adapter(adapters: Any, tiny_model: Path) -> Iterator[Any]:
    """An adapter that launched its own server, with the settings that verl sends."""
    adapter = adapters.HttpServerAdapter(
        first_rank_in_node=True,
        model_path=str(tiny_model),
        host="127.0.0.1",
        port=free_port(),
        dtype="float32",
        mem_fraction_static=0.5,
        disable_cuda_graph=False,
        enable_memory_saver=True,
        base_gpu_id=0,
        gpu_id_step=1,
        tp_size=1,
        dp_size=1,
        ep_size=1,
        node_rank=0,
        nnodes=1,
        load_format="auto",
        trust_remote_code=False,
        max_running_requests=64,
        log_level="error",
        attention_backend="flashinfer",
        mm_attention_backend=None,
        skip_tokenizer_init=False,
        skip_server_warmup=True,
        quantization=None,
        json_model_override_args="{}",
        custom_weight_loader=None,
        enable_weights_cpu_backup=True,
        kv_cache_gib=0.05,
    )
    yield adapter
    adapter.shutdown()
    assert not adapter.process.is_alive()


@pytest.fixture
def attached(adapters: Any, adapter: Any, tiny_model: Path) -> Any:
    """An asynchronous adapter of the same server, as verl's rollout workers make it."""
    port = adapter.server_args.port
    return adapters.AsyncHttpServerAdapter(
        model_path=str(tiny_model), host="127.0.0.1", port=port, launch_server=False, trust_remote_code=False
    )


def weights(folder: Path, factor: float) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor * factor) for name, tensor in load_file(folder / "model.safetensors").items()]


def pushed(adapters: Any, tensors: Any) -> Any:
    """A request as verl's weight sync makes it."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    return UpdateWeightsFromTensorReqInput(serialized_named_tensors=[MultiprocessingSerializer.serialize(tensors)])


def logprobs(answer: Any) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_generate(adapter: Any, server: Server) -> None:
    """`HttpServerAdapter`, launched by `launch_server_process`: `generate` with ids, text, log-probabilities."""
    answer = adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    assert answer["output_ids"] == server.greedy(PROMPT)
    triples = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in triples] == answer["output_ids"] and answer["meta_info"]["weight_version"]
    assert adapter.generate(prompt="Hello", sampling_params=GREEDY)["meta_info"]["completion_tokens"] == 8


def test_memory(adapter: Any) -> None:
    """`HttpServerAdapter`: release and resume by tags, flush, abort; the same output afterwards."""
    before = adapter.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]
    assert adapter.abort_request(abort_all=True) == {}
    assert "Cache flushed" in adapter.flush_cache()["text"]
    adapter.release_memory_occupation(["kv_cache", "weights"])
    adapter.resume_memory_occupation(["weights"])
    adapter.resume_memory_occupation(["kv_cache"])
    assert adapter.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"] == before


def test_push(adapters: Any, adapter: Any, tiny_model: Path) -> None:
    """`HttpServerAdapter.update_weights_from_tensor`: other weights, other log-probabilities; and back."""
    before = logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True))
    changed = weights(tiny_model, 1.5)
    request = pushed(adapters, changed)
    request.serialized_named_tensors = [base64.b64encode(part).decode() for part in request.serialized_named_tensors]
    assert adapter.update_weights_from_tensor(pushed(adapters, changed))["success"]
    assert logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)) != before
    original = weights(tiny_model, 1.0)
    assert adapter.update_weights_from_tensor(pushed(adapters, original))["success"]
    assert logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)) == before


def test_asynchronous(attached: Any, adapters: Any, adapter: Any, tiny_model: Path) -> None:
    """`AsyncHttpServerAdapter`, attached: 32 concurrent `async_generate`, memory, push, flush, abort, models."""
    expected = adapter.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]

    async def run() -> None:
        answers = await asyncio.gather(
            *(attached.async_generate(input_ids=PROMPT, sampling_params=GREEDY) for _ in range(32))
        )
        assert all(answer["output_ids"] == expected for answer in answers)
        assert (await attached.available_models())["data"][0]["id"] == str(tiny_model)
        await attached.release_memory_occupation(["kv_cache"])
        await attached.resume_memory_occupation(["kv_cache"])
        same = weights(tiny_model, 1.0)
        assert (await attached.update_weights_from_tensor(pushed(adapters, same)))["success"]
        assert "Cache flushed" in (await attached.flush_cache())["text"]
        assert await attached.abort_request(rid="unknown") == {}

    asyncio.run(run())


def test_server_adapter(attached: Any, adapter: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ServerAdapter.update_weights`: verl's whole weight sync in buckets, over a device mesh of one rank."""
    import torch.distributed
    from verl.workers.rollout.sglang_rollout import sglang_rollout

    ServerAdapter = sglang_rollout.ServerAdapter
    if not torch.cuda.is_available():  # verl has no platform for the CPU
        monkeypatch.setattr(sglang_rollout, "get_device_id", lambda: "cpu")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "RAY_LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh(
            "cpu", (1, 1, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp")
        )
        syncer = ServerAdapter.__new__(ServerAdapter)
        syncer.__dict__.update(
            config=SimpleNamespace(
                checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1),
                free_cache_engine=True,
                get=lambda *_: None,
            ),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"), local_path=str(tiny_model)),
            device_mesh=mesh,
            sleep_level=2,
            _engine=attached,
            _pd_role=None,
            _has_server=True,
        )
        before = logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True))
        asyncio.run(syncer.update_weights(iter(weights(tiny_model, 1.25))))
        assert logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)) != before
        asyncio.run(syncer.update_weights(iter(weights(tiny_model, 1.0))))
        assert logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)) == before
        asyncio.run(syncer.release())
        asyncio.run(syncer.resume(["weights"]))
        asyncio.run(syncer.resume(["kv_cache"]))
        assert logprobs(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)) == before
    finally:
        torch.distributed.destroy_process_group()


def test_errors(adapters: Any, adapter: Any) -> None:
    """Errors are raised: bad sampling parameters, and settings that this server refuses, by name."""
    import requests

    with pytest.raises(requests.HTTPError, match="400"):
        adapter.generate(input_ids=PROMPT, sampling_params={"temperature": -1})
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(ValueError, match="speculative_algorithm"):
        ServerArgs(model_path="m", speculative_algorithm="EAGLE").resolve_once()
    assert os.getpid() != adapter.process.pid
