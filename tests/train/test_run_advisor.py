"""A run writes each advisory and its end. It logs an advisory, or ends because of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from verl_server.errors import BadRequestError
from verl_server.logprob_gap import LogprobGap, LogprobGapError
from verl_server.train.grpo import main
from verl_server.train.metrics import StepMetrics, describe_rollout
from verl_server.train.ranks import all_ranks
from verl_server.train.rollout_report import RolloutReport
from verl_server.train.run_advisor import AdvisoryError, RunAdvisor, check_names
from verl_server.watch.advisories import NAMES, Advisor
from verl_server.watch.run_records import Alarm, AlarmEnded, RunEvent

pytestmark = pytest.mark.usefixtures("one_rank")
PHASES = {"rollout": 1.0}


def metrics(step: int, failed: int) -> StepMetrics:
    found = describe_rollout(RolloutReport(episodes=256), step=step, version="0", ranks=1, gap=None)
    found.failed, found.failures = failed, {"infrastructure": failed}
    return found


def gap(mean: float) -> LogprobGap:
    return LogprobGap(tokens=10, mean=mean, largest=mean, kl=0.0)


def advising(**settings: Any) -> tuple[RunAdvisor, list[RunEvent]]:
    events: list[RunEvent] = []
    return RunAdvisor(Advisor("float32"), all_ranks(), note=events.append, **settings), events


def test_an_advisory_warns_unless_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    advisor, events = advising()
    with caplog.at_level(logging.WARNING):
        for step in range(6):
            advisor.check_step(metrics(step, 90), PHASES)
    (event,) = events
    assert isinstance(event, Alarm) and (event.name, event.step, event.stops) == ("failed", 2, False)
    (record,) = caplog.records
    assert record.message.startswith("Step 2: 270 of 768 episodes failed") and "Remedy: " in record.message
    for step in range(6, 20):
        advisor.check_step(metrics(step, 0), PHASES)
    assert [(type(e), e.step) for e in events[1:] if isinstance(e, AlarmEnded)] == [(AlarmEnded, 14)]


def test_an_advisory_that_is_named_is_written_before_it_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    advisor, events = advising(stop_on=check_names(["failed"]))
    advisor.check_step(metrics(0, 200), PHASES)
    advisor.check_step(metrics(1, 200), PHASES)
    with pytest.raises(AdvisoryError, match=r"Step 2: 600 of 768 episodes failed") as caught:
        advisor.check_step(metrics(2, 200), PHASES)
    assert caught.value.exit_status == 5 and not caplog.records, "the error says it"
    assert [event.stops for event in events if isinstance(event, Alarm)] == [True]
    advisor.check_gap(gap(0.5), 3)  # it replaced the default


def test_the_gap_ends_a_run_by_default_far_above_its_bound_only(caplog: pytest.LogCaptureFixture) -> None:
    advisor, events = advising()
    advisor.check_gap(None, 0)
    advisor.check_gap(gap(6e-5), 1)
    assert "Step 1: log-probabilities of server and trainer differ" in caplog.text
    with pytest.raises(LogprobGapError, match=r"Step 2: .*Likely causes: server and trainer compute") as caught:
        advisor.check_gap(gap(0.02), 2)
    assert caught.value.exit_status == 4
    assert [(e.step, e.stops, e.severity) for e in events if isinstance(e, Alarm)] == [
        (1, False, "warning"),
        (2, True, "error"),
    ]
    silent, events = advising(stop_on=check_names(["none"]))
    silent.check_gap(gap(0.02), 0)
    assert [event.stops for event in events if isinstance(event, Alarm)] == [False]


def test_a_run_that_goes_on_knows_what_its_first_steps_were_like(tmp_path: Path) -> None:
    """Entropy fell over the restart. The lines of steps that run again do not count."""

    def step(number: int, entropy: float) -> StepMetrics:
        found = metrics(number, 0)
        found.reward, found.losses = 0.2, {"entropy": entropy}
        return found

    earlier = [msgspec.json.encode(step(number, 2.0)) for number in range(3)]
    later = [msgspec.json.encode(step(number, 0.001)) for number in range(3, 9)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*later, *earlier, b""]))
    advisor, events = advising()
    advisor.recall(tmp_path, 3)
    for number in range(3, 6):
        advisor.check_step(step(number, 0.01), PHASES)
    (event,) = events
    assert isinstance(event, Alarm) and (event.name, event.step, event.bound) == ("entropy_collapse", 5, 0.2)


def test_unknown_names_are_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_names(["none"]) == frozenset() and check_names(list(NAMES)) == set(NAMES)
    for wrong in (["failed", "none"], ["entropy"], []):
        with pytest.raises(BadRequestError, match="groups_without_spread") as caught:
            check_names(wrong)
        assert all(name in str(caught.value) for name in NAMES)
    assert main(["--model-path", "absent", "--env-url", "http://127.0.0.1:9", "--stop-on", "entropy", "failed"]) == 2
    assert "--stop-on entropy: name advisories" in capsys.readouterr().err
