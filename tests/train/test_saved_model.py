"""Transformers and the server load the folder that `save_policy` writes, and compute the policy's log-probabilities.

The runs of `test_run_end` save on two ranks, and after errors; here one rank saves, in all combinations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server.engine.in_process import Engine
from verl_server.files import durable
from verl_server.models.tiny import make_model_folder
from verl_server.train.demo import make_policy_folder
from verl_server.train.policy import Policy, load_policy, save_policy

CPU = torch.device("cpu")
TOKENS = torch.tensor([[1, 2, 7, 4, 11, 5]])

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_policy_folder(tmp_path_factory.mktemp("model") / "model", seed=0)
    tied = request.param == "tied"
    return make_model_folder(path, "qwen3", tie_word_embeddings=tied, vocab_size=40, init_std=0.2)


def trained(folder: Path, dtype: torch.dtype) -> Policy:
    policy = load_policy(str(folder), CPU, compute_dtype=dtype)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    logprobs, _ = policy(TOKENS, torch.arange(1, 6), 1.0)
    (-logprobs.sum()).backward()
    optimizer.step()
    return policy


def save(policy: Policy, folder: Path, out: Path) -> None:
    save_policy(policy, out, AutoTokenizer.from_pretrained(folder))


def expected(folder: Path, policy: Policy) -> torch.Tensor:
    """The policy's log-probabilities of `TOKENS` in fp32, from its stored weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in policy.stored_weights()}
    model.load_state_dict({name: weight.detach() for name, weight in weights.items()}, strict=False)
    return logprobs(model)


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.log_softmax(-1)[0, :-1].gather(1, TOKENS[0, 1:, None]).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_loads_what_was_saved(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    policy = trained(folder, dtype)
    save(policy, folder, tmp_path / "model")
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.dtype == torch.float32
    torch.testing.assert_close(logprobs(saved), expected(folder, policy))
    start: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not torch.allclose(logprobs(saved), logprobs(start))
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "model")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()


def test_the_server_loads_what_was_saved(folder: Path, tmp_path: Path) -> None:
    policy = trained(folder, torch.bfloat16)
    save(policy, folder, tmp_path / "model")
    settings: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "kv_cache_gib": 0.1, "log_level": "warning"}
    with Engine(model_path=str(tmp_path / "model"), device="cpu", **settings) as engine:
        result = engine.generate(
            input_ids=TOKENS[0].tolist(),
            sampling_params={"max_new_tokens": 1},
            return_logprob=True,
            logprob_start_len=0,
        )
    served = torch.tensor([entry[0] for entry in result["meta_info"]["input_token_logprobs"][1:]])
    torch.testing.assert_close(served, expected(folder, policy), atol=1e-4, rtol=0)


def test_a_model_is_saved_after_an_error_inside_a_pass(folder: Path, tmp_path: Path) -> None:
    """At that moment FSDP2 has replaced the parameters by gathered bf16 ones."""
    policy = trained(folder, torch.bfloat16)
    want = expected(folder, policy)

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    policy.language_model.model.norm.register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        policy(TOKENS, torch.arange(1, 6), 1.0)
    save(policy, folder, tmp_path / "model")
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(logprobs(saved), want)


def test_a_model_is_replaced_as_a_whole(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model"
    save(trained(folder, torch.float32), folder, out)
    before = (out / "model.safetensors").read_bytes()

    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "flush", full)
        with pytest.raises(OSError, match="No space left"):
            save(load_policy(str(folder), CPU), folder, out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    save(load_policy(str(folder), CPU), folder, out)
    assert (out / "model.safetensors").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
