"""`Policy` computes the same as transformers, whether it is sharded, cast to bf16 or uses gradient checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from tests.train.conftest import make_trajectory
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.train.batches import MicroBatch, Sample
from verl_server.train.policy import Policy, load_policy

CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_model_folder(path, "qwen3", tie_word_embeddings=request.param == "tied", init_std=0.2)


def batch() -> MicroBatch:
    return MicroBatch.of([Sample(make_trajectory(0, 1.0, n, seed=n), 1.0) for n in (7, 2, 5)], CPU)


def gradients(policy: Policy) -> dict[str, Tensor]:
    """Return the gradients of the sum of all log-probabilities."""
    micro = batch()
    logprobs, _ = policy(micro.tokens, micro.positions, 0.7)
    logprobs.sum().backward()
    grads = {name: parameter.grad for name, parameter in policy.named_weights()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items() if g is not None}


def reference(folder: Path) -> dict[str, Tensor]:
    """Return the gradients that transformers computes for one row at a time, without padding, with fp32 logits."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for length in (7, 2, 5):
        tokens = torch.tensor([make_trajectory(0, 1.0, length, seed=length).tokens])
        distribution = (model(input_ids=tokens).logits[0, 1:-1] / 0.7).log_softmax(-1)
        distribution.gather(1, tokens[0, 2:, None]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers(folder: Path, checkpointing: bool) -> None:
    policy = load_policy(str(folder), CPU, gradient_checkpointing=checkpointing, logprob_chunk=4)
    found, expected = gradients(policy), reference(folder)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_weights_are_fp32_where_passes_are_bf16(folder: Path) -> None:
    policy = load_policy(str(folder), CPU, compute_dtype=torch.bfloat16, gradient_checkpointing=True)
    seen: list[torch.dtype] = []
    policy.language_model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    found, expected = gradients(policy), reference(folder)
    assert set(seen) == {torch.bfloat16}
    assert {p.dtype for p in policy.parameters()} == {torch.float32} == {g.dtype for g in found.values()}
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert cosine > 0.98, name


def test_log_probabilities_ignore_padding(folder: Path) -> None:
    policy = load_policy(str(folder), CPU)
    short = MicroBatch.of([Sample(make_trajectory(0, 1.0, 2, seed=2), 1.0)], CPU)
    with torch.no_grad():
        together, _ = policy(batch().tokens, batch().positions, 1.0)
        alone, entropy = policy(short.tokens, short.positions, 1.0, entropy=False)
    torch.testing.assert_close(together[7:9], alone)
    assert entropy is None


def test_a_head_that_does_more_is_refused() -> None:
    model = torch.nn.Module()
    model.config = type("Config", (), {"final_logit_softcapping": 30.0})()
    model.lm_head = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(BadRequestError, match=r"final_logit_softcapping.*Qwen3"):
        Policy(model)
