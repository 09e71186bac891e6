"""`KVCache`: one rank's KV pool and page table.

Owned by the `ModelRunner`. `place` turns the scheduler's `ForwardBatch` into positions and slots, with which the
attention backends index the pool. The pool is in a `MemoryArena`: its addresses never change, but its memory can be
released.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.device_arrays import Ints, to_device, token_positions
from verl_server.models.attention import Placement
from verl_server.models.config import ModelConfig
from verl_server.server_args import ServerArgs
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.memory_account import MemoryBudget
from verl_server.worker.memory_arena import MemoryArena


class KVCache:
    """The pool [layers, pages + 1, page_size, 2 (k, v), kv_heads, head_dim] and the page table of the requests.

    The last page is padding. In memory the keys of one head in one page are contiguous, and so are the values. Without
    `paged_kernels`, pages are zeroed when they are assigned (see `models.attention`).
    """

    def __init__(
        self,
        config: ModelConfig,
        tp: TpGroup,
        server_args: ServerArgs,
        device: torch.device,
        dtype: torch.dtype,
        context_length: int,
        budget: MemoryBudget,
        *,
        paged_kernels: bool,
    ) -> None:
        self.device, self._dtype, self._args = device, dtype, server_args
        self._paged_kernels = paged_kernels
        self._config, self._page_bytes = config, page_bytes(config, tp.size, server_args.page_size, dtype)
        self.page_size, self.max_rows = server_args.page_size, server_args.max_running_requests
        self.kv_heads = _kv_heads(config, tp.size)
        self._columns = math.ceil(context_length / self.page_size)
        pages = self._fitting_pages(budget.bytes)
        # The smallest count of all ranks, because rank 0 assigns pages and every rank's pool must have them.
        self.num_pages = min(pages, *(int(part) for part in tp.gather(str(pages).encode())))
        self._check_room(budget)
        self._arena = MemoryArena(self._page_bytes * (self.num_pages + 1), device)
        self.pool = self._pool_view()
        self.layers = list(self.pool.unbind(0))
        self.page_table = np.full((self.max_rows, self._columns), self.num_pages, dtype=np.int64)
        """[rows, columns] page ids of each row in order. `place` writes the scheduler's assignments."""
        self.device_page_table = torch.full(
            (self.max_rows + 1, self._columns), self.num_pages, dtype=torch.int32, device=device
        )
        """Copy of `page_table` for kernels, updated only with `paged_kernels`. The last row is all padding."""
        self._clear_padding()

    # -- one step ----------------------------------------------------------------------------------------------

    def place(self, batch: ForwardBatch) -> Placement:
        """Write the step's pages into the page table. Return the positions and slots of the step's tokens."""
        cached, extend = _ints(batch.cached_lens), _ints(batch.extend_lens)
        rows = _ints(batch.rows)
        self._write_pages(batch)
        ids = _ints(batch.input_ids)
        if len(ids) == len(rows):
            positions, row_of = cached, rows
            num_decodes = len(rows)
        else:
            positions, row_of = token_positions(cached, extend), np.repeat(rows, extend)
            num_decodes = int((extend != 1).argmax())
        pages = self.page_table[row_of, positions // self.page_size]
        return Placement(
            rows, cached, extend, ids, positions, pages * self.page_size + positions % self.page_size, num_decodes
        )

    def trimmed_table(self, rows: Ints, lens: Ints) -> Ints:
        """Return the page table of `rows` for `lens` tokens each.

        Columns beyond a row's length have the padding page.
        """
        pages = -(-lens // self.page_size)
        columns = np.arange(int(pages.max()))
        return np.where(columns < pages[:, None], self.page_table[rows, : len(columns)], self.num_pages)

    def _write_pages(self, batch: ForwardBatch) -> None:
        if not batch.page_updates:
            return
        for row, column, pages in batch.page_updates:
            self.page_table[row, column : column + len(pages)] = pages
        if self._paged_kernels:
            self._write_device_table(batch)
        else:
            self._zero_new_pages(batch)

    def _write_device_table(self, batch: ForwardBatch) -> None:
        cells = {  # a later update of the same cell wins
            row * self._columns + i: page
            for row, column, pages in batch.page_updates
            for i, page in enumerate(pages, column)
        }
        update = to_device(np.array([list(cells), list(cells.values())]), self.device)
        self.device_page_table.view(-1).index_copy_(0, update[0], update[1].int())

    def _zero_new_pages(self, batch: ForwardBatch) -> None:
        """Zero new pages without cached tokens, because masked positions still enter a sum as `0 * v`."""
        cached_of = dict(zip(batch.rows, batch.cached_lens, strict=True))
        new: list[int] = []
        for row, column, pages in batch.page_updates:
            first_new = -(-cached_of.get(row, self._columns * self.page_size) // self.page_size)
            new += pages[max(0, first_new - column) :]
        if new:
            self.pool.index_fill_(1, to_device(_ints(new), self.device), 0)

    # -- memory ------------------------------------------------------------------------------------------------

    @property
    def bytes_held(self) -> int:
        """Bytes of memory that the pool takes now."""
        return self._arena.bytes_held

    @property
    def is_present(self) -> bool:
        """True while the pool may be used."""
        return self._arena.is_present

    def release(self) -> None:
        """Free the pool's memory. The contents are lost."""
        self._arena.release()

    def resume(self) -> None:
        """Allocate the pool's memory again. No page has valid contents."""
        self._arena.resume()
        self._clear_padding()

    # -- construction ------------------------------------------------------------------------------------------

    def _pool_view(self) -> torch.Tensor:
        pages, config = self.num_pages + 1, self._config
        shape = (config.num_layers, pages, 2, self.kv_heads, self.page_size, config.head_dim)
        return self._arena.view(0, shape, self._dtype).permute(0, 1, 4, 2, 3, 5)

    def _clear_padding(self) -> None:
        self.pool[:, -1].zero_()

    def _fitting_pages(self, budget: int) -> int:
        """Return the number of pages that fit `budget` bytes, at most as many as the largest batch can use."""
        pages = budget // self._page_bytes - 1  # one for padding
        pages = min(pages, self.max_rows * self._columns)
        if self._args.max_total_tokens is not None:
            pages = min(pages, self._args.max_total_tokens // self.page_size)
        return pages

    def _check_room(self, budget: MemoryBudget) -> None:
        if self.num_pages >= 1:
            return
        limit = self._args.max_total_tokens
        if limit is not None and limit < self.page_size:
            raise BadRequestError(
                f"No room for a KV cache: max_total_tokens={limit} is less than one page of {self.page_size} tokens. "
                "Raise max_total_tokens, or lower page_size."
            )
        raise BadRequestError(
            f"No room for a KV cache: {budget.explanation} A page of {self.page_size} tokens takes "
            f"{self._page_bytes / 2**20:.2f} MiB, and two are needed on each rank. {budget.remedy}"
        )


def page_bytes(config: ModelConfig, tp_size: int, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one page on one of `tp_size` ranks."""
    per_token = 2 * _kv_heads(config, tp_size) * config.head_dim * config.num_layers
    return per_token * page_size * dtype.itemsize


def page_table_bytes(max_rows: int, context_length: int, page_size: int) -> int:
    """Return the bytes of `KVCache.device_page_table`."""
    return (max_rows + 1) * math.ceil(context_length / page_size) * 4


def _kv_heads(config: ModelConfig, tp_size: int) -> int:
    return max(1, config.num_kv_heads // tp_size)


def _ints(values: list[int]) -> Ints:
    return np.asarray(values, dtype=np.int64)
