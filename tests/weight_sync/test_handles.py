"""Decoding of descriptions: the types and ranges of their numbers. The receiver checks the meaning."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch

from tests.weight_sync.described import described
from verl_server.weight_sync.handles import WeightsDescription


def test_a_description_crosses_both_wires() -> None:
    _, description = described({"a": torch.ones(2, 3)})
    for wire in (msgspec.json, msgspec.msgpack):
        assert wire.decode(wire.encode(description), type=WeightsDescription) == description


@pytest.mark.parametrize("number", [-1, 2**63, 10**30, 1.5, "1"])
@pytest.mark.parametrize("field", ["allocation", "storage_offset", "shape", "offset", "stride"])
def test_numbers_that_no_memory_has_do_not_come_in(field: str, number: object) -> None:
    _, description = described({"a": torch.ones(2)})
    message = msgspec.to_builtins(description)
    shard = message["tensors"][0]["shards"][0]
    shard[field] = [number] if isinstance(shard.get(field), list) else number
    with pytest.raises(msgspec.ValidationError, match=rf"\$.tensors\[0\].shards\[0\].{field}"):
        msgspec.json.decode(json.dumps(message), type=WeightsDescription)
