"""Two FSDP2 ranks push into the servers that share their GPUs: verl's worker, engine and replicas, real servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from hybrid_fixtures import Hybrid

from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerUnavailableError,
    UnansweredError,
    WeightUpdateError,
)


@pytest.fixture(scope="module")
def vendor() -> Iterator[None]:
    """The engine that yields shards; Ray's processes inherit the variable."""
    os.environ["VERL_ENGINE_VENDOR"] = "verl_server"
    yield
    del os.environ["VERL_ENGINE_VENDOR"]


@pytest.fixture(scope="module", params=["two replicas", "one replica of two ranks, offload"])
def hybrid(
    request: pytest.FixtureRequest, vendor: None, local_ray: None, make_config: Callable[..., Any], tiny_model: Path
) -> Iterator[Hybrid]:
    offloads = "offload" in request.param
    made = Hybrid(make_config, tiny_model, 2 if offloads else 1, offload=offloads)
    yield made
    made.end()


def test_memory_is_open_only_while_it_stays(hybrid: Hybrid) -> None:
    """The server keeps memory open that comes twice, unless the trainer offloads it after the update."""
    hybrid.expect_parity(None)
    hybrid.workers.train(seed=1)
    for steps in (0, 1):
        assert hybrid.push("shards", steps) == [None, None]
    hybrid.expect_parity(1)
    assert all(bool(held) != hybrid.offloads for held in hybrid.workers.held())
    hybrid.workers.record_offloads()
    hybrid.update(2)
    hybrid.expect_parity(2)
    expected = [["cpu", []]] if hybrid.offloads else []
    assert [list(map(list, each)) for each in hybrid.workers.offloads()] == [expected, expected]


def test_sleep_push_wake(hybrid: Hybrid) -> None:
    """verl's order of a step. A forward pass without backward leaves parameters gathered before the push."""
    for steps in (3, 4):
        hybrid.workers.forward_only()
        hybrid.sleep()
        hybrid.sleep()
        hybrid.workers.train(seed=steps)
        hybrid.update(steps)
        hybrid.expect_parity(steps)
        assert hybrid.workers.held() == [[], []], "the server closed this memory when it slept"


@pytest.mark.parametrize("kind", ["gathered", "shards", "staged", "async"])
def test_each_kind_of_iterator(hybrid: Hybrid, kind: str) -> None:
    """Buckets of one transaction, and shards in one push, are served as they are."""
    hybrid.workers.cut_buckets(60_000)
    hybrid.workers.train(seed=10)
    assert hybrid.push(kind, 5) == [None, None]
    hybrid.expect_parity(5)


def test_an_update_without_a_number(hybrid: Hybrid) -> None:
    hybrid.workers.train(seed=11)
    assert hybrid.push("shards", None) == [None, None]
    hybrid.expect_parity(None)
    assert hybrid.push("gathered", None) == [None, None]
    hybrid.expect_parity(None)


def test_release_and_resume_by_the_adapter(hybrid: Hybrid) -> None:
    for tags in (["weights"], ["kv_cache"]):
        ray.get(hybrid.workers.memory("release"), timeout=60)
        ray.get(hybrid.workers.memory("resume", ["weights"]), timeout=60)
        ray.get(hybrid.workers.memory("resume", tags), timeout=60)
    with pytest.raises(ServerUnavailableError):
        hybrid.generate()
    assert hybrid.push("shards", 6) == [None, None]
    hybrid.expect_parity(6)


def test_engine_serves_other_consumers(hybrid: Hybrid) -> None:
    assert hybrid.workers.gathered_by_iteration() == [True, True]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_iterator_that_fails_on_one_rank(hybrid: Hybrid, failing_rank: int) -> None:
    """Both ranks raise it. The server refuses to generate from half an update, and the next push heals it."""
    errors = hybrid.push("staged", 7, failing_rank=failing_rank, stop_at=6)
    assert all(isinstance(error, RuntimeError) for error in errors)
    assert all("the iterator of this rank failed" in str(error) for error in errors)
    with pytest.raises(ServerUnavailableError):
        hybrid.generate()
    assert hybrid.push("shards", 8) == [None, None]
    hybrid.expect_parity(8)


def test_a_refused_update(hybrid: Hybrid) -> None:
    """Both ranks raise the server's refusal; nothing was written."""
    for error in hybrid.push("unknown name", 9):
        assert isinstance(error, WeightUpdateError) and "no.such." in str(error)
    hybrid.expect_parity(8)


def test_missing_parameters(hybrid: Hybrid) -> None:
    for error in hybrid.push("gathered", 9, failing_rank=None, stop_at=4):
        assert isinstance(error, WeightUpdateError) and "21 parameters are missing" in str(error)
    with pytest.raises(ServerUnavailableError):
        hybrid.generate()
    assert hybrid.push("gathered", 9) == [None, None]
    hybrid.expect_parity(9)


def test_iterators_of_different_lengths(hybrid: Hybrid) -> None:
    for error in hybrid.push("staged", 9, failing_rank=-2, stop_at=4):
        assert isinstance(error, BadRequestError) and "iterate different weights" in str(error)
    assert hybrid.push("gathered", 9) == [None, None]


def test_a_server_that_died(hybrid: Hybrid) -> None:
    """Both ranks raise it, also the rank whose own server lives."""
    if hybrid.offloads:
        pytest.skip("the replica is needed for the next test")
    ray.kill(hybrid.servers[1])  # its server ends with it
    for error in hybrid.push("shards", 10):
        assert isinstance(error, ServerDiedError | UnansweredError), error


def test_a_rank_that_fails_before_a_collective(hybrid: Hybrid) -> None:
    """The other rank waits in the collective of the trainer, and raises nevertheless. All later calls fail at once."""
    if not hybrid.offloads:
        pytest.skip("a server of these replicas has ended")
    hybrid.workers.set_grace(1.0)
    failed, waited = hybrid.push("gathered", 10, failing_rank=0, stop_at=4)
    assert isinstance(failed, RuntimeError) and "the iterator of this rank failed" in str(failed)
    assert isinstance(waited, UnansweredError) and "the iterator of this rank failed" in str(waited)
    assert all(isinstance(error, UnansweredError) for error in hybrid.push("staged", 11))
