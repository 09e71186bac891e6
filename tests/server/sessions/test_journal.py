"""The session store on disk: what is durable, what a restarted server reads, and what a crash at any point leaves."""

from __future__ import annotations

import asyncio
import errno
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.sessions.building import caller, created, ids, node, plan, turn
from verl_server.errors import BadRequestError, SessionUnavailableError
from verl_server.messages.session_types import CreateSession, RewardBody, SessionLimits
from verl_server.server.sessions.journal import Journal
from verl_server.server.sessions.journal_files import DamagedStoreError, Disk, JournalFiles
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.records import (
    FORMAT,
    BeginRecord,
    CurrentRecord,
    CutRecord,
    HeaderRecord,
    SessionRecord,
    TurnRecord,
    frame,
    payload,
)
from verl_server.server.sessions.restart import restore
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.turn import sequence
from verl_server.server.sessions.turn_ledger import TurnLedger

HEADER = HeaderRecord(FORMAT, 100, b"t" * 16, "/model")


def run(coro: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coro, 60))


class Store:
    """A ledger over the journal of a folder, as the server opens it."""

    def __init__(self, folder: Path, policy: Any = "never", disk: Disk | None = None, **sizes: Any) -> None:
        self.files = JournalFiles(folder, HEADER, disk)
        self.files.open()
        self.journal = Journal(self.files, policy, asyncio.get_running_loop(), **{"interval": 0.01} | sizes)
        self.ledger = SessionLedger()

        def counted() -> Any:
            for record, size in self.files.records():
                self.journal.count(record, size)
                yield record

        try:
            self.restored = restore(self.ledger, counted())
        except BaseException:
            self.files.close()
            raise
        self.journal.start()
        self.ledger.store = self.journal

    async def close(self) -> None:
        await asyncio.to_thread(self.journal.close)


def image(ledger: SessionLedger) -> dict[str, Any]:
    """Return everything that a ledger holds, except times of its own."""
    found = {}
    for session in (each for root in ledger.table.roots() for each in ledger.table.family(root)):
        found[session.id] = (
            session.record,
            session.turns,
            bytes(session.nodes.data[: session.stored_nodes * 44]),
            session.children,
            session.rewards,
            session.state,
            session.reason,
            session.sampled,
            session.branches,
            session.conversations,
            {key: turns for key, turns in session.keys.items()},
        )
    return found


async def fill(ledger: SessionLedger) -> None:
    """Make two sessions with every kind of record."""
    who = created(ledger, id="one", group="g", metadata={"a": [1]}, limits=SessionLimits(max_turns=99), seed=3)
    first = plan([1, 2], new_nodes=node("head", 0) + node("hi"))
    await turn(ledger, who, first, [3, 4], key=b"key", body=b"b" * 16)
    lost = TurnLedger(ledger).begin(who, plan([9], new_nodes=node("lost"), after_node=1), b"interrupted", b"b" * 16)
    await turn(ledger, who, plan([5], 0, 4, new_nodes=node("more"), after_node=2), [6], spans=[("v1", 0), ("v2", 1)])
    edits = {"policy_logprobs": "given", "policy": b"1234", "has_choice": b"\1", "overridden": b'{"top_p":0.1}'}
    await turn(ledger, who, plan([7]), [8], **edits)
    await turn(ledger, caller("one", "helper"), plan([1]), [2])
    TurnLedger(ledger).delivered("one", 0)
    ledger.reward("one", RewardBody(0.5))
    TurnLedger(ledger).cancel(lost)
    created(ledger, id="two")
    ledger.finish("two", "why")
    created(ledger, id="three")
    ledger.delete("three")
    await ledger.store.flushed()


# -- restart ------------------------------------------------------------------------------------------------


def test_turns_of_older_servers_say_what_is_known(tmp_path: Path) -> None:
    """Their records have no field of the policy's log-probabilities, so edited and filtered turns are unknown."""

    class OldTurn(msgspec.Struct):
        session: str = "one"
        turn: int = 0
        parent: int = -1
        shared: int = 0
        prompt: bytes = ids([1])
        output: bytes = ids([2])
        logprobs: bytes = struct.pack("<f", -0.5)
        spans: tuple[tuple[str, int], ...] = (("v1", 0),)
        finish: tuple[str, int] = ("stop", 2)
        times: tuple[float, float, float] = (1.0, 2.0, 3.0)
        sampling: bytes = b""

    kept = {b'{"temperature":0.7}': "same", b"": "unknown", b'{"temperature":0.7,"grammar":"blake2b:0"}': "unknown"}
    kept |= {b'{"temperature":0.7,"top_p":0.1}': "unknown", b'{"temperature":0.7,"ignore_eos":true}': "same"}
    for sampling, known in kept.items():
        record = msgspec.msgpack.decode(msgspec.msgpack.encode(OldTurn(sampling=sampling)), type=TurnRecord)
        ledger = SessionLedger()
        created(ledger, id="one")
        ledger.record(BeginRecord("one", 0))
        ledger.record(record)
        (stored,) = stored_turns(ledger.table.find("one"))
        assert stored.policy_logprobs == known, sampling
        assert (stored.output_policy(), stored.output_choices(), stored.overridden) == ([], [], {})


@pytest.mark.parametrize("policy", ["interval", "turn", "never"])
def test_a_restarted_server_has_everything(tmp_path: Path, policy: Any) -> None:
    async def main() -> None:
        store = Store(tmp_path / "store", policy)
        _, key = store.ledger.create(CreateSession(id="keyed"))
        await fill(store.ledger)
        before = image(store.ledger)
        await store.close()
        again = Store(tmp_path / "store", policy)
        del again.ledger.table.find("one").keys[b"interrupted"]  # the cancelled turn
        again.ledger.table.measure(again.ledger.table.find("one"))
        assert image(again.ledger) == before
        assert again.ledger.table.of_key(key) == "keyed"
        assert again.ledger.table.find("one").started == 4
        assert again.ledger.table.memory == pytest.approx(store.ledger.table.memory)
        assert again.ledger.table.last_version == "v1"
        # The session goes on, and its ids and nodes are those that it would have had.
        more = await turn(again.ledger, caller("one"), plan([9], 2, 6, new_nodes=node("m"), after_node=5), [1])
        assert (more.turn, more.prompt) == (4, ids([1, 2, 3, 4, 5, 6, 9]))
        await again.close()
        assert all(each.stat().st_mode & 0o777 == 0o600 for each in (tmp_path / "store").iterdir())
        assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
        assert not any(key.encode() in each.read_bytes() for each in (tmp_path / "store").iterdir())

    run(main())


def test_an_interrupted_turn_is_sampled_anew_and_recorded_so(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        who = created(store.ledger)
        TurnLedger(store.ledger).begin(who, plan([1]), b"key", b"b" * 16)
        await store.ledger.store.flushed()
        await store.close()
        again = Store(tmp_path)
        assert TurnLedger(again.ledger).answered(who, b"key", b"b" * 16) == []
        await turn(again.ledger, who, plan([1]), [2], key=b"key", body=b"b" * 16)
        (found,) = TurnLedger(again.ledger).answered(who, b"key", b"b" * 16)
        assert (found.turn, found.stored.flags) == (1, 8)
        await again.close()

    run(main())


def test_a_folder_has_one_server_and_one_tokenizer(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        with pytest.raises(BadRequestError, match="another server"):
            Store(tmp_path)
        await fill(store.ledger)
        await store.close()
        other = JournalFiles(tmp_path, HeaderRecord(FORMAT, 100, b"x" * 16, "/other"))
        other.open()
        with pytest.raises(BadRequestError, match="tokenizer of /model"):
            list(other.records())
        other.close()

    run(main())


# -- damage -------------------------------------------------------------------------------------------------


def test_a_file_that_ends_anywhere_is_cut_to_whole_records(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path / "full")
        await fill(store.ledger)
        await store.close()
        file = tmp_path / "full" / "journal-00000001.log"
        data, current = file.read_bytes(), encoded(CurrentRecord(1, None))
        ends, offset = [0], 0
        while offset < len(data):
            offset += 8 + struct.unpack_from("<I", data, offset)[0]
            ends.append(offset)
        folder = tmp_path / "cut"
        for size in sorted({*range(0, len(data), 3), *ends, *(end - 1 for end in ends[1:])}):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            (folder / file.name).write_bytes(data[:size])
            (folder / "current").write_bytes(current)
            files = JournalFiles(folder, HEADER, DiskWithoutSync())
            files.open()
            whole = sum(end <= size for end in ends) - 1
            if whole == 0:  # the header was on the disk before `current` named the file
                with pytest.raises(DamagedStoreError, match=file.name):
                    list(files.records())
                files.close()
                continue
            assert restore(SessionLedger(), (record for record, _ in files.records())) == max(whole - 1, 0)
            assert (folder / file.name).stat().st_size == ends[whole]
            files.begin()
            files.close()

    run(main())


def test_damage_anywhere_else_refuses_the_start(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path / "full")
        await fill(store.ledger)
        await store.close()
        store = Store(tmp_path / "full")
        await store.close()
        first = tmp_path / "full" / "journal-00000001.log"
        data = first.read_bytes()
        for at in range(0, len(data), 7):
            broken = bytearray(data)
            broken[at] ^= 0x55
            first.write_bytes(broken)
            with pytest.raises((DamagedStoreError, BadRequestError), match=r"journal-00000001\.log"):
                Store(tmp_path / "full")
        first.write_bytes(data[:-1])
        with pytest.raises(DamagedStoreError, match="verl-server trajectories repair"):
            Store(tmp_path / "full")
        # In the last file, a damaged record with sound ones behind it was not cut off either.
        (tmp_path / "last").mkdir()
        broken = bytearray(data)
        broken[len(data) // 2] ^= 1
        (tmp_path / "last" / first.name).write_bytes(broken)
        (tmp_path / "last" / "current").write_bytes(encoded(CurrentRecord(1, None)))
        with pytest.raises(DamagedStoreError, match=r"journal-00000001\.log"):
            Store(tmp_path / "last")

    run(main())


def encoded(record: Any) -> bytes:
    body = payload(record)
    return frame(body) + body


async def long_store(folder: Path, *, killed: bool = False) -> dict[str, bytes]:
    """Make a store of several servers, one after the other, with a snapshot. Return its files as the last left them."""
    files: dict[str, bytes] = {}
    for i in range(5):
        store = Store(folder, compact_bytes=4000 if i == 1 else 2**30)
        for j in range(20 if i == 1 else 2):
            who = created(store.ledger, id=f"s{i}-{j}")
            await turn(store.ledger, who, plan([1] * 40), [2] * 40)
            if i == 1 and j:
                store.ledger.delete(who.session_id)
        await store.ledger.store.flushed()
        if i == 1:
            await _until(lambda: any(folder.glob("snapshot-*.log")))
        if i == 4:
            files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
        await store.close()
    if not killed:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}
    return files


def put(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)


@pytest.mark.parametrize("killed", [False, True])
def test_a_file_that_was_deleted_or_emptied_is_named(tmp_path: Path, killed: bool) -> None:
    async def main() -> None:
        files = await long_store(tmp_path / "full", killed=killed)
        assert len(files) >= 5 and "current" in files
        folder = tmp_path / "damaged"
        put(folder, files)
        await Store(folder).close()
        for name in files:
            put(folder, {other: data for other, data in files.items() if other != name})
            with pytest.raises(DamagedStoreError, match=f"{'journal|' if name.startswith('snapshot') else ''}{name}"):
                Store(folder)
            put(folder, files | {name: b""})
            with pytest.raises(DamagedStoreError, match=name):
                Store(folder)

    run(main())


def test_a_file_that_ends_at_the_end_of_a_record_is_noticed_unless_it_is_that_of_a_killed_server(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        files = await long_store(tmp_path / "full")
        folder = tmp_path / "damaged"
        for name in files.keys() - {"current"}:
            offset, ends = 0, []
            while offset < len(files[name]):
                offset += 8 + struct.unpack_from("<I", files[name], offset)[0]
                ends.append(offset)
            for end in ends[:-1]:
                put(folder, files | {name: files[name][:end]})
                with pytest.raises(DamagedStoreError, match=name):
                    Store(folder)

    run(main())


def left_by_a_killed_server(folder: Path, *records: Any) -> Path:
    """Make a store with one journal, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    files = JournalFiles(folder, HEADER, DiskWithoutSync())
    files.open()
    list(files.records())
    files.begin()
    for record in records:
        files.append(encoded(record))
    files.close()
    (folder / "current").write_bytes(encoded(CurrentRecord(files.number, None)))
    return folder / f"journal-{files.number:08d}.log"


def read_again(folder: Path) -> list[Any]:
    files = JournalFiles(folder, HEADER, DiskWithoutSync())
    files.open()
    try:
        return [record for record, _ in files.records()]
    finally:
        files.close()


def some_sessions(count: int, **fields: Any) -> list[SessionRecord]:
    return [SessionRecord(f"s{i}", b"k%015d" % i, 1.0, **fields) for i in range(count)]


def test_a_stored_record_is_never_taken_for_one_that_was_cut_off(tmp_path: Path) -> None:
    """Any byte of the last record, and any of a large one before others: what was stored once is not removed."""
    file = left_by_a_killed_server(tmp_path / "s", *some_sessions(3))
    data = file.read_bytes()
    for at in range(len(data) - len(encoded(some_sessions(3)[2])), len(data)):
        file.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        with pytest.raises(DamagedStoreError, match="trajectories repair"):
            read_again(tmp_path / "s")
    large = SessionRecord("large", b"k" * 16, 1.0, metadata={"text": "x" * 5 * 2**20})
    file = left_by_a_killed_server(tmp_path / "s", large, *some_sessions(3))
    data = bytearray(file.read_bytes())
    for at in (150, 151, 1000):
        data[at] ^= 0x55
        file.write_bytes(data)
        with pytest.raises(DamagedStoreError, match="trajectories repair"):
            read_again(tmp_path / "s")
        assert file.stat().st_size == len(data)


def test_zeros_that_a_lost_power_leaves_are_cut_off(tmp_path: Path) -> None:
    file = left_by_a_killed_server(tmp_path / "s", *some_sessions(3))
    data = file.read_bytes()
    large = encoded(SessionRecord("large", b"k" * 16, 1.0, metadata={"text": "x" * 5000}))
    for end in (b"\0" * 4096, large[:4000] + b"\0" * (len(large) - 4000)):
        file.write_bytes(data + end)
        assert len(read_again(tmp_path / "s")) == 3 and file.read_bytes() == data


@pytest.mark.parametrize("killed", [False, True])
def test_a_journal_under_another_name_is_noticed(tmp_path: Path, killed: bool) -> None:
    async def main() -> None:
        files = await long_store(tmp_path / "full", killed=killed)
        journals = sorted(name for name in files if name.startswith("journal"))
        beyond = f"journal-{int(journals[-1][8:16]) + 1:08d}.log"
        for source in journals:
            for target in {*journals, beyond} - {source}:
                put(tmp_path / "copied", files | {target: files[source]})
                with pytest.raises(DamagedStoreError, match=target):
                    Store(tmp_path / "copied")

    run(main())


def test_a_folder_that_is_a_file_and_a_file_that_is_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequestError, match="file cannot be a folder"):
        read_again(tmp_path / "file")
    for name in ("journal-00000001.log", "current"):
        file = left_by_a_killed_server(tmp_path / "s", *some_sessions(1)).with_name(name)
        file.unlink()
        file.mkdir()
        with pytest.raises(BadRequestError, match=f"Cannot read .*{name}"):
            read_again(tmp_path / "s")


def test_a_second_creation_of_a_session_does_not_fit() -> None:
    table = SessionLedger().table
    table.apply(some_sessions(1)[0])
    with pytest.raises(KeyError, match="s0"):
        table.apply(some_sessions(1)[0])


def test_a_store_of_an_older_format_is_named_with_the_remedy(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "journal-00000001.log").write_bytes(encoded(msgspec.structs.replace(HEADER, format=1)))
        with pytest.raises(
            BadRequestError, match=r"has format 1, and this version writes format 2\. Name another folder"
        ):
            Store(tmp_path)

    run(main())


def test_a_turn_whose_messages_were_lost_does_not_fit() -> None:
    async def main() -> None:
        ledger, lossy = SessionLedger(), SessionLedger()
        records: list[Any] = []
        ledger.store = Recorder(records)
        who = created(ledger)
        await turn(ledger, who, plan([1], new_nodes=node("a")), [2])
        await turn(ledger, who, plan([3], new_nodes=node("b"), after_node=1), [4])
        kept = [record for record in records if getattr(record, "turn", None) != 0]
        with pytest.raises(DamagedStoreError, match="without 'message 0 of session"):
            restore(lossy, kept)
        restore(SessionLedger(), [*kept[:1], CutRecord("lost"), *kept[1:]])

    run(main())


class Recorder:
    """A store that keeps records in a list."""

    failure: str | None = None

    def __init__(self, records: list[Any]) -> None:
        self.put = records.append

    async def flushed(self) -> None:
        pass


# -- failing disks ------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


class DiskWithoutSync(Disk):
    """A killed process loses nothing that it gave to the system."""

    def sync(self, fd: int) -> None:
        pass


class CrashingDisk(DiskWithoutSync):
    """Ends the process at the call number `at`. A write that it interrupts has written half."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _call(self) -> None:
        if self.left == 0:
            raise Crash
        self.left -= 1

    def open(self, path: Path, flags: int) -> int:
        self._call()
        return super().open(path, flags)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        try:
            self._call()
        except Crash:
            super().write(fd, data[: len(data) // 2])
            raise
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._call()
        super().sync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._call()
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._call()
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        self._call()
        super().remove(path)


def _records_of(folder: Path) -> list[Any]:
    files = JournalFiles(folder, HEADER)
    files.open()
    found = [record for record, _ in files.records()]
    files.close()
    return found


def _write(folder: Path, disk: Disk, records: list[Any], acknowledged: list[Any]) -> None:
    """Write records one by one, rotate on the way, and compact at the end."""
    files = JournalFiles(folder, HEADER, disk)
    try:
        files.open()
        list(files.records())
        files.begin()
        for i, record in enumerate(records):
            body = payload(record)
            files.append(frame(body) + body)
            files.sync()
            acknowledged.append(record)
            if i % 5 == 4:
                files.rotate()
        files.rotate()
        files.compact(files.number, lambda record: getattr(record, "session", record) != "two")
    finally:
        files.close()


def test_a_crash_at_any_call_loses_no_acknowledged_record(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path / "source")
        await fill(store.ledger)
        await store.close()

    run(main())
    source = _records_of(tmp_path / "source")
    kept = [record for record in source if getattr(record, "session", record) != "two"]
    at = 0
    while True:
        folder = tmp_path / f"at-{at}"
        acknowledged: list[Any] = []
        try:
            _write(folder, CrashingDisk(at), source, acknowledged)
            ended = True
        except Crash:
            ended = False
        found = _records_of(folder)
        assert found in (source[: len(found)], kept), at
        assert found == kept or len(found) >= len(acknowledged), at
        # The next start writes behind it.
        again: list[Any] = []
        _write(folder, DiskWithoutSync(), source[:3], again)
        assert _records_of(folder)[-1] == source[2]
        if ended:
            assert found == kept
            return
        at += 1
        assert at < 500


class FullDisk(Disk):
    """Writes a part of the data and then fails, as long as `full` is True."""

    def __init__(self) -> None:
        self.full = False
        self.syncs = 0
        self.broken_sync = False

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.full:
            if len(data) > 1:
                return super().write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self.syncs += 1
        if self.broken_sync:
            raise OSError(errno.EIO, "Input/output error")
        super().sync(fd)


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_full_disk_refuses_turns_and_loses_none(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FullDisk()
        store = Store(tmp_path, disk=disk)
        who = created(store.ledger)
        await turn(store.ledger, who, plan([1]), [2])
        running = plan([3], 0, 2)
        opened = TurnLedger(store.ledger).begin(who, running, None, b"")
        disk.full = True
        from tests.server.sessions.building import finished

        with pytest.raises(SessionUnavailableError, match="No space left"):
            await TurnLedger(store.ledger).commit(opened, finished(running, [4]))
        with pytest.raises(SessionUnavailableError, match="No space left"):
            TurnLedger(store.ledger).view(who)
        with pytest.raises(SessionUnavailableError, match="No space left"):
            created(store.ledger)
        assert store.journal.backlog > 0
        disk.full = False
        await _until(lambda: store.journal.failure is None)
        await turn(store.ledger, who, plan([5], 1, 4), [6])
        await _until(lambda: store.journal.backlog == 0)
        before = image(store.ledger)
        await store.close()
        again = Store(tmp_path)
        assert image(again.ledger) == before
        assert again.journal.size == store.journal.size > 0
        await again.close()

    run(main())


def test_a_failed_sync_refuses_turns_until_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        disk = FullDisk()
        store = Store(tmp_path, "turn", disk=disk)
        who = created(store.ledger)
        disk.broken_sync = True
        with pytest.raises(SessionUnavailableError, match="fdatasync"):
            await turn(store.ledger, who, plan([1]), [2])
        disk.broken_sync = False
        with pytest.raises(SessionUnavailableError, match="Start the server again"):
            TurnLedger(store.ledger).view(who)
        await store.close()

    run(main())


def test_policies(tmp_path: Path) -> None:
    """`turn` syncs before a turn is durable, once for all that wait; `never` does not sync at all."""

    async def main() -> None:
        disk = FullDisk()
        store = Store(tmp_path / "turn", "turn", disk=disk, interval=60.0)
        callers = [created(store.ledger) for _ in range(20)]
        await store.ledger.store.flushed()
        before = disk.syncs
        await asyncio.gather(*(turn(store.ledger, who, plan([1]), [2]) for who in callers))
        assert 1 <= disk.syncs - before <= 10
        await store.close()
        lazy = FullDisk()
        store = Store(tmp_path / "never", "never", disk=lazy)
        before = lazy.syncs
        await turn(store.ledger, created(store.ledger), plan([1]), [2])
        assert lazy.syncs == before
        await store.close()
        timed = FullDisk()
        store = Store(tmp_path / "interval", "interval", disk=timed)
        before = timed.syncs
        await turn(store.ledger, created(store.ledger), plan([1]), [2])
        await _until(lambda: timed.syncs > before)
        await store.close()

    run(main())


def test_long_files_are_rotated_and_dead_sessions_compacted(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path, rotate_bytes=4000, compact_bytes=20_000)
        kept = created(store.ledger, id="kept")
        await turn(store.ledger, kept, plan([1, 2]), [3])
        for i in range(60):
            who = created(store.ledger, id=f"dead{i}")
            await turn(store.ledger, who, plan([1] * 50), [2] * 50)
            store.ledger.delete(who.session_id)
        await store.ledger.store.flushed()
        await _until(lambda: any(path.name.startswith("snapshot") for path in tmp_path.iterdir()))
        before = image(store.ledger)
        await store.close()
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 60 * 700
        again = Store(tmp_path)
        assert image(again.ledger) == before
        assert sequence(again.ledger.table.find("kept").turns, 0) == ids([1, 2, 3])
        await again.close()

    run(main())


def test_a_turn_that_ends_after_its_session_is_no_damage(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        who = created(store.ledger)
        TurnLedger(store.ledger).begin(who, plan([1]), None, b"")
        store.ledger.delete(who.session_id)
        await store.ledger.store.flushed()
        await store.close()
        again = Store(tmp_path)
        assert image(again.ledger) == {}
        await again.close()

    run(main())
