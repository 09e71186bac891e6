"""`ModelRunner`: one rank's model, KV cache and sampler; launches `ForwardBatch`es.

Owned by a scheduler process. Rank 0's also samples. Device memory belongs to it: weights (written only through
`weight_map`), the KV pool, and their release and resume. Both live in a `MemoryArena`: no tensor ever moves.
On CUDA a launch waits for nothing: what a step needs is copied to the device in the stream's order, what it gave
comes back through pinned memory, and `Step.result` waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl_server.errors import BadRequestError
from verl_server.ipc.start_times import StartTimes
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.device_arrays import to_device
from verl_server.model_folder import resolve_model_folder
from verl_server.models.attention import AttentionStep, Placement
from verl_server.models.config import ModelConfig, load_model_config
from verl_server.models.loader import fill_dummy, load_checkpoint
from verl_server.models.ops import Ops
from verl_server.models.transformer import Decoder
from verl_server.sampling.logprobs import PromptCandidates
from verl_server.sampling.sampler import Sampled, Sampler
from verl_server.sampling.spec import ForwardOutput, SampleSpec
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.copying.fused_copy import compile_kernels
from verl_server.worker.device import free_bytes, set_threads, trim_heap
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.kernel_choice import choose_kernels
from verl_server.worker.kv_cache import KVCache, MemoryBudget, cpu_budget, gpu_budget
from verl_server.worker.memory_arena import MemoryArena, aligned
from verl_server.worker.step_attention import StepAttention
from verl_server.worker.step_memory import MOST_GRAPH_TOKENS, SPECIAL_BYTES, StepMemory

if TYPE_CHECKING:  # they need Triton
    from verl_server.models.triton_attention import PagedBackend
    from verl_server.worker.step_graphs import StepGraphs


@dataclass
class RunningStep:
    """A step that was launched, until the `Scheduler` reads its result: one step later where steps overlap."""

    sampled: Sampled | None
    """None if nothing is sampled, and on ranks that do not sample."""
    prompt: dict[int, PromptCandidates] = field(default_factory=dict)
    done: torch.cuda.Event | None = None
    """Recorded behind the last copy to the host; None if the step was computed while it was launched."""

    def result(self) -> ForwardOutput:
        """Wait until the step is computed; what it gave."""
        if self.done is not None:
            self.done.synchronize()
        output = ForwardOutput([], [], [], []) if self.sampled is None else self.sampled.read()
        output.prompt_logprobs = {entry: prompt.read() for entry, prompt in self.prompt.items()}
        return output


class ModelRunner:
    def __init__(
        self, server_args: ServerArgs, tp: TpGroup, device: torch.device, start: StartTimes | None = None
    ) -> None:
        """`start`, if given, learns when each phase ended: device, weights, kv_cache."""
        start = start or StartTimes()
        self.tp, self.device = tp, device
        self._args = server_args
        set_threads(server_args, device)
        free_before = free_bytes(device)
        start.mark("device")
        dummy = server_args.load_format == "dummy"
        folder = resolve_model_folder(server_args.model_path, server_args.revision, config_only=dummy)
        self.config: ModelConfig = load_model_config(folder, server_args.context_length)
        self.vocab_size = self.config.vocab_size
        self.context_length = _context_length(server_args, self.config)
        self.dtype = _compute_dtype(server_args, self.config, device)
        choice = choose_kernels(server_args, device, self.dtype, self.config, tp)
        paged = choice.attention == "triton"
        self.model = self._build(choice.ops(device))
        self.weight_map = self.model.weight_map()
        if dummy:
            fill_dummy(self.weight_map, device)
        else:
            load_checkpoint(self.weight_map, folder)
        start.mark("weights")
        self._step_memory = StepMemory.of(self.config, tp.size, self.dtype)
        self._largest_step, graphs = self._most_memory(paged)
        budget = self._kv_budget(free_before, graphs)
        self.kv = KVCache(
            self.config, tp, server_args, device, self.dtype, self.context_length, budget, paged_kernels=paged
        )
        self.page_size, self.max_rows, self.num_pages = self.kv.page_size, self.kv.max_rows, self.kv.num_pages
        start.mark("kv_cache")
        self.sampler = Sampler(self.vocab_size, device, choice.choose)
        self.overlaps = device.type == "cuda" and not server_args.disable_overlap_schedule
        self._last_tokens = torch.zeros(self.max_rows + 1, dtype=torch.int64, device=device)
        """What each row's latest step sampled; a step may be planned before it is known to the host."""
        num_heads = self.config.num_heads // tp.size
        self._attention = StepAttention(choice, num_heads, self.model.rotary, self.kv, server_args)
        self.step_budget: int | None = None
        """Bound on the sum of `step_bytes` in a step. One rank has none: it can try again in smaller steps."""
        if device.type == "cuda" and tp.size > 1:
            self.step_budget = max(SPECIAL_BYTES, free_bytes(device) - self._largest_step - graphs)
        self._copy_kernels_left = device.type == "cuda" and server_args.fused_weight_copy
        self._graphs = None
        if self._attention.paged is not None and not server_args.disable_cuda_graph:
            self._graphs = self._step_graphs(self._attention.paged)

    # -- one step ----------------------------------------------------------------------------------------------

    def launch(self, batch: ForwardBatch, specs: list[SampleSpec] | None) -> RunningStep:
        """Begin one step; `specs` (one per `batch.sample` entry) on rank 0, None on the others.

        A step that ran out of memory may be launched again, in parts: nothing below its requests' cached lengths was
        written.
        """
        try:
            return self._launch(batch, specs)
        except Exception:
            self.sampler.forget()
            raise

    def step_bytes(self, spec: SampleSpec) -> int:
        """Bytes of device memory that sampling takes for a request in a step, beyond a plain draw."""
        return self._step_memory.special(spec)

    @torch.inference_mode()
    def _launch(self, batch: ForwardBatch, specs: list[SampleSpec] | None) -> RunningStep:
        placement = self.kv.place(batch)
        prompt: dict[int, PromptCandidates] = {}
        logits = None
        if self._graphs is not None and not batch.prompt_logprobs:
            logits = self._graphs.run(placement, batch.sample)
        if logits is None:
            hidden = self._hidden(placement)
            prompt = self._prompt_logprobs(batch, hidden, placement)
            last = to_device(placement.last[batch.sample], self.device)
            logits = self.model.logits(hidden.index_select(0, last)) if batch.sample else hidden
        if not batch.sample:
            return RunningStep(None, prompt, self._event())
        sampled = self._sample(batch, logits, placement, specs)
        return RunningStep(sampled, prompt, self._event())

    def _event(self) -> torch.cuda.Event | None:
        """Behind all that was submitted so far."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _hidden(self, placement: Placement) -> Tensor:
        """Hidden states of all new tokens, launched operator by operator."""
        step, ids, rows = self._attention.plan(placement)
        if (placement.ids < 0).any():
            n = placement.num_decodes  # only these can have been sampled in a step that is not read yet
            ids[:n] = torch.where(ids[:n] < 0, self._last_tokens[rows[:n]], ids[:n])
        hidden: Tensor = self.model(ids, self.kv.layers, step)
        return hidden

    def _forward(self, ids: Tensor, rows: Tensor, last: Tensor | None, step: AttentionStep) -> Tensor:
        """Logits of a step from device tensors alone: what a CUDA graph holds, see `step_graphs.Forward`."""
        head, tail = ids[: len(rows)], ids[len(rows) :]
        head = torch.where(head < 0, self._last_tokens[rows], head)
        hidden = self.model(torch.cat([head, tail]) if len(tail) else head, self.kv.layers, step)
        return self.model.logits(hidden if last is None else hidden.index_select(0, last))

    def _sample(
        self, batch: ForwardBatch, logits: Tensor, placement: Placement, specs: list[SampleSpec] | None
    ) -> Sampled | None:
        """Sample on rank 0; where steps overlap every rank keeps the tokens on its device, for the next step."""
        lens = (placement.cached + placement.extend)[batch.sample]
        sampled = None if specs is None else self.sampler.launch(logits, specs, lens)
        if self.overlaps:
            ids = (
                torch.empty(len(batch.sample), dtype=torch.int64, device=self.device)
                if sampled is None
                else sampled.ids
            )
            self.tp.broadcast(ids)
            rows = to_device(placement.rows[batch.sample], self.device)
            self._last_tokens.index_copy_(0, rows, ids)
        return sampled

    def _prompt_logprobs(
        self, batch: ForwardBatch, hidden: Tensor, placement: Placement
    ) -> dict[int, PromptCandidates]:
        """All ranks take part (the logits are gathered); a bounded number of positions at a time."""
        result = {}
        starts = placement.starts
        for (entry, first, top_num, requested), next_id in zip(
            batch.prompt_logprobs, batch.prompt_next_ids, strict=True
        ):
            step = self._step_memory.prompt_positions(top_num, requested)
            begin, end = int(starts[entry]) + first, int(starts[entry]) + batch.extend_lens[entry]
            targets = batch.input_ids[begin + 1 : end] + ([next_id] if next_id >= 0 else [])
            result[entry] = PromptCandidates(targets, top_num, requested)
            end = begin + len(targets)
            for start in range(begin, end, step):
                result[entry].launch(self.model.logits(hidden[start : min(start + step, end)]))
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
        self.kv.release()

    def resume_kv_cache(self) -> None:
        """Take memory for the KV pool again; every page is handed out anew."""
        self.kv.resume()

    @property
    def can_warm_up(self) -> bool:
        """Whether `warm_up` has something to do, and the memory for it is there."""
        present = self._weights_arena.is_present and self.kv.is_present
        graphs_left = self._graphs is not None and self._graphs.num_left > 0
        return present and (self._copy_kernels_left or graphs_left)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Load the kernels of weight updates, or capture one more CUDA graph, so that nothing waits for it later.

        Takes some ten milliseconds, or seconds for what this machine never compiled. All ranks are asked: a release
        that failed on one may have left their memory unalike.
        """
        if not self.tp.all_agree(self.can_warm_up):
            return
        if self._copy_kernels_left:
            self._copy_kernels_left = False
            compile_kernels(self.device, self.dtype)
        elif self._graphs is not None:
            self._graphs.capture_next()

    def release_cuda_graphs(self) -> None:
        """Give back the memory of captured graphs; until they are resumed, decode steps run without."""
        if self._graphs is not None:
            self.synchronize()
            self._graphs.release()
            self._release_scratch()

    def resume_cuda_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.resume()

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
        """Bytes held now for weights and KV, in whole pages; KV capacity in tokens; CUDA graphs, held and to come."""
        figures: dict[str, float | int] = {
            "weight_bytes": self._weights_arena.bytes_held,
            "kv_cache_bytes": self.kv.bytes_held,
            "token_capacity": self.num_pages * self.page_size,
        }
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            figures |= {"device_free_bytes": free, "device_total_bytes": total}
        if self._graphs is not None:
            figures |= {"cuda_graphs": self._graphs.num_captured, "cuda_graphs_to_capture": self._graphs.num_left}
        return figures

    def _release_scratch(self) -> None:
        """Activations' memory, which the allocators keep for the next step, goes back too."""
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_heap()

    def _clear_weights(self) -> None:
        """Fresh memory must read as zeros: rows of vocabulary padding are never written again."""
        if self.device.type == "cuda":
            self._weights_arena.contents.zero_()

    # -- construction ------------------------------------------------------------------------------------------

    def _build(self, ops: Ops) -> Decoder:
        """The decoder without memory, then its parameters one after another in the weights arena, all zero."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device("meta"):
                model = Decoder(self.config, self.tp, self.context_length, self.device, ops).eval()
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

    def _most_memory(self, paged: bool) -> tuple[int, int]:
        """Bytes that the largest plain step may take, and that CUDA graphs may take besides."""
        rows, memory = self._args.max_running_requests, self._step_memory
        tokens = self._args.prefill_chunk(self.device.type) + rows
        has_graphs = paged and not self._args.disable_cuda_graph
        return memory.largest(tokens, rows), memory.graph(MOST_GRAPH_TOKENS, rows) if has_graphs else 0

    def _kv_budget(self, free_before: int, graphs: int) -> MemoryBudget:
        """What the KV pool may take; `free_before` loading the weights, and `graphs` beside the largest step."""
        if self.device.type == "cpu":
            return cpu_budget(self._args.kv_cache_gib)
        special = SPECIAL_BYTES if self.tp.size > 1 else 0
        step = self._largest_step + graphs + special
        return gpu_budget(free_before, free_bytes(self.device), self._args.mem_fraction_static, step)

    def _step_graphs(self, backend: PagedBackend) -> StepGraphs:
        from verl_server.worker.step_graphs import StepGraphs

        kept_free = self._largest_step + (self.step_budget or 0)
        max_bs = self._args.cuda_graph_max_bs
        return StepGraphs(self._forward, self.kv, backend, self.tp, self._step_memory, max_bs, kept_free)


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
