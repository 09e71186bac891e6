"""Padded steps compute what unpadded steps do, in Triton's interpreter with stand-ins for CUDA graphs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.depth import at_depth
from tests.parity.harness import Driver, Sequence, make_runner, random_prompt
from tests.parity.in_process import ModelHarness
from tests.parity.mixed_requests import FEATURES
from tests.parity.mixed_runs import Judged, Requests, Run, expect_same_ids
from tests.worker.test_memory_account import FakeGpu
from tests.worker.test_model_runner import LonelyRank
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import ContinueGenerationReq, PauseGenerationReq
from verl_server.models import triton_attention
from verl_server.models.attention import Placement
from verl_server.models.triton_attention import PagedBackend
from verl_server.sampling.fused import FusedOps
from verl_server.sampling.sampler import Sampler
from verl_server.server_args import ServerArgs
from verl_server.worker import capture_budget, graph_sizes, model_runner, step_graphs
from verl_server.worker.kernel_choice import KernelChoice
from verl_server.worker.memory_account import LEAST_RECEIVED
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.step_graphs import StepGraphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there, graphs are real: tests/parity/test_cuda.py")


class ComputedAtCapture:
    """A stand-in for a CUDA graph. The step is computed at its capture, so that `replay` does nothing."""

    def replay(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def capture(*_: object, **__: object) -> Iterator[None]:
    yield


class OnceOnly(StepGraphs):
    """Step graphs that capture every step again and record the keys of the steps."""

    steps: list[tuple[str, int, bool]]

    def _graph_of(self, key: Any, *arrays: Any) -> Any:
        self._captured.clear()
        self.steps = [*getattr(self, "steps", []), tuple(key)]
        return super()._graph_of(key, *arrays)

    def _run_once(self, *_: Any) -> None:
        """Do nothing: the step is computed at its capture."""


class FullBeforeShared(OnceOnly):
    """Step graphs without memory for a graph with shared keys."""

    def _graph_of(self, key: Any, *arrays: Any) -> Any:
        self._excluded = {k for k in self._all if k.shared}
        return super()._graph_of(key, *arrays)


def run(driver: Driver) -> list[Sequence]:
    """Run chunks beside decodes, a prefix hit, steps of decodes only, and a step that samples nothing."""
    sequences = [driver.add(random_prompt(n, seed=n)) for n in (8, 15)]
    driver.finish(sequences, 4, chunk=8)
    sequences.append(driver.add(sequences[1].tokens + random_prompt(3, seed=9), shared=sequences[1]))
    driver.finish(sequences, 5, chunk=8)
    return sequences


@pytest.mark.parametrize("most", [1, 3, 64, 100, 256, 1000, 1024, 3000])
def test_padding_of_decode_steps_is_bounded(most: int) -> None:
    sizes = graph_sizes.decode_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for size, larger in itertools.pairwise(sizes):
        assert larger - size <= max(16, size // 8), "less than a tile of a product, or an eighth of the entries"


def test_the_number_of_decode_graphs_is_bounded() -> None:
    assert [len(graph_sizes.decode_sizes(most)) for most in (256, 512, 1024)] == [23, 31, 39]


def test_padded_steps_agree(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(Driver(make_runner(tiny_llama, page_size=4)))
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", OnceOnly)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    runner = make_runner(tiny_llama, page_size=4)
    runner.kv.pool.fill_(torch.nan)  # reading a slot that this run did not write would give NaN
    got = run(Driver(runner))
    for a, b in zip(expected, got, strict=True):
        assert a.spec.output_ids == b.spec.output_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert isinstance(runner._graphs, OnceOnly)
    assert {("decode", 2, False), ("mixed", 16, False)} <= set(runner._graphs.steps)


@pytest.mark.parametrize("graphs", at_depth([True, False]), ids=["graphs", "eager"])
def test_steps_with_shared_keys_agree(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    def run_groups(driver: Driver) -> list[Sequence]:
        """Decode two groups and a request that shares nothing, together and beside the prefill of another request."""
        sequences = []
        for seed in (1, 2):
            first = driver.add(random_prompt(13, seed=seed))
            driver.finish([first], 1)
            others = [driver.add(first.spec.prompt_ids + random_prompt(n, seed=n), shared=first) for n in (1, 5)]
            sequences += [first, *others]
        sequences.append(driver.add(random_prompt(6, seed=3)))
        driver.finish(sequences, 3)
        sequences.append(driver.add(random_prompt(12, seed=4)))
        driver.finish(sequences, 4, chunk=4)
        return sequences

    expected = run_groups(Driver(make_runner(tiny_llama, page_size=4)))
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", OnceOnly)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(triton_attention, "_MIN_RUN_KEYS", 4)
    monkeypatch.setattr(triton_attention, "_MIN_SAVED_BYTES", 1)
    runner = make_runner(tiny_llama, page_size=4, disable_cuda_graph=not graphs)
    runner.kv.pool.fill_(torch.nan)
    planned = []
    plan_decodes = PagedBackend.plan_decodes
    recorded = lambda *a, **k: planned.append(plan_decodes(*a, **k)) or planned[-1]  # noqa: E731
    monkeypatch.setattr(PagedBackend, "plan_decodes", recorded)
    got = run_groups(Driver(runner))
    for a, b in zip(expected, got, strict=True):
        assert a.spec.output_ids == b.spec.output_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    starts = [tuple(work.shared.starts) for work in planned if work.shared is not None]
    assert (12,) * 6 + (0,) in starts, "both groups in one step"
    if graphs:
        assert isinstance(runner._graphs, OnceOnly)
        assert {("decode", 8, True), ("mixed", 16, True)} <= set(runner._graphs.steps)


class Counted(OnceOnly):
    """Step graphs that also record the steps that no graph can compute."""

    eager: list[int]
    """The number of entries of each of these steps."""

    def run(self, placement: Any, sample: list[int]) -> Any:
        logits = super().run(placement, sample)
        if logits is None:
            self.eager = [*getattr(self, "eager", []), len(placement.rows)]
        return logits


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # forbidden tokens, and rows with a late mask
@pytest.mark.parametrize(
    "settings",
    at_depth(
        [
            {"cuda_graph_max_bs": 2, "overlaps": True},
            {"disable_cuda_graph": True, "schedule_policy": "fcfs"},
            {"cuda_graph_max_bs": 2, "schedule_policy": "fcfs"},
            {"disable_cuda_graph": True, "overlaps": True},
            {"overlaps": True},
            {},
        ],
        quick=1,
    ),
    ids=lambda settings: "-".join(settings) or "defaults",
)
def test_mixed_requests_agree_with_few_graphs_and_without(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """All sampling settings, computed by the kernels for GPUs: attention, penalties, filters, candidates and draws."""

    def played(**settings: Any) -> Run:
        h = ModelHarness(tiny_llama, num_pages=40, max_rows=5, **settings)
        if "cpu_kernel_choice" not in settings:
            h.model_runner.sampler = Sampler(h.model_runner.vocab_size, h.model_runner.device, FusedOps())
        steps = itertools.count()

        def retract_once(_: Run) -> None:
            step = next(steps)
            if step == 7:
                h.scheduler.handle(PauseGenerationReq(id=1, mode="retract"))
            elif step == 8:
                h.scheduler.handle(ContinueGenerationReq(id=2))

        return Run(h, Requests(6, count=6, longest=18, most_new=10)).play(retract_once)

    expected = played(cpu_kernel_choice="torch")
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", Counted)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    run = played(**settings)
    Judged(tiny_llama).check(run)
    expect_same_ids(run, expected)
    assert set().union(*[request.features for request in run.asked.values()]) == set(FEATURES)
    assert run.retracted_features() >= {"penalties", "filters"}
    graphs = run.h.model_runner._graphs
    if "disable_cuda_graph" in settings:
        assert graphs is None
        return
    assert isinstance(graphs, Counted)
    sizes = {size for kind, size, _ in graphs.steps if kind == "decode"}
    if "cuda_graph_max_bs" in settings:
        assert sizes == {1, 2} and max(graphs.eager) > 2
    else:
        assert max(sizes) > 2


def test_without_memory_for_shared_keys_the_plain_graph_is_taken(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", FullBeforeShared)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(triton_attention, "_MIN_RUN_KEYS", 4)
    monkeypatch.setattr(triton_attention, "_MIN_SAVED_BYTES", 1)
    runner = make_runner(tiny_llama, page_size=4)
    driver = Driver(runner)
    first = driver.add(random_prompt(5, seed=1))
    driver.finish([first], 1)
    other = driver.add(first.spec.prompt_ids + random_prompt(1, seed=2), shared=first)
    driver.finish([other], 1)
    driver.finish([first, other], 2)
    graphs = runner._graphs
    assert isinstance(graphs, FullBeforeShared)
    assert graphs.steps[-2:] == [("decode", 2, True), ("decode", 2, False)]
    assert len(graphs._captured) == 1, "the step ran as a graph"


def test_every_size_is_captured_ahead_once(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(graph_sizes, "MOST_GRAPH_TOKENS", 32)
    runner = make_runner(tiny_llama, page_size=4, max_running_requests=3)
    runner.memory.release_weights()
    assert not runner.can_warm_up, "a warm-up would read weights that are not present"
    runner.memory.resume_weights()
    runner.memory.release_kv_cache()
    assert not runner.can_warm_up
    runner.memory.resume_kv_cache()
    captured, seconds = [], 0.0
    while runner.can_warm_up:
        runner.warm_up()
        figures = runner.memory.figures()
        captured.append((figures["cuda_graphs"], figures["cuda_graphs_to_capture"]))
        assert figures["cuda_graph_capture_seconds"] > seconds, "captures take time"
        seconds = figures["cuda_graph_capture_seconds"]
    # Decodes of 1, 2 and 3 requests, mixed steps of 16 and 32 tokens; all but the first with shared keys too.
    assert captured == [(held, 9 - held) for held in range(1, 10)]
    assert runner._graphs is not None
    # First the sizes to which others may be padded, the largest of each kind first.
    kinds = [tuple(key) for key in runner._graphs._captured]
    assert kinds[:3] == [("decode", 3, False), ("mixed", 32, False), ("mixed", 16, False)]
    assert kinds[3:] == [
        *(("decode", 3, True), ("mixed", 32, True), ("mixed", 16, True)),
        *(("decode", 2, False), ("decode", 1, False), ("decode", 2, True)),
    ]
    runner.warm_up()


@pytest.mark.parametrize("sizes", [[1], [1, 2, 3], graph_sizes.decode_sizes(1024), graph_sizes.mixed_sizes()])
def test_every_step_may_be_padded_to_a_size_that_is_captured_first(sizes: list[int]) -> None:
    first = graph_sizes.covering(sizes)
    for tokens in range(1, sizes[-1] + 1):
        exact = next(size for size in sizes if size >= tokens)
        assert exact in first or any(size > exact and graph_sizes.may_pad(tokens, size) for size in first)
    assert len(first) < len(sizes) or len(sizes) == 1


class Ignored:
    """Inputs of a graph that computes nothing."""

    def write(self, arrays: object) -> None: ...


class Recorded(StepGraphs):
    """Step graphs that capture nothing and record the sizes that they would capture."""

    captures: list[int]

    def _arrays(self, *_: Any) -> list[Any]:
        return []

    def _capture(self, key: Any, _: Any) -> Any:
        self.captures = [*getattr(self, "captures", []), key.size]
        return step_graphs._Captured(Ignored(), ComputedAtCapture(), torch.empty(0))  # type: ignore[arg-type]

    def replay(self, tokens: int) -> tuple[int, bool]:
        """Return (size of the graph that a step of so many decodes uses, True if the step captured it)."""
        held, nothing = self.num_captured, Any
        key = self._chosen("decode", self._decode_sizes, tokens, shared=False)
        self._graph_of(key, nothing, nothing)  # type: ignore[arg-type]
        return key.size, self.num_captured > held


@pytest.fixture
def recorded(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", Recorded)
    graphs = make_runner(tiny_llama, max_running_requests=256)._graphs
    assert isinstance(graphs, Recorded)
    return graphs


def test_a_busy_engine_pads_instead_of_capturing_in_each_step(recorded: Recorded) -> None:
    assert recorded.replay(256) == (256, True)
    for step in range(1, step_graphs._CAPTURE_INTERVAL):
        assert recorded.replay(240) == (256, False), f"step {step} is padded"
    assert recorded.replay(240) == (240, True), "the size is captured in the end"
    assert recorded.replay(224) == (240, False), "and the next capture waits again"
    assert recorded.replay(100) == (112, True), "too much padding costs more than a capture"
    recorded.release()
    recorded.resume()
    assert recorded.replay(240) == (240, True), "released graphs are not used"


def test_without_memory_for_more_graphs_larger_ones_are_used(recorded: Recorded) -> None:
    recorded.replay(256)
    recorded._excluded = set(recorded._all) - set(recorded._captured)
    assert {recorded.replay(240)[0] for _ in range(2 * step_graphs._CAPTURE_INTERVAL)} == {256}


def test_the_choice_of_graphs_is_the_same_on_all_ranks(tiny_llama: Path, recorded: Recorded) -> None:
    """It depends on steps and captures only, which all ranks have in common."""
    other = make_runner(tiny_llama, max_running_requests=256)._graphs
    assert isinstance(other, Recorded)
    steps = [256 - step // 3 for step in range(600)]
    assert [recorded.replay(n) for n in steps] == [other.replay(n) for n in steps]
    assert recorded.captures == other.captures
    assert len(recorded.captures) < 600 / step_graphs._CAPTURE_INTERVAL + 6, "a batch that shrinks captures few sizes"


@pytest.mark.parametrize(("settings", "largest"), [({}, 40), ({"cuda_graph_max_bs": 16}, 16)])
def test_the_largest_decode_graph(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    largest: int,
) -> None:
    caplog.set_level(logging.INFO, logger="verl_server.worker.step_memory")
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    runner = make_runner(tiny_llama, max_running_requests=40, **settings)
    assert runner._graphs is not None and runner._graphs._in_order()[0] == ("decode", largest, False)
    assert len(caplog.records) == (largest < 40), "what is lost is said once"


def test_released_graphs_are_not_taken(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    runner = make_runner(tiny_llama, page_size=4)
    driver = Driver(runner)
    sequence = driver.add(random_prompt(5, seed=1))
    placement = runner.kv.place(driver.batch([(sequence, 5)]))
    assert runner._graphs is not None and runner._graphs.run(placement, [0]) is not None
    runner.memory.release_cuda_graphs()
    assert runner._graphs.run(placement, [0]) is None
    runner.memory.resume_cuda_graphs()
    assert runner._graphs.run(placement, [0]) is not None


def test_steps_go_on_without_memory_for_graphs(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)

    def no_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "graph", no_memory)
    monkeypatch.setattr(graph_sizes, "MOST_GRAPH_TOKENS", 32)
    runner = make_runner(tiny_llama, page_size=4, max_running_requests=2)
    assert runner._graphs is not None
    for _ in runner._graphs._all:
        runner.warm_up()
    assert not runner.can_warm_up, "idle time would be spent on repeated failures"
    driver = Driver(runner)
    sequence = driver.add(random_prompt(6, seed=1))
    driver.finish([sequence], 3)
    assert len(sequence.spec.output_ids) == 3
    runner.memory.release_cuda_graphs()
    runner.memory.resume_cuda_graphs()
    assert runner.can_warm_up, "memory may be available again"


@dataclass
class OtherRank:
    """A group with one more rank, whose votes are the values of `can`, in their order."""

    can: list[bool]
    size: int = 2
    rank: int = 0
    seconds: float = 0.0
    """Seconds that the other rank reports for its captures."""
    room: int = 2**40
    """Bytes that the other rank has for a capture, if its vote before the capture is True."""

    def all_agree(self, ok: bool) -> bool:
        return self.can.pop(0) and ok

    def gather(self, data: bytes) -> list[bytes]:
        """The vote before a capture (the room of the rank), or after it (an `Outcome`)."""
        can = self.can.pop(0)
        if len(data) == step_graphs._ROOM.size:
            others = step_graphs._ROOM.pack(self.room if can else 0)
        else:
            others = capture_budget._OUTCOME.pack(can, self.seconds, 1, self.room)
        return [data, others] if self.rank == 0 else [others, data]


@pytest.mark.parametrize(
    ("free", "other_can", "holds"),
    [
        pytest.param(2**31, [True, True, True], True, id="all-can"),
        pytest.param(2**31, [True, False], False, id="other-has-no-room"),
        pytest.param(2**20, [True, True], False, id="this-has-no-room"),
        pytest.param(2**31, [True, True, False], False, id="other-failed"),
    ],
)
def test_a_graph_is_held_if_all_ranks_hold_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, free: int, other_can: list[bool], holds: bool
) -> None:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", ComputedAtCapture)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    runner = make_runner(tiny_llama, page_size=4)
    assert runner._graphs is not None
    runner._graphs._account = Account(free)  # type: ignore[assignment]
    other = OtherRank(other_can)
    monkeypatch.setattr(runner, "tp", other)
    monkeypatch.setattr(runner._graphs, "_tp", other)
    runner.warm_up()
    assert bool(runner._graphs._captured) is holds
    assert not other.can, "a vote is missing"


def test_a_rank_that_fails_inside_a_step_does_not_vote(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends and names the cause, because the other ranks wait in the step's sums and cannot vote."""
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    runner = make_runner(tiny_llama, page_size=4)
    assert runner._graphs is not None
    other = OtherRank([True, True])
    monkeypatch.setattr(runner._graphs, "_tp", other)

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner._graphs, "_step", no_memory)
    with pytest.raises(RuntimeError, match=r"other ranks wait for it .* smaller mem_fraction_static"):
        runner.warm_up()
    assert other.can == [True], "one vote, on the memory"
    monkeypatch.setattr(step_graphs, "PackedInts", no_memory)
    with pytest.raises(RuntimeError, match="other ranks wait for it"):
        runner.warm_up()
    assert not other.can, "nor does a rank without memory for the inputs"


@dataclass
class Clock:
    """A stand-in for the module `time`."""

    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(StepGraphs):
    """Step graphs whose captures compute nothing, and take `run_seconds` and then `record_seconds` of the clock."""

    clock: Clock
    run_seconds = record_seconds = 0.5

    def _run_once(self, *_: Any) -> None:
        self.clock.now += self.run_seconds

    def _record(self, key: Any, _: Any) -> Any:
        self.clock.now += self.record_seconds
        return step_graphs._Captured(Ignored(), ComputedAtCapture(), torch.empty(0))  # type: ignore[arg-type]

    def clock_per_capture(self, seconds: float) -> None:
        self.run_seconds = self.record_seconds = seconds / 2

    def capture_all(self) -> set[Any]:
        """Capture in idle time until nothing is left. Return the keys of the graphs."""
        while self.num_left:
            self.capture_next()
        return set(self._captured)

    def replay(self, tokens: int) -> tuple[int, bool]:
        """Return (size of the graph that a step of so many decodes uses, True if the step captured it)."""
        held = self.num_captured
        key = self._chosen("decode", self._decode_sizes, tokens, shared=False)
        none = np.zeros(0, dtype=np.int64)
        nothing = Placement(none, none, none, none, none, none, num_decodes=0)
        assert self._graph_of(key, nothing, self._backend.empty_work(shared=False)) is not None
        return key.size, self.num_captured > held

    @property
    def capture_seconds(self) -> float:
        return float(self.figures()["cuda_graph_capture_seconds"])

    @property
    def needed(self) -> set[Any]:
        """The keys of the graphs to which steps of other sizes may be padded."""
        return {key for key in self._all if key.size in self._first[key.kind]}


@pytest.fixture
def timed(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Timed:
    caplog.set_level(logging.INFO, logger="verl_server.worker.capture_budget")
    return make_timed(tiny_llama, monkeypatch)


def make_timed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", Timed)
    Timed.clock = Clock()
    monkeypatch.setattr(step_graphs, "time", Timed.clock)
    graphs = make_runner(folder, max_running_requests=256)._graphs
    assert isinstance(graphs, Timed)
    return graphs


def test_within_the_budget_of_time_every_size_is_captured(
    timed: Timed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last capture spends the budget, when nothing is left to capture."""
    monkeypatch.setattr(capture_budget, "MOST_SECONDS", len(timed._all) - 0.5)
    assert timed.capture_all() == set(timed._all) and not caplog.records
    assert timed.capture_seconds == len(timed._all)


@pytest.mark.parametrize("others", [-1, 0, 3])
def test_beyond_the_budget_of_time_only_sizes_are_captured_to_which_others_may_be_padded(
    timed: Timed, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The budget is spent before the last of these sizes, with it, or three captures later. The log says so once."""
    monkeypatch.setattr(capture_budget, "MOST_SECONDS", len(timed.needed) + others - 0.5)
    captured = timed.capture_all()
    assert captured == set(timed._all[: len(timed.needed) + max(others, 0)]) and timed.needed <= captured
    assert timed.capture_seconds == len(captured)
    (record,) = caplog.records
    sizes = {kind: len({k.size for k in timed._all if k.kind == kind and k not in captured}) for kind in timed._first}
    for kind, number in sizes.items():
        assert f"{number} sizes of {kind} steps" in record.getMessage()
    assert f"budget of {capture_budget.MOST_SECONDS:.0f} s" in record.getMessage()
    for tokens in range(1, 257):
        assert timed.replay(tokens)[1] is False, "no step captures, and each has a graph"
    assert len(caplog.records) == 1


def test_a_step_beyond_the_budget_captures_the_size_to_which_others_may_be_padded(
    timed: Timed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(capture_budget, "MOST_SECONDS", 0.5)
    assert timed.replay(256) == (256, True) and len(caplog.records) == 1
    assert 24 not in timed._first["decode"] and 32 in timed._first["decode"]
    assert timed.replay(20) == (32, True)
    for _ in range(2 * step_graphs._CAPTURE_INTERVAL):
        assert timed.replay(20) == (32, False), "24 is never captured"
    assert timed.replay(30) == (32, False)


def test_the_compilation_of_kernels_is_not_counted(timed: Timed) -> None:
    """A machine that compiles them for longer than the budget still captures every size."""
    timed.run_seconds, timed.record_seconds = 2 * capture_budget.MOST_SECONDS, 0.02
    timed.capture_next()
    assert timed.capture_seconds == pytest.approx(0.04)


def test_released_graphs_have_the_whole_budget_again(
    timed: Timed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that releases the graphs in each of its steps does not spend the budget little by little."""
    monkeypatch.setattr(capture_budget, "MOST_SECONDS", len(timed._all) + 0.5)
    for cycle in (1, 2, 3):
        assert len(timed.capture_all()) == len(timed._all)
        assert timed.capture_seconds == cycle * len(timed._all), "the figure goes on"
        timed.release()
        timed.resume()
    assert not caplog.records


def test_ranks_that_take_different_times_capture_the_same_graphs(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The slowest rank counts. A rank that decided by its own clock would not vote where others wait for it."""
    monkeypatch.setattr(capture_budget, "MOST_SECONDS", 9.5)
    steps, results = [256, 200, 20, 24, 90, 100, 30, 8, 60] * 20, []
    for rank, own, other in ((0, 0.1, 1.0), (1, 1.0, 0.1)):
        graphs = make_timed(tiny_llama, monkeypatch)
        votes = OtherRank([True] * 1000, rank=rank, seconds=other)
        graphs._tp = votes  # type: ignore[assignment]
        graphs.run_seconds = graphs.record_seconds = own / 2
        replayed = [graphs.replay(tokens) for tokens in steps]
        keys = list(graphs._captured), graphs.capture_all()
        results.append((replayed, keys, graphs.capture_seconds, graphs.num_left, len(votes.can)))
        assert len(graphs._captured) < len(graphs._all)
    assert results[0] == results[1]
    assert len(caplog.records) == 1, "rank 0 says it"


# -- memory --------------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """A stand-in for a `MemoryAccount`."""

    room: int

    def room_for_graphs(self, wanted: int) -> int:
        return self.room

    def free(self) -> int:
        return self.room

    def advice(self) -> str:
        return "Free some memory."


def test_a_size_that_does_not_fit_costs_no_other_size(timed: Timed, caplog: pytest.LogCaptureFixture) -> None:
    """The largest mixed steps take more memory than the largest decode step."""
    caplog.set_level(logging.INFO, logger="verl_server.worker.step_graphs")
    timed.clock_per_capture(0.01)
    largest = timed._all[0]
    assert largest.kind == "decode" and timed._room(timed._all[1]) < timed._room(_mixed(timed, 4096))
    timed._account = Account(room=timed._room(_mixed(timed, 1024)))  # type: ignore[assignment]
    assert timed.capture_all() == {key for key in timed._all if key.kind == "decode" or key.size <= 1024}
    (record,) = caplog.records
    assert "Free some memory." in record.getMessage() and "no memory to capture 24 of 113" in record.getMessage()
    figures = timed.figures()
    assert figures["cuda_graphs_without_memory"] == 24 and figures["cuda_graphs"] == 113 - 24
    decodes = sum(key.kind == "decode" for key in timed._all)
    assert figures["decode_cuda_graphs"] == figures["decode_cuda_graphs_in_all"] == decodes == 45, (
        "none of them is lost"
    )
    timed._account = Account(room=0)  # type: ignore[assignment]
    timed._captured.clear()
    assert timed.capture_all() == set()
    assert (timed.figures()["decode_cuda_graphs"], timed.figures()["decode_cuda_graphs_in_all"]) == (0, decodes)


def _mixed(graphs: StepGraphs, size: int) -> Any:
    return next(key for key in graphs._all if key.kind == "mixed" and key.size == size)


def test_a_failed_capture_excludes_its_own_size_only(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(key: Any, _: Any) -> Any:
        if key.kind == "mixed" and key.size == 4096:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step_graphs._Captured(Ignored(), ComputedAtCapture(), torch.empty(0))  # type: ignore[arg-type]

    monkeypatch.setattr(timed, "_record", record)
    captured = timed.capture_all()
    assert captured == {key for key in timed._all if not (key.kind == "mixed" and key.size == 4096)}


def test_a_driver_without_memory_for_the_graph_excludes_the_size_and_says_so_once(
    timed: Timed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def record(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(timed, "_record", record)
    timed._account = Account(2**40)  # type: ignore[assignment]
    for _ in range(2):
        timed.capture_next()
        assert len(timed._excluded) == 1
        timed.consider_again()
    (record,) = [r.getMessage() for r in caplog.records if r.name.endswith("step_graphs")]
    assert "CUDA error: out of memory" in record and "Free some memory." in record


def test_another_error_of_the_driver_is_raised(timed: Timed, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(timed, "_record", record)
    with pytest.raises(RuntimeError, match="illegal"):
        timed.capture_next()


@pytest.mark.parametrize("tp_size", [1, 2])
def test_all_graphs_fit_the_part_of_the_account_that_is_theirs(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    """Everything else is taken, the slack included, and graphs take all that was estimated: workspaces, too."""
    gpu = FakeGpu(80 * 10**9)
    runner = runner_on(gpu, tiny_llama, monkeypatch, tp_size)
    account, graphs = runner.memory.figures()["account"], runner._graphs
    assert isinstance(graphs, Timed)
    kept = account["step"] + account["special_sampling"] + min(account["received_weights"], LEAST_RECEIVED)
    others = gpu.total - kept - account["cuda_graphs"]
    workspaces = graphs._memory.graph(0, 0)

    def record(key: Any, _: Any) -> Any:
        largest = {}
        for held in [*graphs._captured, key]:
            largest[held.kind] = max(largest.get(held.kind, 0), graphs._bytes(held) - workspaces)
        gpu.held = others + workspaces + sum(largest.values())
        return step_graphs._Captured(Ignored(), ComputedAtCapture(), torch.empty(0))  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "_record", record)
    gpu.held = others
    assert graphs.capture_all() == set(graphs._all)


def test_sizes_are_tried_again_after_a_resume_and_after_many_steps(timed: Timed) -> None:
    timed._account = account = Account(room=0)  # type: ignore[assignment]
    assert timed.capture_all() == set() and timed.num_left == 0
    account.room = 2**40
    assert timed.num_left == 0, "nothing says that memory was freed"
    timed.consider_again()
    assert timed.num_left == len(timed._all)
    account.room = 0
    assert timed.capture_all() == set()
    account.room = 2**40
    placement = decodes(3)
    for _ in range(step_graphs._RETRY_INTERVAL - 1):
        assert timed.run(placement, [0, 1, 2]) is None
    assert timed.run(placement, [0, 1, 2]) is not None


def decodes(entries: int) -> Placement:
    """Return a step in which so many requests decode."""
    ints = np.arange(entries)
    return Placement(ints, ints, np.ones_like(ints), ints, ints, ints, num_decodes=entries)


def test_ranks_exclude_the_same_sizes_though_one_of_them_has_room(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    excluded = []
    for rank in (0, 1):
        graphs = make_timed(tiny_llama, monkeypatch)
        small, large = graphs._room(_mixed(graphs, 1024)), 2**40
        own, other = (large, small) if rank == 0 else (small, large)
        graphs._account = Account(own)  # type: ignore[assignment]
        graphs._tp = OtherRank([True] * 1000, rank=rank, room=other)  # type: ignore[assignment]
        graphs.capture_all()
        excluded.append(graphs._excluded)
        assert [rank["device_free_bytes"] for rank in graphs.figures()["ranks"]] == [large, small]
        assert ("Free some memory." in graphs._why_without()) is (own == small)
        assert ("Rank 1 has the least; its log" in graphs._why_without()) is (rank == 0)
    assert excluded[0] == excluded[1] and excluded[0]


def test_steps_that_should_have_a_graph_are_counted_and_named(timed: Timed, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="verl_server.worker.graph_use")
    assert timed.run(decodes(256), list(range(256))) is not None
    timed._account = Account(room=0)  # type: ignore[assignment]
    for _ in range(150):
        timed.run(decodes(3), [0, 1, 2])
    figures = timed.figures()
    assert (figures["steps_with_cuda_graph"], figures["steps_without_cuda_graph"]) == (1, 150)
    texts = [record.getMessage() for record in caplog.records if record.name.endswith("graph_use")]
    assert [text.split(" steps")[0] for text in texts] == ["1 of 2", "10 of 11", "100 of 101"]
    assert all("3 requests that decode" in text and "Free some memory." in text for text in texts)
    timed.run(decodes(256), list(range(256)))
    timed.release()
    for _ in range(850):
        timed.run(decodes(3), [0, 1, 2])
    assert "Call resume_memory_occupation(['cuda_graph'])" in caplog.messages[-1]


def runner_on(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, tp_size: int, **changes: Any) -> ModelRunner:
    """Return a runner on the CPU whose account is that of `gpu`, with `Timed` graphs."""
    monkeypatch.setattr(model_runner, "choose_kernels", lambda *_: KernelChoice("triton"))
    monkeypatch.setattr(step_graphs, "StepGraphs", Timed)
    Timed.clock = Clock()
    monkeypatch.setattr(step_graphs, "time", Timed.clock)
    monkeypatch.setattr(capture_budget, "MOST_SECONDS", 1000.0)
    settings: dict[str, Any] = {
        "device": "cpu",
        "mem_fraction_static": 0.5,
        "max_total_tokens": 4096,
        "tp_size": tp_size,
    } | changes
    tp = LonelyRank(rank=0, size=tp_size) if tp_size > 1 else TpGroup()
    return ModelRunner(ServerArgs(str(folder), **settings), tp, torch.device("cpu"), memory=gpu)


def test_buffers_of_constant_size_are_in_the_account(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_on(FakeGpu(80 * 10**9), tiny_llama, monkeypatch, 1)
    paged = runner._attention.paged
    assert paged is not None
    tensors = [*runner.model.rotary.tables, runner.kv.device_page_table, *paged.kernels._shared]
    assert runner.memory.figures()["account"]["tables"] == sum(tensor.nbytes for tensor in tensors)


def test_a_smaller_buffer_for_received_weights_is_named(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    gpu = FakeGpu(80 * 10**9)
    assert runner_on(gpu, tiny_llama, monkeypatch, 1).weight_receive_bytes == 2**31 and not caplog.records
    runner = runner_on(gpu, tiny_llama, monkeypatch, 1, weight_receive_bytes=2**40)
    assert runner.weight_receive_bytes < gpu.total
    assert f"weight_receive_bytes is {runner.weight_receive_bytes}, not {2**40}" in caplog.messages[-1]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_runner_keeps_its_graphs_when_another_process_takes_20_gb_later(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tp_size: int
) -> None:
    """On a stand-in for a GPU, whose pool takes half of it, and then without memory for anything."""
    caplog.set_level(logging.INFO)
    gpu = FakeGpu(80 * 10**9)
    runner = runner_on(gpu, tiny_llama, monkeypatch, tp_size)
    account = runner.memory.figures()["account"]
    assert account["free_at_start"] == gpu.total and "special sampling" in caplog.text
    assert runner.memory.step_budget == (account["special_sampling"] if tp_size > 1 else None)
    gpu.held = account["weights"] + account["kv_cache"] + 2**28  # a workspace
    gpu.others = 20 * 10**9
    graphs = runner._graphs
    assert isinstance(graphs, Timed) and graphs.capture_all() == set(graphs._all)
    graphs.release()
    graphs.resume()
    gpu.others = gpu.total - gpu.held
    assert graphs.capture_all() == set()
    assert "Other processes" in caplog.messages[-1] and "have taken" in caplog.messages[-1]
    caplog.clear()
    runner.memory.release_kv_cache()
    runner.memory.resume_kv_cache()
    assert "The largest step may lack" in caplog.messages[-1], "seen when memory is resumed"
    gpu.others = 0
    runner.memory.release_kv_cache()
    runner.memory.resume_kv_cache()
    assert graphs.capture_all() == set(graphs._all)
