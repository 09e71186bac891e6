"""Prefill attention: several new tokens per entry against the entry's pages, causal.

`PagedAttention.extend` launches `extend_kernel`. The rows of a tile are consecutive new tokens of one entry, each with
all query heads of one KV head, so the keys are read once for all these heads. The keys of the new tokens are in the
pool already. Hence new prompts, later chunks and prefix hits are one case: an online softmax over the pages
(FlashAttention-2: Dao, 2023), without a mask up to the tile's first token, and with one over the diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verl_server.kernels import dependent


@triton.jit  # type: ignore[untyped-decorator]
def attend_block(
    i: tl.tensor, page: tl.tensor, queries: tl.tensor, m: tl.tensor, sums: tl.tensor, acc: tl.tensor,
    seen_by_row: tl.tensor, end: tl.tensor, pages: tl.tensor, keys: tl.tensor, values: tl.tensor,
    scale: tl.tensor, stride_page: tl.tensor, stride_token: tl.tensor,
    MASKED: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Add block i of keys to the online softmax (m, sums, acc). Row r attends to keys below seen_by_row[r] <= end.

    `page` holds the page ids of this block. Return those of the next block, so that its keys can be loaded early, and
    the new m, sums and acc.
    """
    token, dim = i * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    inside = (dim < D)[None, :]
    if MASKED:
        inside &= (token < end)[:, None]
    at = page.to(tl.int64) * stride_page + (token % PAGE) * stride_token
    at = at[:, None] + dim[None, :]
    ahead = token + BLOCK_N
    page = tl.load(pages + ahead // PAGE, mask=ahead < end, other=0)
    k = tl.load(keys + at, mask=inside, other=0.0)
    scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
    if MASKED:
        scores = tl.where(token[None, :] < seen_by_row[:, None], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1) * scale)
    weight = tl.exp2(scores * scale - m_new[:, None])
    old = tl.exp2(m - m_new)
    sums = sums * old + tl.sum(weight, 1)
    v = tl.load(values + at, mask=inside, other=0.0)
    acc = tl.dot(weight.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
    return page, m_new, sums, acc


@triton.jit(do_not_specialize=["entries"])  # type: ignore[untyped-decorator]
def extend_kernel(
    out: tl.tensor, q: tl.tensor, kv: tl.tensor, page_table: tl.tensor, rows: tl.tensor, cached: tl.tensor,
    q_starts: tl.tensor, entries: tl.tensor,
    scale: tl.tensor, stride_q_token: tl.tensor, stride_q_head: tl.tensor, stride_row: tl.tensor,
    stride_page: tl.tensor, stride_token: tl.tensor, stride_kv: tl.tensor, stride_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Arguments as in `PagedAttention.extend`. Tiles of entry e are numbered from q_starts[e] // BLOCK_Q + e; some tile
    numbers have no tokens."""
    dependent.let_next_begin(DEPENDENT)
    head, tile = tl.program_id(0), tl.program_id(1)
    entry, above = 0, entries
    while above - entry > 1:
        middle = (entry + above) // 2
        if tl.load(q_starts + middle) // BLOCK_Q + middle <= tile:
            entry = middle
        else:
            above = middle
    start, stop = tl.load(q_starts + entry), tl.load(q_starts + entry + 1)
    # The last tokens of an entry attend to most keys, so their tiles run first and short tiles run at the end.
    first = (tl.cdiv(stop - start, BLOCK_Q) - 1 - (tile - start // BLOCK_Q - entry)) * BLOCK_Q
    dependent.wait(DEPENDENT)
    if (first < 0) | (first >= stop - start):
        return
    before = tl.load(cached + entry)
    pages = page_table + tl.load(rows + entry).to(tl.int64) * stride_row

    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = first + row // GROUP
    real = (row < BLOCK_Q * GROUP) & (query < stop - start)
    inside = real[:, None] & (dim < D)[None, :]
    of_token = (start + query).to(tl.int64)
    q_at = of_token * stride_q_token + (head * GROUP + row % GROUP) * stride_q_head
    queries = tl.load(q + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
    keys = kv + head * stride_head
    values = keys + stride_kv

    seen_by_row = before + query + 1
    end = before + tl.minimum(first + BLOCK_Q, stop - start)
    full = (before + first + 1) // BLOCK_N
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    token = tl.arange(0, BLOCK_N)
    page = tl.load(pages + token // PAGE, mask=token < end, other=0)
    for i in tl.range(0, full, num_stages=STAGES):
        page, m, sums, acc = attend_block(
            i, page, queries, m, sums, acc, seen_by_row, end, pages, keys, values, scale, stride_page, stride_token,
            False, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    for i in tl.range(full, tl.cdiv(end, BLOCK_N), num_stages=STAGES):
        page, m, sums, acc = attend_block(
            i, page, queries, m, sums, acc, seen_by_row, end, pages, keys, values, scale, stride_page, stride_token,
            True, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    out_at = of_token * (KV_HEADS * GROUP * D) + (head * GROUP + row % GROUP) * D
    done = (acc / sums[:, None]).to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + dim[None, :], done, mask=inside)
