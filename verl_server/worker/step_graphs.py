"""`StepGraphs`: steps captured as CUDA graphs, by kind and size. A step is padded up to the next captured size.

Owned by the `ModelRunner`. A step is hundreds of small kernels. With a small model or a small batch, the device waits
while the host launches these kernels one by one. The replay of a graph launches all kernels at once. Steps that only
decode are captured by the number of entries. Steps that also prefill are captured by the number of tokens. Both kinds
are also captured with keys that decodes share (cascade attention), which an additional kernel reads. All inputs of a
step are in a buffer at a fixed address, which one copy fills before the replay. Sizes are captured while the engine is
idle, or when a step needs them. One capture takes some ten milliseconds, so a busy engine uses graphs of larger sizes
first. The total time of captures has a budget. Beyond this budget, only sizes to which other sizes may be padded are
captured. If the memory is too small for a size, this size is excluded until memory is resumed, or for some thousand
steps. Several ranks capture the same sizes in the same order. They keep a graph only if every rank captured it, because
each collective in the graph needs all ranks.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.device_arrays import Ints, PackedInts
from verl_server.kernels.paged_attention import SharedKeys
from verl_server.models.attention import Placement
from verl_server.models.triton_attention import DecodePart, DecodeWork, ExtendPart, PagedBackend, PagedStep
from verl_server.worker.capture_budget import CaptureBudget, Outcome
from verl_server.worker.device import is_out_of_memory
from verl_server.worker.graph_sizes import covering, decode_sizes, may_pad, mixed_sizes
from verl_server.worker.graph_use import GraphUse
from verl_server.worker.kv_cache import KVCache
from verl_server.worker.memory_account import MemoryAccount
from verl_server.worker.step_memory import StepMemory

logger = logging.getLogger(__name__)

_CAPTURE_INTERVAL = 64
"""Fewest steps between two captures of sizes for which a larger graph can be used. A capture takes the time of a few
steps."""

_RETRY_INTERVAL = 4096
"""Number of steps after which excluded sizes are tried again. Other processes may have freed memory."""
_ROOM = struct.Struct("<q")
"""Layout of a rank's message before a capture: the bytes that the capture may take."""
_NO_BOUND = 2**62

Forward = Callable[[Tensor, Tensor, Tensor | None, PagedStep], Tensor]
"""Computes logits [sampled, vocab_size] from (ids [tokens], rows [decodes], last [sampled] or None for all, step)."""


class _Key(NamedTuple):
    """The steps that a graph can compute."""

    kind: str
    """"decode" or "mixed"."""
    size: int
    shared: bool
    """True if an additional kernel reads the keys that decodes share."""

    def __str__(self) -> str:
        return f"{self.kind} step of {self.size}" + (" with shared keys" if self.shared else "")


@dataclass
class _Captured:
    inputs: PackedInts
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    """Output of the graph, valid until the next replay of any graph, because all graphs share their memory. On CUDA the
    tensor does not own that memory."""


class StepGraphs:
    def __init__(
        self,
        forward: Forward,
        kv: KVCache,
        backend: PagedBackend,
        tp: TpGroup,
        memory: StepMemory,
        max_bs: int,
        account: MemoryAccount | None,
    ) -> None:
        """`max_bs` is the number of entries of the largest captured decode step, at most `kv.max_rows`.

        `account` limits the memory that a capture may take. If `account` is None, there is no limit.
        """
        self._memory, self._account = memory, account
        self._forward, self._kv, self._backend, self._tp = forward, kv, backend, tp
        self._max_bs = max_bs
        self._decode_sizes = decode_sizes(self._max_bs)
        self._mixed_sizes = mixed_sizes()
        self._first = {"decode": covering(self._decode_sizes), "mixed": covering(self._mixed_sizes)}
        """Smallest set of sizes of each kind to which steps of every size may be padded."""
        self._all = self._in_order()
        self._captured: dict[_Key, _Captured] = {}
        self._pool: Any = None
        """Memory pool of all graphs, None before the first capture."""
        self._present = True
        self._steps_without_capture = 0
        self._excluded: set[_Key] = set()
        """Keys for which memory was too small at the last try. Equal on all ranks."""
        self._most_excluded = 0
        self._shortest = tp.rank
        """Rank that lacked memory for the latest capture that failed."""
        self._num_steps = 0
        self.use = GraphUse(tp.rank, self._why_without)
        self._budget = CaptureBudget()

    def _in_order(self) -> list[_Key]:
        """Return all keys in the order of capture.

        First come sizes to which a step of any size may be padded (`may_pad`), then the sizes between them. The
        largest of each kind comes first, because smaller graphs reuse its memory.
        """
        sizes = {"decode": self._decode_sizes, "mixed": self._mixed_sizes}
        keys = [_Key(kind, size, False) for kind in sizes for size in reversed(sizes[kind])]
        if self._backend.cascade:
            keys += [key._replace(shared=True) for key in keys if key.size > 1]
        return sorted(keys, key=lambda key: key.size not in self._first[key.kind])

    def run(self, placement: Placement, sample: list[int]) -> Tensor | None:
        """Compute a step. Return its logits [len(sample), vocab_size], valid until the next call.

        Return None, with nothing computed, if there is no graph for the step.
        """
        n, tokens = len(placement.rows), len(placement.ids)
        decodes = placement.num_decodes == n
        if tokens > (self._max_bs if decodes else self._mixed_sizes[-1]):
            return None
        captured = self._replayable(placement, sample) if self._present else None
        self.use.count(tokens, decodes=decodes, has_graph=captured is not None)
        if captured is None:
            return None
        captured.graph.replay()
        return captured.logits[: len(sample)]

    def _replayable(self, placement: Placement, sample: list[int]) -> _Captured | None:
        """Return the graph for a step of a size that is captured, with its inputs written. None if there is none."""
        n, tokens = len(placement.rows), len(placement.ids)
        self._num_steps += 1
        if self._num_steps % _RETRY_INTERVAL == 0:
            self.consider_again()
        all_sampled = placement.num_decodes == n == len(sample)
        kind, sizes = ("decode", self._decode_sizes) if all_sampled else ("mixed", self._mixed_sizes)
        last = None if all_sampled else placement.last[sample]
        rows, lens = placement.rows[: placement.num_decodes], placement.cached[: placement.num_decodes] + 1
        for cascade in (True, False):  # if one graph could not be captured, the other may exist
            work = self._backend.plan_decodes(rows, lens, cascade=cascade)
            key = self._chosen(kind, sizes, tokens, shared=work.shared is not None)
            captured = self._graph_of(key, placement, work, last)
            if captured is not None or work.shared is None:
                break
        return captured

    def _chosen(self, kind: str, sizes: list[int], tokens: int, *, shared: bool) -> _Key:
        """Return the key of the graph for a step of `tokens` tokens: the next size, or a larger size.

        A burst of requests needs new sizes in many consecutive steps. If a captured graph is not much larger than the
        step, the step replays this graph with more padding, and at most one of `_CAPTURE_INTERVAL` steps captures the
        next size. All ranks make the same choice, because it depends only on values that all ranks share.
        """
        self._steps_without_capture += 1
        exact, *larger = (_Key(kind, size, shared) for size in sizes[bisect.bisect_left(sizes, tokens) :])
        if exact in self._captured:
            return exact
        can_capture = self._may_capture(exact)
        if not can_capture or self._steps_without_capture < _CAPTURE_INTERVAL:
            padded = list(itertools.takewhile(lambda key: may_pad(tokens, key.size), larger))
            if found := [key for key in padded if key in self._captured]:
                return found[0]
            if not can_capture and (found := [key for key in padded if self._may_capture(key)]):
                return found[0]
        return exact

    def _may_capture(self, key: _Key) -> bool:
        """Return True if there is memory and time for the capture of `key`, as far as is known."""
        return key not in self._excluded and (not self._budget.is_spent or key.size in self._first[key.kind])

    def consider_again(self) -> None:
        """Try excluded sizes again. All ranks call this at the same point of the command order."""
        self._excluded.clear()

    def figures(self) -> dict[str, Any]:
        """Return the numbers of graphs and of steps with and without one, and the seconds of all captures.

        "decode_cuda_graphs" are the graphs of steps that only decode, and "decode_cuda_graphs_in_all" the number of
        sizes for which there can be one. "steps_without_cuda_graph" counts the steps of sizes that are captured.
        "ranks" are the number of graphs and the free bytes of each rank after the latest capture.
        """
        return {
            "cuda_graphs": self.num_captured,
            "cuda_graphs_to_capture": self.num_left,
            "decode_cuda_graphs": sum(key.kind == "decode" for key in self._captured),
            "decode_cuda_graphs_in_all": sum(key.kind == "decode" for key in self._all),
            "cuda_graphs_without_memory": len(self._excluded),
            "cuda_graph_capture_seconds": self._budget.total_seconds,
            "steps_with_cuda_graph": self.use.num_with,
            "steps_without_cuda_graph": self.use.num_without,
            "ranks": [
                {"cuda_graphs": outcome.graphs, "device_free_bytes": outcome.free} for outcome in self._budget.latest
            ],
        }

    @property
    def num_captured(self) -> int:
        """Number of captured graphs."""
        return len(self._captured)

    @property
    def num_left(self) -> int:
        """Number of graphs that can still be captured while the engine is idle."""
        return len(self._left()) if self._present else 0

    def _left(self) -> list[_Key]:
        return [key for key in self._all if key not in self._captured and self._may_capture(key)]

    def capture_next(self) -> None:
        """Capture one more graph before its first step. Does nothing if `num_left` is 0."""
        if self.num_left:
            key = self._left()[0]
            none = np.zeros(0, dtype=np.int64)
            nothing = Placement(none, none, none, none, none, none, num_decodes=0)
            work = self._backend.empty_work(shared=key.shared)
            self._graph_of(key, nothing, work, None if key.kind == "decode" else none)

    def run_each_once(self) -> None:
        """Run every step that can be captured, but without a capture, so that all its kernels are launched."""
        for key in self._all:
            self._run_once(key, PackedInts(self._capacities(key), self._kv.device))

    def release(self) -> None:
        """Free the graphs and their memory after all work on them has finished. `run` uses no graph until `resume`."""
        self._captured.clear()
        self._pool, self._present = None, False
        self.consider_again()
        self._budget.restart()

    def resume(self) -> None:
        """Permit graphs again. They are captured when they are needed."""
        self._present = True

    def _graph_of(
        self, key: _Key, placement: Placement, work: DecodeWork, last: Ints | None = None
    ) -> _Captured | None:
        """Return the graph of `key` with its inputs written. Capture the graph if necessary.

        Return None if there is no graph, and no memory or no time to capture one.
        """
        arrays = self._arrays(key.size, placement, work, last)
        captured = self._captured.get(key)
        if captured is not None:
            captured.inputs.write(arrays)
            return captured
        if not self._may_capture(key):
            return None
        if not self._has_room(key):
            return None
        try:
            captured = self._capture(key, arrays)
        except torch.OutOfMemoryError as error:
            if self._exclude({key}):
                logger.warning(
                    "There was too little memory to capture a %s as a CUDA graph: %s %s", key, error, self._advice()
                )
            return None
        self._captured[key] = captured
        self._steps_without_capture = 0
        if self._budget.is_spent and self._tp.rank == 0:
            omitted = {(k.kind, k.size) for k in self._all if k not in self._captured and not self._may_capture(k)}
            self._budget.warn(len(self._captured), Counter(kind for kind, _ in sorted(omitted)))
        return captured

    def _capture(self, key: _Key, arrays: list[npt.NDArray[np.integer]]) -> _Captured:
        """Capture the graph on all ranks, or raise torch.OutOfMemoryError on all ranks."""
        start = time.perf_counter()
        inputs = self._inputs(key, arrays)
        self._run_once(key, inputs)
        ran = time.perf_counter()
        captured, failure = None, "another rank ran out of memory"
        try:
            captured = self._record(key, inputs)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error)  # the error keeps what was allocated alive
        recorded = time.perf_counter() - ran
        # The run launches the kernels that the recording records. What it takes beyond that time is their compilation,
        # for which a step without a graph would wait, too.
        outcome = Outcome(
            captured is not None,
            min(ran - start, recorded) + recorded,
            len(self._captured) + (captured is not None),
            0 if self._account is None else self._account.free(),
        )
        agreed = self._budget.all_captured(self._tp, outcome)
        if not agreed or captured is None:
            self._shortest = [outcome.ok for outcome in self._budget.latest].index(False)
            raise torch.OutOfMemoryError(failure)
        logger.debug("Captured a %s in %.0f ms", key, 1e3 * (ran - start + recorded))
        return captured

    def _inputs(self, key: _Key, arrays: list[npt.NDArray[np.integer]]) -> PackedInts:
        """Return the buffer of the graph's inputs with `arrays` written."""
        with self._fatal_for_others(key):
            inputs = PackedInts(self._capacities(key), self._kv.device)
            inputs.write(arrays)
        return inputs

    def _run_once(self, key: _Key, inputs: PackedInts) -> None:
        """Run the step once, to compile kernels and allocate workspaces, neither of which can be captured."""
        with self._fatal_for_others(key):
            self._step(key, inputs)

    @contextlib.contextmanager
    def _fatal_for_others(self, key: _Key) -> Iterator[None]:
        """Replace torch.OutOfMemoryError by RuntimeError if there are several ranks, which can no longer vote."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self._tp.size == 1:
                raise
            raise RuntimeError(
                f"Rank {self._tp.rank} ran out of memory in a {key}. The other ranks wait for it in a collective, so "
                f"the engine ends: {error} Start it with a smaller mem_fraction_static, and check whether other "
                "processes use memory of this device."
            ) from error

    def _record(self, key: _Key, inputs: PackedInts) -> _Captured:
        graph = torch.cuda.CUDAGraph()
        # Another thread may open a trainer's memory meanwhile. Its calls must not make the capture fail.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._step(key, inputs)
        self._pool = self._pool or graph.pool()
        return _Captured(inputs, graph, _borrowed(logits))

    def _has_room(self, key: _Key) -> bool:
        """Return True if every rank has the memory for a capture of `key`.

        If not, exclude all keys that need too much memory. The ranks exchange their free bytes, so that all of them
        exclude the same keys.
        """
        wanted = self._room(key)
        mine = _NO_BOUND if self._account is None else self._account.room_for_graphs(wanted)
        rooms = [_ROOM.unpack(data)[0] for data in self._tp.gather(_ROOM.pack(mine))]
        room = min(rooms)
        if room >= wanted:
            return True
        self._shortest = rooms.index(room)
        has_more = self._exclude({k for k in self._all if k not in self._captured and self._room(k) > room})
        if has_more and self._shortest == self._tp.rank:
            logger.warning(
                "There is no memory to capture %d of %d CUDA graphs: a %s needs %d MiB, and %d MiB are free in "
                "addition to the memory of steps. %s",
                *(len(self._excluded), len(self._all), key, wanted >> 20, room >> 20, self._advice()),
            )
        return False

    def _exclude(self, keys: set[_Key]) -> bool:
        """Exclude `keys`. Return True if more sizes are excluded than ever before, so that the caller logs it."""
        self._excluded |= keys
        has_more = len(self._excluded) > self._most_excluded
        self._most_excluded = max(self._most_excluded, len(self._excluded))
        return has_more

    def _room(self, key: _Key) -> int:
        """Return an upper bound on the bytes that the capture of the step of `key` takes.

        A graph reuses the memory of a larger graph of the same kind. The workspaces of libraries count once.
        `StepMemory.graphs` bounds the sum over all sizes.
        """
        workspaces = self._memory.graph(0, 0)
        held = max((self._bytes(k) for k in self._captured if k.kind == key.kind), default=workspaces)
        return workspaces + max(0, self._bytes(key) - held)

    def _bytes(self, key: _Key) -> int:
        """Return a bound on the bytes of the tensors of a graph, with the workspaces of libraries."""
        entries = key.size if key.kind == "decode" else min(key.size, self._kv.max_rows)
        return self._memory.graph(key.size, entries)

    def _advice(self) -> str:
        return "" if self._account is None else self._account.advice()

    def _why_without(self) -> str:
        """Return the reason why steps run without a graph, and a remedy, as sentences."""
        if not self._present:
            return "The CUDA graphs are released. Call resume_memory_occupation(['cuda_graph'])."
        short = self._shortest != self._tp.rank
        advice = f"Rank {self._shortest} has the least; its log has a remedy." if short else self._advice()
        return f"{len(self._excluded)} sizes could not be captured for lack of memory. {advice}"

    # -- the inputs of a graph -----------------------------------------------------------------------------------

    def _capacities(self, key: _Key) -> list[int]:
        """Return the capacity of each array of `_arrays`, in the same order.

        The arrays are ids, positions and slots; for mixed steps the rows, cached lengths and starts of chunks and the
        sampled tokens; then the rows of decodes, their lengths, and those of `DecodeWork`.
        """
        size, entries = key.size, min(key.size, self._kv.max_rows)
        decodes = [entries, entries, *self._backend.capacities(entries, shared=key.shared)]
        chunks = [] if key.kind == "decode" else [entries, entries, entries + 1, entries]
        return [size, size, size, *chunks, *decodes]

    def _arrays(
        self, size: int, placement: Placement, work: DecodeWork, last: Ints | None
    ) -> list[npt.NDArray[np.integer]]:
        """Return the inputs of a graph, padded to `size` tokens.

        Padding tokens write into the padding page, and attention omits them, so their results are undefined.
        """
        kv, n = self._kv, placement.num_decodes
        entries = min(size, kv.max_rows)
        tokens: list[npt.NDArray[np.integer]] = [
            _pad(placement.ids, size, 0),
            _pad(placement.positions, size, 0),
            _pad(placement.slots, size, kv.num_pages * kv.page_size),
        ]
        lens = placement.cached[:n] + 1
        decodes = [_pad(placement.rows[:n], entries, kv.max_rows), _pad(lens, entries, 1), *work.arrays]
        if last is None:
            return tokens + decodes
        starts = n + np.concatenate(([0], np.cumsum(placement.extend[n:])))
        chunks = [
            _pad(placement.rows[n:], entries, kv.max_rows),
            _pad(placement.cached[n:], entries, 0),
            _pad(starts, entries + 1, int(starts[-1])),  # padding chunks have no tokens
            _pad(last, entries, 0),
        ]
        return tokens + chunks + decodes

    def _step(self, key: _Key, inputs: PackedInts) -> Tensor:
        ids, positions, slots, *rest = inputs.views
        chunks, extend, last = [] if key.kind == "decode" else rest[:4], None, None
        rows, lens, work, *shared = rest[len(chunks) :]
        if chunks:
            extend, last = ExtendPart(chunks[0], chunks[1], chunks[2], len(ids)), chunks[3]
        decode = DecodePart(rows, lens, work, SharedKeys(*shared) if shared else None)
        return self._forward(ids, rows, last, PagedStep(self._backend, positions, slots, decode, extend))


def _borrowed(tensor: Tensor) -> Tensor:
    """Return a view of a CUDA tensor that does not keep its memory allocated.

    The pool of the graphs reserves the memory of a tensor that is owned. Hence each graph would hold logits of its own:
    6 GiB for all graphs of 256 entries and a vocabulary of 151,936.
    """
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    construct = torch._C._construct_storage_from_data_pointer  # as torch's own CUDA graph trees do
    borrowed = construct(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())


def _pad(values: Ints, size: int, value: int) -> Ints:
    return values if len(values) == size else np.concatenate([values, np.full(size - len(values), value)])
