"""`DemoTrajectories`: trajectories.jsonl of the demo, with its index. The demo writes its episodes with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_server.files.json_values import jsonable
from verl_server.files.segments import Segments
from verl_server.rollout.trajectory import Trajectory, labelled
from verl_server.watch.index.index_file import IndexFile
from verl_server.watch.index.line_rows import trajectory_row
from verl_server.watch.index.row_kinds import index_beside
from verl_server.watch.run_records import Label


class DemoTrajectories:
    """Nothing is created before the first episode is written. `close` it at the end."""

    def __init__(self, folder: Path) -> None:
        file = folder / "trajectories.jsonl"
        self._file = Segments(file)
        self._index = IndexFile(index_beside(file))

    def add(self, trajectories: Sequence[Trajectory], phase: str, step: int | None = None) -> None:
        """Append episodes of a phase (before, training, after), and their rows in the index."""
        label = {"phase": phase} if step is None else {"phase": phase, "step": step}
        lines = [msgspec.json.encode(each, enc_hook=jsonable) + b"\n" for each in labelled(trajectories, **label)]
        places = self._file.append(lines)
        self._index.add(
            places, lambda: [trajectory_row("trajectory", Label(step=step), each, phase) for each in trajectories]
        )

    def close(self) -> None:
        self._file.close()
        self._index.close()
