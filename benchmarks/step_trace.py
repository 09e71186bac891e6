"""Seconds of a step by its parts, of a scheduler that `benchmarks.constrained --trace` drives in this process.

The parts are wrapped from outside. So the same file traces the scheduler of another checkout, and a part that a
checkout does not have is left out. A part that runs within another one counts for itself alone.

On a GPU the model runs, the parts are wall time, and a second pass finds in torch's profiler how long the device was
idle. On the CPU no model runs: a step is computed at once, and its tokens are drawn from the masks. The parts are
processor time of the scheduler's thread then, so threads that compute masks and other programs do not count. This is
the host's own work for a step, which is the same for a GPU, except for the launches.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import GrammarTokenizer, SchedulerOutput, TokenizedGenerateReq
from verl_server.sampling.spec import ForwardOutput, MakeMasks, SampleSpec, TokenMasks
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.scheduler import Scheduler
from verl_server.server_args import ServerArgs
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.tp_worker import TpWorker

_PARTS = [
    ("planner", "plan", "plan"),
    ("planner", "plan_ahead", "plan"),
    ("planner", "confirm", "plan"),
    ("planner", "collected", "process"),
    ("planner", "share", "process"),
    ("", "process", "process"),
    ("", "_process", "process"),
    ("", "emit", "emit"),
    ("grammars.masks", "consume", "consume"),
    ("grammars.masks", "compute", "masks"),
    ("grammars.masks", "start", "masks"),
    ("grammars.masks", "finish", "masks"),
]
"""(path from the scheduler to an object, its method, name of the part)."""
_OTHER = "other"
"""The part that has all other time of a turn."""


class PartTimes:
    """Seconds by part. Time within a part that another part interrupts does not count for the former."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock
        self._stack: list[str] = []
        self._since = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._count()
        self._stack.append(name)
        try:
            yield
        finally:
            self._count()
            self._stack.pop()

    def rename(self, name: str) -> None:
        """Let the rest of the current part count as `name`."""
        self._count()
        self._stack[-1] = name

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Count each call of `owner.method` as `name`."""
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return call(*args, **kwargs)

        setattr(owner, method, timed)

    def _count(self) -> None:
        now = self._clock()
        if self._stack:
            self.seconds[self._stack[-1]] += now - self._since
        self._since = now


class NoWeights:
    """The state of weights that nothing changes."""

    version, state, epoch = "0", "serving", 0

    def refusal(self) -> None:
        return None


class NoStager:
    def finished(self) -> list[Any]:
        return []


class DrawnStep:
    """A step without a model: draws an allowed token for each row when its result is read."""

    def __init__(self, count: int, masks: TokenMasks | None, times: PartTimes, rng: random.Random) -> None:
        self._count, self._masks, self._times, self._rng = count, masks, times, rng

    def result(self) -> ForwardOutput:
        with self._times.part("model"):
            tokens = [300] * self._count
            rows = [] if self._masks is None else self._masks.rows
            for place, row in enumerate(rows):
                words = self._masks.words[place].numpy().copy()  # type: ignore[union-attr]  # a process writes late masks
                allowed = np.flatnonzero(words)
                if len(allowed):
                    word = allowed[self._rng.randrange(len(allowed))]
                    bits = np.unpackbits(words[word : word + 1].view(np.uint8), bitorder="little")
                    tokens[row] = int(32 * word + self._rng.choice(np.flatnonzero(bits).tolist()))
            return ForwardOutput(tokens, [-1.0] * self._count, [None] * self._count, [None] * self._count)


class DrawingRunner:
    """A runner without a model. Steps overlap, and the logits are always computed when masks are waited for."""

    page_size = 16
    overlaps = True
    can_warm_up = False
    step_budget = None
    device = torch.device("cpu")

    def __init__(self, vocab_size: int, rows: int, context: int, times: PartTimes) -> None:
        self.vocab_size, self.max_rows, self.context_length = vocab_size, rows, context
        self.num_pages = 2 * rows * -(-context // self.page_size)  # so that all requests are admitted at once
        self._times, self._rng = times, random.Random(2)

    @property
    def memory(self) -> DrawingRunner:
        return self

    def figures(self) -> dict[str, Any]:
        return {"weight_bytes": 0, "kv_cache_bytes": 0}

    def step_bytes(self, spec: SampleSpec) -> int:
        return 0

    def warm_up(self) -> bool:
        return True

    def launch(self, batch: ForwardBatch, specs: list[SampleSpec], make_masks: MakeMasks | None = None) -> DrawnStep:
        masks = None if make_masks is None else make_masks(lambda: True)
        return DrawnStep(len(batch.sample), masks, self._times, self._rng)


@dataclass
class Workload:
    """Requests that are submitted at once."""

    prompts: list[list[int]]
    grammars: list[str]
    """The translated grammar of each request, "" for none."""
    output: int
    """Tokens of each output."""


class Trace:
    """A scheduler in this process whose parts are timed."""

    def __init__(self, settings: dict[str, Any], tokenizer: bytes, vocab_size: int, load: Workload) -> None:
        args = ServerArgs(**settings)
        on_gpu = args.device == "cuda"
        self.times = PartTimes(time.perf_counter if on_gpu else time.thread_time)
        self._load, self._runs = load, 0
        runner: Any
        if on_gpu:
            runner = ModelRunner(args, TpGroup(), torch.device("cuda:0"))
            while runner.can_warm_up and runner.warm_up():
                pass
        else:
            length = len(load.prompts[0]) + load.output
            runner = DrawingRunner(vocab_size, args.max_running_requests, length, self.times)
        encoder = msgspec.msgpack.Encoder()
        worker = TpWorker(runner, NoWeights(), NoStager(), TpGroup())  # type: ignore[arg-type]

        def send(message: SchedulerOutput) -> None:
            encoder.encode(message)  # what it takes without the socket

        self.scheduler = Scheduler(args, worker, send)
        self.scheduler.handle(GrammarTokenizer(tokenizer=tokenizer, eos_token_ids=[]))
        self._wrap(runner)

    def _wrap(self, runner: Any) -> None:
        for path, method, name in _PARTS:
            owner: Any = self.scheduler
            for attribute in filter(None, path.split(".")):
                owner = getattr(owner, attribute)
            if hasattr(owner, method):
                self.times.wrap(owner, method, name)
        launch, times = runner.launch, self.times
        matchers = self.scheduler.grammars.masks.matchers  # type: ignore[union-attr]
        begin = matchers.begin

        def timed_begin(buffer: int) -> Any:
            run = begin(buffer)
            times.wrap(run, "wait", "wait for masks")
            return run

        matchers.begin = timed_begin  # type: ignore[method-assign]

        def timed_launch(batch: Any, specs: Any, make_masks: MakeMasks | None = None) -> Any:
            def timed_masks(is_due: Callable[[], bool] | None) -> TokenMasks | None:
                assert make_masks is not None
                with times.part(_OTHER):
                    masks = make_masks(is_due)
                times.rename("launch of sampling")
                return masks

            with times.part("launch of forward"):
                step = launch(batch, specs, None if make_masks is None else timed_masks)
            times.wrap(step, "result", "collect")
            return step

        runner.launch = timed_launch

    def run(self) -> int:
        """Run the workload to its end. Return the number of steps that decode all requests. `times` has their parts."""
        scheduler, load = self.scheduler, self._load
        self._runs += 1
        sampling = SamplingParams(max_new_tokens=load.output, ignore_eos=True)
        for i, (ids, grammar) in enumerate(zip(load.prompts, load.grammars, strict=True)):
            rid = f"{self._runs}-{i}"
            scheduler.handle(TokenizedGenerateReq(rid=rid, input_ids=ids, sampling=sampling, grammar=grammar))
        while scheduler.grammars.waiting and not all(
            req.grammar.start.done() for req in scheduler.grammars.waiting.values() if req.grammar
        ):
            time.sleep(0.01)
        while scheduler.planner.waiting or any(req.prefilling for req in scheduler.planner.running) or not self._busy:
            scheduler.advance()
        self.times.seconds.clear()
        steps = 0
        with self.times.part(_OTHER):
            while len(scheduler.planner.running) == len(load.prompts):
                scheduler.advance()
                steps += 1
        parts = dict(self.times.seconds)
        while scheduler.has_work():
            scheduler.advance()
        self.times.seconds = defaultdict(float, parts)
        return steps

    @property
    def _busy(self) -> bool:
        return bool(self.scheduler.planner.running)


@dataclass
class Idle:
    """Microseconds in which a device did nothing, between the first and the last of its operations."""

    before_sampling: float = 0.0
    """Before a sampling with masks: the device waited for the masks."""
    elsewhere: float = 0.0
    """Above all before a forward pass: the device waited for the launch."""


def idle_time(operations: Sequence[tuple[float, float, str]]) -> Idle:
    """Return the gaps between `operations`, each (start, end, name) in microseconds, in any order.

    A gap is before a sampling if the kernel of the masks is among the next four operations, after its inputs.
    """
    ordered = sorted(operations)
    idle, end = Idle(), ordered[0][0]
    for place, (start, stop, _) in enumerate(ordered):
        if start > end:
            if any("mask" in name for _, _, name in ordered[place : place + 4]):
                idle.before_sampling += start - end
            else:
                idle.elsewhere += start - end
        end = max(end, stop)
    return idle


def device_idle(trace: Trace) -> tuple[int, Idle]:
    """Run the workload once more with torch's profiler. Return the number of steps and the idle time of the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps = trace.run()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() if event.device_type.name == "CUDA"]
    return steps, idle_time([(event.time_range.start, event.time_range.end, event.name) for event in on_device])
