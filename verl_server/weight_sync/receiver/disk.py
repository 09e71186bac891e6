"""A folder of safetensors as a source of weights. The files are read, not mapped, and only this rank's part of them.

The stager opens a `Checkpoint`, passes its `tensors` to the receiver's `plan` like other full tensors, and then calls
`read` with the plan's sources. `read` reads exactly those bytes from the files, while generation continues. The commit
copies from memory and does not wait for a disk.

The tensors lie in one anonymous mapping as large as the checkpoint, of which only the pages that are read into take
memory. Mapped files would take less memory, but would have three faults. The page cache may drop the file's pages
before the commit. If another process cuts a file off, a read of the mapping is SIGBUS, which ends the server. If
another process rewrites a file, the weights are a silent mixture of two checkpoints. With reads, a file that was cut
off is a short read, and a rewritten file is detected by its times. Both raise an ordinary error before any weight is
written.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.models.loader import checkpoint_files
from verl_server.weight_sync.shm_file import read_exactly

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_MAP_NORESERVE = 0x4000  # of Linux; Python's mmap does not name it everywhere
_MAX_HEADER_BYTES = 100 * 2**20
_MAX_DIM = 16
_ALIGNMENT = 64
_CHUNK_BYTES = 16 * 2**20
"""Bytes of one read, and of the scratch buffer from which columns are copied out of whole rows."""
_RUN_BYTES = 256 * 1024
"""A contiguous part of at least this many bytes is read alone.

Smaller parts are read together with the bytes between them.
"""
_READERS = 4
"""Number of reads in flight. A fast disk needs several to reach its bandwidth."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class _File:
    path: Path
    fd: int
    identity: tuple[int, ...]
    """Identity and times of the file, which change when the file is written or replaced."""
    start: int
    """Byte offset of the file's data in the mapping."""
    data_offset: int
    """Byte offset of the data in the file."""
    nbytes: int


class Checkpoint:
    """An open checkpoint. `tensors` have shapes and may be sliced, but hold zeros until `read` has read them."""

    def __init__(self, folder: str | Path) -> None:
        """Open all files and check their headers. Raise BadRequestError, which names the file and the fault."""
        self.tensors: list[tuple[str, Tensor]] = []
        """Full tensors in the order of the files."""
        self._files: list[_File] = []
        try:
            headers = [self._open(path) for path in checkpoint_files(Path(folder))]
            # Pages that are never touched take no memory.
            self._map = mmap.mmap(-1, max(1, self._end), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
            for file, header in zip(self._files, headers, strict=True):
                self.tensors += [(name, self._tensor(file, entry)) for name, entry in header.items()]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, views: Iterable[Tensor]) -> None:
        """Fill views of `tensors` from the files. Raise WeightUpdateError if a file changed since it was opened."""
        readers = ThreadPoolExecutor(_READERS, thread_name_prefix="checkpoint")
        try:
            for done in [readers.submit(self._read_view, view) for view in views]:
                done.result()
        finally:
            readers.shutdown(cancel_futures=True)
        for file in self._files:
            _check_untouched(file)

    def close(self) -> None:
        """Close the files. The memory that was read stays until the last tensor on it is freed."""
        for file in self._files:
            os.close(file.fd)
        self._files = []

    @property
    def _end(self) -> int:
        return self._files[-1].start + self._files[-1].nbytes if self._files else 0

    # -- headers -----------------------------------------------------------------------------------------------

    def _open(self, path: Path) -> dict[str, _Entry]:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadRequestError(f"Cannot read {path}: {error.strerror}.") from None
        try:
            status = os.fstat(fd)
            header, data_offset = _read_header(fd, path, status.st_size)
        except BaseException:
            os.close(fd)
            raise
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self._files.append(_File(path, fd, _identity(status), start, data_offset, status.st_size - data_offset))
        return header

    def _tensor(self, file: _File, entry: _Entry) -> Tensor:
        begin, end = (file.start + offset for offset in entry.data_offsets)
        data = self._memory[begin:end]
        dtype = _DTYPES[entry.dtype]
        if begin % dtype.itemsize:
            raise BadRequestError(
                f"{file.path} has {entry.dtype} data at byte {entry.data_offsets[0]}, which is not a multiple of "
                f"{dtype.itemsize}. Save it again with safetensors, which aligns it."
            )
        return data.view(dtype).view(entry.shape)

    # -- data --------------------------------------------------------------------------------------------------

    def _read_view(self, view: Tensor) -> None:
        if view.numel() == 0:
            return
        if view.is_contiguous():
            self._read_span(view.data_ptr() - self._memory.data_ptr(), view.nbytes)
        elif view.dim() == 2 and view.stride(1) == 1 and view.shape[1] * view.itemsize < _RUN_BYTES:
            self._read_columns(view)
        else:
            for part in view:
                self._read_view(part)

    def _read_span(self, start: int, nbytes: int) -> None:
        """Read a range of bytes of the mapping that is also contiguous in one file."""
        target = memoryview(self._map)[start : start + nbytes]
        file = self._file_at(start)
        _read(file, target, start - file.start + file.data_offset)

    def _read_columns(self, view: Tensor) -> None:
        """Read some columns of a matrix: read whole rows into a scratch buffer, and copy the columns from it."""
        pitch, width = view.stride(0) * view.itemsize, view.shape[1] * view.itemsize
        start = view.data_ptr() - self._memory.data_ptr()
        file = self._file_at(start)
        rows = max(1, _CHUNK_BYTES // pitch)
        scratch = bytearray(min(rows, len(view)) * pitch)
        source = torch.frombuffer(scratch, dtype=torch.uint8)
        for row in range(0, len(view), rows):
            part = view[row : row + rows]
            nbytes = (len(part) - 1) * pitch + width
            offset = start + row * pitch - file.start + file.data_offset
            _read(file, memoryview(scratch)[:nbytes], offset)
            part.copy_(source.view(view.dtype).as_strided(part.shape, view.stride()))

    def _file_at(self, start: int) -> _File:
        return next(file for file in reversed(self._files) if file.start <= start)


def _read(file: _File, target: memoryview, offset: int) -> None:
    try:
        for start in range(0, len(target), _CHUNK_BYTES):
            read_exactly(file.fd, target[start : start + _CHUNK_BYTES], offset + start, str(file.path))
    except OSError as error:
        raise WeightUpdateError(f"Cannot read {file.path}: {error.strerror}.") from None


def _read_header(fd: int, path: Path, size: int) -> tuple[dict[str, _Entry], int]:
    """Return (tensor name -> entry, byte offset of the data). Every entry lies within the file and fits its shape.

    Raise BadRequestError if the file is not a complete safetensors file.
    """
    try:
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
        fields = msgspec.json.decode(os.pread(fd, length, 8), type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        header = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in fields.items()}
        for name, entry in header.items():
            _check_entry(name, entry, size - 8 - length)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise BadRequestError(f"{path} is not a complete safetensors file: {error}.") from None
    return header, 8 + length


def _check_entry(name: str, entry: _Entry, nbytes: int) -> None:
    begin, end = entry.data_offsets
    if entry.dtype not in _DTYPES:
        raise ValueError(f"'{name}' has dtype {entry.dtype}, which is not supported")
    if len(entry.shape) > _MAX_DIM or not all(0 <= length < 2**48 for length in entry.shape):
        raise ValueError(f"'{name}' has shape {entry.shape}")
    if not 0 <= begin <= end <= nbytes:
        raise ValueError(f"'{name}' ends at byte {end:,} of {nbytes:,}; the file was cut off")
    if end - begin != math.prod(entry.shape) * _DTYPES[entry.dtype].itemsize:
        raise ValueError(f"'{name}', {entry.dtype} {entry.shape}, has {end - begin:,} bytes")


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _check_untouched(file: _File) -> None:
    """Raise WeightUpdateError if the file was written or replaced since it was opened.

    In this case, other files of the folder may already belong to another checkpoint.
    """
    seen = [os.fstat(file.fd)]
    with contextlib.suppress(FileNotFoundError):  # deleted is fine: what is open is still whole
        seen.append(os.stat(file.path))
    if any(_identity(status) != file.identity for status in seen):
        raise WeightUpdateError(
            f"{file.path} was written or replaced while it was read. Give each checkpoint a folder of its own, and "
            "update from it when it is complete."
        )
