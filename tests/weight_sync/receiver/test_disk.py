"""Checkpoints as a source of weights: exact values, reads of slices only, and plain errors for broken files."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.receiver import disk
from verl_server.weight_sync.receiver.disk import Checkpoint

WEIGHTS = {
    "matrix": torch.randn(300, 70),
    "other": torch.randn(64, 33).bfloat16(),
    "norm": torch.randn(9),
    "cube": torch.randn(4, 5, 6).half(),
    "ids": torch.arange(5),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


def test_whole_tensors(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        tensors = dict(checkpoint.tensors)
        assert set(tensors) == set(WEIGHTS)
        checkpoint.read(tensors.values())
    for name, expected in WEIGHTS.items():
        assert tensors[name].dtype == expected.dtype and torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("run_bytes", [16, 256 * 1024])
@pytest.mark.parametrize("chunk_bytes", [1000, 16 * 2**20])
def test_slices_and_nothing_else(
    folder: Path, run_bytes: int, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "_RUN_BYTES", run_bytes)
    monkeypatch.setattr(disk, "_CHUNK_BYTES", chunk_bytes)
    slices: dict[str, Any] = {
        "matrix": (slice(100, 200), slice(10, 30)),
        "other": (slice(32, 64), slice(None)),
        "norm": slice(3, 3),
        "cube": (slice(1, 3), slice(2, 4), slice(1, 5)),
    }
    with Checkpoint(folder) as checkpoint:
        tensors = dict(checkpoint.tensors)
        checkpoint.read(tensors[name][index] for name, index in slices.items())
    for name, index in slices.items():
        assert torch.equal(tensors[name][index], WEIGHTS[name][index]), name
        rest = tensors[name].clone()
        rest[index] = 0
        assert not rest.any(), f"more of {name} was read than requested"
    assert not tensors["ids"].any()


def test_shards_in_several_files(tmp_path: Path) -> None:
    names = list(WEIGHTS)
    parts = {"model-1.safetensors": names[:3], "model-2.safetensors": names[3:]}
    for file, some in parts.items():
        save_file({name: WEIGHTS[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint(tmp_path) as checkpoint:
        tensors = dict(checkpoint.tensors)
        checkpoint.read(tensors.values())
    assert all(torch.equal(tensors[name], expected) for name, expected in WEIGHTS.items())


def test_tensors_outlive_the_checkpoint_and_descriptors_do_not(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Checkpoint(folder) as checkpoint:
        matrix = dict(checkpoint.tensors)["matrix"]
        checkpoint.read([matrix])
    del checkpoint
    assert torch.equal(matrix, WEIGHTS["matrix"])
    (folder / "model.safetensors").write_bytes(b"")
    for _ in range(3):
        with pytest.raises(BadRequestError):
            Checkpoint(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_deleting_the_checkpoint_while_it_is_read_is_harmless(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        shutil.rmtree(folder)
        tensors = dict(checkpoint.tensors)
        checkpoint.read(tensors.values())
        assert torch.equal(tensors["matrix"], WEIGHTS["matrix"])


# -- files that change while they are read --------------------------------------------------------------------


def test_a_file_that_is_cut_off_is_an_error_and_not_the_end(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        os.truncate(folder / "model.safetensors", 2000)
        with pytest.raises(WeightUpdateError, match="was cut off while it was read"):
            checkpoint.read(tensor for _, tensor in checkpoint.tensors)


def test_a_file_that_is_written_in_place(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        with open(folder / "model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x01")
        status = os.stat(folder / "model.safetensors")
        # The file system's clock may be too coarse to show the write.
        os.utime(folder / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(WeightUpdateError, match="was written or replaced while it was read"):
            checkpoint.read(tensor for _, tensor in checkpoint.tensors)


def test_a_file_that_is_replaced(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        save_file({"matrix": torch.zeros(300, 70)}, folder / "new")
        os.replace(folder / "new", folder / "model.safetensors")
        with pytest.raises(WeightUpdateError, match="Give each checkpoint a folder of its own"):
            checkpoint.read(tensor for _, tensor in checkpoint.tensors)


# -- broken checkpoints ---------------------------------------------------------------------------------------


def written(folder: Path, header: object, data: bytes = bytes(8)) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def test_the_smallest_file_is_read(tmp_path: Path) -> None:
    with Checkpoint(written(tmp_path, {"__metadata__": {"format": "pt"}} | entry())) as checkpoint:
        assert [name for name, _ in checkpoint.tensors] == ["w"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "not a complete safetensors file"),
        (b"[]", "not a complete safetensors file"),
        (b"\xff\xfe", "not a complete safetensors file"),
        (entry(data_offsets=[0, 12], shape=[3]), "'w' ends at byte 12 of 8; the file was cut off"),
        (entry(data_offsets=[8, 0]), "'w' ends at byte 0"),
        (entry(data_offsets=[-8, 0]), "'w' ends at byte 0"),
        (entry(shape=[3]), r"'w', F32 \[3\], has 8 bytes"),
        (entry(shape=[-1, -2]), r"'w' has shape \[-1, -2\]"),
        (entry(shape=[2**62, 2**62]), "'w' has shape"),
        (entry(shape=[2**100, 0], data_offsets=[0, 0]), "'w' has shape"),
        (entry(shape=[1] * 100), "'w' has shape"),
        (entry(dtype="F4"), "'w' has dtype F4, which is not supported"),
        (entry(dtype="BF16", shape=[1], data_offsets=[1, 3]), "data at byte 1, which is not a multiple of 2"),
        ({"w": {"dtype": "F32"}}, "missing required field"),
        ({"w": 3}, "Expected `object`"),
    ],
)
def test_headers_that_are_wrong(tmp_path: Path, header: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        Checkpoint(written(tmp_path, header))


@pytest.mark.parametrize("size", [0, 4, 8, 9, 100, 2000])
def test_truncated_files_are_refused_when_opened(folder: Path, size: int) -> None:
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(BadRequestError, match=r"model\.safetensors is not a complete safetensors file"):
        Checkpoint(folder)


def test_a_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(BadRequestError, match="a header of"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"w": 3}}',
        b'{"weight_map": {"w": "../model.safetensors"}}',
        b'{"weight_map": {"w": "/etc/passwd"}}',
        b'{"weight_map": {"w": ["a"]}}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_wrong(folder: Path, index: bytes) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(BadRequestError, match=r"Cannot read .*model\.safetensors\.index\.json: .*Is it complete"):
        Checkpoint(folder)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"has no \*\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "model-1.safetensors"}}')
    with pytest.raises(BadRequestError, match=r"names files that do not exist: model-1\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(BadRequestError, match=r"Cannot read|not a complete"):
        Checkpoint(tmp_path)
