"""Gradients are clipped by the norm over all ranks' shards: two ranks step exactly as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.torchrun import run_ranks
from tests.train.clip_ranks import MAX_NORM, main


def test_two_ranks_clip_as_one_rank_does(policy_folder: Path, tmp_path: Path) -> None:
    main(str(policy_folder), str(tmp_path / "1"))
    arguments = [str(policy_folder), str(tmp_path / "2")]
    assert run_ranks(2, "tests.train.clip_ranks", arguments, tmp_path / "log", 60) == [0, 0], (
        tmp_path / "log"
    ).read_text()
    one, two = (torch.load(tmp_path / name) for name in ("1", "2"))
    assert one["norm"] > 2 * MAX_NORM
    assert two["norm"] == pytest.approx(one["norm"], rel=1e-4)
    assert (two["after"] - two["before"]).norm().item() == pytest.approx(MAX_NORM, rel=1e-3)
    torch.testing.assert_close(two["after"], one["after"], rtol=0, atol=1e-6)
