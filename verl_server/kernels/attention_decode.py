"""Decode attention: one query token per entry against its pages, in one launch of fixed size.

`PagedAttention.decode` launches `decode_kernel`. The work of a step is a list of units, one for each (entry, KV head,
block of keys), in that order. Every program processes an equal number of consecutive units (stream-K: Osama et al.,
2023), so any mix of lengths is balanced. A program that processes all units of a head writes the result of that head at
once. If the units of a head are divided between programs, each program stores its part of the softmax in a workspace,
and the program that finishes last merges the parts in order, so the result does not depend on which one that is.

Keys that several entries share are processed by another kernel before (`attention_shared`). The decode kernel then
starts behind the shared keys of an entry, and merges the stored softmax over them into the finished head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verl_server.kernels import dependent


@triton.jit  # type: ignore[untyped-decorator]
def _program_of(unit: tl.tensor, share: tl.tensor, larger: tl.tensor) -> tl.tensor:
    """Return the program that processes `unit`. The first `larger` programs have `share` + 1 units, others `share`."""
    shared_out = larger * (share + 1)
    return tl.where(unit < shared_out, unit // (share + 1), larger + (unit - shared_out) // tl.maximum(share, 1))


@triton.jit  # type: ignore[untyped-decorator]
def _load_shared(values: tl.tensor, entry: tl.tensor, LEVELS: tl.constexpr) -> tl.tensor:
    """values[entry] if the launch has shared keys; otherwise 0, without a read."""
    if LEVELS:
        return tl.load(values + entry)
    else:
        return entry * 0


@triton.jit  # type: ignore[untyped-decorator]
def _merge_shared(
    m: tl.tensor, total: tl.tensor, acc: tl.tensor, row: tl.tensor, of_head: tl.tensor, levels: tl.tensor,
    heads: tl.tensor, shared_acc: tl.tensor, shared_max: tl.tensor, shared_sum: tl.tensor,
    ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, LEVELS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Merge a head's softmax over its own keys (m, total, acc) with its softmax over shared keys in `levels` runs.

    `of_head` is the index of (entry, KV head) among `heads` such pairs. The shared results are stored level by level.
    """
    dim = tl.arange(0, BLOCK_D)
    for level in tl.static_range(LEVELS):
        at = (level * heads + of_head) * ROWS + row
        there = (row < ROWS) & (level < levels)
        inside = there[:, None] & (dim < D)[None, :]
        m_new = tl.maximum(m, tl.load(shared_max + at, mask=there, other=float("-inf")))
        old = tl.exp2(m - m_new)
        weight = tl.exp2(tl.load(shared_max + at, mask=there, other=float("-inf")) - m_new)
        total = total * old + weight * tl.load(shared_sum + at, mask=there, other=0.0)
        acc_shared = tl.load(shared_acc + at[:, None] * D + dim[None, :], mask=inside, other=0.0)
        acc = acc * old[:, None] + weight[:, None] * acc_shared
        m = m_new
    return m, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def _merge_if_last(
    out: tl.tensor, part_acc: tl.tensor, part_max: tl.tensor, part_sum: tl.tensor, arrivals: tl.tensor,
    start: tl.tensor, blocks: tl.tensor, share: tl.tensor, larger: tl.tensor,
    of_head: tl.tensor, levels: tl.tensor, heads: tl.tensor,
    shared_acc: tl.tensor, shared_max: tl.tensor, shared_sum: tl.tensor,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
    LEVELS: tl.constexpr,
) -> None:  # fmt: skip
    """Count this program as done with the head of units start .. start + blocks - 1; the last program writes `out`.

    The program that processed the head's first unit stored its part in the second half of the slots, the others stored
    theirs in the first half. `AT_ONCE` parts are loaded together.
    """
    first = _program_of(start, share, larger)
    last = _program_of(start + blocks - 1, share, larger)
    if tl.atomic_add(arrivals + first, 1, sem="acq_rel") == last - first:
        tl.store(arrivals + first, 0)  # the counter starts at 0 for the next layer
        opening = tl.num_programs(0) + first
        row, dim = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_D)
        real = row < ROWS
        inside = real[:, None] & (dim < D)[None, :]
        m = tl.load(part_max + opening * ROWS + row, mask=real, other=0.0)
        total = tl.load(part_sum + opening * ROWS + row, mask=real, other=1.0)
        for part in range(first + 1, last + 1, 128):
            slot = part + tl.arange(0, 128)
            there = (slot <= last)[:, None] & real[None, :]
            at = slot[:, None] * ROWS + row[None, :]
            m_parts = tl.load(part_max + at, mask=there, other=float("-inf"))
            sums = tl.load(part_sum + at, mask=there, other=0.0)
            m_new = tl.maximum(m, tl.max(m_parts, 0))
            total = total * tl.exp2(m - m_new) + tl.sum(sums * tl.exp2(m_parts - m_new[None, :]), 0)
            m = m_new
        acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
        for part in range(first, last + 1, AT_ONCE):
            for i in tl.static_range(AT_ONCE):
                at = tl.where(part + i == first, opening, part + i) * ROWS + row
                there = part + i <= last
                weight = tl.exp2(tl.load(part_max + at, mask=real & there, other=float("-inf")) - m)
                acc_part = tl.load(part_acc + at[:, None] * D + dim[None, :], mask=inside & there, other=0.0)
                acc += weight[:, None] * acc_part
        if LEVELS:
            m, total, acc = _merge_shared(m, total, acc, row, of_head, levels, heads, shared_acc, shared_max,
                                          shared_sum, ROWS, D, BLOCK_D, LEVELS)  # fmt: skip
        tl.store(
            out + of_head * (ROWS * D) + row[:, None] * D + dim[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=inside,
        )


@triton.jit  # type: ignore[untyped-decorator]
def decode_kernel(
    out: tl.tensor, q: tl.tensor, kv: tl.tensor, page_table: tl.tensor, rows: tl.tensor, kv_lens: tl.tensor,
    meta: tl.tensor, part_acc: tl.tensor, part_max: tl.tensor, part_sum: tl.tensor, arrivals: tl.tensor,
    starts: tl.tensor, levels: tl.tensor, shared_acc: tl.tensor, shared_max: tl.tensor, shared_sum: tl.tensor,
    scale: tl.tensor, stride_q_entry: tl.tensor, stride_q_head: tl.tensor, stride_row: tl.tensor,
    stride_page: tl.tensor, stride_token: tl.tensor, stride_kv: tl.tensor, stride_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Arguments as in `PagedAttention.decode`. `meta` is the result of `host_metadata`. `scale` includes log2(e), since
    the softmax is computed in powers of 2.

    With LEVELS, an entry's own keys begin at `starts`; the softmax over the keys before that is in `shared_acc`,
    `shared_max` and `shared_sum`.

    One loop covers all units of the program, even if they belong to several heads: while one head is finished, the keys
    of the next head are being loaded. The compiler can issue a load early only if its address needs no load of the same
    iteration. Hence everything that a unit needs is read or derived one unit ahead, and an entry's row and length one
    entry ahead.
    """
    dependent.let_next_begin(DEPENDENT)
    program, programs = tl.program_id(0), tl.num_programs(0)
    share, larger, active, last_entry = tl.load(meta), tl.load(meta + 1), tl.load(meta + 2), tl.load(meta + 3)
    entry = tl.load(meta + 4 + 3 * program)
    head = tl.load(meta + 5 + 3 * program)
    block = tl.load(meta + 6 + 3 * program)
    if program >= active:
        dependent.wait(DEPENDENT)
        return
    count = share + (program < larger).to(tl.int32)
    begin = program * share + tl.minimum(program, larger)
    lane, row, dim = tl.arange(0, BLOCK), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    q_inside = (row < GROUP)[:, None] & (dim < D)[None, :]

    heads = (last_entry + 1) * KV_HEADS
    kv_len, table_row, own = tl.load(kv_lens + entry), tl.load(rows + entry), _load_shared(starts, entry, LEVELS)
    next_entry = tl.minimum(entry + 1, last_entry)
    next_len, next_row = tl.load(kv_lens + next_entry), tl.load(rows + next_entry)
    next_own = _load_shared(starts, next_entry, LEVELS)
    token = own + block * BLOCK + lane
    page = tl.load(page_table + table_row.to(tl.int64) * stride_row + token // PAGE, mask=token < kv_len, other=0)
    first_start, first_blocks = begin - block, tl.cdiv(kv_len - own, BLOCK)
    first_entry, first_head = entry, head
    dependent.wait(DEPENDENT)  # what follows reads queries, new keys and shared results

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        token = own + block * BLOCK + lane
        seen = token < kv_len
        at = page.to(tl.int64) * stride_page + (token % PAGE) * stride_token + head * stride_head
        at = at[:, None] + dim[None, :]
        inside = seen[:, None] & (dim < D)[None, :]
        q_at = q + entry * stride_q_entry + (head * GROUP + row)[:, None] * stride_q_head + dim[None, :]
        queries = tl.load(q_at, mask=q_inside, other=0.0)
        k = tl.load(kv + at, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # The sums start again with a new head. They are selected, not multiplied by 0, because the sums of the head
        # before may be NaN, and that head may belong to another request.
        opens = block == 0
        m = tl.where(opens, float("-inf"), m)
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        weight = tl.exp2(scores * scale - m_new[:, None])
        old = tl.exp2(m - m_new)
        sums = tl.where(opens, 0.0, sums * old[:, None]) + weight
        v = tl.load(kv + stride_kv + at, mask=inside, other=0.0)
        acc = tl.where(opens, 0.0, acc * old[:, None])
        acc = tl.dot(weight.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new

        head_ends = block + 1 == tl.cdiv(kv_len - own, BLOCK)
        more = i + 1 < count
        if head_ends | (i + 1 == count):
            total = tl.sum(sums, 1)
            if head_ends & (i >= block):
                of_head, whole, total_whole = entry * KV_HEADS + head, acc, total
                if LEVELS:
                    in_runs = _load_shared(levels, entry, LEVELS)
                    _, total_whole, whole = _merge_shared(m, total, acc, row, of_head, in_runs, heads,
                        shared_acc, shared_max, shared_sum, GROUP, D, BLOCK_D, LEVELS)  # fmt: skip
                done = (whole / total_whole[:, None]).to(out.dtype.element_ty)
                tl.store(out + (of_head * GROUP + row)[:, None] * D + dim[None, :], done, mask=q_inside)
            else:
                # The head is divided between programs. This can be so only for the first head of a program, which an
                # earlier program began, and for the last head, which a later program continues.
                slot = tl.where(i < block, program, programs + program) * GROUP + row
                tl.store(part_max + slot, m, mask=row < GROUP)
                tl.store(part_sum + slot, total, mask=row < GROUP)
                tl.store(part_acc + slot[:, None] * D + dim[None, :], acc, mask=q_inside)

        entry_ends = more & head_ends & (head + 1 == KV_HEADS)
        block = tl.where(more, tl.where(head_ends, 0, block + 1), block)  # after the loop: that of the last unit
        head = tl.where(more & head_ends, tl.where(entry_ends, 0, head + 1), head)
        entry += entry_ends.to(tl.int32)
        kv_len = tl.where(entry_ends, next_len, kv_len)
        table_row = tl.where(entry_ends, next_row, table_row)
        own = tl.where(entry_ends, next_own, own)
        ahead = own + block * BLOCK + lane
        page = tl.load(page_table + table_row.to(tl.int64) * stride_row + ahead // PAGE, mask=ahead < kv_len, other=0)
        next_entry = tl.minimum(entry + 1, last_entry)
        next_len, next_row = tl.load(kv_lens + next_entry), tl.load(rows + next_entry)
        next_own = _load_shared(starts, next_entry, LEVELS)

    tl.debug_barrier()  # all threads of this program have stored before one of them counts the program as done
    end = begin + count
    start, blocks = end - 1 - block, tl.cdiv(kv_len - own, BLOCK)
    if (first_start < begin) | (first_start + first_blocks > end):
        _merge_if_last(out, part_acc, part_max, part_sum, arrivals, first_start, first_blocks, share, larger,
                       first_entry * KV_HEADS + first_head, _load_shared(levels, first_entry, LEVELS), heads,
                       shared_acc, shared_max, shared_sum,
                       D, GROUP, BLOCK_ROWS, BLOCK_D, AT_ONCE, LEVELS)  # fmt: skip
    if (start != first_start) & (start + blocks > end):
        _merge_if_last(out, part_acc, part_max, part_sum, arrivals, start, blocks, share, larger,
                       entry * KV_HEADS + head, _load_shared(levels, entry, LEVELS), heads,
                       shared_acc, shared_max, shared_sum,
                       D, GROUP, BLOCK_ROWS, BLOCK_D, AT_ONCE, LEVELS)  # fmt: skip
