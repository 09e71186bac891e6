"""A trainer process for tests of the receiver. It does not import torch, so that it starts fast.

`python -m tests.weight_sync.owner` prints the description of an embedding (0 to 31) in two shards and of a norm (ones)
as JSON. Each line of standard input is a command: "write" multiplies all values by ten, "free" closes the memory.
"""

from __future__ import annotations

import array
import fcntl
import json
import mmap
import os
import sys
import uuid

id = uuid.uuid4().hex
fd = os.memfd_create(f"verl-{id}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 1 << 20)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
memory = mmap.mmap(fd, 1 << 20)
values = array.array("f", [*range(32), 1, 1, 1, 1])
memory[: 36 * 4] = values.tobytes()


def shard(shape: list[int], offset: list[int], start: int) -> dict[str, object]:
    stride = [4, 1][2 - len(shape) :]
    return {"allocation": 0, "shape": shape, "offset": offset, "stride": stride, "storage_offset": start}


allocation = {"id": id, "kind": "shm", "nbytes": 1 << 20, "pid": os.getpid(), "fd": fd, "inode": os.fstat(fd).st_ino}
embed = [shard([5, 4], [0, 0], 0), shard([3, 4], [5, 0], 20)]
tensors = [
    {"name": "model.embed_tokens.weight", "dtype": "float32", "shape": [8, 4], "shards": embed},
    {"name": "model.norm.weight", "dtype": "float32", "shape": [4], "shards": [shard([4], [0], 32)]},
]
print(json.dumps({"id": "theirs", "allocations": [allocation], "tensors": tensors}), flush=True)
for line in sys.stdin:
    if line.strip() == "write":
        values = array.array("f", [value * 10 for value in values])
        memory[: 36 * 4] = values.tobytes()
    elif line.strip() == "free":
        os.close(fd)
    print("done", flush=True)
