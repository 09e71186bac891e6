"""Plans of decodes that read shared keys together. No kernel is launched, so that no GPU is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from verl_server.kernels.paged_attention import PagedAttention
from verl_server.models import triton_attention
from verl_server.models.layers import RotaryEmbedding
from verl_server.models.triton_attention import PagedBackend

CPU = torch.device("cpu")
PAGE, GROUP, PROMPT = 16, 32, 2048


def make_backend(*, cascade: bool = True) -> PagedBackend:
    """Return a backend whose rows start with two prompts in turn, and continue with pages of their own.

    A layer's keys and values take 4 KiB for each token.
    """
    own = 2 * PROMPT // PAGE + np.arange(2 * GROUP * 8).reshape(2 * GROUP, 8)
    prompts = np.arange(2 * PROMPT // PAGE).reshape(2, -1)
    table = np.concatenate([np.tile(prompts, (GROUP, 1)), own], axis=1)
    kernels = PagedAttention(
        num_heads=16,
        kv_heads=8,
        head_dim=128,
        page_size=PAGE,
        dtype=torch.bfloat16,
        device=CPU,
        max_shared_entries=2 * GROUP if cascade else 0,
    )
    rotary = RotaryEmbedding(128, 64, {"rope_type": "default", "rope_theta": 1e4}, CPU)
    return PagedBackend(kernels, rotary, torch.from_numpy(table), table, PAGE, fused=False)


def test_a_group_reads_its_prompt_together() -> None:
    backend = make_backend()
    rows = np.arange(2 * GROUP)
    lens = PROMPT + 1 + rows % 100
    planned = backend.plan_decodes(rows, lens)
    assert planned.shared is not None
    assert planned.shared.starts.tolist() == [PROMPT] * len(rows)
    alone = make_backend(cascade=False).plan_decodes(rows, lens - PROMPT)
    assert alone.shared is None
    assert planned.work.tolist() == alone.work.tolist(), "the rest is each entry's own"
    capacities = backend.capacities(len(rows), shared=True)
    assert all(len(array) <= room for array, room in zip(planned.arrays, capacities, strict=True))


@pytest.mark.parametrize(
    ("rows", "prompt"),
    [
        pytest.param([], PROMPT, id="nobody"),
        pytest.param([3], PROMPT, id="one"),
        pytest.param([0, 1], PROMPT, id="of-two-groups"),
        pytest.param([0, 2], PROMPT, id="too-few"),
        pytest.param(list(range(2 * GROUP)), 256, id="too-short"),
    ],
)
def test_little_that_is_shared_is_not_worth_a_kernel(rows: list[int], prompt: int) -> None:
    planned = make_backend().plan_decodes(np.array(rows, dtype=np.int64), np.full(len(rows), prompt + 1))
    assert planned.shared is None and len(planned.arrays) == 1
    assert len(planned.work) == make_backend().capacities(1, shared=False)[0]


def test_one_long_entry_costs_no_columns() -> None:
    """Keys of only one entry are not shared: the table is read up to the end of the second longest entry."""
    backend = make_backend()
    lens = np.full(2 * GROUP, PROMPT + 5)
    lens[7] = PROMPT + 8 * PAGE
    planned = backend.plan_decodes(np.arange(2 * GROUP), lens)
    assert planned.shared is not None and planned.shared.starts.tolist() == [PROMPT] * len(lens)


def test_what_is_shared_is_looked_for_when_it_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, searches = make_backend(), 0
    search = triton_attention.find_runs

    def find_runs(*given: Any) -> Any:
        nonlocal searches
        searches += 1
        return search(*given)

    monkeypatch.setattr(triton_attention, "find_runs", find_runs)
    rows, lens = np.arange(2 * GROUP), np.full(2 * GROUP, PROMPT + 5)

    def starts(rows: Any, lens: Any) -> list[int]:
        shared = backend.plan_decodes(rows, lens).shared
        return [] if shared is None else list(shared.starts)

    for step in (0, 0, 1, 2):
        assert starts(rows, lens + step) == [PROMPT] * len(rows)
    assert searches == 1, "appended keys are not shared, so that no search is needed"
    assert starts(rows[:-1], lens[:-1]) == [PROMPT] * (len(rows) - 1)
    assert searches == 2, "the batch is another"
    # The rows are the same, but row 3 now belongs to another request, with pages of its own.
    backend._host_table[3] = 10**6 + np.arange(backend._host_table.shape[1])
    assert starts(rows[:-1], lens[:-1])[3] == 0
    assert searches == 3
    # The rows are the same, but row 5 now belongs to a request of another length.
    lens[5] = PROMPT - PAGE
    assert starts(rows[:-1], lens[:-1])[5] < PROMPT
    assert searches == 4


def test_requests_that_share_more_are_seen_in_the_rows_of_those_that_did_not() -> None:
    backend = make_backend()
    rows, prompts = np.arange(2 * GROUP), backend._host_table.copy()
    backend._host_table[:] = 10**6 + np.arange(prompts.size).reshape(prompts.shape)
    assert backend.plan_decodes(rows, np.full(len(rows), PROMPT + 90)).shared is None
    backend._host_table[:] = prompts
    assert backend.plan_decodes(rows, np.full(len(rows), PROMPT + 5)).shared is not None
