"""The KV cache: the slots of a step's tokens, the page table, and the size of the pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.models.config import load_model_config
from verl_server.server_args import ServerArgs
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.kv_cache import KVCache
from verl_server.worker.memory_account import MemoryBudget, cpu_budget

CPU = torch.device("cpu")


def make_cache(folder: Path, *, paged_kernels: bool = False, **changes: float) -> KVCache:
    settings = {"page_size": 4, "max_running_requests": 3, "max_total_tokens": 64} | changes
    args = ServerArgs(model_path=str(folder), device="cpu", **settings)  # type: ignore[arg-type]
    config = load_model_config(folder)
    budget = cpu_budget(args.kv_cache_gib)
    return KVCache(config, TpGroup(), args, CPU, torch.float32, 40, budget, paged_kernels=paged_kernels)


def step(cached: list[int], extend: list[int], pages: list[list[int]]) -> ForwardBatch:
    """Return a batch whose entry i uses row i and lists all pages of that row."""
    return ForwardBatch(
        rows=list(range(len(cached))),
        cached_lens=cached,
        extend_lens=extend,
        input_ids=list(range(100, 100 + sum(extend))),
        page_updates=[(row, 0, held) for row, held in enumerate(pages)],
        sample=[],
    )


def test_tokens_go_to_the_slots_of_their_pages(tiny_llama: Path) -> None:
    placement = make_cache(tiny_llama).place(step([5, 0, 7], [1, 1, 3], [[9, 2], [4], [0, 7, 11]]))
    assert placement.positions.tolist() == [5, 0, 7, 8, 9]
    assert placement.slots.tolist() == [2 * 4 + 1, 4 * 4, 7 * 4 + 3, 11 * 4, 11 * 4 + 1]
    assert placement.num_decodes == 2
    assert placement.starts.tolist() == [0, 1, 2] and placement.last.tolist() == [0, 1, 4]


@pytest.mark.parametrize(("extend", "decodes"), [([1, 1], 2), ([2, 1], 0), ([1, 3], 1)])
def test_leading_entries_that_decode_are_counted(tiny_llama: Path, extend: list[int], decodes: int) -> None:
    assert make_cache(tiny_llama).place(step([0, 0], extend, [[1], [2]])).num_decodes == decodes


def test_the_device_has_the_same_table(tiny_llama: Path) -> None:
    cache = make_cache(tiny_llama, paged_kernels=True)
    batch = step([5, 0], [1, 1], [[9, 2], [4]])
    batch.page_updates += [(0, 1, [3]), (0, 2, [8])]  # the later update wins
    cache.place(batch)
    table = cache.device_page_table
    assert np.array_equal(table[: cache.max_rows].numpy(), cache.page_table)
    assert table[0, :4].tolist() == [9, 3, 8, cache.num_pages]
    assert (table[-1] == cache.num_pages).all()


def test_keys_of_one_head_and_page_lie_together(tiny_llama: Path) -> None:
    cache = make_cache(tiny_llama)
    config = load_model_config(tiny_llama)
    shape = (config.num_layers, cache.num_pages + 1, 4, 2, config.num_kv_heads, config.head_dim)
    assert cache.pool.shape == shape and cache.pool.stride(-1) == 1
    assert cache.layers[0][3, :, 1, 1].is_contiguous()


def test_pages_are_zeroed_only_where_masked_positions_are_multiplied(tiny_llama: Path) -> None:
    for paged_kernels in (False, True):
        cache = make_cache(tiny_llama, paged_kernels=paged_kernels)
        cache.pool.fill_(1.0)
        cache.place(step([4], [2], [[9, 2]]))
        assert (cache.pool[:, 9] == 1.0).all(), "a page with cached tokens was cleared"
        assert bool((cache.pool[:, 2] == 0.0).all()) is not paged_kernels


def test_no_room(tiny_llama: Path) -> None:
    with pytest.raises(BadRequestError, match=r"No room.*max_total_tokens=3"):
        make_cache(tiny_llama, max_total_tokens=3)
    with pytest.raises(BadRequestError, match=r"No room for a KV cache: kv_cache_gib=1e-06.*Raise kv_cache_gib"):
        make_cache(tiny_llama, kv_cache_gib=1e-6)


def test_no_room_on_a_gpu_names_what_was_free_and_the_remedy(tiny_llama: Path) -> None:
    args = ServerArgs(model_path=str(tiny_llama), device="cpu")
    budget = MemoryBudget(0, "20.00 GiB of the GPU were free.", "Raise mem_fraction_static.")
    with pytest.raises(BadRequestError) as error:
        KVCache(load_model_config(tiny_llama), TpGroup(), args, CPU, torch.float32, 40, budget, paged_kernels=False)
    for words in (budget.explanation, budget.remedy, "two are needed on each rank"):
        assert words in str(error.value)
