"""`CpuChoice`: the kernels for products and attention on the CPU, chosen once and kept in a file.

`kernel_choice` calls `choose_on_cpu` at each start. The first start on a machine measures (`cpu_measurement`) and
writes the choice beside the compiled library. Every later start reads the file, so that all starts compute the same
bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from verl_server.errors import BadRequestError

logger = logging.getLogger(__name__)

Shape = tuple[int, int]

MOST_ROWS = 512
"""Largest number of rows of a product that is measured: 1, 2, 4, 8, ..., 512."""


class CpuChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names of kernels. Entry i of a list is for 2^(i-1) + 1 to 2^i rows or tokens. The last entry is also for more."""

    products: dict[str, list[Literal["cpp", "torch", "onednn"]]]
    """Kernels for 1, 2, 4, 8, ... rows, by weight shape "OUTxIN"."""
    prompts: Literal["cpp", "torch"]
    """Kernel that normalizes, rotates and stores in steps without decodes."""
    decodes: list[Literal["cpp", "torch"]]
    """Attention kernels for 1, 2, 4, 8, ... decoded tokens in a step."""

    def linears(self, shapes: list[Shape]) -> dict[Shape, list[str]]:
        """Return the list of `products` for each of `shapes`."""
        return {shape: list(self.products[_key(shape)]) for shape in shapes}

    def attends(self, num_decodes: int) -> bool:
        """Return True if the compiled kernel computes attention in a step with `num_decodes` decoded tokens."""
        if not num_decodes:
            return self.prompts == "cpp"
        return self.decodes[min((num_decodes - 1).bit_length(), len(self.decodes) - 1)] == "cpp"

    def lacks(self, shapes: list[Shape]) -> list[str]:
        """Return the `shapes` without kernels as "OUTxIN". Append "decodes" if decodes have no attention kernels."""
        missing = [_key(shape) for shape in shapes if not self.products.get(_key(shape))]
        return missing if self.decodes else [*missing, "decodes"]

    def __str__(self) -> str:
        rows = [f"{shape} {_runs(names)}" for shape, names in self.products.items()]
        return "; ".join([*rows, f"attention of prompts {self.prompts}, of decodes {_runs(self.decodes)}"])


def counts(most: int) -> list[int]:
    """Return the numbers of rows or tokens that are measured: 1, 2, 4, 8, ..., `most`."""
    return [2**i for i in range(most.bit_length())]


def make_choice(products: Mapping[Shape, Sequence[str]], prompts: str, decodes: Sequence[str]) -> CpuChoice:
    """Return a checked `CpuChoice` from products by weight shape."""
    fields = {"products": {_key(shape): names for shape, names in products.items()}}
    return msgspec.convert(fields | {"prompts": prompts, "decodes": decodes}, CpuChoice)


def choose_on_cpu(
    file: Path | None, cache_folder: Path | None, made_of: str, shapes: list[Shape], measure: Callable[[], CpuChoice]
) -> CpuChoice:
    """Return the choice in `file` or, if `file` is None, in a file of the cache whose name is derived from `made_of`.

    If the file in the cache does not exist or is broken, call `measure` and write the result. Raise `BadRequestError`
    if `file` cannot be read or does not fit the model.
    """
    if file is not None:
        return _from_file(file, shapes, measure)
    if cache_folder is None:
        choice = measure()
        logger.info("There is no cache folder for the choice of CPU kernels; every start measures it: %s", choice)
        return choice
    path = cache_folder / f"cpu-choice-{hashlib.sha256(made_of.encode()).hexdigest()[:32]}.json"
    try:
        choice = _read(path, shapes)
        logger.info("CPU kernels as measured before, from %s: %s", path, choice)
        return choice
    except FileNotFoundError:
        return _keep(measure(), path, shapes, replace=False)
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used and is measured anew: %s", path, error)
        return _keep(measure(), path, shapes, replace=True)


def _from_file(path: Path, shapes: list[Shape], measure: Callable[[], CpuChoice]) -> CpuChoice:
    try:
        choice = _read(path, shapes)
        logger.info("CPU kernels from %s: %s", path, choice)
        return choice
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise BadRequestError(
            f"cpu_kernel_choice={str(path)!r} cannot be used: {error}. Name a file that does not exist, so that the "
            "choice is measured and written there, or use 'auto'."
        ) from error
    choice = measure()
    try:
        _write(choice, path, replace=True)
    except OSError as error:
        raise BadRequestError(f"cpu_kernel_choice={str(path)!r} cannot be written: {error}.") from error
    logger.info("Measured CPU kernels and wrote %s: %s", path, choice)
    return choice


def _read(path: Path, shapes: list[Shape]) -> CpuChoice:
    """Return the choice in the file. Raise OSError, or ValueError if it is malformed or lacks one of `shapes`."""
    choice = msgspec.json.decode(path.read_bytes(), type=CpuChoice)
    if missing := choice.lacks(shapes):
        raise ValueError(f"it has no kernels for {', '.join(missing)}")
    return choice


def _keep(choice: CpuChoice, path: Path, shapes: list[Shape], *, replace: bool) -> CpuChoice:
    """Write a new choice into the cache and return it, or the choice of another process that wrote first."""
    try:
        _write(choice, path, replace=replace)
    except FileExistsError:
        return _read(path, shapes)
    except OSError as error:
        logger.warning("The choice of CPU kernels could not be kept, so the next start measures again: %s", error)
        return choice
    logger.info("Measured CPU kernels and kept the choice in %s: %s", path, choice)
    return choice


def _write(choice: CpuChoice, path: Path, *, replace: bool) -> None:
    """Write the file atomically. Raise FileExistsError if it exists, unless `replace`."""
    descriptor, made = tempfile.mkstemp(suffix=".json", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(choice), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())  # or a loss of power leaves an empty file under the name
        os.chmod(made, 0o644)
        if replace or not _link(made, path):
            os.replace(made, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)


def _link(made: str, path: Path) -> bool:
    """Link `made` as `path`. Return False if the file system has no links; raise FileExistsError if `path` exists."""
    try:
        os.link(made, path)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _key(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}"


def _runs(names: Sequence[str]) -> str:
    """Format kernel names for the log: ["torch", "cpp", "cpp"] becomes "torch from 1, cpp from 2"."""
    starts: Iterator[tuple[int, str]] = ((2 ** (i - 1) + 1 if i else 1, name) for i, name in enumerate(names))
    groups = itertools.groupby(starts, key=lambda item: item[1])
    return ", ".join(f"{name} from {next(members)[0]}" for name, members in groups)
