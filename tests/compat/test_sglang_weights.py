"""Trainers written for SGLang work with our server: payloads from another process, process groups, disk."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import fork_server
from tests.weight_sync.group.test_process_group import Trainer
from tests.weight_sync.group_trainer import SHAPES
from tests.weight_sync.prime_rl_trainer import broadcasts, layers
from verl_server import HttpServerEngineAdapter, WeightUpdateError
from verl_server.errors import VerlServerError
from verl_server.weight_sync.group.broadcast import broadcast_weights, init_weights_update_group
from verl_server.weight_sync.group.group_connection import in_thread

BOUND = 60.0
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def server(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[HttpServerEngineAdapter]:
    options = {"tp_size": request.param, "kv_cache_gib": 0.05, "cpu_threads": 1, "port": 0, "control_timeout": 60.0}
    with HttpServerEngineAdapter(model_path=str(tiny_llama), **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def client() -> Iterator[subprocess.Popen[str]]:
    process = fork_server.run_module(
        "tests.compat.sglang_client", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def weights(tiny_llama: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_llama / "model.safetensors")


def ranks(server: HttpServerEngineAdapter) -> int:
    size: int = server.get_server_info()["tp_size"]
    return size


def digest(server: HttpServerEngineAdapter) -> str:
    value: str = server.weights_checker()["per_engine_checksum"]
    return value


def serve(server: HttpServerEngineAdapter, weights: dict[str, torch.Tensor], factor: float = 1.0) -> str:
    """Push with our own client, and return the digest of the weights that the server then holds."""
    server.update_weights_from_tensor([(name, tensor * factor) for name, tensor in weights.items()])
    return digest(server)


def tell(client: subprocess.Popen[str], **ask: Any) -> tuple[int, dict[str, Any]]:
    assert client.stdin is not None and client.stdout is not None
    client.stdin.write(json.dumps(ask) + "\n")
    client.stdin.flush()
    status, body = json.loads(client.stdout.readline())
    return status, body


def post(server: HttpServerEngineAdapter, body: dict[str, Any]) -> httpx.Response:
    headers = {"Authorization": f"Bearer {server.admin_api_key}"}
    return httpx.post(f"{server.url}/update_weights_from_tensor", json=body, headers=headers, timeout=60)


# -- payloads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wire", ["pairs", "one for all", "local", "bucket", "old bucket"])
def test_payloads_of_another_process(
    server: HttpServerEngineAdapter,
    client: subprocess.Popen[str],
    tiny_llama: Path,
    weights: dict[str, torch.Tensor],
    wire: str,
) -> None:
    wanted = serve(server, weights, 1.25)
    assert serve(server, weights) != wanted
    ask = {"url": server.url, "key": server.admin_api_key, "folder": str(tiny_llama), "ranks": ranks(server)}
    status, reply = tell(client, **ask, factor=1.25, format=wire)
    assert (status, reply["success"]) == (200, True), reply
    assert digest(server) == wanted
    assert len(server.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]) == 4


def test_a_refused_global_is_named_and_the_server_goes_on(
    server: HttpServerEngineAdapter, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/canary",)

    before = serve(server, weights)
    payload = base64.b64encode(pickle.dumps([("w", Attack())])).decode()
    reply = post(server, {"serialized_named_tensors": [payload] * ranks(server)})
    assert reply.status_code == 400
    assert "the global posix.system is not allowed" in reply.json()["message"]
    assert not (tmp_path / "canary").exists()
    assert digest(server) == before
    assert len(server.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]) == 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"serialized_named_tensors": ["gASVAAAA"]}, "refused at byte"),
        ({"serialized_named_tensors": ["gASVAAAA"], "load_format": "direct"}, "'direct' is not supported"),
        ({"serialized_named_tensors": ["nothing"] * 3}, "3 entries"),
        ({"serialized_named_tensors": []}, "0 entries"),
    ],
)
def test_payloads_that_are_none(server: HttpServerEngineAdapter, body: dict[str, Any], message: str) -> None:
    before = digest(server)
    reply = post(server, body)
    assert reply.status_code == 400 and message in reply.json()["message"]
    assert digest(server) == before


# -- process groups -------------------------------------------------------------------------------------------


def test_a_process_group_of_our_own_trainer(server: HttpServerEngineAdapter, weights: dict[str, torch.Tensor]) -> None:
    wanted, other = serve(server, weights, 1.5), serve(server, weights, 2.5)
    serve(server, weights)
    with init_weights_update_group(
        [server], "127.0.0.1", tp_size=ranks(server), backend="gloo", device="cpu", timeout=BOUND
    ) as group:
        broadcast_weights(group, [(name, tensor * 1.5) for name, tensor in weights.items()])
        assert digest(server) == wanted
        server.begin_weight_update()
        broadcast_weights(group, ((name, tensor * 2.5) for name, tensor in weights.items()), bucket_bytes=100_000)
        server.end_weight_update()
        assert digest(server) == other
        with pytest.raises(VerlServerError, match="no parameter 'unknown'"):
            broadcast_weights(group, [("unknown", torch.ones(2))])
    assert digest(server) == other
    server.destroy_weights_update_group()


def test_the_broadcasts_of_prime_rls_trainers(
    server: HttpServerEngineAdapter, weights: dict[str, torch.Tensor]
) -> None:
    """A server process receives updates that announce themselves, and keeps its weights if the trainer ends."""
    wanted, before = serve(server, weights, 1.5), serve(server, weights)

    def update() -> tuple[bool, str]:
        return server.update_weights_from_distributed(
            [], [], [], "prime_rl", load_format="state_dicts", mode="in_place", partial=False
        )

    with init_weights_update_group(
        [server], "127.0.0.1", tp_size=ranks(server), backend="gloo", device="cpu", group_name="prime_rl", timeout=BOUND
    ) as group:
        for factor, expected in ((1.5, wanted), (1.0, before)):
            answer = in_thread(update)
            group.broadcast(broadcasts(layers({name: tensor * factor for name, tensor in weights.items()})))
            assert answer.result(BOUND)[0] and digest(server) == expected
        answer = in_thread(update)
        group.broadcast(list(broadcasts(layers(weights)))[:5])
        group.close()
        with pytest.raises(VerlServerError, match="the group 'prime_rl'"):
            answer.result(BOUND)
    assert digest(server) == before
    assert len(server.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]) == 4
    server.destroy_weights_update_group("prime_rl")


def test_a_trainer_that_dies_while_the_server_receives(
    server: HttpServerEngineAdapter, weights: dict[str, torch.Tensor]
) -> None:
    before = serve(server, weights)
    trainer = Trainer(world_size=1 + ranks(server), name="dying")
    try:
        server.init_weights_update_group("127.0.0.1", trainer.port, 1, 1 + ranks(server), "dying", "gloo")
        update = in_thread(
            lambda: server.update_weights_from_distributed(
                list(SHAPES), ["float32"] * len(SHAPES), list(SHAPES.values()), "dying"
            )
        )
        trainer.tell("float32")
        assert trainer.line() == "sent\n"
        trainer.tell("die")
        with pytest.raises(VerlServerError, match="the group 'dying'"):
            update.result(BOUND)
    finally:
        trainer.end()
    assert digest(server) == before
    assert len(server.generate(input_ids=[5, 6], sampling_params=GREEDY)["output_ids"]) == 4
    with pytest.raises(VerlServerError, match="broken"):
        server.update_weights_from_distributed(["a"], ["float32"], [[1]], "dying")
    server.destroy_weights_update_group("dying")
    with init_weights_update_group(
        [server], "127.0.0.1", tp_size=ranks(server), backend="gloo", device="cpu", group_name="dying", timeout=BOUND
    ) as group:
        broadcast_weights(group, weights.items())
    assert digest(server) == before
    server.destroy_weights_update_group("dying")


# -- disk -----------------------------------------------------------------------------------------------------


def test_disk(
    server: HttpServerEngineAdapter, tiny_llama: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wanted, before = serve(server, weights, 1.75), serve(server, weights)
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_llama, folder)
    file = folder / "model.safetensors"
    save_file({name: tensor * 1.75 for name, tensor in weights.items()}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightUpdateError, match="not a complete safetensors file"):
        server.update_weights_from_disk(str(folder))
    save_file({name: tensor for name, tensor in weights.items() if "norm" not in name}, file)
    with pytest.raises(WeightUpdateError, match="does not cover every parameter"):
        server.update_weights_from_disk(str(folder))
    shard = file.rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightUpdateError, match=r"Cannot read .*model\.safetensors\.index\.json"):
        server.update_weights_from_disk(str(folder))
    assert digest(server) == before
    (folder / "model.safetensors.index.json").unlink()
    shard.unlink()
    file.write_bytes(whole)
    server.update_weights_from_disk(str(folder))
    assert digest(server) == wanted
