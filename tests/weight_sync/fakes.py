"""Model runners that hold only the weights of a small model, and server ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from verl_server.errors import VerlServerError
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import StagedReq
from verl_server.models.loader import WeightMap, WeightSlot
from verl_server.server_args import ServerArgs
from verl_server.weight_version import WeightVersion
from verl_server.worker.agreement import agree
from verl_server.worker.weights.stager import UNLIKE_NAMES, digest_of_names
from verl_server.worker.weights.weight_sources import WeightSources, needs_staging
from verl_server.worker.weights.weight_updater import WeightUpdater

T = TypeVar("T")

EMBED = "model.embed_tokens.weight"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
O_PROJ, NORM = "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"
SHAPES: dict[str, tuple[int, ...]] = {EMBED: (8, 4), Q: (4, 4), K: (2, 4), O_PROJ: (4, 4), NORM: (4,)}


def random_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class FakeRunner:
    """A runner with fused rows of q and k, a whole norm and a tied head.

    Ranks split the embedding, q and k by rows, and o by columns.
    """

    def __init__(self, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32, tied: bool = True) -> None:
        self.device = torch.device("cpu")
        self.embed = torch.zeros(8 // size, 4, dtype=dtype)
        self.qk = torch.zeros(6 // size, 4, dtype=dtype)
        self.o = torch.zeros(4, 4 // size, dtype=dtype)
        self.norm = torch.zeros(4, dtype=dtype)
        self.weight_map = WeightMap(aliases={"lm_head.weight": EMBED} if tied else {})
        full = slice(None)

        def rows(name: str, destination: torch.Tensor) -> WeightSlot:
            n = SHAPES[name][0] // size
            return WeightSlot(name, SHAPES[name], dtype, [(destination, (slice(rank * n, (rank + 1) * n), full))])

        q_rows, columns = 4 // size, slice(rank * 4 // size, (rank + 1) * 4 // size)
        self.weight_map.add(
            [
                rows(EMBED, self.embed),
                rows(Q, self.qk[:q_rows]),
                rows(K, self.qk[q_rows:]),
                WeightSlot(O_PROJ, SHAPES[O_PROJ], dtype, [(self.o, (full, columns))]),
                WeightSlot.whole(NORM, self.norm),
            ]
        )
        self.calls: list[str] = []
        self.fail: dict[str, Exception] = {}
        self.has_backup = False
        """True if `resume_weights` restores the weights."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        """Return a method for `release_*`, `resume_*` and `synchronize` that records its call.

        The method raises `fail[name]` if it is set, and returns `has_backup` otherwise.
        """
        if not name.startswith(("release_", "resume_", "synchronize")):
            raise AttributeError(name)

        def call(*_: object) -> bool:
            self.calls.append(name)
            if name in self.fail:
                raise self.fail[name]
            return self.has_backup

        return call

    @property
    def memory(self) -> Any:
        return self

    def check_release(self, tags: list[str]) -> None:
        """All memory can be released."""

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(destination, weights[slot.name][index].to(slot.dtype))
            for slot in self.weight_map.slots.values()
            for destination, index in slot.pieces
        )


class Board:
    """An all-gather for ranks that are threads: a list that all ranks share, between two waits at a barrier."""

    def __init__(self, size: int) -> None:
        self._barrier, self._slots = threading.Barrier(size), [b""] * size

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self._slots[rank] = data
        self._barrier.wait(timeout=10)
        everyone = list(self._slots)
        self._barrier.wait(timeout=10)
        return everyone

    def abort(self) -> None:
        """Break the barrier, as a dead rank would."""
        self._barrier.abort()


class FakeTp:
    """A `TpGroup` whose ranks are threads. The loop and the stager's two threads each vote on their own board."""

    def __init__(self, rank: int, size: int, boards: list[Board]) -> None:
        self.rank, self.size, self._boards = rank, size, boards

    def gather(self, data: bytes) -> list[bytes]:
        return self._boards[0].gather(self.rank, data)

    def for_staging(self) -> FakeTp:
        return FakeTp(self.rank, self.size, self._boards[1:])

    def for_joining(self) -> FakeTp:
        return FakeTp(self.rank, self.size, self._boards[2:])


class Ranks:
    """`size` weight updaters and their sources. `handle` runs a request on all of them and returns the common reply."""

    def __init__(self, size: int = 1, *, args: dict[str, Any] | None = None, **runner: Any) -> None:
        boards = [Board(size) for _ in range(3)]
        self.runners = [FakeRunner(rank, size, **runner) for rank in range(size)]
        self.args = ServerArgs(model_path="none", tp_size=size, **(args or {}))
        self.tps = [FakeTp(rank, size, boards) for rank in range(size)]
        self.sources = [WeightSources(r, tp, self.args) for r, tp in zip(self.runners, self.tps, strict=True)]  # type: ignore[arg-type]
        self.updaters = [
            WeightUpdater(runner, tp, sources, self.args)  # type: ignore[arg-type]
            for runner, tp, sources in zip(self.runners, self.tps, self.sources, strict=True)
        ]

    def handle(self, req: Any) -> Any:
        """Check, stage and execute `req`. Assert that the ranks agree on success, message, state and version."""
        try:
            self.updaters[0].check(req)
        except VerlServerError as error:
            return ControlReply(id=req.id, success=False, message=str(error), status_code=error.status_code)
        replies = self.on_all_ranks(lambda rank: self._handle(rank, req))
        assert len({(reply.success, reply.message) for reply in replies}) == 1
        assert len({(u.state, u.version, u.epoch, u.refusal()) for u in self.updaters}) == 1
        return replies[0]

    def _handle(self, rank: int, req: Any) -> Any:
        prepared = None
        if isinstance(req, StagedReq) and needs_staging(req):
            try:
                prepared = self.stage(rank, req)
            except VerlServerError as error:
                return ControlReply(id=req.id, success=False, message=str(error), status_code=error.status_code)
        return self.updaters[rank].handle(req, prepared)

    def stage(self, rank: int, req: Any) -> Any:
        """Stage `req` on one rank as the stager does, and return the prepared update."""
        done: list[Any] = []

        def prepare() -> Any:
            done.append(self.sources[rank].prepare(req))
            return done[0]

        try:
            agree(self.tps[rank].for_staging(), prepare, alike=digest_of_names, unlike=UNLIKE_NAMES)  # type: ignore[arg-type]
        except VerlServerError as error:
            for prepared in done:
                prepared.discard()
            self.sources[rank].refused(req, error)
            raise
        return done[0]

    def on_all_ranks(self, call: Callable[[int], T]) -> list[T]:
        results: list[Any] = [None] * len(self.updaters)

        def run(rank: int) -> None:
            results[rank] = call(rank)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.updaters))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert all(result is not None for result in results), "a rank did not answer"
        return results

    def hold(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(runner.holds(weights) for runner in self.runners)

    @property
    def state(self) -> str:
        return self.updaters[0].state

    @property
    def version(self) -> str:
        return self.updaters[0].version

    @property
    def number(self) -> int:
        """The number of a version that the server itself has named."""
        version = WeightVersion.parse(self.version)
        assert version is not None, self.version
        return version.number

    @property
    def refusal(self) -> str | None:
        return self.updaters[0].refusal()
