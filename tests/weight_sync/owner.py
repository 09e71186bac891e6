"""A trainer process for the receiver's tests: describes two tensors, then does what stdin says."""

from __future__ import annotations

import sys

import msgspec
import torch

from verl_server.weight_sync.sender import describe_tensors

weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
print(msgspec.json.encode(describe_tensors(weights.items())).decode(), flush=True)
for line in sys.stdin:
    if line.strip() == "write":
        weights["a"].mul_(10)
    elif line.strip() == "free":
        weights.clear()
    print("done", flush=True)
