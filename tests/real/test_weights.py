"""Weights of the real model are pushed, healed, saved and loaded: the server then computes what transformers does."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from conftest import KEY, SETTINGS
from prompts import TEXTS
from reference import Reference
from torch.distributed.device_mesh import init_device_mesh

from tests.reserved_port import reserved_port
from verl_server import HttpServerEngineAdapter, ServerRestartedError, VerlEngine
from verl_server.ipc.child_process import ChildProcess
from verl_server.server_args import ServerArgs

PROMPTS = TEXTS[:4]


def check(engine: Any, reference: Reference, tokenizer: Any, version: str) -> list[str]:
    """Assert that greedy outputs are those of `reference`, of one version. Return their texts."""
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    results: Any = engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True, timeout=120)
    for prompt, result in zip(prompts, results, strict=True):
        spans = result["meta_info"]["weight_versions"]
        assert [span["version"] for span in spans] == [version]
        sampled = [found for found, _, _ in result["meta_info"]["output_token_logprobs"]]
        reference.check(prompt, result["output_ids"], sampled)
    return [result["text"] for result in results]


def test_push(pushable: HttpServerEngineAdapter, reference: Reference, perturbed: Reference, tokenizer: Any) -> None:
    """The tied head is in a state dict, and is not in the named parameters. Both are complete pushes."""
    before = check(pushable, reference, tokenizer, "default")
    pushable.update_weights_from_tensor(
        list(perturbed.model.state_dict().items()), weight_version="noisy", partial=False
    )
    assert check(pushable, perturbed, tokenizer, "noisy") != before
    pushable.update_weights_from_tensor(
        list(reference.model.named_parameters()), weight_version="again", partial=False, mode="retract"
    )
    assert check(pushable, reference, tokenizer, "again") == before


def test_push_through_verl_engine(pushable: HttpServerEngineAdapter, perturbed: Reference, tokenizer: Any) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        keys = {"api_key": KEY, "admin_api_key": pushable.admin_api_key}
        with VerlEngine(mesh, server_url=pushable.url, **keys) as engine:
            engine.update_weights_from_tensor(perturbed.model.named_parameters(), weight_version="verl", partial=False)
    finally:
        dist.destroy_process_group()
    check(pushable, perturbed, tokenizer, "verl")


def test_save_and_reload(
    pushable: HttpServerEngineAdapter, perturbed: Reference, tokenizer: Any, tmp_path: Path
) -> None:
    """A folder that transformers writes is loaded by the running server."""
    perturbed.model.save_pretrained(tmp_path / "saved")
    pushable.update_weights_from_disk(str(tmp_path / "saved"), weight_version="saved")
    check(pushable, perturbed, tokenizer, "saved")


def serve(folder: Path, port: int) -> ChildProcess:
    args = ServerArgs(model_path=str(folder), port=port, **SETTINGS)
    server = ChildProcess("server", "verl_server.server.launch", {"server_args": args.to_json()})
    server.wait_ready(180)
    return server


def test_heal(folder: Path, reference: Reference, perturbed: Reference, tokenizer: Any) -> None:
    """A server that is killed and started again has the folder's weights, until `heal` has pushed the newest ones."""
    with reserved_port() as port:
        server = serve(folder, port)
        try:
            with HttpServerEngineAdapter.attach(f"http://127.0.0.1:{port}") as engine:
                weights = list(perturbed.model.named_parameters())
                engine.update_weights_from_tensor(weights, weight_version="noisy", partial=False)
                texts = check(engine, perturbed, tokenizer, "noisy")
                os.kill(server.pid, signal.SIGKILL)
                server.terminate()
                server = serve(folder, port)
                with pytest.raises(ServerRestartedError):
                    engine.generate("The capital of France is", {"max_new_tokens": 1})
                engine.heal(weights, version="noisy")
                assert check(engine, perturbed, tokenizer, "noisy") == texts
        finally:
            server.terminate()
