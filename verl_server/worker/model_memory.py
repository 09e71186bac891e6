"""`ModelMemory`: the memory of one rank's weights, KV pool and CUDA graphs, which a trainer can release and resume.

The `ModelRunner` creates it when everything is allocated. Weights and KV pool are in a `MemoryArena` each, so no tensor
ever moves.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import compilation
from verl_server.models.transformer import Decoder
from verl_server.sampling.sampler import Sampler
from verl_server.worker.device import synchronize, trim_heap
from verl_server.worker.kv_cache import KVCache
from verl_server.worker.memory_account import MemoryAccount
from verl_server.worker.memory_arena import MemoryArena, aligned

if TYPE_CHECKING:  # this import needs Triton
    from verl_server.worker.step_graphs import StepGraphs

logger = logging.getLogger(__name__)


def weight_bytes(model: Decoder) -> int:
    return sum(aligned(parameter.nbytes) for parameter in model.parameters())


def allocate_weights(model: Decoder, device: torch.device) -> MemoryArena:
    """Replace all parameters by zeros in a new arena, and return the arena."""
    arena = MemoryArena(weight_bytes(model), device)
    _clear(arena)
    offset = 0
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            view = arena.view(offset, parameter.shape, parameter.dtype)
            setattr(module, name, nn.Parameter(view, requires_grad=False))
            offset += aligned(parameter.nbytes)
    return arena


def close_account(account: MemoryAccount, kv_bytes: int, tp: TpGroup, wanted: int) -> int:
    """Close the account after the KV pool was allocated. All ranks call it together.

    Return the bytes for received weights: the smallest budget of all ranks. Log a warning if it is below `wanted`.
    """
    account.close(kv_bytes)
    received = min(int(part) for part in tp.gather(str(account.received).encode()))
    logger.info("%s", account.table())
    if tp.size == 1 and account.special < account.needs.special_most:
        logger.info(
            "Filters, penalties and masks of all requests at once would take %d MiB, and %d MiB are left for them "
            "beside the KV cache. Steps that need more are computed in smaller parts. A smaller mem_fraction_static "
            "leaves more.",
            *(account.needs.special_most >> 20, account.special >> 20),
        )
    if received < wanted and tp.rank == 0:
        logger.warning(
            "weight_receive_bytes is %d, not %d: the GPU has no more memory for received weights. Larger updates "
            "from process groups stop generation while they are received. A smaller mem_fraction_static leaves "
            "more.",
            *(received, wanted),
        )
    return received


class ModelMemory:
    """Implements `ReleasableMemory`, and reports how much memory each part has."""

    def __init__(
        self,
        weights: MemoryArena,
        kv: KVCache,
        graphs: StepGraphs | None,
        sampler: Sampler,
        account: MemoryAccount | None,
        *,
        keeps_weights: bool,
        is_alone: bool,
    ) -> None:
        """`keeps_weights` is True if a release keeps the weights' contents in host memory by default.

        `is_alone` is True if there is no other rank, so that a step that runs out of memory can be retried in smaller
        steps.
        """
        self._weights, self._kv, self._graphs, self._sampler, self._account = weights, kv, graphs, sampler, account
        self._device, self._keeps_weights = kv.device, keeps_weights
        self.step_budget = None if account is None or is_alone else account.special
        """Bound on the sum of `step_bytes` in a step, measured again when memory is resumed. None for a single rank."""

    @property
    def is_present(self) -> bool:
        """True if weights and KV pool are present."""
        return self._weights.is_present and self._kv.is_present

    def check_release(self, tags: list[str]) -> None:
        """Accept all tags: all memory can be released, in any order."""

    def release_kv_cache(self) -> None:
        """Free the KV pool's memory. The contents are lost."""
        self._release_scratch()
        self._kv.release()

    def resume_kv_cache(self) -> None:
        """Allocate the KV pool's memory again. No page has valid contents."""
        self._kv.resume()
        self._measure_again()

    def release_cuda_graphs(self) -> None:
        """Free the memory of captured graphs. Until the resume, steps are launched operator by operator."""
        if self._graphs is not None:
            synchronize(self._device)
            self._graphs.release()
            self._release_scratch()

    def resume_cuda_graphs(self) -> None:
        """Permit CUDA graphs again. They are captured when they are needed."""
        if self._graphs is not None:
            self._graphs.resume()
            self._graphs.consider_again()

    def release_weights(self, keep_contents: bool | None = None) -> None:
        """Free the weights' memory. With `keep_contents`, keep the contents in host memory.

        None means the server's setting `enable_weights_cpu_backup`.
        """
        self._release_scratch()
        keep = self._keeps_weights if keep_contents is None else keep_contents
        self._weights.release(keep_contents=keep)

    def resume_weights(self) -> bool:
        """Allocate the weights' memory again. Return True if the weights are unchanged since the release.

        Otherwise they are zeros until a full update. Rows of vocabulary padding stay zero.
        """
        restored = self._weights.resume()
        if not restored:
            _clear(self._weights)
        self._measure_again()
        return restored

    def _measure_again(self) -> None:
        """Permit all graph sizes again after a resume, and measure how much memory steps can take now.

        Log a warning if the largest step may lack memory.
        """
        if self._graphs is not None:
            self._graphs.consider_again()
        if self._account is None or not self.is_present:
            return
        if self.step_budget is not None:
            self.step_budget = self._account.special_now()
        if lacking := self._account.shortage():
            logger.warning("The largest step may lack %.2f GiB of memory. %s", lacking / 2**30, self._account.advice())

    def figures(self) -> dict[str, Any]:
        """Return bytes held for weights and KV pool, KV capacity in tokens, and the figures of `StepGraphs`.

        On CUDA the result also has the bytes of each part of this rank's `MemoryAccount` ("account"), the free and
        total bytes of the device, the number of Triton kernels that this process compiled because the cache lacked
        them, and the number of allocations for which the allocator had to free its unused memory. Steps are slow while
        the last number grows.
        """
        figures: dict[str, Any] = {
            "weight_bytes": self._weights.bytes_held,
            "kv_cache_bytes": self._kv.bytes_held,
            "token_capacity": self._kv.num_pages * self._kv.page_size,
        }
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            figures |= {"device_free_bytes": free, "device_total_bytes": total}
            figures["kernels_compiled"] = compilation.num_compiled()
            figures["allocator_retries"] = torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0)
        if self._account is not None:
            figures["account"] = self._account.parts()
        if self._graphs is not None:
            figures |= self._graphs.figures()
        return figures

    def _release_scratch(self) -> None:
        """Free the memory that allocators keep for the next step's activations, and the memory of the last batch."""
        synchronize(self._device)
        self._sampler.forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_heap()


def _clear(weights: MemoryArena) -> None:
    """Zero new memory on CUDA, because rows of vocabulary padding are never written."""
    if weights.device.type == "cuda":
        weights.contents.zero_()
