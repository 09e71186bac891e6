"""A minimal scheduler over `ModelRunner`, and the transformers reference with which the results are compared."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.packed import TokenLogprobs
from verl_server.sampling.spec import ForwardOutput, SampleSpec
from verl_server.sampling_params import SamplingParams
from verl_server.server_args import ServerArgs
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner

GREEDY = {"temperature": 0.0}


CPU = torch.device("cpu")
CPU_KERNELS = "cpp" if any(map(shutil.which, ("c++", "g++", "clang++"))) else "torch"
"""A `cpu_kernel_choice` that needs no measurement."""


def make_runner(folder: Path, tp: TpGroup | None = None, device: torch.device = CPU, **changes: Any) -> ModelRunner:
    settings: dict[str, Any] = {
        "max_total_tokens": 4096,
        "max_running_requests": 32,
        "cpu_threads": 1,
        "cpu_kernel_choice": CPU_KERNELS,
    } | changes
    kind: Any = device.type
    args = ServerArgs(model_path=str(folder), device=kind, tp_size=tp.size if tp else 1, **settings)
    return ModelRunner(args, tp or TpGroup(), device)


@dataclass
class Sequence:
    """A request: its row, its pages and its outputs."""

    row: int
    spec: SampleSpec
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    logprobs: list[float] = field(default_factory=list)
    top: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.spec.prompt_ids + self.spec.output_ids


def spec_of(prompt: list[int], seed: int = 0, top: int = 0, **params: Any) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams.parse(params),
        seed=seed,
        prompt_ids=prompt,
        output_ids=[],
        stop_ids=[],
        return_logprob=True,
        top_logprobs_num=top,
    )


class Driver:
    """Assigns rows and pages, and runs steps. No page is reused, so that only `shared` makes requests share pages."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.free_pages = list(range(runner.num_pages))
        random.Random(0).shuffle(self.free_pages)  # as in a long-lived server
        self._rows = 0

    def add(self, prompt: list[int], shared: Sequence | None = None, **params: Any) -> Sequence:
        """Return a new request. With `shared`, its first full pages are those of an earlier request."""
        sequence = Sequence(self._rows, spec_of(prompt, **({} | GREEDY | params)))
        self._rows += 1
        if shared is not None:
            common = min(shared.cached, len(prompt) - 1) // self.runner.page_size
            assert shared.tokens[: common * self.runner.page_size] == prompt[: common * self.runner.page_size]
            sequence.pages = shared.pages[:common]
            sequence.cached = common * self.runner.page_size
        return sequence

    def batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        """Return a batch that extends each sequence by the given number of tokens.

        Sequences that the batch computes to their end are sampled.
        """
        batch = ForwardBatch(
            rows=[], cached_lens=[], extend_lens=[], input_ids=[], page_updates=[], sample=[], prompt_logprobs=[]
        )
        for entry, (sequence, extend) in enumerate(work):
            end = sequence.cached + extend
            needed = -(-end // self.runner.page_size)
            while len(sequence.pages) < needed:
                sequence.pages.append(self.free_pages.pop())
            batch.rows.append(sequence.row)
            batch.cached_lens.append(sequence.cached)
            batch.extend_lens.append(extend)
            batch.input_ids += sequence.tokens[sequence.cached : end]
            batch.page_updates.append((sequence.row, 0, list(sequence.pages)))
            if end == len(sequence.tokens):
                batch.sample.append(entry)
        return batch

    def step(self, work: list[tuple[Sequence, int]]) -> ForwardOutput:
        batch = self.batch(work)
        output = self.runner.launch(batch, [work[i][0].spec for i in batch.sample]).result()
        self.accept(work, batch, output)
        return output

    @staticmethod
    def accept(work: list[tuple[Sequence, int]], batch: ForwardBatch, output: ForwardOutput) -> None:
        for sequence, extend in work:
            sequence.cached += extend
        for i, entry in enumerate(batch.sample):
            sequence = work[entry][0]
            sequence.spec.output_ids.append(output.next_ids[i])
            sequence.logprobs.append(output.logprobs[i])
            sequence.top.append(output.top_logprobs[i])

    def finish(self, sequences: list[Sequence], new_tokens: int, chunk: int = 1 << 30) -> None:
        """Run all sequences until each has `new_tokens` outputs, prefilling in chunks of at most `chunk`."""
        while True:
            work = [(s, min(chunk, len(s.tokens) - s.cached)) for s in sequences if len(s.spec.output_ids) < new_tokens]
            if not work:
                return
            self.step(work)

    def retract(self, sequence: Sequence) -> None:
        """Drop the request's KV, so that it is computed again from prompt and output tokens."""
        sequence.pages, sequence.cached = [], 0


class Reference:
    """A model of transformers, by default in fp32 on the CPU."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> None:
        # Imported here because the import takes seconds, and tensor-parallel ranks do not need it.
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()

    def check(self, sequence: Sequence, tolerance: float = 1e-4) -> None:
        """Assert the greedy id and the log-probability of every output token, given the tokens before it."""
        logprobs = self.logprobs(sequence.tokens)[len(sequence.spec.prompt_ids) - 1 : -1]
        assert len(logprobs) == len(sequence.spec.output_ids)
        for i, (row, token) in enumerate(zip(logprobs, sequence.spec.output_ids, strict=True)):
            best = row.topk(2)
            gap = float(best.values[0] - best.values[1])
            assert token == int(best.indices[0]) or gap < 1e-4, (i, token, best)
            assert abs(sequence.logprobs[i] - float(row[token])) < tolerance, (i, sequence.logprobs[i], row[token])

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """Return log-probabilities of the token after each position, [len(tokens), vocab]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens], device=self.model.device)).logits[0].float().cpu()
        return logits - logits.logsumexp(-1, keepdim=True)


def random_prompt(length: int, seed: int, vocab_size: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, vocab_size, (length,), generator=generator).tolist()
