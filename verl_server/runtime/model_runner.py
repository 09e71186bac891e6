"""`ModelRunner`: one rank's model, its KV pool and page table; executes `ForwardBatch`es.

Owned by a scheduler process. Rank 0's also samples. Device memory belongs to it: weights (written only through
`weight_map`), the KV pool, and their release and resume. Both live in a `MemoryArena`: no tensor ever moves.
"""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from verl_server.errors import BadRequestError
from verl_server.io_struct import PromptLogprobs
from verl_server.models.attention import Ints, plan_attention, to_device, token_positions
from verl_server.models.config import ModelConfig, load_model_config, resolve_model_folder
from verl_server.models.loader import fill_dummy, load_checkpoint
from verl_server.models.transformer import Decoder
from verl_server.runtime.forward_batch import ForwardBatch, ForwardOutput, SampleSpec
from verl_server.runtime.memory_arena import MemoryArena, aligned
from verl_server.runtime.sampler import Sampler, prompt_logprobs
from verl_server.runtime.tp_group import TpGroup
from verl_server.server_args import ServerArgs

_PROMPT_LOGIT_BYTES = 256 * 2**20
"""Bound on the fp32 logits held at once for prompt log-probabilities."""


@dataclass
class _Computed:
    """A step that was computed while it was launched; None on ranks that do not sample."""

    output: ForwardOutput | None

    def result(self) -> ForwardOutput:
        assert self.output is not None, "only rank 0 has the output of a step"
        return self.output


class ModelRunner:
    overlaps = False

    def __init__(self, server_args: ServerArgs, tp: TpGroup, device: torch.device) -> None:
        self.tp, self.device = tp, device
        self._args = server_args
        _set_threads(server_args, device)
        dummy = server_args.load_format == "dummy"
        folder = resolve_model_folder(server_args.model_path, server_args.revision, config_only=dummy)
        self.config: ModelConfig = load_model_config(folder, server_args.context_length)
        self.vocab_size = self.config.vocab_size
        self.context_length = _context_length(server_args, self.config)
        self.dtype = _compute_dtype(server_args, self.config, device)
        self.page_size, self.max_rows = server_args.page_size, server_args.max_running_requests
        self.model = self._build()
        self.weight_map = self.model.weight_map()
        if dummy:
            fill_dummy(self.weight_map, server_args.random_seed, device)
        else:
            load_checkpoint(self.weight_map, folder)
        self.num_pages = self._size_kv_pool()
        self._allocate_kv_pool()
        self.sampler = Sampler(self.vocab_size, device, server_args.random_seed)

    # -- one step ----------------------------------------------------------------------------------------------

    def launch(self, batch: ForwardBatch, specs: list[SampleSpec] | None) -> _Computed:
        return _Computed(self.forward(batch, specs))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, specs: list[SampleSpec] | None) -> ForwardOutput | None:
        """Run one step; `specs` (one per `batch.sample` entry) on rank 0, None on the others, which return None."""
        cached, extend = _ints(batch.cached_lens), _ints(batch.extend_lens)
        self._update_page_table(batch)
        rows = _ints(batch.rows)
        group_heads = self.config.num_heads // self.tp.size // self._kv_heads
        table = self._trimmed_table(rows, cached + extend)
        plan = plan_attention(cached, extend, table, self.page_size, group_heads, self.device)
        ids = to_device(_ints(batch.input_ids), self.device)
        positions = to_device(token_positions(cached, extend), self.device)
        hidden = self.model(ids, positions, self._kv_layers, plan)
        starts = np.cumsum(extend) - extend
        prompt = self._prompt_logprobs(batch, hidden, starts)
        if not batch.sample:
            return ForwardOutput([], [], [], [], prompt) if specs is not None else None
        last = to_device((starts + extend - 1)[batch.sample], self.device)
        logits = self.model.logits(hidden.index_select(0, last))
        if specs is None:
            return None
        output = self.sampler(logits, specs)
        output.prompt_logprobs = prompt
        return output

    def _update_page_table(self, batch: ForwardBatch) -> None:
        """Write the step's pages into the table; zero those that no cached token is in (see `attention`)."""
        cached_of = dict(zip(batch.rows, batch.cached_lens, strict=True))
        new: list[int] = []
        for row, column, pages in batch.page_updates:
            self.page_table[row, column : column + len(pages)] = pages
            first_new = -(-cached_of.get(row, self.context_length) // self.page_size)
            new += pages[max(0, first_new - column) :]
        if new:
            self.kv_pool.index_fill_(1, to_device(_ints(new), self.device), 0)

    def _trimmed_table(self, rows: Ints, lens: Ints) -> Ints:
        """The step's part of the page table; columns beyond a request's length point to the padding page."""
        pages = -(-lens // self.page_size)
        columns = np.arange(int(pages.max()))
        return np.where(columns < pages[:, None], self.page_table[rows, : len(columns)], self.num_pages)

    def _prompt_logprobs(self, batch: ForwardBatch, hidden: Tensor, starts: Ints) -> dict[int, PromptLogprobs]:
        """All ranks take part (the logits are gathered); a bounded number of positions at a time."""
        step = max(1, _PROMPT_LOGIT_BYTES // (4 * self.vocab_size))
        result = {}
        for (entry, first, top_num, requested), next_id in zip(
            batch.prompt_logprobs, batch.prompt_next_ids, strict=True
        ):
            begin, end = int(starts[entry]) + first, int(starts[entry]) + batch.extend_lens[entry]
            targets = batch.input_ids[begin + 1 : end] + ([next_id] if next_id >= 0 else [])
            part = PromptLogprobs(
                token_ids=targets,
                logprobs=[],
                top=[] if top_num else None,
                requested=[] if requested is not None else None,
            )
            for i in range(0, len(targets), step):
                chunk = targets[i : i + step]
                logits = self.model.logits(hidden[begin + i : begin + i + len(chunk)])
                prompt_logprobs(part, logits, chunk, top_num, requested)
            result[entry] = part
        return result

    def synchronize(self) -> None:
        """Wait until the device has finished what this thread submitted.

        Not for other threads: a stager may be receiving what its trainer has not sent yet.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    # -- memory ------------------------------------------------------------------------------------------------

    def release_kv_cache(self) -> None:
        """Give the KV pool's memory back; its contents are lost."""
        self._release_scratch()
        self._kv_arena.release()

    def resume_kv_cache(self) -> None:
        """Take memory for the KV pool again; every page is handed out anew, and zeroed then."""
        self._kv_arena.resume()
        self.kv_pool[:, -1].zero_()

    def release_weights(self) -> None:
        """Give the weights' memory back; kept in host memory if `enable_weights_cpu_backup`, else lost."""
        self._release_scratch()
        self._weights_arena.release(keep_contents=self._args.enable_weights_cpu_backup)

    def resume_weights(self) -> bool:
        """Take memory for the weights again; True if they are what they were when they were released.

        Else they are zeros (vocabulary padding stays so) until a full update fills them.
        """
        restored = self._weights_arena.resume()
        if not restored:
            self._clear_weights()
        return restored

    def memory_figures(self) -> dict[str, float | int]:
        """Bytes held now for weights and KV, in whole pages, and the KV capacity in tokens."""
        figures: dict[str, float | int] = {
            "weight_bytes": self._weights_arena.bytes_held,
            "kv_cache_bytes": self._kv_arena.bytes_held,
            "token_capacity": self.num_pages * self.page_size,
        }
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            figures |= {"device_free_bytes": free, "device_total_bytes": total}
        return figures

    def _release_scratch(self) -> None:
        """Activations' memory, which the allocators keep for the next step, goes back too."""
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            _trim_heap()

    def _clear_weights(self) -> None:
        """Fresh memory must read as zeros: rows of vocabulary padding are never written again."""
        if self.device.type == "cuda":
            self._weights_arena.contents.zero_()

    # -- construction ------------------------------------------------------------------------------------------

    def _build(self) -> Decoder:
        """The decoder without memory, then its parameters one after another in the weights arena, all zero."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device("meta"):
                model = Decoder(self.config, self.tp, self.context_length, self.device).eval()
        finally:
            torch.set_default_dtype(previous)
        self._weights_arena = MemoryArena(sum(aligned(p.nbytes) for p in model.parameters()), self.device)
        self._clear_weights()
        offset = 0
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                view = self._weights_arena.view(offset, parameter.shape, parameter.dtype)
                setattr(module, name, nn.Parameter(view, requires_grad=False))
                offset += aligned(parameter.nbytes)
        return model

    @property
    def _kv_heads(self) -> int:
        return max(1, self.config.num_kv_heads // self.tp.size)

    @property
    def _page_bytes(self) -> int:
        per_token = 2 * self._kv_heads * self.config.head_dim * self.config.num_layers
        return per_token * self.page_size * self.dtype.itemsize

    def _size_kv_pool(self) -> int:
        """Pages that fit the memory settings, no more than the largest batch could use."""
        if self.device.type == "cuda":
            self.synchronize()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            budget = free - total * (1 - self._args.mem_fraction_static)
            setting = f"mem_fraction_static={self._args.mem_fraction_static}"
        else:
            budget = self._args.kv_cache_gib * 2**30
            setting = f"kv_cache_gib={self._args.kv_cache_gib}"
        pages = int(budget // self._page_bytes) - 1  # one for padding
        pages = min(pages, self.max_rows * math.ceil(self.context_length / self.page_size))
        if self._args.max_total_tokens is not None:
            pages = min(pages, self._args.max_total_tokens // self.page_size)
            setting = f"{setting}, max_total_tokens={self._args.max_total_tokens}"
        pages = min(self._agree(pages), pages)
        if pages < 1:
            raise BadRequestError(
                f"No room for a KV cache after the weights ({setting}, {self._page_bytes} bytes a page). "
                "Raise the setting, free memory on the device, or use a smaller model or a larger tp_size."
            )
        return pages

    def _agree(self, pages: int) -> int:
        """The smallest count of all ranks: page ids are rank 0's, so every pool must hold them."""
        return min(int(part) for part in self.tp.gather(str(pages).encode()))

    def _allocate_kv_pool(self) -> None:
        config = self.config
        shape = (config.num_layers, self.num_pages + 1, self.page_size, 2, self._kv_heads, config.head_dim)
        self._kv_arena = MemoryArena(math.prod(shape) * self.dtype.itemsize, self.device)
        self.kv_pool = self._kv_arena.view(0, shape, self.dtype)
        self.kv_pool[:, -1].zero_()
        self._kv_layers = list(self.kv_pool.unbind(0))
        columns = math.ceil(self.context_length / self.page_size)
        self.page_table = np.full((self.max_rows, columns), self.num_pages, dtype=np.int64)


def device_of(server_args: ServerArgs, tp_rank: int) -> torch.device:
    """The device of a rank: `gpu_uuids` by UUID, else `base_gpu_id` + local rank, or the CPU."""
    if server_args.device == "cpu" or (server_args.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadRequestError("device='cuda', but torch sees no CUDA device. Use device='cpu' or check the driver.")
    local_rank = tp_rank % server_args.ranks_per_node
    count = torch.cuda.device_count()
    if server_args.gpu_uuids:
        wanted = server_args.gpu_uuids[local_rank].removeprefix("GPU-").lower()
        uuids = [str(torch.cuda.get_device_properties(i).uuid).removeprefix("GPU-").lower() for i in range(count)]
        if wanted not in uuids:
            raise BadRequestError(
                f"gpu_uuids names {server_args.gpu_uuids[local_rank]}, but this process sees {uuids} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})."
            )
        return torch.device("cuda", uuids.index(wanted))
    ordinal = server_args.base_gpu_id + local_rank
    if ordinal >= count:
        raise BadRequestError(f"Rank {tp_rank} needs CUDA device {ordinal}, but there are {count}.")
    return torch.device("cuda", ordinal)


def _context_length(server_args: ServerArgs, config: ModelConfig) -> int:
    longest = config.max_position_embeddings
    if (server_args.context_length or 0) > longest:
        raise BadRequestError(
            f"context_length={server_args.context_length} exceeds the model's max_position_embeddings={longest}."
        )
    return server_args.context_length or longest


def _compute_dtype(server_args: ServerArgs, config: ModelConfig, device: torch.device) -> torch.dtype:
    if server_args.dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    dtype: torch.dtype = getattr(torch, server_args.dtype)
    return dtype


def _set_threads(server_args: ServerArgs, device: torch.device) -> None:
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(server_args.cpu_threads or max(1, cores // server_args.ranks_per_node))
    else:
        torch.cuda.set_device(device)


def _trim_heap() -> None:
    """glibc keeps freed blocks below its mmap threshold; ask it to give them to the system."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another libc: large blocks are mapped one by one there too


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
