"""The benchmark of hostile callers runs on the CPU and prints the figures that it documents."""

from __future__ import annotations

import pytest

from benchmarks import hostile_callers
from tests.benchmark.lines import figures


@pytest.mark.exhaustive
def test_hostile_callers(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["n_1000000", "token_ids_logprob_1000000", "control_characters"]
    small = ["--set", "cpu_threads=1", "--set", "kv_cache_gib=0.1"]
    hostile_callers.main([*small, "--rounds", "1", "--seconds", "0.2", "--connections", "20", "--only", *chosen])
    found = figures(capsys)
    for name in ("loop_held_ms", "added_gap_ms"):
        assert found[name]["attack"] in chosen and set(found[name]["statuses"]) == {"400"}
    assert len(found["added_gap_ms"]["spread"]) == 1
    for kind in ("idle", "half_open"):
        assert found[f"{kind}_connection_bytes"]["connections"] == 20
    assert found["quiet_gap_ms"]["value"] > 0 and found["quiet_health_ms"]["value"] > 0
