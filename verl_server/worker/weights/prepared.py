"""`Prepared`: a staged request of one rank, which the loop carries out.

`WeightSources` creates it on the stager's thread. `WeightUpdater` calls `ready` on the loop. If all ranks are ready,
`WeightUpdater` calls `commit`, `nonfinite` and `confirm`. In any case it calls `discard`. If all sources can be read in
place, the receiver's `UpdatePlan` is the `Prepared`. This module has the classes for the other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from verl_server.errors import VerlServerError, WeightUpdateError
from verl_server.weight_sync.receiver.plan import UpdatePlan

Window = list[tuple[str, Tensor]]
"""(name, tensor) pairs that were received together."""


class Prepared(Protocol):
    @property
    def names(self) -> list[str]:
        """Names of the parameters that `commit` writes. Complete after `commit`."""

    def ready(self) -> None:
        """Run the last check before the first write, with generation stopped.

        Raise an error if the write would fail.
        """

    def commit(self) -> None:
        """Start to write the weights. The device may finish after the return. An error may leave a part written."""

    def nonfinite(self) -> list[str]:
        """Return the trainer's names of tensors that hold NaN or infinity. Called when the device has finished."""

    def confirm(self, checksums: Mapping[str, str]) -> None:
        """Raise WeightUpdateError if the data that was read differs from `checksums`.

        Called when the device has finished.
        """

    def discard(self) -> None:
        """Close everything that staging opened.

        Called once, after or without `commit`, on the loop or on a stager's thread.
        """


class Received:
    """Tensors of a process group, all of which are received before the first write.

    They are received during staging, or in `ready`, with generation stopped.
    """

    def __init__(self, receive: Callable[[], UpdatePlan], release: Callable[[], None]) -> None:
        """`receive` returns the plan of the received tensors.

        `release` is called when the tensors are no longer needed.
        """
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


class Announced:
    """An update whose tensors are described only as they arrive.

    The first tensors, up to `most_bytes`, are received before the first write, during staging or in `ready`. If these
    are all tensors, the update is checked as a whole. Otherwise `commit` writes these tensors, and receives, checks and
    writes the rest, window by window. An update that is refused is received to its end, because the trainer's
    broadcasts would hang otherwise.
    """

    def __init__(
        self,
        windows: Iterable[Window],
        plan: Callable[[Window, bool], UpdatePlan],
        write: Callable[[Window], tuple[list[str], list[str]]],
        check_complete: Callable[[list[str]], None],
        release: Callable[[], None],
        *,
        most_bytes: int,
    ) -> None:
        """`plan(tensors, is_part)` checks tensors and returns their plan.

        `write` copies a window, waits for the device, and returns the names of the parameters that it wrote and of the
        tensors with NaN or infinity. `check_complete` raises if the parameters of these names are not all that the
        update must write. `release` runs when nothing more is received.
        """
        self.names: list[str] = []
        self._windows, self._most_bytes = iter(windows), most_bytes
        self._make_plan, self._write, self._check_complete, self._release = plan, write, check_complete, release
        self._held: list[Window] = []
        self._plan: UpdatePlan | None = None
        self._is_ready = False
        self._nonfinite: list[str] = []

    def ready(self) -> None:
        if self._is_ready:
            return
        held = 0
        for window in self._windows:
            self._held.append(window)
            held += sum(tensor.nbytes for _, tensor in window)
            if held > self._most_bytes:
                self._check_held()
                break
        else:
            self._plan = self._make_plan([entry for window in self._held for entry in window], False)
            self.names = self._plan.names
            self._held = []
        self._is_ready = True

    def _check_held(self) -> None:
        """Raise an error if the first tensors of the update are wrong, before anything is written."""
        try:
            self._make_plan([entry for window in self._held for entry in window], True).close()
        except VerlServerError:
            self._receive_rest()
            raise

    def commit(self) -> None:
        if self._plan is not None:
            self._plan.commit()
            return
        try:
            while self._held:
                self._write_window(self._held.pop(0))
            for window in self._windows:
                self._write_window(window)
            self._check_complete(self.names)
        except VerlServerError:
            self._receive_rest()
            raise

    def _write_window(self, window: Window) -> None:
        names, nonfinite = self._write(window)
        if twice := set(names) & set(self.names):
            raise WeightUpdateError(f"The update has '{min(twice)}' twice.")
        self.names += names
        self._nonfinite += nonfinite

    def _receive_rest(self) -> None:
        self._held = []
        for _ in self._windows:
            pass

    def nonfinite(self) -> list[str]:
        return self._plan.nonfinite() if self._plan is not None else self._nonfinite

    def confirm(self, checksums: Mapping[str, str]) -> None:
        pass

    def discard(self) -> None:
        self._held = []
        if self._plan is not None:
            self._plan.close()
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
