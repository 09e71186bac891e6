"""A damaged store is cut at its last whole record, a copy is kept, and a server then reads what is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.sessions.test_journal import HEADER, Store, fill, run
from verl_server.cli import main
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
    assert file.read_bytes() == data[: damage.offset]
    copy = file.with_name("journal-00000001.log.damaged-0")
    assert copy.read_bytes() == data and str(copy) in capsys.readouterr().out
    assert asyncio.run(_records(file.parent)) > 0

    assert main(["trajectories", "repair", str(file.parent)]) == 0
    assert "all records are whole" in capsys.readouterr().out
    file.write_bytes(data)
    assert main(["trajectories", "repair", str(file.parent)]) == 0
    assert copy.with_name("journal-00000001.log.damaged-1").exists(), "an earlier copy stays"


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
