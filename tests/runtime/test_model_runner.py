"""The runner's memory: sizing, release and resume, and pages that must not leak what they held."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from tests.parity.harness import Driver, make_runner, random_prompt
from verl_server.errors import BadRequestError
from verl_server.models.tiny import make_model_folder
from verl_server.runtime.model_runner import device_of
from verl_server.server_args import ServerArgs


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_kv_size_follows_the_settings(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, max_total_tokens=1000, page_size=16)
    assert runner.num_pages == 62
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, page, heads, dim, fp32
    by_bytes = make_runner(tiny_llama, max_total_tokens=None, kv_cache_gib=100 * page_bytes / 2**30)
    assert by_bytes.num_pages == 99  # one more is the padding page
    roomy = make_runner(tiny_llama, max_total_tokens=None, max_running_requests=3)
    assert roomy.num_pages == 3 * 512 // 16  # never more than the largest batch could fill
    with pytest.raises(BadRequestError, match="No room for a KV cache"):
        make_runner(tiny_llama, kv_cache_gib=1e-6)


def test_context_length_beyond_the_model_is_refused(tiny_llama: Path) -> None:
    assert make_runner(tiny_llama, context_length=100).context_length == 100
    with pytest.raises(BadRequestError, match="max_position_embeddings=512"):
        make_runner(tiny_llama, context_length=513)


def test_release_gives_memory_back_and_resume_keeps_identity(tmp_path: Path) -> None:
    folder = make_model_folder(
        tmp_path, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, weights=False
    )
    runner = make_runner(folder, load_format="dummy", max_total_tokens=8192)
    runner.kv_pool.fill_(1.0)  # touch every page
    figures = runner.memory_figures()
    kv, weights = int(figures["kv_cache_bytes"]), int(figures["weight_bytes"])
    assert kv > 8 << 20 and weights > 50 << 20
    parameters = list(runner.model.parameters())
    views = [destination for slot in runner.weight_map.slots.values() for destination, _ in slot.pieces]

    for _ in range(2):  # the allocator learns from the first round, and would keep the second one's memory
        before = resident_bytes()
        runner.release_kv_cache()
        assert before - resident_bytes() > 0.9 * kv
        runner.release_weights()
        assert before - resident_bytes() > 0.9 * (kv + weights)
        assert runner.memory_figures()["kv_cache_bytes"] == runner.memory_figures()["weight_bytes"] == 0
        runner.resume_weights()
        runner.resume_kv_cache()
        assert runner.memory_figures() == figures
        runner.kv_pool.fill_(1.0)
    assert all(a is b for a, b in zip(parameters, runner.model.parameters(), strict=True))
    for view in views:  # views made before the release write into the resumed storage
        view.fill_(0.5)
    assert all((p == 0.5).all() for p in parameters)


def test_padding_page_is_zero_after_resume(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    runner.kv_pool.fill_(torch.nan)
    runner.release_kv_cache()
    runner.resume_kv_cache()
    assert (runner.kv_pool[:, -1] == 0).all()


def test_generation_after_release_and_resume_is_the_same(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3)
    first, second = Driver(runner), Driver(runner)
    prompt = random_prompt(30, seed=0)
    a = first.add(prompt)
    first.finish([a], 10)
    weights = {name: runner.weight_map.read(name) for name in runner.weight_map.slots}
    runner.release_kv_cache()
    runner.release_weights()
    runner.resume_weights()
    runner.resume_kv_cache()
    for name, tensor in weights.items():
        runner.weight_map.slots[name].copy_from(tensor)
    b = second.add(prompt)
    second.finish([b], 10)
    assert a.spec.output_ids == b.spec.output_ids and a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_nan_in_the_pool_harms_nobody_later(tiny_llama: Path) -> None:
    """Pages that held NaN are handed out again, partly filled and as padding of longer neighbours."""
    runner = make_runner(tiny_llama)
    clean = Driver(runner)
    prompts = [random_prompt(n, seed=n) for n in (5, 40)]
    expected = [clean.add(p) for p in prompts]
    clean.finish(expected, 12)
    runner.kv_pool[:, : runner.num_pages] = torch.nan
    again = Driver(runner)
    runner.page_table[:] = again.free_pages[0]  # rows still name their last users' pages
    got = [again.add(p) for p in prompts]
    again.finish(got, 12)
    for a, b in zip(expected, got, strict=True):
        assert a.spec.output_ids == b.spec.output_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_nan_weights_are_reported_as_nan(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    driver = Driver(runner)
    runner.weight_map.slots["model.norm.weight"].pieces[0][0].fill_(torch.nan)
    sequence = driver.add(random_prompt(8, seed=0))
    output = driver.step([(sequence, 8)])
    assert math.isnan(output.logprobs[0]) and 0 <= output.next_ids[0] < runner.vocab_size


def test_ragged_lengths_are_split_and_agree(tiny_qwen3: Path) -> None:
    """One long request among many short: several decode groups, same results as alone."""
    runner = make_runner(tiny_qwen3, max_total_tokens=8192)
    lengths = [3, 5, 450, 8, 300, 2, 7, 4, 9, 11]
    alone = Driver(runner)
    expected = []
    for n in lengths:
        sequence = alone.add(random_prompt(n, seed=n))
        alone.finish([sequence], 6)
        expected.append(sequence)
    together = Driver(runner)
    got = [together.add(random_prompt(n, seed=n)) for n in lengths]
    together.finish(got, 6)
    for a, b in zip(expected, got, strict=True):
        assert a.spec.output_ids == b.spec.output_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_page_size_does_not_matter(tiny_llama: Path, page_size: int) -> None:
    results = []
    for size in (16, page_size):
        driver = Driver(make_runner(tiny_llama, page_size=size))
        sequences = [driver.add(random_prompt(n, seed=n)) for n in (1, 20, 70)]
        driver.finish(sequences, 9, chunk=24)
        results.append([s.spec.output_ids for s in sequences])
    assert results[0] == results[1]


def test_bf16_on_cpu_stays_near_fp32(tiny_qwen3: Path) -> None:
    prompts = [random_prompt(n, seed=n) for n in (10, 33)]
    driver = Driver(make_runner(tiny_qwen3, dtype="bfloat16"))
    assert driver.runner.dtype == torch.bfloat16
    sequences = [driver.add(p) for p in prompts]
    driver.finish(sequences, 4)
    exact = Driver(make_runner(tiny_qwen3))
    for sequence in sequences:
        same = exact.add(sequence.tokens[: len(sequence.spec.prompt_ids)])
        exact.finish([same], 1)
        if same.spec.output_ids[0] == sequence.spec.output_ids[0]:
            assert sequence.logprobs[0] == pytest.approx(same.logprobs[0], abs=0.3)


def test_device_of_rank() -> None:
    args = ServerArgs(model_path="x", device="cpu", tp_size=2)
    assert device_of(args, 1) == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(BadRequestError, match="no CUDA device"):
            device_of(args.replace(device="cuda"), 0)
