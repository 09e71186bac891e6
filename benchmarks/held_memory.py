"""A process that holds all but some GiB of a GPU, so that a program beside it sees the memory of a smaller card.

    python -m benchmarks.held_memory --free 16

prints one JSON line when it holds the memory, and ends when its stdin is closed. So it ends with its parent.
`smaller_card` starts it and waits for the line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from verl_server.ipc.readiness import wait_readable

_BLOCK = 4 * 2**30
_STEP = 2**21
"""torch's allocator takes large blocks in multiples of this size from the driver."""
_START_SECONDS, _END_SECONDS = 120.0, 30.0


@contextlib.contextmanager
def smaller_card(free_gib: float, command: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Hold all but `free_gib` GiB of the first GPU during the context. Yield the process's line.

    `command` is by default this module. Raise RuntimeError if the process does not hold the memory within 120 s.
    """
    command = command or [sys.executable, "-m", "benchmarks.held_memory", "--free", str(free_gib)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        line = process.stdout.readline() if wait_readable(process.stdout, _START_SECONDS) else ""
        if not line:
            raise RuntimeError(f"The process that holds memory did not hold it within {_START_SECONDS:g} s; see above.")
        yield json.loads(line)
    finally:
        process.stdin.close()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_END_SECONDS)
        process.stdout.close()


def hold(wanted: int, free: Callable[[], int], allocate: Callable[[int], object]) -> list[object]:
    """Allocate blocks until only about `wanted` bytes are free. Return the blocks.

    Raise RuntimeError if fewer are free at the start.
    """
    if (before := free()) < wanted:
        raise RuntimeError(f"{before / 2**30:.2f} GiB of the GPU are free, less than the {wanted / 2**30:.2f} wanted.")
    blocks = []
    while (excess := free() - wanted) >= _STEP:
        blocks.append(allocate(min(excess, _BLOCK) // _STEP * _STEP))
    return blocks


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.held_memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--free", type=float, required=True, metavar="GIB", help="GiB that stay free")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    blocks = hold(
        round(args.free * 2**30),
        lambda: int(torch.cuda.mem_get_info(device)[0]),
        lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device),
    )
    free, total = torch.cuda.mem_get_info(device)
    print(json.dumps({"free_gib": round(free / 2**30, 3), "total_gib": round(total / 2**30, 3)}), flush=True)
    sys.stdin.read()
    del blocks


if __name__ == "__main__":
    main()
