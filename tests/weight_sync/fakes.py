"""A small model's weights over any number of ranks, without a model; ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from verl_server.models.loader import WeightMap, WeightSlot
from verl_server.runtime.weight_updater import WeightUpdater
from verl_server.server_args import ServerArgs

EMBED = "model.embed_tokens.weight"
Q, K = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
O_PROJ, NORM = "model.layers.0.self_attn.o_proj.weight", "model.norm.weight"
SHAPES: dict[str, tuple[int, ...]] = {EMBED: (8, 4), Q: (4, 4), K: (2, 4), O_PROJ: (4, 4), NORM: (4,)}


def random_weights(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class FakeRunner:
    """Fused q/k rows, sharded by rows (embedding, q, k) or columns (o), a whole norm; a tied head."""

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

    def __getattr__(self, name: str) -> Callable[[], None]:
        """release_weights() and its like are noted, and fail if told to."""
        if not name.startswith(("release_", "resume_", "synchronize")):
            raise AttributeError(name)

        def call() -> None:
            self.calls.append(name)
            if name in self.fail:
                raise self.fail[name]

        return call

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(destination, weights[slot.name][index].to(slot.dtype))
            for slot in self.weight_map.slots.values()
            for destination, index in slot.pieces
        )


class FakeTp:
    """Ranks are threads; a gather is a barrier around a shared list."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._board, self._barrier = board, barrier

    def gather(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(timeout=10)
        everyone = list(self._board)
        self._barrier.wait(timeout=10)
        return everyone


class Ranks:
    """`size` updaters; `handle` runs a request on all of them at once and returns their replies."""

    def __init__(self, size: int = 1, **runner: Any) -> None:
        barrier, board = threading.Barrier(size), [None] * size
        self.runners = [FakeRunner(rank, size, **runner) for rank in range(size)]
        args = ServerArgs(model_path="none", tp_size=size)
        self.updaters = [
            WeightUpdater(runner, FakeTp(rank, size, board, barrier), args)  # type: ignore[arg-type]
            for rank, runner in enumerate(self.runners)
        ]

    def handle(self, req: Any) -> Any:
        """Rank 0's reply; the ranks agree on success, state and version."""
        replies: list[Any] = [None] * len(self.updaters)

        def run(rank: int) -> None:
            replies[rank] = self.updaters[rank].handle(req)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(self.updaters))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert all(reply is not None for reply in replies), "a rank did not answer"
        assert len({(reply.success, reply.message) for reply in replies}) == 1
        assert len({(u.state, u.version, u.refusal()) for u in self.updaters}) == 1
        return replies[0]

    def hold(self, weights: dict[str, torch.Tensor]) -> bool:
        return all(runner.holds(weights) for runner in self.runners)

    @property
    def state(self) -> str:
        return self.updaters[0].state

    @property
    def version(self) -> str:
        return self.updaters[0].version

    @property
    def refusal(self) -> str | None:
        return self.updaters[0].refusal()
