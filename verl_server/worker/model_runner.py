"""`ModelRunner`: one rank's model, KV cache and sampler. It launches the steps that `ForwardBatch`es describe.

Each scheduler process has one, which the `TpWorker` calls. Only rank 0 samples. The runner builds the model, the KV
cache and the CUDA graphs, in an order that the memory account requires; `ModelMemory` releases and resumes them later.
The weights are written only through `weight_map`. On CUDA a launch does not wait for the device: inputs are copied to
the device in stream order, results are copied to pinned memory, and `RunningStep.result` waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.errors import BadRequestError
from verl_server.files.model_folder import resolve_model_folder
from verl_server.ipc.start_times import StartTimes
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import compilation, token_mask
from verl_server.kernels.device_arrays import to_device
from verl_server.models.attention import AttentionStep, Placement
from verl_server.models.config import ModelConfig, load_model_config
from verl_server.models.loader import fill_dummy, load_checkpoint
from verl_server.models.ops import Ops
from verl_server.models.transformer import Decoder
from verl_server.sampling.logprobs import PromptCandidates
from verl_server.sampling.sampler import Sampled, Sampler
from verl_server.sampling.spec import ForwardOutput, MakeMasks, SampleSpec, TokenMasks
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.copying.fused_copy import compile_kernels
from verl_server.worker.device import DeviceMemory, set_threads, synchronize
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.kernel_choice import choose_kernels
from verl_server.worker.kv_cache import KVCache, page_bytes
from verl_server.worker.logits_clock import LogitsClock
from verl_server.worker.memory_account import Memory, MemoryAccount, Needs, cpu_budget
from verl_server.worker.memory_check import check_memory, log_capacity
from verl_server.worker.memory_needs import memory_needs
from verl_server.worker.model_memory import ModelMemory, allocate_weights, close_account
from verl_server.worker.step_attention import StepAttention
from verl_server.worker.step_memory import StepMemory, log_uncaptured, most_decodes

if TYPE_CHECKING:  # these imports need Triton
    from verl_server.models.triton_attention import PagedBackend
    from verl_server.worker.step_graphs import StepGraphs


@dataclass
class RunningStep:
    """A step that was launched. If steps overlap, the `Scheduler` reads the result after the next launch."""

    sampled: Sampled | None
    """Sampled tokens. None if the step samples nothing, and on ranks other than 0."""
    prompt: list[PromptCandidates] = field(default_factory=list)
    """Log-probabilities of prompts."""
    done: torch.cuda.Event | None = None
    """Event after the last copy to the host. None on the CPU, where the launch computes the step."""
    clock: LogitsClock | None = None
    """Is told when the step is finished, if the step has masks."""

    def result(self) -> ForwardOutput:
        """Wait until the step is computed and return its output."""
        if self.done is not None:
            self.done.synchronize()
        if self.clock is not None:
            self.clock.step_read()
        output = ForwardOutput([], [], [], []) if self.sampled is None else self.sampled.read()
        for prompt in self.prompt:
            output.prompt_logprobs |= prompt.read()
        return output


class ModelRunner:
    def __init__(
        self,
        server_args: ServerArgs,
        tp: TpGroup,
        device: torch.device,
        start: StartTimes | None = None,
        memory: Memory | None = None,
    ) -> None:
        """`start` records the times at which the phases device, weights and kv_cache ended.

        `memory` is by default the memory of `device`, and None if `device` is no GPU.
        """
        start = start or StartTimes()
        self.tp, self.device = tp, device
        self._args = server_args
        set_threads(server_args, device)
        if memory is None and device.type == "cuda":
            memory = DeviceMemory(device)
        free_at_start = 0 if memory is None else memory.reclaim()
        tp.connect_collectives(device)
        collectives = 0 if memory is None else max(0, free_at_start - memory.reclaim())
        start.mark("device")
        dummy = server_args.load_format == "dummy"
        folder = resolve_model_folder(server_args.model_path, server_args.revision, config_only=dummy)
        self.config = self._load_config(folder)
        self.vocab_size = self.config.vocab_size
        self.context_length = _context_length(server_args, self.config)
        self.dtype = _compute_dtype(server_args, self.config, device)
        self.kernels = choice = choose_kernels(server_args, device, self.dtype, self.config, tp)
        paged = choice.attention == "triton"
        self._step_memory = StepMemory.of(self.config, tp.size, self.dtype, fused=choice.fused and device.type != "cpu")
        self.model = self._build(choice.ops(device))
        account = None
        if memory is not None:
            account = self._open_account(memory, free_at_start, collectives, paged=paged)
        weights = allocate_weights(self.model, device)
        self.weight_map = self.model.weight_map()
        self._load_weights(folder)
        start.mark("weights")
        budget = cpu_budget(server_args.kv_cache_gib) if account is None else account.kv_budget()
        self.kv = KVCache(
            self.config, tp, server_args, device, self.dtype, self.context_length, budget, paged_kernels=paged
        )
        self.page_size, self.max_rows, self.num_pages = self.kv.page_size, self.kv.max_rows, self.kv.num_pages
        self.weight_receive_bytes = server_args.weight_receive_bytes
        """The most bytes of tensors that a process group sent and that are not written yet. Equal on all ranks."""
        if account is not None:
            self.weight_receive_bytes = close_account(account, self.kv.bytes_held, tp, self.weight_receive_bytes)
        if tp.rank == 0 and (account is not None or device.type == "cpu"):  # `compile_jobs` serves no request
            log_capacity(server_args, self.kv, self.context_length, budget.remedy)
        start.mark("kv_cache")
        self.sampler = Sampler(self.vocab_size, device, choice.sampling)
        self.overlaps = device.type == "cuda" and not server_args.disable_overlap_schedule
        self._clock = LogitsClock(lambda: torch.cuda.Event(enable_timing=True)) if self.overlaps else None  # type: ignore[no-untyped-call]
        self._last_tokens = torch.zeros(self.max_rows + 1, dtype=torch.int64, device=device)
        """int64 [rows + 1]: the token that the latest step sampled for each row. The next step reads it on the device.
        """
        num_heads = self.config.num_heads // tp.size
        self._attention = StepAttention(choice, num_heads, self.model.rotary, self.kv, server_args)
        self._kernels_left = device.type == "cuda"
        if device.type == "cuda" and (paged or choice.fused):
            compilation.share()
        self._graphs = None
        if self._attention.paged is not None and not server_args.disable_cuda_graph:
            self._graphs = self._step_graphs(self._attention.paged, account)
        self.memory = ModelMemory(
            weights,
            self.kv,
            self._graphs,
            self.sampler,
            account,
            keeps_weights=server_args.enable_weights_cpu_backup,
            is_alone=tp.size == 1,
        )

    @property
    def has_graphs(self) -> bool:
        """True if steps may be replayed from CUDA graphs."""
        return self._graphs is not None

    # -- one step ----------------------------------------------------------------------------------------------

    def launch(
        self,
        batch: ForwardBatch,
        specs: list[SampleSpec] | None,
        make_masks: MakeMasks | None = None,
    ) -> RunningStep:
        """Launch one step. `specs` has one entry for each of `batch.sample` on rank 0, and is None on other ranks.

        `make_masks` is called on rank 0 while the device computes the logits, which stay valid until the next launch.
        It must broadcast no command, because the other ranks wait for the sampled tokens.

        A step that ran out of memory may be launched again in parts, because it wrote nothing below the cached lengths
        of its requests.
        """
        try:
            return self._launch(batch, specs, make_masks)
        except Exception:
            self.sampler.forget()
            if self._clock is not None:
                self._clock.forget()
            raise

    def step_bytes(self, spec: SampleSpec) -> int:
        """Return the bytes of device memory that sampling takes for a request beyond a plain draw."""
        return self._step_memory.special(spec)

    @torch.inference_mode()
    def _launch(
        self,
        batch: ForwardBatch,
        specs: list[SampleSpec] | None,
        make_masks: MakeMasks | None,
    ) -> RunningStep:
        placement = self.kv.place(batch)
        prompt: list[PromptCandidates] = []
        logits = None
        clock = self._clock if make_masks is not None else None
        begin = None if clock is None else clock.forward_begins()
        if self._graphs is not None and not batch.prompt_logprobs:
            logits = self._graphs.run(placement, batch.sample)
        if logits is None:
            hidden = self._hidden(placement)
            prompt = self._prompt_logprobs(batch, hidden, placement)
            last = to_device(placement.last[batch.sample], self.device)
            logits = self.model.logits(hidden.index_select(0, last)) if batch.sample else hidden
        if not batch.sample:
            return RunningStep(None, prompt, self._event())
        masks = None
        if make_masks is not None:
            is_due = None
            if clock is not None and begin is not None:
                is_due = clock.forward_launched(begin, len(batch.input_ids))
            masks = make_masks(is_due)
        elif self._clock is not None:
            self._clock.forget()
        sampled = self._sample(batch, logits, placement, specs, masks)
        return RunningStep(sampled, prompt, self._event(), clock)

    def _event(self) -> torch.cuda.Event | None:
        """Record an event after all submitted work. Return None on the CPU."""
        if self.device.type == "cpu":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _hidden(self, placement: Placement) -> Tensor:
        """Launch the model operator by operator. Return the hidden states [tokens, hidden_size]."""
        step, ids, rows = self._attention.plan(placement)
        if (placement.ids < 0).any():
            n = placement.num_decodes  # only decodes can continue a token that the host has not read yet
            ids[:n] = torch.where(ids[:n] < 0, self._last_tokens[rows[:n]], ids[:n])
        hidden: Tensor = self.model(ids, self.kv.layers, step)
        return hidden

    def _forward(self, ids: Tensor, rows: Tensor, last: Tensor | None, step: AttentionStep) -> Tensor:
        """Compute logits from device tensors only, as a CUDA graph requires. See `step_graphs.Forward`."""
        hidden = self.model(self._known(ids, rows), self.kv.layers, step)
        return self.model.logits(hidden if last is None else hidden.index_select(0, last))

    def _known(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return `ids`, with each negative id replaced by the latest sampled token of its row. `rows` decode."""
        head, tail = ids[: len(rows)], ids[len(rows) :]
        head = torch.where(head < 0, self._last_tokens[rows], head)
        return torch.cat([head, tail]) if len(tail) else head

    def _sample(
        self,
        batch: ForwardBatch,
        logits: Tensor,
        placement: Placement,
        specs: list[SampleSpec] | None,
        masks: TokenMasks | None,
    ) -> Sampled | None:
        """Sample on rank 0. If steps overlap, broadcast the tokens to the devices of all ranks for the next step."""
        lens = (placement.cached + placement.extend)[batch.sample]
        sampled = None if specs is None else self.sampler.launch(logits, specs, lens, masks)
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

    def _prompt_logprobs(self, batch: ForwardBatch, hidden: Tensor, placement: Placement) -> list[PromptCandidates]:
        """Compute log-probabilities of prompts, a bounded number of positions at a time.

        The entries that request the same are computed together. All ranks take part, because the logits are gathered.
        """
        result = []
        for (top_num, _), prompts in _by_request(batch, placement).items():
            requested = prompts[0].requested
            targets = {prompt.entry: prompt.targets for prompt in prompts}
            candidates = PromptCandidates(self.sampler.ops, targets, top_num, requested, self.device)
            positions = to_device(np.concatenate([prompt.positions for prompt in prompts]), self.device)
            step = self._step_memory.prompt_positions(top_num, requested)
            for start in range(0, len(positions), step):
                candidates.launch(self.model.logits(hidden.index_select(0, positions[start : start + step])))
            result.append(candidates)
        return result

    def synchronize(self) -> None:
        """Wait until the device has finished the work of this thread's stream.

        It does not wait for the streams of other threads: a stager may wait there for data that its trainer has not
        sent yet.
        """
        synchronize(self.device)

    # -- warming up --------------------------------------------------------------------------------------------

    @property
    def can_warm_up(self) -> bool:
        """True if `warm_up` has something left to do, and weights and KV pool are present."""
        graphs_left = self._graphs is not None and self._graphs.num_left > 0
        return self.memory.is_present and (self._kernels_left or graphs_left)

    @torch.inference_mode()
    def warm_up(self) -> bool:
        """Load the kernels of weight updates and masks, or capture one more CUDA graph, so that no later request waits.

        One call takes some ten milliseconds, or seconds for a kernel that this machine has not compiled before. All
        ranks vote, because a release that failed on one rank may have released memory on others. Return False if a rank
        cannot warm up now.
        """
        if not self.tp.all_agree(self.can_warm_up):
            return False
        if self._kernels_left:
            self._kernels_left = False
            if self._args.fused_weight_copy:
                compile_kernels(self.device, self.dtype)
            token_mask.compile_kernel(self.vocab_size, self.dtype, self.device)
        elif self._graphs is not None:
            self._graphs.capture_next()
        return True

    # -- construction ------------------------------------------------------------------------------------------

    def _load_config(self, folder: Path) -> ModelConfig:
        return load_model_config(folder, self._args.context_length)

    def _load_weights(self, folder: Path) -> None:
        if self._args.load_format == "dummy":
            fill_dummy(self.weight_map, self.device)
        else:
            load_checkpoint(self.weight_map, folder)

    def _open_account(self, memory: Memory, free: int, collectives: int, *, paged: bool) -> MemoryAccount:
        """Return the account of this rank's GPU. Raise BadRequestError if the engine does not fit it."""

        def needs_with(args: ServerArgs) -> Needs:
            return memory_needs(
                args, self.config, self.tp.size, self.context_length, self.model, self._step_memory, paged=paged
            )

        args = self._args
        account = MemoryAccount(memory, needs_with(args), args.mem_fraction_static, free=free, collectives=collectives)
        page = page_bytes(self.config, self.tp.size, args.page_size, self.dtype)
        check_memory(args, account, page, self.context_length, needs_with, self.device)
        return account

    def _build(self, ops: Ops) -> Decoder:
        """Return the decoder with parameters that have no memory yet."""
        previous = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device("meta"):
                return Decoder(self.config, self.tp, self.context_length, self.device, ops).eval()
        finally:
            torch.set_default_dtype(previous)

    def _step_graphs(self, backend: PagedBackend, account: MemoryAccount | None) -> StepGraphs:
        from verl_server.worker.step_graphs import StepGraphs

        largest = most_decodes(self._args.cuda_graph_max_bs, self._args.max_running_requests)
        if self.tp.rank == 0:
            log_uncaptured(largest, self.max_rows)
        return StepGraphs(self._forward, self.kv, backend, self.tp, self._step_memory, largest, account)


class _Prompt(NamedTuple):
    """Prompt tokens of one entry whose log-probabilities are requested."""

    entry: int
    positions: npt.NDArray[np.int64]
    """Indices of the step's new tokens that predict the targets."""
    targets: npt.NDArray[np.int64]
    requested: list[int] | None


def _by_request(batch: ForwardBatch, placement: Placement) -> dict[tuple[int, tuple[int, ...] | None], list[_Prompt]]:
    """Return the requests for log-probabilities of prompts by (number of most likely tokens, requested ids)."""
    found: dict[tuple[int, tuple[int, ...] | None], list[_Prompt]] = {}
    for (entry, first, top_num, requested), next_id in zip(batch.prompt_logprobs, batch.prompt_next_ids, strict=True):
        start = int(placement.starts[entry])
        begin, end = start + first, start + batch.extend_lens[entry]
        targets = placement.ids[begin + 1 : end]
        if next_id >= 0:
            targets = np.append(targets, next_id)
        prompt = _Prompt(entry, np.arange(begin, begin + len(targets)), targets, requested)
        found.setdefault((top_num, None if requested is None else tuple(requested)), []).append(prompt)
    return found


def _context_length(server_args: ServerArgs, config: ModelConfig) -> int:
    longest = config.longest_context
    if (server_args.context_length or 0) > longest:
        limit = f"max_position_embeddings={config.max_position_embeddings}"
        if longest != config.max_position_embeddings:
            limit = f"context of {longest} tokens (rope factor {config.rope['factor']})"
        why = ""
        if config.rope["rope_type"] == "dynamic":
            why = (
                " Beyond it, rope type 'dynamic' changes the keys of earlier tokens, which a KV cache keeps. Use yarn."
            )
        raise BadRequestError(f"context_length={server_args.context_length} exceeds the model's {limit}.{why}")
    return server_args.context_length or longest


def _compute_dtype(server_args: ServerArgs, config: ModelConfig, device: torch.device) -> torch.dtype:
    if server_args.dtype == "auto":
        return torch.float32 if device.type == "cpu" else config.dtype
    dtype: torch.dtype = getattr(torch, server_args.dtype)
    return dtype
