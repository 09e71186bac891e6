"""What a session exports is what was sampled: recomputed with transformers in float32, over a real server.

The agent is the openai SDK. Weights are pushed between two turns, and in the middle of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder

KEY = "owner"
TOLERANCE = 1e-4
SMALL: dict[str, Any] = {"kv_cache_gib": 0.1, "cpu_threads": 1, "cpu_kernel_choice": "torch", "port": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServerEngineAdapter]:
    store = str(tmp_path_factory.mktemp("store"))
    with HttpServerEngineAdapter(
        model_path=str(folder), api_key=KEY, admin_api_key="admin", session_store=store, **SMALL
    ) as server:
        yield server


def model_of(folder: Path, scale: float) -> Any:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def owner(server: HttpServerEngineAdapter, method: str, path: str, body: Any = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.request(method, f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert answer.status_code < 300, answer.text
    return answer.json()


@torch.inference_mode()
def check(branch: dict[str, Any], models: dict[str, Any]) -> int:
    """Assert every log-probability of a branch under the version that its token names. Return how many there are."""
    ids, checked = branch["ids"], 0
    for span in branch["weight_versions"]:
        logits = models[span["version"]](torch.tensor([ids[: span["end"]]])).logits[0]
        rows = logits[span["start"] - 1 : span["end"] - 1].log_softmax(-1)
        for place, row in enumerate(rows, start=span["start"]):
            assert branch["loss_mask"][place] == 1
            assert abs(float(row[ids[place]]) - branch["logprobs"][place]) < TOLERANCE, f"token {place} of {span}"
            checked += 1
    assert checked == sum(branch["loss_mask"])
    assert all(value == 0.0 for value, mask in zip(branch["logprobs"], branch["loss_mask"], strict=True) if not mask)
    return checked


def test_turns_between_and_across_pushes_are_exact(server: HttpServerEngineAdapter, folder: Path) -> None:
    models = {"default": model_of(folder, 1.0), "2": model_of(folder, 1.05), "3": model_of(folder, 0.95)}
    created = owner(server, "POST", "/sessions", {"seed": 3})
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=f"{server.url}{created['base_url']}", api_key="unused", max_retries=0) as client:

        def turn(text: str, **options: Any) -> None:
            messages.append({"role": "user", "content": text})
            reply = client.chat.completions.create(model="m", messages=messages, temperature=1.0, **options)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})

        turn("one", max_tokens=24)
        server.update_weights_from_tensor(list(models["2"].state_dict().items()), weight_version="2", partial=False)
        turn("two", max_tokens=24)
        messages.append({"role": "user", "content": "three"})
        stream = client.chat.completions.create(
            model="m", messages=messages, temperature=1.0, stream=True, max_tokens=600, extra_body={"ignore_eos": True}
        )
        text = next(iter(stream)).choices[0].delta.content or ""
        server.update_weights_from_tensor(
            list(models["3"].state_dict().items()), weight_version="3", partial=False, mode="retract"
        )
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        messages.append({"role": "assistant", "content": text})
        turn("four", max_tokens=24)
    trajectory = owner(server, "GET", f"/sessions/{created['id']}/trajectory")
    (branch,) = trajectory["branches"]
    versions = [
        [s["version"] for s in branch["weight_versions"] if t["start"] <= s["start"] < t["end"]]
        for t in branch["turns"]
    ]
    assert versions == [["default"], ["2"], ["2", "3"], ["3"]]
    assert check(branch, models) > 600


def test_branches_and_samples_are_exact(server: HttpServerEngineAdapter, folder: Path) -> None:
    server.update_weights_from_tensor(
        list(model_of(folder, 1.0).state_dict().items()), weight_version="default", partial=False
    )
    created = owner(server, "POST", "/sessions", {})
    with openai.OpenAI(base_url=f"{server.url}{created['base_url']}", api_key="unused", max_retries=0) as client:
        first = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], max_tokens=8, n=2, stop=["e"]
        )
        for choice in first.choices:
            history: list[Any] = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": choice.message.content},
                {"role": "user", "content": "b"},
            ]
            client.chat.completions.create(model="m", messages=history, max_tokens=8)
    trajectory = owner(server, "GET", f"/sessions/{created['id']}/trajectory")
    models = {"default": model_of(folder, 1.0)}
    assert len(trajectory["branches"]) == 2
    assert sum(check(branch, models) for branch in trajectory["branches"]) > 4
