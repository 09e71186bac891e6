"""`Prepared`: what staging leaves for the loop to carry out, on one rank.

Made by `WeightSources` on the stager's thread, carried out by `WeightUpdater` on the loop: `ready`, and when all ranks
are, `commit`, `nonfinite` and `confirm`, and in any case `discard`. Where all sources are within reach it is the
receiver's `UpdatePlan` itself; here is what is left for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from verl_server.weight_sync.receiver.plan import UpdatePlan

Window = list[tuple[str, Tensor]]
"""(name, tensor) pairs that arrived together."""


class Prepared(Protocol):
    @property
    def names(self) -> list[str]:
        """Parameters that `commit` writes; known when it is ready."""

    def ready(self) -> None:
        """The last check before the first write, with generation stopped. Raises if writing is impossible by now."""

    def commit(self) -> None:
        """Write; the device may still be busy with it. An error may leave some of it written."""

    def nonfinite(self) -> list[str]:
        """After the device is done: the tensors, by the trainer's names, that brought NaN or infinity to this rank."""

    def confirm(self, checksums: Mapping[str, str]) -> None:
        """After the device is done: raise if what was read is not what the trainer meant."""

    def discard(self) -> None:
        """Close what was opened, committed or not. Called once, on the loop or the stager's thread."""


class Received:
    """Tensors of a process group, all of them in memory before the first write.

    Received while staging, or else in `ready`, with generation stopped.
    """

    def __init__(self, receive: Callable[[], UpdatePlan], let_go: Callable[[], None]) -> None:
        self._receive, self._let_go = receive, let_go
        self._plan: UpdatePlan | None = None

    @property
    def names(self) -> list[str]:
        return self._plan.names if self._plan is not None else []

    def ready(self) -> None:
        if self._plan is None:
            self._plan = self._receive()

    def commit(self) -> None:
        assert self._plan is not None
        self._plan.commit()

    def nonfinite(self) -> list[str]:
        return self._plan.nonfinite() if self._plan is not None else []

    def confirm(self, checksums: Mapping[str, str]) -> None:
        pass

    def discard(self) -> None:
        if self._plan is not None:
            self._plan.close()
        self._let_go()


class Streamed:
    """An update too large to hold at once: received and copied window by window, with generation stopped."""

    def __init__(
        self,
        names: list[str],
        windows: Iterable[Window],
        write: Callable[[Window], list[str]],
        let_go: Callable[[], None],
    ) -> None:
        """`write` waits for the device, and returns what of the window was NaN or infinity."""
        self.names = names
        self._windows, self._write, self._let_go = windows, write, let_go
        self._nonfinite: list[str] = []

    def ready(self) -> None:
        pass

    def commit(self) -> None:
        for window in self._windows:
            self._nonfinite += self._write(window)

    def nonfinite(self) -> list[str]:
        return self._nonfinite

    def confirm(self, checksums: Mapping[str, str]) -> None:
        pass

    def discard(self) -> None:
        self._let_go()


class Done:
    """A request that staging completed (a registration, a joined group); `undo` runs if it is refused afterwards."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.names: list[str] = []
        self._undo, self._wanted = undo, False

    def ready(self) -> None:
        pass

    def commit(self) -> None:
        self._wanted = True

    def nonfinite(self) -> list[str]:
        return []

    def confirm(self, checksums: Mapping[str, str]) -> None:
        pass

    def discard(self) -> None:
        if not self._wanted:
            self._undo()
