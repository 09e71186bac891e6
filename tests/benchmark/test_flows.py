"""The recorder of `benchmarks.flows` sees all processes and threads of a push, and counts what it says."""

from __future__ import annotations

import pytest

from benchmarks.flows import files_of, moves_of, record


@pytest.mark.exhaustive
def test_a_push_is_recorded_from_the_trainer_to_the_copy() -> None:
    calls = record(("push",), http=False)["push"]
    files = files_of(calls)
    assert "engine/verl_engine.py" in files, "the trainer's process"
    assert "server/tokenizer_manager.py" in files, "the thread of the event loop"
    assert "weight_sync/receiver/plan.py" in files, "the scheduler's process"
    assert "server/launch.py" not in files, "the start does not count"
    assert (
        "worker/weights/weight_updater.py:WeightUpdater._copy",
        "weight_sync/receiver/plan.py:UpdatePlan.commit",
    ) in (moves_of(calls))


def test_moves_are_calls_between_rooms_that_begin_in_the_flow() -> None:
    calls = {
        (None, "a/x.py:f"),
        ("a/x.py:f", "a/y.py:g"),  # one room
        ("a/x.py:f", "a/deep/w.py:k"),  # one room
        ("a/x.py:f", "b/z.py:h"),
        ("a/x.py:f", "weight_sync/trainer/t.py:t"),
        ("weight_sync/trainer/t.py:t", "weight_sync/receiver/r.py:r"),
        ("b/z.py:h", "errors.py:e"),  # no room
        ("c/loop.py:run", "a/x.py:f"),  # the caller ran before
    }
    assert files_of(calls)[:4] == ["a/deep/w.py", "a/x.py", "a/y.py", "b/z.py"]
    assert moves_of(calls) == [
        ("a/x.py:f", "b/z.py:h"),
        ("a/x.py:f", "weight_sync/trainer/t.py:t"),
        ("weight_sync/trainer/t.py:t", "weight_sync/receiver/r.py:r"),
    ]
