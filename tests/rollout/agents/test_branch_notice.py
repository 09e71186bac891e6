"""The warning that episodes have many branches is given once, with their kinds and an example."""

from __future__ import annotations

import logging

import pytest

from tests.rollout.test_token_counts import conversation, exported
from verl_server.messages.session_types import Message
from verl_server.rollout.agents.branch_notice import BranchNotice
from verl_server.rollout.trajectory import Trajectory


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def edited() -> list[Trajectory]:
    """Return the three branches of an agent that moved a reminder twice."""
    tree = conversation()
    tree.add(0, began="edited")
    tree.add(0, shared=1, began="edited")
    branches = exported(tree)
    branches[1].turns[-1].messages = [Message("user", "Go on.\n<system-reminder>"), Message("user", "Quick.")]
    return branches


def test_a_run_whose_episodes_are_edited_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    notice = BranchNotice()
    for number in range(7):
        notice.add(f"{number}-0-0", edited())
    assert warnings(caplog) == []
    notice.add("7-0-0", edited())
    notice.add("8-0-0", edited())
    notice.end()
    (text,) = warnings(caplog)
    assert "The first 8 episodes have many branches: 24, 3 an episode (edited 16, root 8)." in text
    assert "branch 1 of the episode 0-0-0 begins as edited at the user's message 'Go on. <system-reminder>'" in text


def test_a_short_run_is_judged_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    notice = BranchNotice()
    notice.add("0-0-0", edited())
    assert warnings(caplog) == []
    notice.end()
    assert len(warnings(caplog)) == 1


def test_conversations_that_go_on_are_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    notice = BranchNotice()
    for number in range(20):
        notice.add(f"{number}-0-0", exported(conversation()))
    notice.add("20-0-0", [])
    notice.end()
    assert warnings(caplog) == []
