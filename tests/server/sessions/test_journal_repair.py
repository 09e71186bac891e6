"""The repair gives up the lost part of a damaged store, keeps a copy of each file, and a server reads the rest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.sessions.building import caller, created, plan, turn
from tests.server.sessions.test_journal import HEADER, Store, fill, image, long_store, put, run
from verl_server.cli.main import main
from verl_server.errors import BadRequestError
from verl_server.server.sessions.journal_files import DamagedStoreError, JournalFiles
from verl_server.server.sessions.journal_repair import find_damage, locked


def damaged(folder: Path) -> tuple[Path, bytes]:
    """Make a store whose middle record has a flipped bit. Return its file, and the bytes of the file."""

    async def made() -> None:
        store = Store(folder)
        await fill(store.ledger)
        await store.close()

    run(made())
    file = folder / "journal-00000001.log"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file, bytes(data)


def test_a_damaged_store_is_repaired_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, data = damaged(tmp_path / "store")
    with pytest.raises(DamagedStoreError, match="trajectories repair"):
        asyncio.run(_records(file.parent))
    [damage] = find_damage(file.parent)
    assert 0 < damage.offset <= len(data) // 2 and damage.size == len(data)

    assert main(["trajectories", "repair", str(file.parent), "--check"]) == 1
    assert file.read_bytes() == data, "--check changes nothing"
    assert f"{file}, byte {damage.offset}" in capsys.readouterr().out

    assert main(["trajectories", "repair", str(file.parent)]) == 0
    assert file.read_bytes()[: damage.offset] == data[: damage.offset]
    copy = file.with_name("journal-00000001.log.damaged-0")
    assert copy.read_bytes() == data and str(copy) in capsys.readouterr().out
    assert asyncio.run(_records(file.parent)) > 0

    assert main(["trajectories", "repair", str(file.parent)]) == 0
    assert "all records are whole" in capsys.readouterr().out
    file.write_bytes(data)
    assert main(["trajectories", "repair", str(file.parent)]) == 0
    assert copy.with_name("journal-00000001.log.damaged-1").exists(), "an earlier copy stays"


@pytest.mark.parametrize("killed", [False, True])
def test_whatever_was_lost_can_be_given_up_and_the_rest_goes_on(tmp_path: Path, killed: bool) -> None:
    """Each file is deleted, emptied, cut, and has a byte flipped: a repair leaves what is in the other files."""

    async def main_loop() -> None:
        files = await long_store(tmp_path / "full", killed=killed)
        folder = tmp_path / "damaged"
        put(folder, files)
        store = Store(folder)
        everything = image(store.ledger)
        await store.close()
        for name, data in files.items():
            flipped = bytearray(data)
            flipped[len(data) // 2] ^= 1
            for broken in (None, b"", data[: len(data) // 2], bytes(flipped)):
                put(folder, {k: v for k, v in (files | {name: broken}).items() if v is not None})
                is_last = name == max(each for each in files if each.startswith("journal"))
                if not (killed and is_last and broken and len(broken) < len(data)):  # a torn end
                    with pytest.raises(DamagedStoreError):
                        Store(folder)
                    assert main(["trajectories", "repair", str(folder)]) == 0
                assert find_damage(folder) == []
                store = Store(folder)
                left = image(store.ledger)
                kept = left.keys() & everything.keys()
                assert len(kept) >= len(everything) - 3
                assert sum(everything[session] != left[session] for session in kept) <= 1, "cut in a session"
                assert all(session.startswith("s1-") for session in left.keys() - kept), "a deletion was lost"
                assert left == everything or name != "current"
                await turn(store.ledger, created(store.ledger, id="new"), plan([1]), [2])
                await store.close()
                again = Store(folder)
                assert image(again.ledger).keys() == left.keys() | {"new"}
                await again.close()

    run(main_loop())


def test_a_session_that_needs_a_lost_record_is_left_out_behind_a_repair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main_loop() -> None:
        for i in range(3):
            store = Store(tmp_path)
            if i == 0:
                created(store.ledger, id="hurt")
                created(store.ledger, id="whole")
            await turn(store.ledger, caller("hurt"), plan([1], i - 1, 2 * i) if i else plan([1]), [2])
            await store.close()
        (tmp_path / "journal-00000002.log").unlink()
        assert main(["trajectories", "repair", str(tmp_path)]) == 0
        for _ in range(2):  # also at the next start
            store = Store(tmp_path)
            assert image(store.ledger).keys() == {"whole"}
            assert "1 sessions lost records before the store was repaired, and are left out: hurt" in caplog.text
            caplog.clear()
            await store.close()

    run(main_loop())


async def _records(folder: Path) -> int:
    files = JournalFiles(folder, HEADER)
    files.open()
    try:
        return sum(1 for _ in files.records())
    finally:
        files.close()


def test_a_store_in_use_and_a_folder_without_one_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, data = damaged(tmp_path / "store")
    with locked(file.parent), pytest.raises(BadRequestError, match="Stop it"), locked(file.parent):
        pass
    assert file.read_bytes() == data
    with pytest.raises(BadRequestError, match="is no session store"):
        find_damage(tmp_path)
    assert main(["trajectories", "repair", str(tmp_path / "none")]) != 0
    assert "is no folder" in capsys.readouterr().err
