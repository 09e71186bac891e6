"""A process that takes the lock on the GPUs, for tests of the lock.

`python -m tests.gpu_lock_holder FOLDER alone|shared` prints "held" when it has the lock. It keeps the lock until its
standard input ends.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.gpu_plugin import GpuLock

lock = GpuLock(Path(sys.argv[1]))
lock.acquire(alone=sys.argv[2] == "alone", seconds=60)
print("held", flush=True)
sys.stdin.read()
