"""The simulator of cache policies: small runs of the real planner, and Belady's bound on a record by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks import cache_policies
from benchmarks.cache_policies import Access, Machine, Work, belady_hits, main, simulate


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 agents of four turns, and a pool for half of their histories."""
    monkeypatch.setitem(cache_policies.MACHINES, "0.6b", Machine(14_000, 1, 0.8e-3, 0.3e-3, 2.2e-6, 28e-9))
    monkeypatch.setitem(cache_policies.WORKLOADS, "small", Work("0.6b", 24, 4))


def test_the_default_policy_keeps_histories_where_first_come_first_served_loses_them() -> None:
    fcfs, lpm = simulate("small", "fcfs"), simulate("small", "lpm")
    assert float(lpm["hit_rate"]) > 1.3 * float(fcfs["hit_rate"])
    assert float(lpm["computed_again"]) < 0.7 * float(fcfs["computed_again"])
    assert float(lpm["of_belady"]) >= 0.9


@pytest.mark.parametrize("policy", list(cache_policies.POLICIES))
def test_no_policy_beats_the_bounds(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--workload", "small", "--policy", policy])
    line = json.loads(capsys.readouterr().out)
    assert line["hit_rate"] <= line["belady"] <= line["allowed"]
    assert simulate("small", policy) | {"took": 0} == line | {"took": 0}, "a run can be repeated"


def test_optimal_eviction_keeps_the_history_that_is_used_first() -> None:
    turns = [Access("start", agent, 0) for agent in (0, 1, 2)]
    ends = [Access("end", agent, 4) for agent in (0, 1, 2)]
    again = [Access("start", agent, 4) for agent in (2, 0)]
    accesses = [*turns, *ends, Access("hold", -1, 0), *again]
    assert belady_hits(accesses, 12) == 8, "agent 1 does not return"
    assert belady_hits(accesses, 6) == 6, "agent 0 returns last, and loses two pages"
    assert belady_hits([*accesses[:6], Access("hold", -1, 4), *again], 6) == 2, "running requests hold four pages"
