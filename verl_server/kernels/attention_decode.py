"""Decode attention: one query token per entry against its pages, in one launch of fixed size.

`PagedAttention.decode` launches it. The work of a step is a list of units, one for each (entry, KV head, block of
keys), in that order. Every program walks an equal run of units (stream-K: Osama et al., 2023), so any mix of lengths
is balanced. A head that one program saw alone is written at once; of a head cut between programs each leaves its
part of the softmax in a workspace, and the one that arrives last merges them, in order: the result does not depend
on who that is.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _program_of(unit: tl.tensor, share: tl.tensor, larger: tl.tensor) -> tl.tensor:
    """The program whose run holds `unit`: the first `larger` programs have share + 1 units, the others share."""
    head = larger * (share + 1)
    return tl.where(unit < head, unit // (share + 1), larger + (unit - head) // tl.maximum(share, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _merge(
    out: tl.tensor, part_acc: tl.tensor, part_max: tl.tensor, part_sum: tl.tensor,
    opening: tl.tensor, first: tl.tensor, last: tl.tensor,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the parts of one head: slot `opening`, then slots first + 1 .. last, into out [ROWS, D]."""
    row, dim = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
    inside = (row < ROWS)[:, None] & (dim < D)[None, :]
    m = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for start in range(first, last + 1, AT_ONCE):
        part = start + tl.arange(0, AT_ONCE)
        slot = tl.where(part == first, opening, part)
        there = (part <= last)[:, None] & (row < ROWS)[None, :]
        at = slot[:, None] * ROWS + row[None, :]
        m_part = tl.load(part_max + at, mask=there, other=float("-inf"))
        sum_part = tl.load(part_sum + at, mask=there, other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))
        m_new = tl.where(row < ROWS, m_new, 0.0)
        weight = tl.exp2(m_part - m_new[None, :])
        old = tl.exp2(m - m_new)
        total = total * old + tl.sum(sum_part * weight, 0)
        tile = tl.load(
            part_acc + at[:, :, None] * D + dim[None, None, :],
            mask=there[:, :, None] & (dim < D)[None, None, :],
            other=0.0,
        )
        acc = acc * old[:, None] + tl.sum(tile * weight[:, :, None], 0)
        m = m_new
    acc = acc / tl.where(row < ROWS, total, 1.0)[:, None]
    tl.store(out + row[:, None] * D + dim[None, :], acc.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(
    out: tl.tensor, q: tl.tensor, kv: tl.tensor, page_table: tl.tensor, rows: tl.tensor, kv_lens: tl.tensor,
    meta: tl.tensor, part_acc: tl.tensor, part_max: tl.tensor, part_sum: tl.tensor, arrivals: tl.tensor,
    scale: tl.tensor, stride_q_entry: tl.tensor, stride_q_head: tl.tensor, stride_row: tl.tensor,
    stride_page: tl.tensor, stride_token: tl.tensor, stride_kv: tl.tensor, stride_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """See `PagedAttention.decode`; `meta` is `host_metadata`'s. `scale` includes log2(e): softmax is in powers of 2."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    share, larger = tl.load(meta), tl.load(meta + 1)
    entry = tl.load(meta + 2 + 3 * program)
    head = tl.load(meta + 3 + 3 * program)
    block = tl.load(meta + 4 + 3 * program)
    left = share + (program < larger).to(tl.int32)
    unit = program * share + tl.minimum(program, larger)
    lane, row, dim = tl.arange(0, BLOCK), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_inside = (row < GROUP)[:, None] & (dim < D)[None, :]

    while left > 0:
        kv_len = tl.load(kv_lens + entry)
        pages = page_table + tl.load(rows + entry).to(tl.int64) * stride_row
        blocks = tl.cdiv(kv_len, BLOCK)
        taken = tl.minimum(blocks - block, left)
        q_at = q + entry * stride_q_entry + (head * GROUP + row)[:, None] * stride_q_head + dim[None, :]
        queries = tl.load(q_at, mask=q_inside, other=0.0)
        keys = kv + head * stride_head
        values = keys + stride_kv

        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for i in tl.range(block, block + taken, num_stages=STAGES):
            token = i * BLOCK + lane
            seen = token < kv_len
            page = tl.load(pages + token // PAGE, mask=seen, other=0)
            at = page.to(tl.int64) * stride_page + (token % PAGE) * stride_token
            at = at[:, None] + dim[None, :]
            inside = seen[:, None] & (dim < D)[None, :]
            k = tl.load(keys + at, mask=inside, other=0.0)
            scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            weight = tl.exp2(scores - m_new[:, None])
            old = tl.exp2(m - m_new)
            sums = sums * old[:, None] + weight
            v = tl.load(values + at, mask=inside, other=0.0)
            acc = tl.dot(weight.to(v.dtype), v, acc * old[:, None], input_precision=PRECISION)
            m = m_new
        total = tl.sum(sums, 1)

        out_at = out + (entry * KV_HEADS + head) * (GROUP * D)
        if taken == blocks:
            done = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out_at + row[:, None] * D + dim[None, :], done, mask=q_inside)
        else:
            first = _program_of(unit - block, share, larger)
            last = _program_of(unit - block + blocks - 1, share, larger)
            # A program continues at most one head, its first, and opens at most one that it cannot finish, its last.
            slot = tl.where(block > 0, program, programs + program) * GROUP + row
            tl.store(part_max + slot, m, mask=row < GROUP)
            tl.store(part_sum + slot, total, mask=row < GROUP)
            tl.store(part_acc + slot[:, None] * D + dim[None, :], acc, mask=q_inside)
            tl.debug_barrier()  # all of this program's threads have stored before one announces it
            if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == last - first:
                tl.store(arrivals + first, 0)
                _merge(out_at, part_acc, part_max, part_sum, programs + first, first, last, D, GROUP,
                       BLOCK_ROWS, BLOCK_D, 8)  # fmt: skip

        unit += taken
        left -= taken
        block = 0
        head += 1
        if head == KV_HEADS:
            head = 0
            entry += 1
