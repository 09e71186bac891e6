"""SmolLM2-135M-Instruct, a server of it that all tests share, and transformers as the reference.

`make test-real` runs these tests in an environment of its own, which has the package with the weights.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "*"}

import httpx
import pytest
import torch
from reference import Reference
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_model import make_real_model
from verl_server import HttpServerEngineAdapter

torch.set_num_threads(1)  # two threads wait for each other in spins where other processes use the cores

KEY = "owner"
CHUNK = 128
"""Tokens of a prefill step of the shared server."""
TEMPLATE = Path(__file__).with_name("tools_template.jinja")


@pytest.fixture(scope="session")
def folder() -> Path:
    """Return the model's folder. It is made once for each environment, because that takes most of a minute."""
    path = Path(sys.prefix) / "smollm2"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as new:
            make_real_model(Path(new) / "smollm2")
            (Path(new) / "smollm2").rename(path)
    return path


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=dtype).eval()


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def reference(folder: Path) -> Iterator[Reference]:
    reference = Reference(load(folder))
    yield reference
    print(f"\nlog-probabilities within {reference.worst:.1e} of transformers")


@pytest.fixture(scope="session")
def perturbed(reference: Reference) -> Reference:
    """Return the model with noise of 5 % in all weights: it writes other text, and has other log-probabilities."""
    model = copy.deepcopy(reference.model)
    noise = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.std() * torch.randn(parameter.shape, generator=noise)
    return Reference(model)


SETTINGS: dict[str, Any] = {"device": "cpu", "max_total_tokens": 8192, "log_level": "warning", "check_invariants": True}


@pytest.fixture(scope="session")
def shared_engine(folder: Path) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter(
        model_path=str(folder),
        api_key=KEY,
        port=0,
        chunked_prefill_size=CHUNK,
        allowed_chat_templates=(str(TEMPLATE),),
        **SETTINGS,
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: HttpServerEngineAdapter) -> HttpServerEngineAdapter:
    """Return the shared server with the weights of the folder and an empty cache."""
    shared_engine.flush_cache(timeout=30)
    return shared_engine


@pytest.fixture
def pushable(engine: HttpServerEngineAdapter, reference: Reference) -> Iterator[HttpServerEngineAdapter]:
    """Yield the shared server to a test that replaces the weights, which are pushed back at its end."""
    yield engine
    engine.update_weights_from_tensor(list(reference.model.named_parameters()), weight_version="default", partial=False)


@pytest.fixture
def client(engine: HttpServerEngineAdapter) -> Iterator[httpx.Client]:
    """Yield an HTTP client of the shared server, with the owner's key."""
    assert engine.url is not None
    with httpx.Client(base_url=engine.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as client:
        yield client


@pytest.fixture(scope="session")
def post() -> Callable[..., Any]:
    """Return a function that posts a body and returns the answer's JSON, after it has asserted success."""

    def post(client: httpx.Client, route: str, body: dict[str, Any], **headers: str) -> Any:
        answer = client.post(route, json=body, headers=headers)
        assert answer.is_success, answer.text
        return answer.json()

    return post
