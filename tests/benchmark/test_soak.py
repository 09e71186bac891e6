"""A hundred updates in each mode arrive while requests run, each checked by checksum. (`make soak`: a thousand.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.soak import MODES, Trainer, check_reply, soak
from tests.depth import at_depth


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", at_depth(MODES))
def test_every_update_arrives_while_requests_run(mode: str, tiny_llama: Path) -> None:
    figures = soak(mode, tiny_llama, updates=100, bound=10.0, progress=lambda text: None)
    assert figures["checksummed"] >= 100
    assert figures["generations"] > 20, "requests must have run during the updates"


class StaleEngine:
    """Accepts every update and applies none."""

    def __init__(self, checksums: dict[str, str]) -> None:
        self.checksums = checksums

    def update_weights_from_tensor(self, *_: Any, **__: Any) -> None: ...

    def weights_checker(self) -> dict[str, Any]:
        return {"ranks": [{"checksums": self.checksums}]}


def test_a_lost_update_does_not_pass(tiny_llama: Path) -> None:
    trainer = Trainer(tiny_llama)
    with pytest.raises(AssertionError, match="differ from the trainer's"):
        trainer.push(StaleEngine({}), mode="wait")  # type: ignore[arg-type]
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("ids", "spans", "finish"),
    [
        ([1, 2], [("1@5f2c9a1e", 0, 2)], "length"),  # a token is missing
        ([1, 2, 3], [("1@5f2c9a1e", 0, 2)], "length"),  # a token without a version
        ([1, 2, 3], [("2@5f2c9a1e", 0, 2), ("1@5f2c9a1e", 2, 3)], "length"),  # returns to an older version
        ([1, 2, 3], [("1@5f2c9a1e", 0, 1), ("2@5f2c9a1e", 2, 3)], "length"),  # a gap between versions
        ([1, 2, 3], [("1@5f2c9a1e", 0, 2), ("default", 2, 3)], "length"),  # returns to the loaded weights
    ],
)
def test_a_wrong_reply_does_not_pass(ids: list[int], spans: list[tuple[str, int, int]], finish: str) -> None:
    versions = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    meta = {"finish_reason": {"type": finish}, "weight_versions": versions}
    with pytest.raises(AssertionError):
        check_reply({"meta_info": meta, "output_ids": ids}, 3)
    whole = [{"version": "1@5f2c9a1e", "start": 0, "end": 3}]
    check_reply({"meta_info": meta | {"weight_versions": whole}, "output_ids": [1, 2, 3]}, 3)
