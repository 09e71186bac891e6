"""The CUDA path: fp32 parity, bf16 error, memory that really comes back, weights that are none."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.harness import Driver, Reference, Sequence, make_runner, random_prompt
from verl_server import Engine, ServerUnavailableError, WeightUpdateError

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


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_no_token_comes_of_weights_that_hold_nan(place: str, tiny_qwen3: Path) -> None:
    """Steps overlap, requests run, and the push lets them: one kernel copies, or the driver from host memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.bfloat16).to(place)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    spoiled = next(name for name in weights if name.endswith("k_proj.weight"))
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "mem_fraction_static": 0.2}
    sampling = {"temperature": 1.0, "max_new_tokens": 500, "ignore_eos": True}
    with Engine(model_path=str(tiny_qwen3), **settings) as engine, ThreadPoolExecutor(1) as pool:
        engine.register_weights(list(weights.items()))
        for turn in range(3):
            running = pool.submit(engine.generate, input_ids=[5, 6, 7], sampling_params=sampling, timeout=120)
            while engine.get_server_info()["internal_states"][0]["num_running_reqs"] == 0:
                assert not running.done()
            held = weights[spoiled][-1, -1].clone()
            weights[spoiled][-1, -1] = [float("nan"), float("inf"), -float("inf")][turn]
            with pytest.raises(WeightUpdateError, match=f"NaN or infinity in 1 of {len(weights)} tensors: {spoiled}"):
                engine.push_weights(mode="in_place")
            with pytest.raises(ServerUnavailableError, match="NaN or infinity"):
                running.result(120)
            with pytest.raises(ServerUnavailableError, match="NaN or infinity"):
                engine.generate(input_ids=[5, 6, 7], sampling_params=sampling)
            weights[spoiled][-1, -1] = held
            engine.push_weights(turn + 1, mode="in_place")
            reply = engine.generate(input_ids=[5, 6, 7], sampling_params=sampling | {"max_new_tokens": 8})
            assert len(reply["output_ids"]) == 8 and reply["meta_info"]["weight_version"] == str(turn + 1)
