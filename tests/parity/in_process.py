"""A scheduler over the real `ModelRunner` in this process, which records what each reply contains."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.grammar.local_matchers import LocalMatchers, LocalRun
from tests.parity.harness import CPU_KERNELS
from tests.parity.mixed_requests import MixedRequest, grammar_tokenizer
from tests.parity.sampling_judge import Found, unpacked
from tests.scheduler.fakes import FakeStager, Harness
from verl_server.grammar.mask_executor import MaskExecutor
from verl_server.grammar.mask_memory import States, Words
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import BatchTokenIDOut, SchedulerOutput
from verl_server.sampling.spec import MakeMasks, SampleSpec
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner, RunningStep
from verl_server.worker.tp_worker import TpWorker
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater


class OverlappedRunner(ModelRunner):
    """A runner on the CPU whose steps may overlap. It computes a step at its launch, so that masks can be late."""

    def launch(
        self, batch: ForwardBatch, specs: list[SampleSpec] | None, make_masks: MakeMasks | None = None
    ) -> RunningStep:
        if make_masks is None or not self.overlaps:
            return super().launch(batch, specs, make_masks)
        return super().launch(batch, specs, lambda _: make_masks(lambda: True))


class LateRun(LocalRun):
    """Computes masks in the caller's thread, and some of them late, by random numbers."""

    def __init__(self, buffer: int, words: Words, states: States, rng: random.Random) -> None:
        super().__init__(buffer, words, states)
        self._rng = rng

    def compute(self, executor: MaskExecutor) -> None:
        self.compute_some(0.7)

    def compute_some(self, share: float) -> None:
        for row in range(self.num_rows):
            if self._rng.random() < share:
                self.wait_row(row)

    def wait(self, is_due: Callable[[], bool] | None, least: int = 0) -> None:
        for row in range(self.num_rows):
            if is_due is None or self._num_done() < least:
                self.wait_row(row)

    def wait_row(self, row: int) -> None:
        if not self.is_done(row):
            self.compute_row(row)


class LateMasks(LocalMatchers):
    """Each step computes half of the masks that were late in earlier steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._rng = random.Random(0)
        self._runs: list[LateRun] = []
        self.num_late = 0

    def begin(self, buffer: int) -> LateRun:
        for run in self._runs:
            run.compute_some(0.5)
        self._runs = [run for run in self._runs if not run.all_done]
        self.num_late += len(self._runs)
        self._runs.append(LateRun(buffer, self.words(buffer), self.states[buffer], self._rng))
        return self._runs[-1]


class ModelHarness(Harness):
    """Steps are computed at their launch also if they overlap, and are read a turn later."""

    def __init__(self, folder: Path, num_pages: int, page_size: int = 4, max_rows: int = 8, **settings: Any) -> None:
        self.found: dict[str, Found] = {}
        self.starts: list[str] = []
        """Request ids in the order of their first tokens."""
        settings = {"cpu_threads": 1, "cpu_kernel_choice": CPU_KERNELS, "context_length": 256} | settings
        super().__init__(num_pages, page_size, max_rows, model_path=str(folder), device="cpu", **settings)
        self.scheduler.grammars.make_matchers = self._make_late
        self.scheduler.handle(grammar_tokenizer())

    def _make_late(self, *args: Any) -> LateMasks:
        self.late_masks = LateMasks(*args)
        return self.late_masks

    def make_worker(self, num_pages: int, page_size: int, max_rows: int, context_length: int) -> TpWorker:
        self.args = self.args.replace(max_total_tokens=num_pages * page_size, context_length=context_length)
        tp = TpGroup()
        self.model_runner = OverlappedRunner(self.args, tp, torch.device("cpu"))
        self.runner = self.model_runner  # type: ignore[assignment]
        sources = WeightSources(self.model_runner, tp, self.args)
        updater = WeightUpdater(self.model_runner, tp, sources, self.args)
        return TpWorker(self.model_runner, updater, FakeStager(), tp)

    def ask(self, rid: str, request: MixedRequest, **fields: Any) -> None:
        self.scheduler.handle(request.message(rid, **fields))

    def receive(self, message: SchedulerOutput) -> None:
        super().receive(message)
        if not isinstance(message, BatchTokenIDOut):
            return
        for index, rid in enumerate(message.rids):
            found = self.found.setdefault(rid, Found())
            if message.output_ids[index] and not found.output_ids:
                self.starts.append(rid)
            found.output_ids += message.output_ids[index]
            found.logprobs += message.output_logprobs[index]
            found.top += map(unpacked, message.top_logprobs.get(index, ()))
            found.requested += map(unpacked, message.token_ids_logprobs.get(index, ()))
            found.masks += [mask.token_ids for mask in message.sampling_masks.get(index, ())]
            if (part := message.prompt_logprobs.get(index)) is not None:
                found.prompt = list(zip(part.logprobs, part.token_ids, strict=True))
                found.prompt_top = list(map(unpacked, part.top or ()))
                found.prompt_requested = list(map(unpacked, part.requested or ()))
            if (reason := message.finish_reasons[index]) is not None:
                found.finish = {"type": reason.type, "matched": reason.matched, "message": reason.message}

    def num_retractions(self, rid: str) -> int:
        message, index = self.last[rid]
        return message.num_retractions[index]

    def compile(self) -> None:
        """Wait until all grammars are compiled, so that the order of arrivals does not depend on time."""
        for req in self.scheduler.grammars.waiting.values():
            assert req.grammar is not None
            req.grammar.start.exception(timeout=20)
