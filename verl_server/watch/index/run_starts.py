"""`RunStarts`: follows the events of a run that say which episodes count: its starts, and the fates of groups.

`run_database` asks it for what is new, and settles the rows of trajectories with it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import read_json
from verl_server.files.segments import segment_files
from verl_server.watch.index.line_files import read_lines
from verl_server.watch.run_files import Lineage, rank_paths
from verl_server.watch.run_records import GroupDone, RunResumed, RunStarted, SegmentRemoved, StepBegan

_ASYNCHRONOUS = "train.async_"
"""Beginning of the names of the commands whose episodes play while they train."""
_READ = RunStarted | RunResumed | GroupDone | SegmentRemoved | StepBegan
_TAGS = tuple(f'"{kind.__struct_config__.tag}"'.encode() for kind in _READ.__args__)


class News(msgspec.Struct):
    """What the last call of `read` has found."""

    starts: bool = False
    """True if the run has started again."""
    fates: list[GroupDone] = msgspec.field(default_factory=list)
    begun: list[StepBegan] = msgspec.field(default_factory=list)


class RunStarts:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, int] = {}
        self._starts: list[RunStarted | RunResumed] = []
        self.removed: set[str] = set()
        """Names of segments that the run has removed."""
        self.lineage = Lineage(iter(()))
        self.is_asynchronous = False
        """True if groups have fates, and a line's step is the one in which its group started."""

    @property
    def incarnation(self) -> str | None:
        """The incarnation of the last start; None if there is none."""
        return self._starts[-1].incarnation if self._starts else None

    @property
    def incarnations(self) -> set[str | None]:
        """The incarnations of all starts."""
        return {start.incarnation for start in self._starts}

    def read(self) -> News:
        """Read the events since the last call. Damaged lines are left out: readers of events report them."""
        news = News()
        for path in [self._folder / "events.jsonl", *rank_paths(self._folder, "events")]:
            for file in segment_files(path):
                self._read_file(file, news)
        if news.starts:
            self.lineage = Lineage(iter(self._starts))
            self.is_asynchronous = self.is_asynchronous or str(self._command()).startswith(_ASYNCHRONOUS)
        self.is_asynchronous = self.is_asynchronous or bool(news.fates)
        return news

    def _read_file(self, file: Path, news: News) -> None:
        begin = self._read.get(file.name, 0)
        for offset, length, line in read_lines(file, begin):
            self._read[file.name] = offset + length
            if line is None or not any(tag in line for tag in _TAGS):
                continue
            try:
                event = msgspec.json.decode(line, type=_READ)
            except msgspec.DecodeError:
                continue
            match event:
                case RunStarted() | RunResumed():
                    self._starts.append(event)
                    news.starts = True
                case GroupDone():
                    news.fates.append(event)
                case StepBegan():
                    news.begun.append(event)
                case SegmentRemoved():
                    self.removed.add(event.file)

    def _command(self) -> object:
        try:
            return read_json(self._folder / "run.json").get("command")
        except BadRequestError:
            return None
