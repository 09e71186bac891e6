"""TensorBoard: event files in the folder `tensorboard` of the run, written by TensorBoard's own writer.

`tensorboard --logdir OUT` shows one run, and with the folder above OUT it shows all of them. Evaluations are in a
folder of their own. The first event of a start makes readers forget the steps that run again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from verl_server.train.trackers.tracked_run import Figures, TrackedRun


class TensorBoardRun:
    run_id = None

    def __init__(self, run: TrackedRun) -> None:
        folder = Path(run.folder) / "tensorboard"
        self._steps = _Events(folder, run.next_step)
        self._steps.add(run.next_step, [_settings(run)])
        # The evaluation with the number of the first step is of the step before, and is not lost with the steps.
        self._evaluations = _Events(folder / "evaluation", run.next_step + 1)

    def log(self, figures: Figures) -> None:
        events = self._steps if figures.kind == "step" else self._evaluations
        values = [Summary.Value(tag=name, simple_value=figure) for name, figure in figures.figures.items()]
        events.add(figures.step, values)

    def close(self, exit_status: int) -> None:
        self._steps.close()
        self._evaluations.close()


class _Events:
    """The event files of a folder. A file is begun with its first event, or if there are files of an earlier start."""

    def __init__(self, folder: Path, first: int) -> None:
        """Readers forget the events of earlier files at the step `first` and later ones."""
        self._folder, self._first = folder, first
        self._writer: EventFileWriter | None = None
        if folder.exists():
            self.add(first, [])

    def add(self, step: int, values: Sequence[Summary.Value]) -> None:
        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
            self._write(Event(step=self._first, session_log=SessionLog(status=SessionLog.START)))
        if values:
            self._write(Event(step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write(self, event: Event) -> None:
        assert self._writer is not None
        event.wall_time = time.time()
        self._writer.add_event(event)


def _settings(run: TrackedRun) -> Summary.Value:
    """Return the settings as a text, which TensorBoard shows as Markdown."""
    text = "    " + json.dumps(run.settings, indent=2, default=str).replace("\n", "\n    ")
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag="settings", metadata=metadata, tensor=tensor)


def open_run(run: TrackedRun) -> TensorBoardRun:
    return TensorBoardRun(run)
