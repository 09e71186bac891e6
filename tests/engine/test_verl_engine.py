"""`VerlEngine` on several ranks. One launch under torchrun runs many of the checks in `verl_engine_ranks.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.verl_engine_ranks import SCENARIOS
from tests.torchrun import expect_passed, torchrun

pytestmark = pytest.mark.timeout(300)


def checks_of(scenario: str) -> list[str]:
    _, checks = SCENARIOS[scenario]
    return [f"{scenario}: {check}" for check in ("start", *checks)]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    torchrun(2, "tests.engine.verl_engine_ranks", "server", tiny_llama, results=folder)
    return folder


@pytest.mark.parametrize("check", [*checks_of("server"), "a_restarted_server_is_healed_by_all_ranks"])
def test_two_ranks(two_ranks: Path, check: str) -> None:
    expect_passed(two_ranks, 2, check)


def test_two_ranks_over_a_router(tmp_path: Path, tiny_llama: Path) -> None:
    torchrun(2, "tests.engine.verl_engine_ranks", "router", tiny_llama, results=tmp_path)
    expect_passed(tmp_path, 2, "all_ranks_push_to_all_servers")


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "server"])
def test_two_ranks_with_other_engines(scenario: str, tmp_path: Path, tiny_llama: Path) -> None:
    torchrun(2, "tests.engine.verl_engine_ranks", scenario, tiny_llama, results=tmp_path)
    for check in checks_of(scenario):
        expect_passed(tmp_path, 2, check)


@pytest.fixture(scope="module")
def two_replicas(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("two_replicas")
    torchrun(4, "tests.engine.verl_engine_ranks", "replicas", tiny_llama, results=folder)
    return folder


@pytest.mark.parametrize(
    "check",
    [
        "start",
        "own_weights",
        "each_replica_has_a_seed_of_its_own",
        "shards_of_all_ranks_are_refused",
        "start jointly",
        "fsdp2_trainer",
        "tensor_parallel_trainer",
        "release_and_resume",
        "one_engine_refuses",
        "an_engine_that_is_gone_is_no_success",
    ],
)
def test_two_replicas_of_two_ranks(two_replicas: Path, check: str) -> None:
    expect_passed(two_replicas, 4, check)
