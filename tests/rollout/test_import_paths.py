"""Import paths that README, docs and examples showed still lead to the same objects."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "name"),
    [("env_server", "EnvServer"), ("games", "GuessNumber"), ("games", "ReasoningGym"), ("tools", "tool")],
)
def test_a_path_that_was_shown_leads_to_the_same_object(module: str, name: str) -> None:
    before = importlib.import_module(f"verl_server.rollout.{module}")
    now = importlib.import_module(f"verl_server.rollout.environments.{module}")
    assert getattr(before, name) is getattr(now, name)
