"""The CUDA path: fp32 parity, bf16 error, memory that is released, shared or exhausted, and weights with NaN."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.harness import Driver, Reference, Sequence, make_runner, random_prompt
from verl_server import Engine, ServerUnavailableError, WeightUpdateError
from verl_server.models.tiny import make_model_folder

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda", 0)


def load_once(folder: Path) -> None:
    """Start and end a small runner: what CUDA and its libraries load and reserve at a first use, they keep."""
    make_runner(folder, device=CUDA, disable_cuda_graph=True)
    gc.collect()
    torch.cuda.empty_cache()


def busy_run(driver: Driver) -> list[Sequence]:
    """Run mixed lengths, chunks, a shared prefix and a retraction, all in common steps."""
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
    runner = make_runner(path, device=CUDA, dtype="float32")
    for sequence in busy_run(Driver(runner)):
        reference.check(sequence, tolerance=5e-4)


def test_bf16_error_is_that_of_transformers(tiny_qwen3: Path) -> None:
    """The mean absolute log-probability error against fp32 is at most 1.5 times that of transformers in bf16."""
    exact, rounded = Reference(tiny_qwen3), Reference(tiny_qwen3, torch.bfloat16, CUDA)
    runner = make_runner(tiny_qwen3, device=CUDA, dtype="bfloat16")
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


@pytest.mark.gpu_alone
def test_release_frees_device_memory(tiny_llama: Path) -> None:
    runner = make_runner(
        tiny_llama, device=CUDA, mem_fraction_static=0.5, max_total_tokens=None, max_running_requests=4096
    )
    held = runner.memory.figures()
    runner.memory.release_kv_cache()
    runner.memory.release_weights()
    freed = runner.memory.figures()["device_free_bytes"] - held["device_free_bytes"]
    assert held["kv_cache_bytes"] > 256 << 20 and freed > 0.95 * held["kv_cache_bytes"]
    runner.memory.resume_weights()
    runner.memory.resume_kv_cache()
    assert runner.memory.figures()["kv_cache_bytes"] == held["kv_cache_bytes"]


@pytest.mark.gpu_alone
def test_the_kv_cache_is_a_share_of_what_was_free(tiny_llama: Path) -> None:
    """Another process (here: a tensor) holds 60 % of the GPU, and the pool takes half of the rest."""
    load_once(tiny_llama)
    free, total = torch.cuda.mem_get_info(CUDA)
    other = torch.empty(int(free - 0.4 * total), dtype=torch.uint8, device=CUDA)
    free_before, _ = torch.cuda.mem_get_info(CUDA)
    settings = {"mem_fraction_static": 0.5, "max_total_tokens": None, "max_running_requests": 2**17}
    runner = make_runner(tiny_llama, device=CUDA, disable_cuda_graph=True, chunked_prefill_size=1024, **settings)
    held = runner.memory.figures()
    static = held["kv_cache_bytes"] + held["weight_bytes"]
    assert static == pytest.approx(0.5 * free_before, rel=0.05)
    del other


def test_a_step_that_runs_out_of_memory_is_computed_in_parts(tiny_llama: Path) -> None:
    """A real allocation fails. The same requests, in two steps, then get the tokens of an undisturbed run."""
    runner = make_runner(tiny_llama, device=CUDA, dtype="float32", disable_cuda_graph=True)
    apply = runner.sampler._penalties.apply

    def apply_with_less_memory(*args: Any) -> None:
        apply(*args)
        torch.empty(2**50, dtype=torch.uint8, device=CUDA)

    def play(driver: Driver, *, harmed: bool) -> list[Sequence]:
        sequences = [driver.add(random_prompt(100, seed=n), frequency_penalty=0.5) for n in range(8)]
        driver.step([(s, 100) for s in sequences])
        work = [(s, 1) for s in sequences]
        if harmed:
            runner.sampler._penalties.apply = apply_with_less_memory  # type: ignore[method-assign]
            with pytest.raises(torch.OutOfMemoryError):
                runner.launch(driver.batch(work), [s.spec for s in sequences])
            runner.sampler._penalties.apply = apply  # type: ignore[method-assign]
        driver.step(work[:4])
        driver.step(work[4:])
        driver.finish(sequences, 6)
        return sequences

    driver = Driver(runner)
    for ours, theirs in zip(play(driver, harmed=True), play(driver, harmed=False), strict=True):
        assert ours.spec.output_ids == theirs.spec.output_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.gpu_alone
def test_a_prompt_out_of_memory_is_computed_in_smaller_steps(tmp_path: Path) -> None:
    """The logits of a prompt's log-probabilities take 450 MB at once, and 48 MiB are free."""
    folder = make_model_folder(tmp_path, "llama", vocab_size=150_000, max_position_embeddings=2048, weights=False)
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy", "max_total_tokens": 4096}
    with Engine(model_path=str(folder), device="cuda", disable_cuda_graph=True, **settings) as engine:
        params = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
        expected = engine.generate(input_ids=[5, 6, 7], sampling_params=params)
        # CUDA loads the code of kernels at their first launch. Without memory for it, the launch fails.
        engine.generate(sampling_params=params, return_logprob=True, logprob_start_len=0, input_ids=[5, 6, 7])
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(CUDA)
        others = torch.empty(free - (48 << 20), dtype=torch.uint8, device=CUDA)
        request: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "input_ids": random_prompt(1500, 1)}
        short = engine.generate(sampling_params=params, **request)
        again = engine.generate(input_ids=[5, 6, 7], sampling_params=params)
        del others
        torch.cuda.empty_cache()
        plenty = engine.generate(sampling_params=params, **request)
        assert isinstance(again, dict) and isinstance(expected, dict)
        assert again["output_ids"] == expected["output_ids"]
        assert isinstance(short, dict) and isinstance(plenty, dict)
        found, true = ([t[0] for t in r["meta_info"]["input_token_logprobs"][1:]] for r in (short, plenty))
        assert len(found) == 1499
        assert found == pytest.approx(true, abs=0.05)  # in bf16, products of other sizes are rounded differently


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_no_token_comes_of_weights_that_hold_nan(place: str, tmp_path: Path) -> None:
    """Steps overlap and requests run during the push: they are long enough for that on a slow host, too.

    A kernel copies device memory, and the driver copies host memory.
    """
    folder = make_model_folder(tmp_path, "qwen3", max_position_embeddings=8192)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(place)
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    spoiled = next(name for name in weights if name.endswith("k_proj.weight"))
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_total_tokens": 16_384}
    sampling = {"temperature": 1.0, "max_new_tokens": 8000, "ignore_eos": True}
    with Engine(model_path=str(folder), **settings) as engine, ThreadPoolExecutor(1) as pool:
        engine.register_weights(list(weights.items()))
        for turn in range(3):
            running = pool.submit(engine.generate, input_ids=[5, 6, 7], sampling_params=sampling, timeout=120)
            while not engine.get_server_info()["internal_states"][0].get("num_running_reqs"):
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
