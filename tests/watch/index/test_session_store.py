"""Whoever watches a session store sees what its server has, and changes nothing in it."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.sessions import test_reading as reading
from tests.server.sessions.building import floats, ids
from tests.server.sessions.test_journal import HEADER, Store, fill
from tests.server.sessions.test_reading import ASK, CALL, Talk
from tests.server.sessions.test_turn_texts import Store as MemoryStore
from tests.server.sessions.test_turn_texts import said, session_of, texts_of
from verl_server.errors import BadRequestError, SessionNotFoundError
from verl_server.rollout.trajectory import StopReason
from verl_server.server.sessions.journal_files import JournalFiles
from verl_server.server.sessions.records import (
    BeginRecord,
    DeleteRecord,
    FinishRecord,
    Record,
    RewardRecord,
    SessionRecord,
    TurnRecord,
    framed,
    read_record,
)
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.trajectory import branches
from verl_server.watch.index import store_frames
from verl_server.watch.index.session_store import SessionStore

tools = reading.tools


class Server:
    """Writes records as a server does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = JournalFiles(folder, HEADER)
        self.files.open()
        self.read = [record for record, _ in self.files.records()]
        self.files.begin()

    def write(self, *records: Record) -> None:
        self.files.append(b"".join(map(framed, records)))

    def kill(self) -> None:
        """End without a word, as after SIGKILL: the lock is released, and `current` has no size."""
        os.close(self.files._fd)
        os.close(self.files._lock)

    @property
    def journal(self) -> Path:
        return max(self.folder.glob("journal-*.log"))


def session(name: str, created: float = 100.0, **fields: Any) -> SessionRecord:
    return SessionRecord(name, b"h" * 32, created, **fields)


def turn(
    name: str, number: int = 0, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (3,), **fields: Any
) -> TurnRecord:
    values: dict[str, Any] = {
        "output": ids(output),
        "logprobs": floats([-0.5] * len(output)),
        "spans": [("v1", 0)],
        "finish": ("stop", 3),
        "times": (101.0 + number, 101.5 + number, 102.0 + number),
        "parent": -1,
        "shared": 0,
    }
    return TurnRecord(session=name, turn=number, prompt=ids(prompt), **values | fields)


def followed(folder: Path) -> SessionStore:
    store = SessionStore(folder)
    store.poll()
    return store


def names(store: SessionStore, **asked: Any) -> list[str]:
    return [row.session for row in store.sessions(**asked).rows]


def image(folder: Path) -> dict[str, Any]:
    paths = [folder, *folder.rglob("*")]
    stats = {str(path): (path.stat(), path.read_bytes() if path.is_file() else b"") for path in paths}
    return {name: (s.st_mode, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, data) for name, (s, data) in stats.items()}


def test_a_growing_store_shows_each_record(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "store")
    assert not store.poll() and names(store) == [] and store.state == "unknown"
    server = Server(tmp_path / "store")
    server.write(session("a", group="g"), session("a.helper", 101.0, parent="a"), BeginRecord("a", 0))
    assert store.poll() and store.state == "running" and store.model_path == "/model"
    row = store.session("a")
    assert (row.turns, row.running, row.children, row.active, row.state) == (0, 1, ["a.helper"], 100.0, "open")
    server.write(turn("a", spans=[("v1", 0), ("v2", 1)], output=(3, 4)), RewardRecord("a", 0.5, None, "x"))
    server.write(RewardRecord("a", 1.0, None, "y"), RewardRecord("a", 9.0, 0, "of a turn"))
    assert store.poll()
    row = store.session("a")
    assert (row.turns, row.running, row.tokens, row.sampled, row.reward) == (1, 0, 4, 2, 1.5)
    assert (row.active, row.generate_seconds, row.oldest_version, row.newest_version) == (102.0, 1.0, "v1", "v2")
    server.write(FinishRecord("a", "finished", "done", 110.0), session("b"))
    server.files.rotate()
    server.write(session("c"), turn("c"))
    assert store.poll() and store.session("a").ended == 110.0
    assert names(store) == ["c", "b", "a"] and store.progress[0] == store.progress[1] > 500
    assert (store.damaged, store.warnings) == (0, [])
    server.write(DeleteRecord("a"))
    assert store.poll() and names(store, children=True) == ["c", "b"] and store.deleted == 1
    with pytest.raises(SessionNotFoundError, match="no session a"):
        store.session("a")
    assert not store.poll()
    server.files.close()
    assert store.poll() and store.state == "ended"


def test_sessions_are_ordered_paged_and_chosen(tmp_path: Path) -> None:
    server = Server(tmp_path)
    for number, reward in enumerate((0.5, None, 2.0, -1.0)):
        server.write(session(f"s{number}", group=f"g{number % 2}"))
        server.write(*(turn(f"s{number}", each, output=(3,) * (9 - number)) for each in range(number)))
        server.write(*([] if reward is None else [RewardRecord(f"s{number}", reward, None, "reward")]))
    store = followed(tmp_path)
    assert names(store) == ["s3", "s2", "s1", "s0"] and names(store, order="oldest") == ["s0", "s1", "s2", "s3"]
    assert names(store, order="reward") == ["s3", "s0", "s2", "s1"] and names(store, order="-reward") == [
        "s2",
        "s0",
        "s3",
        "s1",
    ]
    assert names(store, order="-turns") == ["s3", "s2", "s1", "s0"] and names(store, order="-tokens")[:2] == [
        "s1",
        "s2",
    ]
    page = store.sessions(limit=3)
    assert (page.after, page.total) == (3, 4)
    page = store.sessions(limit=3, after=3)
    assert [row.session for row in page.rows] == ["s0"] and page.after is None
    assert names(store, group="g1") == ["s3", "s1"] and store.sessions(group="none").total == 0
    server.kill()


def test_trajectories_are_the_branches_of_the_server(tmp_path: Path) -> None:
    async def written() -> dict[str, list[Any]]:
        server = Store(tmp_path)
        await fill(server.ledger)
        table = server.ledger.table
        found = {each.id: list(branches(stored_turns(each), "once", True)) for each in table.all()}
        await server.close()
        return found

    expected = asyncio.run(written())
    store = followed(tmp_path)
    assert set(names(store, children=True)) == expected.keys() == {"one", "one.helper", "two"}
    assert store.deleted == 1 and store.metadata("one") == {"a": [1]}
    assert sum(map(len, expected.values())) >= 3
    for name, found in expected.items():
        trajectories = list(store.trajectories(name))
        assert [t.tokens for t in trajectories] == [branch.ids for branch in found]
        assert [t.loss_mask for t in trajectories] == [branch.loss_mask for branch in found]
        assert [t.logprobs for t in trajectories] == [branch.logprobs for branch in found]
        assert [t.shared for t in trajectories] == [branch.shared_tokens for branch in found]
        assert [t.has_choice for t in trajectories] == [branch.has_choice or [] for branch in found]
        spans = [[(turn.start, turn.prompt_end) for turn in branch.turns] for branch in found]
        assert [[turn.observation_span for turn in t.turns] for t in trajectories] == spans
        assert [b.kind for b in store.branches(name)] == [branch.kind for branch in found]
        assert sum(len(t.events) for t in trajectories) == store.session(name).turns
    one = next(store.trajectories("one"))
    assert one.weight_versions[2:4] == ["v1", "v1"] and one.reward == 0.5 and one.stop_reason is None
    assert next(store.trajectories("one.helper")).parent == "one"
    assert (store.session("two").state, store.session("two").reason) == ("finished", "why")


@pytest.fixture
def talk(tools: Any) -> Talk:
    """A session with a tool call, a history that the client edited, and a reply after it."""
    talk = Talk(tools)
    talk.ledger.store = MemoryStore()
    talk.ledger.store.put(session_of(talk).record)
    history = [ASK]
    called = said(talk, CALL, *history)
    history += [called, {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "2"}]
    said(talk, "<think>\nso\n</think>\n\nTwo.", *history)
    said(talk, "Another.", ASK, called, {"role": "user", "content": "never mind"})
    return talk


def test_texts_are_those_that_the_server_exports(tmp_path: Path, talk: Talk) -> None:
    server = Server(tmp_path)
    server.files.append(b"".join(talk.ledger.store.records))  # type: ignore[attr-defined]
    expected = texts_of(session_of(talk), retries=True)
    found = list(followed(tmp_path).trajectories(talk.caller.session_id))
    assert [t.tokens for t in found] == [branch.ids for branch in expected] and len(found) == 2
    for trajectory, branch in zip(found, expected, strict=True):
        texts = [(turn.messages, turn.reply) for turn in trajectory.turns]
        assert texts == [(turn.messages, turn.reply) for turn in branch.turns]
    assert found[0].turns[0].messages[0].text == ASK["content"] and found[0].turns[1].messages[0].text == "2"
    assert (found[1].fork_of, found[1].shared) == (expected[1].fork_of, expected[1].shared_tokens)
    server.kill()


def test_a_session_that_lost_a_turn_has_tokens_and_no_texts(tmp_path: Path, talk: Talk) -> None:
    records: list[bytes] = talk.ledger.store.records  # type: ignore[attr-defined]
    turns = [data for data in records if isinstance(read_record(data, 0)[0], TurnRecord)]
    found = []
    for number, lost in enumerate(turns):
        server = Server(tmp_path / str(number))
        server.files.append(b"".join(data for data in records if data is not lost))
        server.kill()
        trajectories = list(followed(tmp_path / str(number)).trajectories(talk.caller.session_id))
        found.append([[bool(turn.messages) for turn in t.turns] for t in trajectories])
    assert found == [[], [[False, False]], [[True, True]]], "without the last turn, all texts are there"


def test_the_end_of_a_session_is_a_stop_reason(tmp_path: Path) -> None:
    server = Server(tmp_path)
    ends = {
        "done": "finished",
        "max_turns": "finished",
        "seconds": "expired",
        "idle_seconds": "expired",
        "session_ttl": "expired",
    }
    for reason, state in ends.items():
        server.write(session(reason), turn(reason), FinishRecord(reason, state, reason, 200.0))
    store = followed(tmp_path)
    found = [next(store.trajectories(reason)).stop_reason for reason in ends]
    assert found == [
        StopReason.DONE,
        StopReason.MAX_TURNS,
        StopReason.TIME_LIMIT,
        StopReason.IDLE,
        StopReason.SESSION_LOST,
    ]
    trajectory = next(store.trajectories("done"))
    assert trajectory.began == 100.0 and [(e.kind, e.start, e.end) for e in trajectory.events] == [
        ("generate", 1.0, 2.0)
    ]
    server.kill()


def test_a_snapshot_in_the_place_of_journals_is_read_from_its_beginning(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.write(session("dead"), turn("dead"), session("live"), turn("live"))
    store = followed(tmp_path)
    before = store.generation
    server.write(DeleteRecord("dead"))
    server.files.rotate()
    server.files.compact(
        server.files.number, lambda record: "live" in (getattr(record, "id", ""), getattr(record, "session", ""))
    )
    with pytest.raises(BadRequestError, match="Cannot read"):
        next(store.trajectories("live"))
    store.poll(seconds=0.0)
    assert "live" in names(store), "the earlier figures are shown until all is read"
    while store.poll():
        pass
    assert names(store) == ["live"] and store.generation > before
    assert next(store.trajectories("live")).tokens == [1, 2, 3]
    server.write(turn("live", 1, prompt=(7,)))
    assert store.poll() and store.session("live").turns == 2 and store.damaged == 0
    server.kill()


def test_a_snapshot_counts_while_its_journals_are_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    server.write(session("dead"), session("live"))
    store = followed(tmp_path)
    monkeypatch.setattr(server.files, "_remove_before", lambda number: None)  # killed before it removes them
    server.files.compact(2, lambda record: getattr(record, "id", "") == "live")
    assert store.poll() and names(store) == names(followed(tmp_path)) == ["live"]
    server.kill()


def test_a_record_that_is_being_written_waits(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.write(session("a"))
    store = followed(tmp_path)
    data = framed(turn("a"))
    for cut in (3, 8, len(data) - 1):
        os.write(server.files._fd, data[:cut])
        assert not store.poll() and store.damaged == 0 and store.session("a").turns == 0
        os.ftruncate(server.files._fd, server.files.size)
        os.lseek(server.files._fd, server.files.size, os.SEEK_SET)
    server.write(turn("a"))
    assert store.poll() and store.session("a").turns == 1
    os.write(server.files._fd, data[:20])
    server.kill()
    assert store.poll() and store.state == "unknown" and store.damaged == 0, "the next server cuts it off"
    other = Server(tmp_path)
    other.write(session("b"))
    assert store.poll() and names(store) == ["b", "a"] and store.damaged == 0
    other.kill()


def flip(data: bytearray, at: int, record: bytes) -> None:
    data[at + len(record) - 1] ^= 255


def zero_length(data: bytearray, at: int, record: bytes) -> None:
    data[at : at + 4] = bytes(4)


def huge_length(data: bytearray, at: int, record: bytes) -> None:
    data[at : at + 4] = (2**30).to_bytes(4, "little")


def zeros(data: bytearray, at: int, record: bytes) -> None:
    data[at : at + len(record)] = bytes(len(record))


@pytest.mark.parametrize("is_newest", [True, False])
@pytest.mark.parametrize("damage", [flip, zero_length, huge_length, zeros])
def test_damage_is_counted_and_the_rest_is_read(
    tmp_path: Path, damage: Callable[[bytearray, int, bytes], None], is_newest: bool
) -> None:
    server = Server(tmp_path)
    server.write(session("a"), turn("a"), turn("a", 1), session("b"), turn("b"))
    journal, record = server.journal, framed(turn("a", 1))
    if not is_newest:
        server.files.rotate()
    server.kill()
    data = bytearray(journal.read_bytes())
    damage(data, data.index(record), record)
    journal.write_bytes(data)
    store = followed(tmp_path)
    assert store.damaged == 1 and "journal-00000001.log, byte" in store.warnings[0]
    assert (store.session("a").turns, store.session("b").turns) == (1, 1)
    assert not store.poll() and store.damaged == 1


def test_damage_at_the_end_of_a_closed_file_is_counted(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.write(session("a"), turn("a"))
    journal = server.journal
    server.files.rotate()
    server.write(session("b"))
    server.kill()
    os.truncate(journal, journal.stat().st_size - 5)
    store = followed(tmp_path)
    assert names(store) == ["b", "a"] and store.session("a").turns == 0 and store.damaged == 1


def test_a_record_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_frames, "_CHUNK", 4096)
    server = Server(tmp_path)
    server.write(session("a"), turn("a", reply="x" * 9000), turn("a", 1, reply="y" * 20_000), turn("a", 2))
    store = SessionStore(tmp_path)
    store._frames._longest = 10_000
    store.poll()
    assert store.session("a").turns == 2 and store.damaged == 1 and "too many" in store.warnings[0]
    assert len(list(store.trajectories("a"))) == 2
    server.kill()


def test_records_without_their_session_and_turns_without_their_parent_are_left_out(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.write(turn("unknown"), session("a"), turn("a", 3, parent=2, shared=1), turn("a", 4), BeginRecord("b", 0))
    store = followed(tmp_path)
    assert names(store) == ["a"] and store.session("a").turns == 2
    assert [t.tokens for t in store.trajectories("a")] == [[1, 2, 3]]
    assert "2 records" in store.warnings[0]
    server.kill()


def test_a_long_store_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_frames, "_CHUNK", 1024)
    server = Server(tmp_path)
    server.write(*(record for number in range(50) for record in (session(f"s{number}"), turn(f"s{number}"))))
    store, calls = SessionStore(tmp_path), 0
    while store.poll(seconds=0.0):
        calls += 1
    assert calls > 5 and len(names(store)) == 50
    server.kill()


@pytest.mark.parametrize("is_open", [True, False])
def test_nothing_in_the_store_changes(tmp_path: Path, is_open: bool) -> None:
    folder = tmp_path / "store"
    server = Server(folder)
    server.write(session("a", metadata={"x": 1}), turn("a"))
    (folder / "snapshot-00000009.tmp").write_text("a server that opens the store removes this")
    os.write(server.files._fd, framed(turn("a", 1))[:20])  # a server cuts this off
    if not is_open:
        server.kill()
    for path in folder.iterdir():
        path.chmod(0o440)
    folder.chmod(0o550)
    before = image(folder)
    store = followed(folder)
    assert names(store) == ["a"] and store.metadata("a") == {"x": 1}
    assert len(list(store.trajectories("a"))) == len(store.branches("a")) == 1
    assert not store.poll()
    assert image(folder) == before
    lock = os.open(folder / "lock", os.O_RDONLY)
    if is_open:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        server.kill()
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(lock)
    assert image(folder) == before


def test_only_reading_calls_reach_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    server.write(session("a"), turn("a"))
    server.kill()
    forbidden = ("ftruncate", "truncate", "chmod", "rename", "replace", "unlink", "remove", "mkdir", "write", "utime")
    with monkeypatch.context() as patched:
        for name in forbidden:
            patched.setattr(os, name, None)
        patched.setattr(fcntl, "flock", None)
        store = followed(tmp_path)
        assert len(list(store.trajectories("a"))) == 1
