"""`StepAttention`: the attention backend of one rank. It plans each step and copies the inputs to the device.

Owned by the `ModelRunner`, which passes the plan to the decoder layers. `kernel_choice` chooses the backend once.
`StepGraphs` uses the paged backend directly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from verl_server.kernels.device_arrays import to_device, upload
from verl_server.models.attention import AttentionStep, Placement, plan_attention
from verl_server.models.cpu_attention import CpuAttention
from verl_server.models.layers import RotaryEmbedding
from verl_server.server_args import ServerArgs
from verl_server.worker.kernel_choice import KernelChoice
from verl_server.worker.kv_cache import KVCache

if TYPE_CHECKING:  # the import needs Triton
    from verl_server.models.triton_attention import PagedBackend


class StepAttention:
    def __init__(
        self, choice: KernelChoice, num_heads: int, rotary: RotaryEmbedding, kv: KVCache, server_args: ServerArgs
    ) -> None:
        """`num_heads` is the number of this rank's query heads."""
        self._num_heads, self._rotary, self._kv = num_heads, rotary, kv
        self.paged = self._paged_backend(choice, server_args) if choice.attention == "triton" else None
        """Backend with Triton's kernels, whose steps can be captured in CUDA graphs. None with another backend."""
        self._cpu_attention = None
        if choice.cpu is not None and choice.attention == "cpp":
            self._cpu_attention = CpuAttention(choice.cpu, rotary, kv, num_heads)
        self._cpu_attends = choice.cpu_attends

    def plan(self, placement: Placement) -> tuple[AttentionStep, Tensor, Tensor]:
        """Return (attention of the step, int64 token ids [tokens], page-table rows), with both tensors on the device.

        The rows of the entries that decode come first.
        """
        if self.paged is not None:
            return self._plan_paged(self.paged, placement)
        return self._plan_unpaged(placement)

    def _plan_unpaged(self, placement: Placement) -> tuple[AttentionStep, Tensor, Tensor]:
        """Plan a step for PyTorch's attention or for the compiled kernels."""
        ids, rows = to_device(placement.ids, self._kv.device), to_device(placement.rows, self._kv.device)
        attends = self._cpu_attends is None or self._cpu_attends(placement.num_decodes)
        if self._cpu_attention is not None and attends:
            return self._cpu_attention.plan(placement), ids, rows
        lens = placement.cached + placement.extend
        plan = plan_attention(
            placement.cached,
            placement.extend,
            placement.slots,
            self._kv.trimmed_table(placement.rows, lens),
            self._num_heads,
            self._kv.layers[0],
            self._rotary.at(to_device(placement.positions, self._kv.device)),
        )
        return plan, ids, rows

    def _plan_paged(self, backend: PagedBackend, placement: Placement) -> tuple[AttentionStep, Tensor, Tensor]:
        """Plan a step for Triton's kernels, whose inputs are copied to the device in one transfer."""
        from verl_server.kernels.paged_attention import SharedKeys
        from verl_server.models.triton_attention import DecodePart, ExtendPart, PagedStep

        n = placement.num_decodes
        lens = placement.cached[:n] + 1
        starts = n + np.concatenate(([0], np.cumsum(placement.extend[n:])))
        decodes = backend.plan_decodes(placement.rows[:n], lens)
        arrays = [placement.ids, placement.positions, placement.slots, placement.rows[:n], lens]
        arrays += [placement.rows[n:], placement.cached[n:], starts]
        on_device = upload([*arrays, *decodes.arrays], self._kv.device)
        ids, positions, slots, rows, kv_lens, chunk_rows, cached, chunk_starts, work, *shared = on_device
        decode, chunks = None, None
        if n:
            decode = DecodePart(rows, kv_lens, work, SharedKeys(*shared) if shared else None)
        if n < len(placement.rows):
            chunks = ExtendPart(chunk_rows, cached, chunk_starts, int(placement.extend[n:].max()))
        return PagedStep(backend, positions, slots, decode, chunks), ids.long(), rows

    def _paged_backend(self, choice: KernelChoice, server_args: ServerArgs) -> PagedBackend:
        from verl_server.kernels.paged_attention import PagedAttention
        from verl_server.models.triton_attention import PagedBackend

        cascade = not (server_args.disable_cascade_attention or server_args.disable_radix_cache)
        kernels = PagedAttention(
            num_heads=self._num_heads,
            kv_heads=self._kv.kv_heads,
            head_dim=self._kv.pool.shape[-1],
            page_size=self._kv.page_size,
            dtype=self._kv.pool.dtype,
            device=self._kv.device,
            max_shared_entries=self._kv.max_rows if cascade else 0,
            pdl=choice.pdl,
        )
        return PagedBackend(
            kernels,
            self._rotary,
            self._kv.device_page_table,
            self._kv.page_table,
            self._kv.page_size,
            fused=choice.fused and self._kv.device.type != "cpu",
            pdl=choice.pdl,
        )
