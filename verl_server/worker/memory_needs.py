"""`memory_needs`: computes the bytes that each part of one rank needs on its GPU, before any part is allocated."""

from __future__ import annotations

from verl_server.models.config import ModelConfig
from verl_server.models.transformer import Decoder
from verl_server.server_args import ServerArgs
from verl_server.worker.kv_cache import page_table_bytes
from verl_server.worker.memory_account import LEAST_SPECIAL, Needs
from verl_server.worker.model_memory import weight_bytes
from verl_server.worker.step_memory import StepMemory, most_decodes


def memory_needs(
    args: ServerArgs,
    config: ModelConfig,
    tp_size: int,
    context_length: int,
    model: Decoder,
    memory: StepMemory,
    *,
    paged: bool,
) -> Needs:
    """Return the bytes for one of `tp_size` ranks. The parameters of `model` may be without memory.

    `paged` is True if Triton computes attention, so that CUDA graphs can be captured.
    """
    rotary = sum(table.nbytes for table in model.rotary.tables)
    rows = args.max_running_requests
    tokens = args.prefill_chunk("cuda") + rows
    has_graphs = paged and not args.disable_cuda_graph
    return Needs(
        weights=weight_bytes(model),
        tables=rotary + _table_bytes(args, config, tp_size, context_length, paged),
        step=memory.largest(tokens, rows),
        graphs=memory.graphs(most_decodes(args.cuda_graph_max_bs, rows), rows) if has_graphs else 0,
        special_least=LEAST_SPECIAL if tp_size > 1 else 0,
        special_most=max(LEAST_SPECIAL, memory.most_special(rows)),
        received_most=args.weight_receive_bytes,
    )


def _table_bytes(args: ServerArgs, config: ModelConfig, tp_size: int, context_length: int, paged: bool) -> int:
    """Return the bytes of the page table, and of the partial results of attention over shared keys."""
    pages = page_table_bytes(args.max_running_requests, context_length, args.page_size)
    if not paged or args.disable_cascade_attention or args.disable_radix_cache:
        return pages
    from verl_server.kernels.paged_attention import shared_bytes

    return pages + shared_bytes(args.max_running_requests, config.num_heads // tp_size, config.head_dim)
