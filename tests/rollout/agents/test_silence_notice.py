"""The warnings that all first episodes of a run are silent: without a sampled token, or with empty answers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from verl_server.rollout.agents.silence_notice import SilenceNotice
from verl_server.rollout.agents.types import AgentEpisode, AgentTask
from verl_server.rollout.trajectory import Fault, StopReason


def ended(reason: StopReason = StopReason.DONE, tokens: int = 3, **fields: Any) -> AgentEpisode:
    return AgentEpisode(AgentTask(), 0, 0, 0, 0, reason=reason, tokens=tokens, **fields)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def given(caplog: pytest.LogCaptureFixture, *episodes: AgentEpisode, end: bool = True) -> list[str]:
    notice = SilenceNotice()
    for episode in episodes:
        notice.add(episode)
    if end:
        notice.end()
    return warnings(caplog)


def test_a_run_that_samples_nothing_is_warned_about_early_and_once(caplog: pytest.LogCaptureFixture) -> None:
    silent = ended(StopReason.AGENT_ERROR, 0, error="Exit code 1. Please run /login.", fault=Fault.POLICY)
    (text,) = given(caplog, *[silent] * 4, end=False)
    assert "None of the first 4 episodes has a recorded token. Episode 0-0-0 ended as agent_error: Exit code 1" in text
    assert all(cause in text for cause in ("another base URL", "login", "does not fit"))
    given(caplog, *[silent] * 9)
    assert len(warnings(caplog)) == 2  # one of each run


def test_a_fault_of_the_infrastructure_is_no_fault_of_the_agents_settings(caplog: pytest.LogCaptureFixture) -> None:
    away = ended(StopReason.SESSION_LOST, 0, error="The server is away", fault=Fault.INFRASTRUCTURE)
    (text,) = given(caplog, away)
    assert "The server is away" in text and "Likely causes" not in text


def test_the_output_stands_for_an_error_that_there_is_not(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = given(caplog, ended(tokens=0, output="".join(f"line {i}\n" for i in range(9)), fault=Fault.POLICY))
    assert "the program's last lines are\nline 4\n" in text and "line 3" not in text


def test_a_run_whose_answers_are_empty_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = given(caplog, *[ended(result=" \n", output="all done")] * 4, end=False)
    assert "Each of the first 4 episodes ended regularly with an empty answer" in text and "all done" in text
    assert "in another form than its recipe reads" in text


@pytest.mark.parametrize(
    "episode",
    [
        ended(result="42"),
        ended(result=None),  # a command has no answer
        ended(StopReason.MAX_TURNS, result=""),  # a limit explains it
    ],
)
def test_one_episode_that_is_not_silent_is_enough(caplog: pytest.LogCaptureFixture, episode: AgentEpisode) -> None:
    assert given(caplog, *[ended(result="")] * 3, episode, *[ended(result="")] * 9) == []
    assert given(caplog, *[ended(tokens=0, fault=Fault.POLICY)] * 3, episode) == []


def test_one_empty_answer_is_no_pattern(caplog: pytest.LogCaptureFixture) -> None:
    assert given(caplog, ended(result="")) == []
