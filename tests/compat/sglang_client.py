"""A trainer process that pushes weights as SGLang's clients do: one push, and one line of output, for each input line.

An input line is {"url", "key", "folder", "factor", "format", "ranks"}. The weights are those of the checkpoint in
`folder`, times `factor`, in one of SGLang's wire formats, for `ranks` tensor-parallel ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.multiprocessing
from safetensors.torch import load_file

from tests.weight_sync import sglang_payloads as sglang


def payloads(name: str, weights: list[tuple[str, torch.Tensor]], ranks: int) -> dict[str, Any]:
    """Return the body of the request."""
    if name == "pairs":
        return {"serialized_named_tensors": [sglang.serialized(weights) for _ in range(ranks)]}
    if name == "one for all":
        return {"serialized_named_tensors": [sglang.serialized(weights)] * ranks}
    if name == "local":
        with sglang.stub_modules(**{f"{sglang.OLD}:LocalSerializedTensor": sglang.LocalSerializedTensor}):
            local = [
                (key, sglang.LocalSerializedTensor([sglang.dumps(tensor) for _ in range(ranks)]))
                for key, tensor in weights
            ]
            return {"serialized_named_tensors": [sglang.serialized(local)] * ranks}
    module = sglang.BUCKETS if name == "bucket" else sglang.OLD
    with sglang.stub_modules(**{f"{module}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
        bucket = sglang.bucket(weights, count_bytes=name == "bucket")
        data = [sglang.serialized(bucket) for _ in range(ranks)]
    return {"serialized_named_tensors": data, "load_format": "flattened_bucket", "kept": bucket}


def main() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    for line in sys.stdin:
        ask = json.loads(line)
        loaded = load_file(Path(ask["folder"]) / "model.safetensors")
        weights = [(name, tensor * ask["factor"]) for name, tensor in loaded.items()]
        body = payloads(ask["format"], weights, ask["ranks"])
        kept = body.pop("kept", weights)  # Keep shared tensors alive until the reply.
        headers = {"Authorization": f"Bearer {ask['key']}"}
        reply = httpx.post(f"{ask['url']}/update_weights_from_tensor", json=body, headers=headers, timeout=60)
        del kept
        print(json.dumps([reply.status_code, reply.json()]), flush=True)


if __name__ == "__main__":
    main()
