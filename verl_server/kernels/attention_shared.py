"""Attention from many entries to the keys that they share: the first half of cascade attention.

`PagedAttention.decode` launches `shared_kernel` before `decode_kernel`. For every entry, head and level, this kernel
stores the softmax over the shared keys, not yet divided by its sum, and `decode_kernel` merges it. `shared_keys` plans
the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from verl_server.kernels import dependent
from verl_server.kernels.attention_extend import attend_block


@triton.jit  # type: ignore[untyped-decorator]
def shared_kernel(
    q: tl.tensor, kv: tl.tensor, page_table: tl.tensor, rows: tl.tensor, order: tl.tensor, items: tl.tensor,
    shared_acc: tl.tensor, shared_max: tl.tensor, shared_sum: tl.tensor,
    part_acc: tl.tensor, part_max: tl.tensor, part_sum: tl.tensor, arrivals: tl.tensor,
    scale: tl.tensor, stride_q_entry: tl.tensor, stride_q_head: tl.tensor, stride_row: tl.tensor,
    stride_page: tl.tensor, stride_token: tl.tensor, stride_kv: tl.tensor, stride_head: tl.tensor,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ITEM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Store the softmax over shared keys: shared_acc [levels, entries, heads, D], shared_max and shared_sum without D.

    `items` is [number of items, number of entries in the step, then `shared_keys.ITEM` integers for each item].

    A program computes tiles: one item and one KV head each. Row r of a tile is query head r % GROUP of the KV head, for
    entry number r // GROUP of the item. If a tile has several chunks, each chunk stores its part in a slot, and the
    program that finishes last merges the parts in order.
    """
    dependent.let_next_begin(DEPENDENT)
    num_items, entries = tl.load(items), tl.load(items + 1)
    row, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    dependent.wait(DEPENDENT)
    for job in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        item, head = items + 2 + (job // KV_HEADS) * ITEM, job % KV_HEADS
        first, count, begin, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        level, chunks, slot, chunk = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
        real = row < count * GROUP
        inside = real[:, None] & (dim < D)[None, :]
        entry = tl.load(order + first + row // GROUP, mask=real, other=0)
        q_at = entry * stride_q_entry + (head * GROUP + row % GROUP) * stride_q_head
        queries = tl.load(q + q_at[:, None] + dim[None, :], mask=inside, other=0.0)
        # A run begins at a page boundary, and so does the part of it that an item reads.
        pages = page_table + tl.load(rows + tl.load(order + first)).to(tl.int64) * stride_row + begin // PAGE
        keys = kv + head * stride_head
        values = keys + stride_kv

        length = end - begin
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        seen = tl.zeros([BLOCK_M], tl.int32) + length
        token = tl.arange(0, BLOCK_N)
        page = tl.load(pages + token // PAGE, mask=token < length, other=0)
        for i in tl.range(0, length // BLOCK_N, num_stages=STAGES):
            page, m, sums, acc = attend_block(
                i, page, queries, m, sums, acc, seen, length, pages, keys, values, scale, stride_page, stride_token,
                False, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
        if length % BLOCK_N != 0:
            page, m, sums, acc = attend_block(
                length // BLOCK_N, page, queries, m, sums, acc, seen, length, pages, keys, values, scale, stride_page,
                stride_token, True, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip

        whole = chunks == 1
        if not whole:
            at = ((slot + chunk) * KV_HEADS + head) * BLOCK_M + row
            tl.store(part_max + at, m, mask=real)
            tl.store(part_sum + at, sums, mask=real)
            tl.store(part_acc + at[:, None] * D + dim[None, :], acc, mask=inside)
            tl.debug_barrier()  # all threads of this program have stored before one of them counts the part as done
            arrival = arrivals + slot * KV_HEADS + head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == chunks - 1:
                tl.store(arrival, 0)  # the counter starts at 0 for the next layer
                m = tl.full([BLOCK_M], float("-inf"), tl.float32)
                sums = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for part in range(chunks):
                    at = ((slot + part) * KV_HEADS + head) * BLOCK_M + row
                    m_part = tl.load(part_max + at, mask=real, other=0.0)
                    m_new = tl.maximum(m, m_part)
                    old, weight = tl.exp2(m - m_new), tl.exp2(m_part - m_new)
                    sums = sums * old + tl.load(part_sum + at, mask=real, other=1.0) * weight
                    acc_part = tl.load(part_acc + at[:, None] * D + dim[None, :], mask=inside, other=0.0)
                    acc = acc * old[:, None] + acc_part * weight[:, None]
                    m = m_new
                whole = True
        if whole:
            at = ((level * entries + entry) * KV_HEADS + head) * GROUP + row % GROUP
            tl.store(shared_max + at, m, mask=real)
            tl.store(shared_sum + at, sums, mask=real)
            tl.store(shared_acc + at[:, None] * D + dim[None, :], acc, mask=inside)
