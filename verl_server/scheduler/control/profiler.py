"""`StepProfiler`: records steps with torch's profiler, for `/start_profile` and `/stop_profile`.

Rank 0's `Scheduler` owns it, passes these two requests to it, and calls `step` before each step. The folder is the
operator's choice. A recording is bounded, because a trace grows with every operator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_server.messages.io_struct import ControlReply, ProfileReq, StartProfileReq

logger = logging.getLogger(__name__)

_MOST_STEPS = 1000
_MOST_SECONDS = 60.0


class StepProfiler:
    def __init__(self, folder: str | None, device_type: str, clock: Callable[[], float]) -> None:
        """Create a profiler that writes traces to `folder` and its subfolders only.

        If `folder` is None, requests are refused.
        """
        self._folder = None if folder is None else Path(folder).resolve()
        self._device_type, self._clock = device_type, clock
        self._profile: Any = None
        """torch's profiler while it records."""
        self._path = Path()
        self._steps_left = 0
        self._deadline = 0.0
        self._ended_by_itself = False
        """True from the end of a recording until a stop request is answered with the trace."""

    def handle(self, req: ProfileReq) -> ControlReply:
        """Begin or end a recording, and return the reply."""
        try:
            message = self._start(req) if isinstance(req, StartProfileReq) else self._stop()
        except ValueError as error:
            return ControlReply(id=req.id, success=False, message=str(error), status_code=400)
        except (OSError, RuntimeError) as error:
            self._profile = None
            logger.exception("The profiler failed.")
            return ControlReply(id=req.id, success=False, message=f"The profiler failed: {error}", status_code=500)
        return ControlReply(id=req.id, success=True, message=message)

    def step(self) -> None:
        """Record that a step follows. End the recording if it is complete.

        If the trace cannot be written, only log it.
        """
        if self._profile is None:
            return
        if self._steps_left > 0 and self._clock() < self._deadline:
            self._steps_left -= 1
            return
        try:
            self._stop()
            self._ended_by_itself = True
        except (OSError, RuntimeError):
            self._profile = None
            logger.exception("The trace could not be written.")

    def _start(self, req: StartProfileReq) -> str:
        if self._folder is None:
            raise ValueError("Profiling is off: start the server with profile_folder, to which traces are written.")
        folder = self._folder if req.output_dir is None else Path(req.output_dir).resolve()
        if not folder.is_relative_to(self._folder):
            raise ValueError(f"output_dir must be {self._folder} (profile_folder) or a folder in it.")
        if self._profile is not None:
            raise ValueError("A recording is under way. Call stop_profile first.")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{req.profile_prefix or 'profile'}-{time.time_ns()}-TP-0.trace.json.gz"
        self._steps_left = req.num_steps or _MOST_STEPS
        self._deadline = self._clock() + _MOST_SECONDS
        profile = self._make(req)
        profile.start()
        self._profile, self._ended_by_itself = profile, False
        return f"Recording up to {self._steps_left} steps for {self._path}."

    def _make(self, req: StartProfileReq) -> Any:
        from torch import profiler

        known = {"CPU": profiler.ProfilerActivity.CPU, "GPU": profiler.ProfilerActivity.CUDA}
        wanted = req.activities or ["CPU", "GPU"]
        activities = [known[name] for name in wanted if name == "CPU" or self._device_type == "cuda"]
        if not activities:
            raise ValueError("activities=['GPU'] needs a GPU, but this server runs on the CPU.")
        return profiler.profile(activities=activities, with_stack=req.with_stack, record_shapes=req.record_shapes)

    def _stop(self) -> str:
        if self._profile is None and self._ended_by_itself:
            self._ended_by_itself = False
            return f"The trace is in {self._path}."
        if self._profile is None:
            raise ValueError("Nothing is being recorded. Call start_profile first.")
        profile, self._profile = self._profile, None
        profile.stop()
        profile.export_chrome_trace(str(self._path))
        logger.info("The trace is in %s.", self._path)
        return f"The trace is in {self._path}."
