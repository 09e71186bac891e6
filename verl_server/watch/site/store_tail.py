"""`StoreTail`: the state of a server's session store, as views ask it of a run's files. `runs` opens it for `--store`.

A store has neither steps nor metrics nor events.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from verl_server.watch.index.run_tail import EvaluationRow, RunState, StepTimes
from verl_server.watch.index.session_store import SessionStore
from verl_server.watch.run_records import AnyEvent


class StoreTail:
    """What views ask of a run's metrics, evaluations and events: a store has none."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.exit_status: int | None = None
        self.error: str | None = None
        self.started: float | None = None
        self.last: float | None = None

    @property
    def generation(self) -> int:
        return self._store.generation

    @property
    def settings(self) -> dict[str, Any]:
        return {"command": "serve", "model_path": self._store.model_path}

    @property
    def state(self) -> RunState:
        return self._store.state

    @property
    def warnings(self) -> list[str]:
        return self._store.warnings

    def poll(self) -> bool:
        grown = self._store.poll()
        if grown or self.last is None:
            newest = self._store.sessions(order="newest", limit=1, children=True).rows
            oldest = self._store.sessions(order="oldest", limit=1, children=True).rows
            self.started = oldest[0].created if oldest else None
            self.last = newest[0].active if newest else None
        return grown

    def steps(self, *, lost: bool = False) -> list[int]:
        return []

    def names(self) -> list[str]:
        return []

    def metrics(
        self, names: Sequence[str] | None = None, first: int | None = None, last: int | None = None
    ) -> dict[str, list[Any]]:
        return {name: [] for name in ("step", "time", *(names or ()))}

    def events(
        self, kinds: Collection[str] | None = None, after: int = 0, limit: int = 1000, *, newest: bool = False
    ) -> list[tuple[int, AnyEvent]]:
        return []

    def evaluations(self, *, lost: bool = False) -> list[EvaluationRow]:
        return []

    def evaluation_playing(self) -> tuple[int, float] | None:
        return None

    def steps_between(self, begin: float, end: float, limit: int = 1000) -> list[StepTimes]:
        return []
