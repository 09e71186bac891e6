"""`StepQueue`: the steps of an engine, from a thread of its driver to the backend's thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from verl_server.backends.process.driver import Step
from verl_server.errors import ServerDiedError


class StepQueue:
    def __init__(self, engine: str, ring: Callable[[], None]) -> None:
        """`engine` is its name for errors."""
        self._engine = engine
        self._ring = ring
        self._steps: deque[Step] = deque()
        self._error: Exception | None = None

    def add(self, step: Step) -> None:
        self._steps.append(step)
        self._ring()

    def fail(self, error: Exception) -> None:
        """Make `take` raise ServerDiedError."""
        self._error = self._error or error
        self._ring()

    def check(self) -> None:
        """Raise ServerDiedError after `fail`."""
        if self._error is not None:
            raise ServerDiedError(
                f"{self._engine} failed: {type(self._error).__name__}: {self._error}"
            ) from self._error

    def take(self) -> list[Step]:
        """Return the steps since the last call. Raise ServerDiedError after `fail`."""
        self.check()
        steps: list[Step] = []
        while self._steps:
            steps.append(self._steps.popleft())
        return steps
