"""`VerlEngine` on several ranks: `verl_engine_ranks.py` under torchrun, one launch for many checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torchrun import expect_passed, torchrun
from tests.verl_engine_ranks import SCENARIOS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    torchrun(2, "tests.verl_engine_ranks", "all", tiny_llama, results=folder)
    return folder


CHECKS = [f"{name}: {check}" for name, (_, checks) in SCENARIOS.items() for check in ("start", *checks)]


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(two_ranks: Path, check: str) -> None:
    expect_passed(two_ranks, 2, check)


def test_two_replicas_of_two_ranks(tmp_path: Path, tiny_llama: Path) -> None:
    torchrun(4, "tests.verl_engine_ranks", "replicas", tiny_llama, results=tmp_path)
    expect_passed(tmp_path, 4, "replicas")
