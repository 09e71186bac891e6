"""`PipeOutput`: an output that is no regular file (a pipe, a terminal, /dev/null), which is opened once.

`TrajectoryFile` uses it. If a pipe were opened for each line, its reader would see the end after the first line.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from pathlib import Path

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.run_output import is_stdout

logger = logging.getLogger(__name__)

_READER_SECONDS = 60.0
"""Seconds for a reader to open a named pipe."""
_PAUSE = 0.05


class PipeOutput:
    """One open output. `close` it at the end."""

    def __init__(self, file: Path) -> None:
        """Open the output. Raise BadRequestError if it cannot be written, or no reader opens a pipe in a minute."""
        self.file = file
        self._descriptor = _opened(file)

    @property
    def is_stdout(self) -> bool:
        """True if this process prints to the same place."""
        return is_stdout(self._descriptor)

    def write(self, data: bytes) -> None:
        """Write all of `data`. Raise VerlServerError if the reader has closed the output."""
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BrokenPipeError:
            raise VerlServerError(
                f"The reader of {self.file} has ended before the run. Let it read until its input ends, or name a file."
            ) from None
        except OSError as error:
            raise VerlServerError(f"{self.file} cannot be written: {error.strerror or error}.") from None

    def close(self) -> None:
        """Close the output, so that its reader sees the end."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_no_regular_file(file: Path) -> bool:
    """Return True if the place has something that is neither a regular file nor a folder. Links are followed.

    Raise BadRequestError if the place cannot be read: a name that is too long, a link to itself, no permission.
    """
    try:
        mode = file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise BadRequestError(f"The file {file} cannot be written: {error}.") from None
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _opened(file: Path) -> int:
    """Return a descriptor for writing. Retry a named pipe without a reader, because opening it would wait forever."""
    end = time.monotonic() + _READER_SECONDS
    is_announced = False
    while True:
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO or not file.is_fifo():
                raise BadRequestError(f"{file} cannot be written: {error.strerror or error}.") from None
        else:
            os.set_blocking(descriptor, True)
            return descriptor
        if time.monotonic() > end:
            raise BadRequestError(f"Nobody reads the pipe {file}. Start its reader before this command.")
        if not is_announced:
            logger.warning("Waiting up to %.0f s for a reader of the pipe %s.", _READER_SECONDS, file)
            is_announced = True
        time.sleep(_PAUSE)
