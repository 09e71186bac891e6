"""The CUDA path of `ModelRunner`: fp32 parity, bf16 error, memory that really comes back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.harness import Driver, Reference, Sequence, make_runner, random_prompt

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)


def busy_run(driver: Driver) -> list[Sequence]:
    """Mixed lengths, chunks, a shared prefix and a retraction, all in common steps."""
    sequences = [driver.add(random_prompt(n, seed=n)) for n in (3, 40, 40, 150, 1)]
    driver.finish(sequences, 6, chunk=33)
    sequences.append(driver.add(sequences[1].tokens + random_prompt(9, seed=9), shared=sequences[1]))
    driver.retract(sequences[3])
    driver.finish(sequences, 24)
    return sequences


@pytest.mark.parametrize("folder", ["tiny_llama", "tiny_qwen2", "tiny_qwen3"])
def test_fp32_parity(folder: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(folder)
    reference = Reference(path)
    runner = make_runner(path, device=CUDA, dtype="float32", mem_fraction_static=0.2)
    for sequence in busy_run(Driver(runner)):
        reference.check(sequence, tolerance=5e-4)


def test_bf16_error_is_that_of_transformers(tiny_qwen3: Path) -> None:
    """Mean absolute log-probability error against fp32, at most 1.5 times that of transformers in bf16."""
    exact, rounded = Reference(tiny_qwen3), Reference(tiny_qwen3, torch.bfloat16, CUDA)
    runner = make_runner(tiny_qwen3, device=CUDA, dtype="bfloat16", mem_fraction_static=0.2)
    ours: list[float] = []
    theirs: list[float] = []
    for sequence in busy_run(Driver(runner)):
        first = len(sequence.spec.prompt_ids) - 1
        ids = torch.tensor(sequence.spec.output_ids).unsqueeze(1)
        truth = exact.logprobs(sequence.tokens)[first:-1].gather(1, ids)[:, 0]
        peer = rounded.logprobs(sequence.tokens)[first:-1].gather(1, ids)[:, 0]
        ours += (torch.tensor(sequence.logprobs) - truth).abs().tolist()
        theirs += (peer - truth).abs().tolist()
    ratio = sum(ours) / sum(theirs)
    print(f"mean error: ours {sum(ours) / len(ours):.5f}, transformers {sum(theirs) / len(theirs):.5f}, {ratio:.3f}")
    assert ratio < 1.5


def test_release_frees_device_memory(tiny_llama: Path) -> None:
    runner = make_runner(
        tiny_llama, device=CUDA, mem_fraction_static=0.5, max_total_tokens=None, max_running_requests=4096
    )
    held = runner.memory_figures()
    runner.release_kv_cache()
    runner.release_weights()
    freed = runner.memory_figures()["device_free_bytes"] - held["device_free_bytes"]
    assert held["kv_cache_bytes"] > 256 << 20 and freed > 0.95 * held["kv_cache_bytes"]
    runner.resume_weights()
    runner.resume_kv_cache()
    assert runner.memory_figures()["kv_cache_bytes"] == held["kv_cache_bytes"]
