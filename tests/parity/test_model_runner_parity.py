"""`ModelRunner` against transformers (fp32, CPU): greedy ids identical, log-probabilities within 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.parity.harness import Driver, Reference, make_runner, random_prompt
from verl_server.models.tiny import make_model_folder
from verl_server.worker.step_memory import StepMemory

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_attention_heads": 8}),
    "mistral": ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}


class Model:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = Reference(folder)


@pytest.fixture(scope="module", params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    arch, shape = CASES[request.param]
    return Model(make_model_folder(tmp_path_factory.mktemp(request.param), arch, **shape))


@pytest.fixture(params=["kernels", "torch"])
def driver(request: pytest.FixtureRequest, model: Model) -> Driver:
    """A driver with the CPU's compiled kernels, if there is a compiler, and a driver in plain PyTorch."""
    plain = {"attention_backend": "torch", "fused_kernels": False} if request.param == "torch" else {}
    return Driver(make_runner(model.folder, **plain))


def test_alone(model: Model, driver: Driver) -> None:
    for length in (1, 2, 16, 17, 100):
        sequence = driver.add(random_prompt(length, seed=length))
        driver.finish([sequence], 20)
        model.reference.check(sequence)


def test_mixed_batch(model: Model, driver: Driver) -> None:
    """Requests have different lengths, and later requests join while the earlier ones decode."""
    sequences = [driver.add(random_prompt(length, seed=length)) for length in (3, 40, 40, 90, 150, 1)]
    driver.finish(sequences, 5)
    sequences += [driver.add(random_prompt(length, seed=1000 + length)) for length in (60, 7, 200)]
    driver.finish(sequences, 30)
    for sequence in sequences:
        model.reference.check(sequence)


@pytest.mark.parametrize("chunk", at_depth([5, 16, 33], quick=2))
def test_chunked_prefill(model: Model, driver: Driver, chunk: int) -> None:
    sequences = [driver.add(random_prompt(length, seed=length)) for length in (80, 31, 120)]
    driver.finish(sequences, 8, chunk=chunk)
    for sequence in sequences:
        model.reference.check(sequence)


def test_cached_prefix(model: Model, driver: Driver) -> None:
    """Second turns share the pages of the history, also two requests in one step."""
    first = driver.add(random_prompt(50, seed=1))
    driver.finish([first], 14)
    turns = [driver.add(first.tokens + random_prompt(n, seed=n), shared=first) for n in (9, 30)]
    assert all(turn.cached == 48 for turn in turns)
    fresh = driver.add(random_prompt(25, seed=7))
    driver.finish([*turns, fresh], 10)
    for sequence in (first, *turns, fresh):
        model.reference.check(sequence)


def test_retract(model: Model, driver: Driver) -> None:
    kept, retracted = driver.add(random_prompt(30, seed=1)), driver.add(random_prompt(45, seed=2))
    driver.finish([kept, retracted], 10)
    driver.retract(retracted)
    driver.finish([kept, retracted], 20)
    for sequence in (kept, retracted):
        model.reference.check(sequence)


def test_after_in_place_update(model: Model, driver: Driver, tmp_path: Path) -> None:
    """New weights through the weight map give the new model's outputs, and no parameter moves."""
    new = Reference(model.folder)
    generator = torch.Generator().manual_seed(5)
    weight_map = driver.runner.weight_map
    addresses = [p.data_ptr() for p in driver.runner.model.parameters()]
    with torch.no_grad():
        for name, parameter in new.model.named_parameters():
            parameter.mul_(1.0 + 0.2 * torch.randn(parameter.shape, generator=generator))
            weight_map.slots[name].copy_from(parameter)
    assert [p.data_ptr() for p in driver.runner.model.parameters()] == addresses
    sequence = driver.add(random_prompt(40, seed=3))
    driver.finish([sequence], 20)
    new.check(sequence)
    with pytest.raises(AssertionError):
        model.reference.check(sequence)


def test_prompt_and_top_logprobs(model: Model, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt log-probabilities with top-k and requested ids agree from `first` on, over chunks, in bounded memory."""
    monkeypatch.setattr(StepMemory, "prompt_positions", lambda *_: 7)
    prompt = random_prompt(60, seed=4)
    sequence = driver.add(prompt, top=3)
    batch = driver.batch([(sequence, 40)])
    batch.prompt_logprobs, batch.prompt_next_ids = [(0, 10, 3, [5, 6])], [prompt[40]]
    first = driver.runner.launch(batch, []).result()
    assert first is not None
    sequence.cached = 40
    batch = driver.batch([(sequence, 20)])
    batch.prompt_logprobs, batch.prompt_next_ids = [(0, 0, 3, [5, 6])], [-1]
    second = driver.runner.launch(batch, [sequence.spec]).result()
    assert second is not None
    a, b = first.prompt_logprobs[0], second.prompt_logprobs[0]
    expected = model.reference.logprobs(prompt)[10:-1]
    assert a.token_ids + b.token_ids == prompt[11:]
    got = torch.tensor(a.logprobs + b.logprobs)
    torch.testing.assert_close(got, expected.gather(1, torch.tensor([prompt[11:]]).T)[:, 0], atol=1e-4, rtol=0)
    assert a.top and b.top and a.requested and b.requested
    for row, top, requested in zip(expected, a.top + b.top, a.requested + b.requested, strict=True):
        assert top is not None and requested is not None
        torch.testing.assert_close(torch.tensor(top.logprobs), row.topk(3).values, atol=1e-4, rtol=0)
        assert requested.token_ids == [5, 6]
        torch.testing.assert_close(torch.tensor(requested.logprobs), row[5:7], atol=1e-4, rtol=0)
    chosen = second.top_logprobs[0]
    assert chosen is not None and chosen.token_ids[0] == second.next_ids[0]


def test_prompt_logprobs_of_several_requests(model: Model, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of a step that request the same are computed together; chunks end within an entry."""
    monkeypatch.setattr(StepMemory, "prompt_positions", lambda *_: 7)
    prompts = [random_prompt(length, seed=length) for length in (11, 23, 9, 16)]
    sequences = [driver.add(prompt) for prompt in prompts]
    batch = driver.batch([(each, len(prompt)) for each, prompt in zip(sequences, prompts, strict=True)])
    batch.prompt_logprobs = [(0, 0, 0, None), (1, 4, 0, None), (2, 0, 2, None), (3, 14, 0, None)]
    batch.prompt_next_ids = [-1] * 4
    launched: list[int] = []
    compute = driver.runner.model.logits
    monkeypatch.setattr(
        driver.runner.model, "logits", lambda hidden: (launched.append(len(hidden)), compute(hidden))[1]
    )
    found = driver.runner.launch(batch, [each.spec for each in sequences]).result().prompt_logprobs
    assert launched[:-1] == [7, 7, 7, 7, 1, 7, 1], "10 + 18 + 1 positions together, and 8 with candidates"
    for entry, (first, prompt) in enumerate(zip((0, 4, 0, 14), prompts, strict=True)):
        expected = model.reference.logprobs(prompt)[first:-1].gather(1, torch.tensor([prompt[first + 1 :]]).T)[:, 0]
        assert found[entry].token_ids == prompt[first + 1 :]
        torch.testing.assert_close(torch.tensor(found[entry].logprobs), expected, atol=1e-4, rtol=0)
        assert (found[entry].top is None) == (entry != 2)
