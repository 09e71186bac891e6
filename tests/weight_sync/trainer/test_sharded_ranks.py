"""Sharded modules on four real ranks. One launch of `sharded_ranks.py` under torchrun runs all checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torchrun import expect_passed, torchrun
from tests.weight_sync.sharded_ranks import CHECKS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four_ranks")
    torchrun(4, "tests.weight_sync.sharded_ranks", results=folder)
    return folder


@pytest.mark.parametrize("check", CHECKS)
def test_four_ranks(four_ranks: Path, check: str) -> None:
    expect_passed(four_ranks, 4, check)
