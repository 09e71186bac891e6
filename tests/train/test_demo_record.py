"""The demo's trajectories have their index from the beginning: a reader decodes no line for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watch.index.runs import episode
from tests.watch.index.test_index_build import expect_spared, said
from verl_server.rollout.trajectory import read_jsonl
from verl_server.train.demo_record import DemoTrajectories


def test_the_index_is_what_a_reader_would_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = DemoTrajectories(tmp_path)
    record.add([episode(0, member, float(member)) for member in range(2)], "before")
    record.add([episode(1), episode(2)], "training", 0)
    record.add([], "training", 1)
    record.add([episode(3)], "after")
    record.close()
    assert len(read_jsonl(tmp_path / "trajectories.jsonl")) == 5
    spared = expect_spared(tmp_path, monkeypatch)
    (tmp_path / "trajectories.jsonl.index.sqlite").unlink()
    assert said(tmp_path) == spared
