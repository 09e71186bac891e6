"""`Steps` counts the lines of Python that run: tests compare the work at two sizes without a clock."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType
from typing import Any


class Steps:
    """Counts lines of functions that are called in this thread, within the context."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Steps:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
        return self._trace
