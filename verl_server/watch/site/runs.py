"""`OpenRuns`: the runs that the command opened. Each `WatchedRun` has its files' followers, index and tokenizer.

A thread polls the followers and tells who listens that a run has grown. An index is opened when a view first asks for
episodes, and of many opened indexes the one that was not asked for longest is closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

from verl_server.errors import BadRequestError
from verl_server.rollout.trajectory import Trajectory
from verl_server.watch.advisories import Advisory, FolderAdvisories
from verl_server.watch.index.rows import Progress
from verl_server.watch.index.run_index import RunIndex
from verl_server.watch.index.run_tail import RunTail
from verl_server.watch.index.session_store import SessionStore
from verl_server.watch.run_records import TrainedTrajectory
from verl_server.watch.site.page_errors import PageError
from verl_server.watch.site.store_index import StoreIndex
from verl_server.watch.site.store_tail import StoreTail
from verl_server.watch.site.token_texts import TokenTexts, find_tokenizer

logger = logging.getLogger(__name__)

Kind = Literal["training", "rollout", "agents", "demo", "store"]
Tail: TypeAlias = RunTail | StoreTail
Index: TypeAlias = RunIndex | StoreIndex

MOST_RUNS = 64
"""Most runs of a folder that are opened: the newest."""
_MOST_INDEXES = 8
"""Most indexes that are open at one time."""
_POLL_SECONDS = 1.0
_EVIDENCE = ("metrics.jsonl", "events.jsonl", "trajectories*.jsonl", "episodes.jsonl", "run.json", "errors.jsonl")
"""Files that make a folder a run."""


class WatchedRun:
    """One run. Any thread may call it."""

    def __init__(
        self, path: Path, tokenizer: str | None = None, *, follow: bool = True, is_store: bool = False
    ) -> None:
        """`path` is a run's folder, a file of trajectories or, with `is_store`, the folder of a session store.

        `tokenizer` is the option of the command. With `follow`, the index follows the files in a thread; otherwise it
        is complete when it is first asked for.
        """
        self.path = path
        absolute = path.resolve()
        digest = hashlib.sha256(str(absolute).encode("utf-8", "surrogateescape")).hexdigest()[:4]
        self.id = f"{_plain(absolute.name)}-{digest}"
        self._store = SessionStore(path) if is_store else None
        self.tail: Tail = RunTail(path) if self._store is None else StoreTail(self._store)
        self._option, self._follow = tokenizer, follow
        self._lock = threading.Lock()
        self._index: Index | None = None
        self._judging = threading.Lock()
        self._advisories: FolderAdvisories | None = None
        self._decoding = threading.Lock()
        self._trajectories: OrderedDict[str, tuple[Trajectory, TrainedTrajectory | None]] = OrderedDict()
        self._tokens: TokenTexts | None = None
        self._tokens_key: tuple[Path | None, str] | None = None
        self._tokens_problem = ""

    @property
    def kind(self) -> Kind:
        """The command that wrote the run."""
        command = self.tail.settings.get("command")
        if self._store is not None:
            return "store"
        if not self.path.is_dir():
            return "rollout"
        if command == "demo":
            return "demo"
        if command == "run_agents" or (self.path / "episodes.jsonl").exists():
            return "agents"
        return "training"

    def modified(self) -> float | None:
        """Return the time at which a rollout last wrote, None if it has not. Its files have no times of lines."""
        names = ("episodes.jsonl", "trajectories.jsonl")
        for file in [self.path / name for name in names] if self.path.is_dir() else [self.path]:
            with contextlib.suppress(OSError):
                return file.stat().st_mtime
        return None

    @property
    def index(self) -> Index:
        """The index of the run's episodes, which begins to work when it is first asked for."""
        with self._lock:
            if self._index is None:
                self._index = RunIndex(self.path) if self._store is None else StoreIndex(self._store)
                if self._follow:
                    self._index.start()
                while not self._follow and self._index.poll():
                    pass
            return self._index

    def progress(self) -> Progress | None:
        """Return how far the run is indexed, None if nobody has asked for its episodes."""
        with self._lock:
            index = self._index
        return None if index is None else index.progress()

    def generation(self) -> int:
        """Return a number that grows when the run has something new."""
        progress = self.progress()
        return self.tail.generation + (0 if progress is None else progress.generation)

    def advisories(self) -> list[Advisory]:
        """Return what is wrong with the run, by its steps. Raise BadRequestError for a damaged line."""
        with self._judging:
            if self._advisories is None:
                self._advisories = FolderAdvisories(self.path)
            try:
                return self._advisories.read()
            except BadRequestError:
                self._advisories = None  # it has read past the line: the next request begins again
                raise

    def close_index(self) -> None:
        with self._lock:
            index, self._index = self._index, None
        if index is not None:
            index.close()

    def trajectory(self, row: str) -> tuple[Trajectory, TrainedTrajectory | None]:
        """Return the line of a row, and what the trainer recorded of it.

        Lines are decoded one at a time, and the last two are kept: one of 128,000 tokens takes tens of megabytes.
        """
        with self._decoding:
            if row not in self._trajectories:
                while len(self._trajectories) > 1:
                    self._trajectories.popitem(last=False)
                self._trajectories[row] = (self.index.trajectory(row), self.index.trained(row))
            self._trajectories.move_to_end(row)
            return self._trajectories[row]

    def tokens(self) -> tuple[TokenTexts | None, str]:
        """Return the texts of the run's tokens, or None and why there are none. Settings may name one later."""
        folder = self.path if self.path.is_dir() else self.path.parent
        found = find_tokenizer(self._option, self.tail.settings, folder)
        with self._lock:
            if self._tokens_key != found:
                self._tokens_key, (file, self._tokens_problem) = found, found
                self._tokens = None
                if file is not None:
                    try:
                        self._tokens = TokenTexts(file)
                    except BadRequestError as error:
                        self._tokens_problem = str(error)
            return self._tokens, self._tokens_problem


class OpenRuns:
    """All runs of the command. Call `start`, and `close` at the end."""

    def __init__(
        self,
        paths: Sequence[Path],
        tokenizer: str | None = None,
        *,
        stores: Sequence[Path] = (),
        follow: bool = True,
    ) -> None:
        """Take runs, files of trajectories, folders with runs, and session stores.

        Raise BadRequestError if a path is none of these.
        Without `follow`, the runs are read once, by `poll` and by the views.
        """
        found = [run for path in paths for run in find_runs(path)]
        runs = [WatchedRun(path, tokenizer, follow=follow) for path in dict.fromkeys(found)]
        for path in stores:
            if not path.is_dir():
                raise BadRequestError(f"There is no folder {path}. --store is the folder of serve --session-store.")
            runs.append(WatchedRun(path, tokenizer, follow=follow, is_store=True))
        self.runs: dict[str, WatchedRun] = {run.id: run for run in runs}
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()
        self._listeners: set[Callable[[], None]] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch-runs", daemon=True)

    def start(self) -> None:
        """Read every run once, and follow them in a thread."""
        self.poll()
        if len(self.runs) <= _MOST_INDEXES:
            for run in self.runs.values():
                self.with_index(run.id).index  # noqa: B018 - begins to work
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        for run in self.runs.values():
            run.close_index()

    def get(self, run_id: str) -> WatchedRun:
        """Return a run. Raise PageError if there is none of this id."""
        if (run := self.runs.get(run_id)) is None:
            raise PageError(404, f"There is no run {run_id:.100}.", "/api/runs lists the ids of the opened runs.")
        return run

    def with_index(self, run_id: str) -> WatchedRun:
        """Return a run whose episodes are asked for. Of many open indexes, the oldest is closed."""
        run = self.get(run_id)
        with self._lock:
            self._asked[run_id] = None
            self._asked.move_to_end(run_id)
            closing = [self._asked.popitem(last=False)[0] for _ in range(len(self._asked) - _MOST_INDEXES)]
        for each in closing:
            self.runs[each].close_index()
        return run

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, in another thread, after each poll that found something. Return what ends that."""
        with self._lock:
            self._listeners.add(listener)
        return lambda: self._listeners.discard(listener)

    def poll(self) -> None:
        """Read what is new in every run, and tell the listeners."""
        for run in self.runs.values():
            try:
                run.tail.poll()
            except Exception:  # a fault of one run must not end the others
                logger.exception("%s cannot be read.", run.path)
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    def _follow(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self.poll()


def find_runs(path: Path) -> list[Path]:
    """Return the run at a path, or the newest runs in a folder of runs. Raise BadRequestError if there is none.

    An empty folder counts as a run that has not begun.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise BadRequestError(
            f"There is no {path}. Name the folder of a run, a folder with runs, or a trajectories file."
        )
    if _is_run(path):
        return [path]
    inner = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and _is_run(folder)]
    if inner:
        newest = sorted(inner, key=lambda folder: folder.stat().st_mtime, reverse=True)
        if len(newest) > MOST_RUNS:
            logger.warning("%s has %d runs. The newest %d are opened.", path, len(newest), MOST_RUNS)
        return sorted(newest[:MOST_RUNS])
    if any(path.iterdir()):
        raise BadRequestError(
            f"{path} is neither a run (it has no metrics.jsonl, events.jsonl or trajectories.jsonl), nor does one of "
            "its folders have one. Name the folder of a run, a folder with runs, or a trajectories file."
        )
    return [path]


def _is_run(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in _EVIDENCE)


def _plain(name: str) -> str:
    """Return a name for URLs: letters, digits, dots, dashes and underlines."""
    kept = "".join(each if each.isascii() and (each.isalnum() or each in "._-") else "_" for each in name)
    return kept[:80] or "run"
