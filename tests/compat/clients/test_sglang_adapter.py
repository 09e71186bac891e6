"""SGLang's own `HttpServerEngineAdapter`, from its wheel, with `verl_server.compat.sglang` in the place of its engine.

The module of the adapter is loaded from its file. The package around it needs CUDA libraries at import, so the names
that the module imports are the stand-ins.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import Server, free_port
from safetensors.torch import load_file

import verl_server.compat.sglang

pytestmark = pytest.mark.client("SGLang's HttpServerEngineAdapter", "sglang")

PROMPT = [70, 71, 72, 73]
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def adapter(tiny_model: Path) -> Iterator[Any]:
    verl_server.compat.sglang.install()
    file = importlib.metadata.distribution("sglang").locate_file("sglang/srt/entrypoints/http_server_engine.py")
    spec = importlib.util.spec_from_file_location("sglang_http_server_engine", str(file))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    settings = {"model_path": str(tiny_model), "tp_size": 1, "kv_cache_gib": 0.05, "log_level": "error"}
    adapter = module.HttpServerEngineAdapter(port=free_port(), **settings)
    yield adapter
    adapter.shutdown()
    assert not adapter.process.is_alive()


def test_generate(adapter: Any, server: Server) -> None:
    """Launched by its own `launch_server_process`: `generate` with ids and text, log-probabilities, `priority`."""
    answer = adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
    assert answer["output_ids"] == server.greedy(PROMPT)
    assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
    texts = adapter.generate(prompt=["a", "b"], sampling_params=GREEDY)
    assert [text["meta_info"]["completion_tokens"] for text in texts] == [8, 8]


def test_push(adapter: Any, tiny_model: Path) -> None:
    """`begin_weight_update`, `update_weights_from_tensor`, `end_weight_update`: other outputs, then the old ones."""

    def scores() -> list[float]:
        answer = adapter.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True)
        return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]

    before = scores()
    for factor in (1.5, 1.0):
        tensors = [(name, tensor * factor) for name, tensor in load_file(tiny_model / "model.safetensors").items()]
        assert adapter.begin_weight_update()["success"]
        assert adapter.update_weights_from_tensor(tensors)["success"]
        assert adapter.end_weight_update()["success"]
        assert (scores() == before) == (factor == 1.0)


def test_memory(adapter: Any, tiny_model: Path) -> None:
    """`release_memory_occupation`, `resume_memory_occupation`, then a push makes the weights whole again."""
    assert adapter.release_memory_occupation() is None and adapter.resume_memory_occupation() is None
    tensors = list(load_file(tiny_model / "model.safetensors").items())
    adapter.begin_weight_update()
    adapter.update_weights_from_tensor(tensors)
    adapter.end_weight_update()
    assert len(adapter.generate(input_ids=PROMPT, sampling_params=GREEDY)["output_ids"]) == 8


def test_flush(adapter: Any) -> None:
    """`flush_cache` flushes; the adapter then expects JSON, and fails on SGLang's text as it does with SGLang."""
    with pytest.raises((requests.exceptions.JSONDecodeError, json.JSONDecodeError)):
        adapter.flush_cache()
    assert requests.get(f"{adapter.server_args.url()}/flush_cache", timeout=10).text.startswith("Cache flushed.")
