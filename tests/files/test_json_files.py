"""Every fault that a JSON file can have is a BadRequestError that names the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_server.errors import BadRequestError
from verl_server.files.json_files import convert, decode_json, parse_json, read_json, read_text

_FAULTS = {
    "empty": b"",
    "cut off": b'{"a": 1',
    "binary": b"\xff\xfe\x00",
    "a list": b"[]",
    "202 levels": b'{"a": ' + b"[" * 201 + b"]" * 201 + b"}",
    "100,000 levels": b"[" * 100_000,
    "a lone surrogate": rb'{"a": "\ud800"}',
    "a number of 5000 digits": b'{"a": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("fault", list(_FAULTS))
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    (tmp_path / "f.json").write_bytes(_FAULTS[fault])
    with pytest.raises(BadRequestError, match=r"f\.json"):
        read_json(tmp_path / "f.json")


def test_an_absent_file_a_folder_and_a_wrong_path_are_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", tmp_path / ("a" * 300), tmp_path / "a\0b"):
        with pytest.raises(BadRequestError, match="Cannot read"):
            read_json(path)
    (tmp_path / "key").write_bytes(b"\xff")
    with pytest.raises(BadRequestError, match=r"key is not a text"):
        read_text(tmp_path / "key")


def test_deep_but_bounded_json_is_read() -> None:
    assert parse_json("[" * 200 + "]" * 200, "t")


class Record(msgspec.Struct):
    step: int = 0


@pytest.mark.parametrize(
    "data", [b'{"step": 1e999}', b'{"step": "\xff"}', b"[", b"[" * 100_000, b"null", b'{"step": NaN}']
)
def test_a_record_of_another_type_is_refused_by_place(data: bytes) -> None:
    with pytest.raises(BadRequestError, match=r"^f:3: "):
        decode_json(data, Record, "f:3")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), "x", [], None])
def test_a_value_of_another_type_is_refused_by_key(value: Any) -> None:
    with pytest.raises(BadRequestError, match=r"^f: .*\$\.step"):
        convert({"step": value}, Record, "f")
