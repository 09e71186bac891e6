"""The runner's memory: sizing, release and resume, and pages whose old contents must not reach a later request."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.parity.harness import Driver, make_runner, random_prompt
from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.models.tiny import make_model_folder
from verl_server.sampling.spec import SampleSpec, TokenMasks
from verl_server.sampling_params import SamplingParams
from verl_server.server_args import ServerArgs
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner


class LonelyRank(TpGroup):
    """One of several ranks without the others, which gathers only its own vote.

    Such a runner can be built and released. It cannot run a step.
    """

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_kv_size_follows_the_settings(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama, max_total_tokens=1000, page_size=16)
    assert runner.num_pages == 62
    page_bytes = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, page, heads, dim, fp32
    by_bytes = make_runner(tiny_llama, max_total_tokens=None, kv_cache_gib=100 * page_bytes / 2**30)
    assert by_bytes.num_pages == 99  # the hundredth page is the padding page
    roomy = make_runner(tiny_llama, max_total_tokens=None, max_running_requests=3)
    assert roomy.num_pages == 3 * 512 // 16  # no more than the largest batch could fill
    with pytest.raises(BadRequestError, match="No room for a KV cache"):
        make_runner(tiny_llama, kv_cache_gib=1e-6)


def test_context_length_beyond_the_model_is_refused(tiny_llama: Path) -> None:
    assert make_runner(tiny_llama, context_length=100).context_length == 100
    with pytest.raises(BadRequestError, match="max_position_embeddings=512"):
        make_runner(tiny_llama, context_length=513)


@pytest.fixture
def big_runner(tmp_path: Path) -> ModelRunner:
    """Return a runner with tens of MiB of weights and of KV pool, and with all pages of both touched."""
    folder = make_model_folder(
        tmp_path, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=4, weights=False
    )
    runner = make_runner(folder, load_format="dummy", max_total_tokens=8192)
    runner.kv.pool.fill_(1.0)
    return runner


def test_release_gives_memory_back_and_resume_keeps_addresses(big_runner: ModelRunner) -> None:
    runner = big_runner
    figures = runner.memory.figures()
    kv, weights = int(figures["kv_cache_bytes"]), int(figures["weight_bytes"])
    assert kv > 8 << 20 and weights > 50 << 20
    parameters = list(runner.model.parameters())
    addresses = [p.data_ptr() for p in parameters] + [runner.kv.pool.data_ptr()]
    views = [destination for slot in runner.weight_map.slots.values() for destination, _ in slot.pieces]

    for _ in range(3):
        before = resident_bytes()
        runner.memory.release_kv_cache()
        assert before - resident_bytes() > 0.95 * kv
        runner.memory.release_weights()
        assert before - resident_bytes() > 0.95 * (kv + weights)
        assert runner.memory.figures()["kv_cache_bytes"] == runner.memory.figures()["weight_bytes"] == 0
        assert runner.memory.resume_weights() is False
        runner.memory.resume_kv_cache()
        assert runner.memory.figures() == figures
        assert all((p == 0).all() for p in parameters)  # the padding of the vocabulary must be zero
        for view in views:  # views that were made before the release write into the resumed memory
            view.fill_(0.5)
        assert all((p == 0.5).all() for p in parameters)
        runner.kv.pool.fill_(1.0)
    assert all(a is b for a, b in zip(parameters, runner.model.parameters(), strict=True))
    assert [p.data_ptr() for p in parameters] + [runner.kv.pool.data_ptr()] == addresses


def test_memory_figures_of_a_gpu(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(tiny_llama)
    assert "allocator_retries" not in runner.memory.figures()
    monkeypatch.setattr(runner.memory, "_device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1, 2))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 3})
    figures = runner.memory.figures()
    assert figures["device_free_bytes"] == 1 and figures["device_total_bytes"] == 2
    assert figures["allocator_retries"] == 3


def test_weights_are_aligned_and_apart(tiny_qwen2: Path) -> None:
    """Tied embeddings are stored once. Parameters share no byte, and each starts at a multiple of 512 bytes."""
    runner = make_runner(tiny_qwen2)
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in runner.model.parameters())
    assert runner.model.lm_head.weight is runner.model.embed_tokens.weight
    assert all(start % 512 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    taken = sum(end - start for start, end in spans)
    assert taken <= runner.memory.figures()["weight_bytes"] < taken + 512 * len(spans) + 4096


def test_vocabulary_padding_is_zero_at_first_and_after_resume(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "llama", vocab_size=323, weights=False)
    args = ServerArgs(model_path=str(folder), device="cpu", tp_size=2, load_format="dummy", max_total_tokens=1024)
    last_rank = LonelyRank(rank=1, size=2)
    runner = ModelRunner(args.replace(cpu_threads=1), last_rank, torch.device("cpu"))
    embedding = runner.model.embed_tokens.weight
    assert embedding.shape[0] == 162 and (embedding[:161] != 0).any() and (embedding[161] == 0).all()
    runner.memory.release_weights()
    runner.memory.resume_weights()
    assert (embedding == 0).all()


def test_backup_brings_the_weights_back(tiny_qwen3: Path) -> None:
    runner = make_runner(tiny_qwen3, enable_weights_cpu_backup=True)
    expected = {name: runner.weight_map.read(name) for name in runner.weight_map.slots}
    for _ in range(2):
        runner.memory.release_weights()
        assert runner.memory.resume_weights() is True
        for name, tensor in expected.items():
            assert torch.equal(runner.weight_map.read(name), tensor), name
        name = "model.norm.weight"  # the next cycle must restore the newest values
        expected[name] = expected[name] + 1
        runner.weight_map.slots[name].copy_from(expected[name])


def test_releasing_and_resuming_twice_is_harmless(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    before = runner.weight_map.read("model.norm.weight")
    assert runner.memory.resume_weights() is True  # nothing was released, so the weights are present
    runner.memory.resume_kv_cache()
    assert torch.equal(runner.weight_map.read("model.norm.weight"), before)
    for _ in range(2):
        runner.memory.release_weights()
        runner.memory.release_kv_cache()
    assert runner.memory.resume_weights() is False


def test_padding_page_is_zero_after_resume(tiny_llama: Path) -> None:
    runner = make_runner(tiny_llama)
    runner.kv.pool.fill_(torch.nan)
    runner.memory.release_kv_cache()
    runner.memory.resume_kv_cache()
    assert (runner.kv.pool[:, -1] == 0).all()


@pytest.mark.parametrize("backup", [False, True])
def test_generation_after_release_and_resume_is_the_same(tiny_qwen3: Path, backup: bool) -> None:
    """The colocated cycle: release everything, restore or refill the weights, resume the KV pool."""
    runner = make_runner(tiny_qwen3, enable_weights_cpu_backup=backup)
    weights = {name: runner.weight_map.read(name) for name in runner.weight_map.slots}
    prompt = random_prompt(30, seed=0)
    results = []
    for _ in range(4):
        driver = Driver(runner)
        sequence = driver.add(prompt)
        driver.finish([sequence], 10)
        results.append((sequence.spec.output_ids, sequence.logprobs))
        runner.memory.release_kv_cache()
        runner.memory.release_weights()
        if not runner.memory.resume_weights():
            for name, tensor in weights.items():
                runner.weight_map.slots[name].copy_from(tensor)
        runner.memory.resume_kv_cache()
    for ids, logprobs in results[1:]:
        assert ids == results[0][0] and logprobs == pytest.approx(results[0][1], abs=1e-5)


def test_nan_in_the_pool_harms_nobody_later(tiny_llama: Path) -> None:
    """Pages that held NaN are used again, partly filled and as padding beside longer requests."""
    runner = make_runner(tiny_llama)
    clean = Driver(runner)
    prompts = [random_prompt(n, seed=n) for n in (5, 40)]
    expected = [clean.add(p) for p in prompts]
    clean.finish(expected, 12)
    runner.kv.pool[:, : runner.num_pages] = torch.nan
    again = Driver(runner)
    runner.kv.page_table[:] = again.free_pages[0]  # rows still list the pages of earlier requests
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
    """One long request among many short ones takes several decode groups. The results are the same as alone."""
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


class RecordingRank(TpGroup):
    """Records when tokens are broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def broadcast(self, tensor: torch.Tensor) -> None:
        self.events.append("broadcast")


def test_masks_are_made_between_the_forward_pass_and_the_broadcast(tiny_llama: Path) -> None:
    """All ranks meet in the same order: the forward pass, then the broadcast of tokens. Rank 0 makes masks between."""
    runner = make_runner(tiny_llama)
    rank = RecordingRank()
    runner.tp, runner.overlaps = rank, True
    logits = runner.model.logits

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rank.events.append("forward")
        return logits(hidden)

    def make_masks(is_computed: Callable[[], bool] | None) -> TokenMasks:
        rank.events.append("masks")
        words = torch.zeros(1, runner.vocab_size // 32, dtype=torch.int32)
        words[0, 3] = 1 << 7
        return TokenMasks([0], words)

    runner.model.logits = forward  # type: ignore[method-assign]
    spec = SampleSpec(SamplingParams(), 7, [5, 6, 7], [], [], True)
    batch = ForwardBatch(
        rows=[0], cached_lens=[0], extend_lens=[3], input_ids=[5, 6, 7], page_updates=[(0, 0, [0])], sample=[0]
    )
    assert runner.launch(batch, [spec], make_masks).result().next_ids == [3 * 32 + 7]
    assert rank.events == ["forward", "masks", "broadcast"]
    rank.events.clear()
    runner.launch(batch, None)
    assert rank.events == ["forward", "broadcast"], "the other ranks"
