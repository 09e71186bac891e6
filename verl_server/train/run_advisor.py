"""`RunAdvisor`: what a run does about its advisories: it writes them to events.jsonl, logs them, and ends for some.

`grpo` and `async_grpo` call `check_gap` before a step trains, `run` calls `check_step` after a step was recorded. Rank
0 judges the steps, and all ranks raise the same error. `watch.advisories` has the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from verl_server.engine.rank_group import RankGroup
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.logprob_gap import LogprobGap, LogprobGapError
from verl_server.train.metrics import StepMetrics
from verl_server.watch.advisories import GAP, NAMES, Advisor, Advisory
from verl_server.watch.run_files import read_metrics
from verl_server.watch.run_records import AlarmEnded, RunEvent

logger = logging.getLogger(__name__)

NOTHING = "none"
"""The value of `--stop-on` with which no advisory ends a run."""


class AdvisoryError(VerlServerError):
    """An advisory of `--stop-on` ends the run."""

    exit_status = 5


def check_names(names: Sequence[str]) -> frozenset[str]:
    """Return the names of `--stop-on`. Raise BadRequestError, which lists all names, for an unknown one."""
    if list(names) == [NOTHING]:
        return frozenset()
    if not names or not set(names) <= set(NAMES):
        wrong = ", ".join(name for name in names if name not in NAMES) or "nothing"
        known = "; ".join(f"{name} ({about})" for name, about in NAMES.items())
        raise BadRequestError(f"--stop-on {wrong}: name advisories, or {NOTHING} alone. The advisories are: {known}.")
    return frozenset(names)


class RunAdvisor:
    def __init__(
        self,
        advisor: Advisor,
        ranks: RankGroup,
        *,
        stop_on: Collection[str] = (GAP,),
        note: Callable[[RunEvent], None] = lambda event: None,
    ) -> None:
        """`stop_on` has the names of the advisories that end the run. `note` takes the events, on rank 0."""
        self._advisor = advisor
        self._ranks = ranks
        self._stop_on = stop_on
        self._note = note

    def recall(self, folder: Path, next_step: int) -> None:
        """Take the steps before `next_step` that are recorded in the folder of a run that goes on."""
        for line in read_metrics(folder):
            if line["step"] < next_step:
                self._advisor.recall(line)

    def check_gap(self, gap: LogprobGap | None, step: int) -> None:
        """Judge the gap of log-probabilities of a step, before it trains. All ranks call it with the same gap.

        Raise LogprobGapError far above its bound, or if it keeps growing, if `stop_on` has its name.
        """
        if gap is None:
            return
        found = self._advisor.judge_gap(step, gap.mean, gap.largest, gap.kl)
        for advisory in self._tell(found, step):
            raise LogprobGapError(advisory)

    def check_step(self, metrics: StepMetrics, phases: Mapping[str, float]) -> None:
        """Judge a step that was recorded, and its phases. All ranks call it; the arguments of rank 0 count.

        Raise AdvisoryError on all ranks if an advisory of `stop_on` has become true.
        """

        def judge(_: Sequence[bytes]) -> list[str]:
            return self._tell(self._advisor.judge(asdict(metrics), phases), metrics.step)

        for advisory in self._ranks.call("RunAdvisor.check_step", judge):
            raise AdvisoryError(advisory)

    def _tell(self, found: Sequence[Advisory], step: int) -> list[str]:
        """Note and log the advisories, and those that ended. Return the texts of those that end the run."""
        for name in self._advisor.ended:
            self._note(AlarmEnded(name=name, step=step))
        ends = []
        for advisory in found:
            stops = advisory.name in self._stop_on and (advisory.name != GAP or advisory.severity == "error")
            self._note(advisory.event(stops=stops))
            if stops:
                ends.append(advisory.describe())
            else:
                logger.log(logging.INFO if advisory.severity == "info" else logging.WARNING, "%s", advisory.describe())
        return ends
