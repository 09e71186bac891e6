"""`Prepared`: a staged request of one rank, which the loop carries out.

`WeightSources` makes it on the stager's thread. `WeightUpdater` calls `ready` on the loop; if all ranks are ready, it
calls `commit`, `nonfinite` and `confirm`; and in any case `discard`. If all sources can be read in place, the
receiver's `UpdatePlan` is the `Prepared`. This module has the classes for the other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from verl_server.weight_sync.receiver.plan import UpdatePlan

Window = list[tuple[str, Tensor]]
"""(name, tensor) pairs that were received together."""


class Prepared(Protocol):
    @property
    def names(self) -> list[str]:
        """Names of the parameters that `commit` writes. Complete after `ready`."""

    def ready(self) -> None:
        """Check for the last time before the first write, with generation stopped. Raise if the write would fail."""

    def commit(self) -> None:
        """Start to write the weights. The device may finish after the return. An error may leave a part written."""

    def nonfinite(self) -> list[str]:
        """Return the trainer's names of tensors that hold NaN or infinity. Called when the device has finished."""

    def confirm(self, checksums: Mapping[str, str]) -> None:
        """Raise if the data that was read differs from `checksums`. Called when the device has finished."""

    def discard(self) -> None:
        """Close everything that staging opened. Called once, after or without `commit`, on the loop or the stager."""


class Received:
    """Tensors of a process group, all of which are received before the first write.

    They are received during staging, or in `ready`, with generation stopped.
    """

    def __init__(self, receive: Callable[[], UpdatePlan], release: Callable[[], None]) -> None:
        """`receive` returns the plan of the received tensors. `release` runs when they are not needed any more."""
        self._receive, self._release = receive, release
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
        self._release()


class Streamed:
    """An update that is too large to hold in memory: `commit` receives and copies it window by window."""

    def __init__(
        self,
        names: list[str],
        windows: Iterable[Window],
        write: Callable[[Window], list[str]],
        release: Callable[[], None],
    ) -> None:
        """`write` copies a window, waits for the device, and returns the names of tensors with NaN or infinity.

        `release` runs when nothing more is received.
        """
        self.names = names
        self._windows, self._write, self._release = windows, write, release
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
        self._release()


class Done:
    """A request that staging completed: a registration, or a joined group. `undo` runs if it is refused afterwards."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.names: list[str] = []
        self._undo, self._committed = undo, False

    def ready(self) -> None:
        pass

    def commit(self) -> None:
        self._committed = True

    def nonfinite(self) -> list[str]:
        return []

    def confirm(self, checksums: Mapping[str, str]) -> None:
        pass

    def discard(self) -> None:
        if not self._committed:
            self._undo()
