"""The folder of an agent run: settings, trajectories, episodes and a summary; and what a resumed run skips.

    run.json            settings without keys, and a digest of the tasks
    trajectories.jsonl  a `Trajectory` for each branch of each final attempt
    episodes.jsonl      a line for each attempt, in the order of their ends
    agents/             the output of programs, TASK-MEMBER-ATTEMPT.log
    summary.json        figures of the whole run

An episode's trajectories are written before its line in episodes.jsonl. When the run is resumed, trajectories without
such a line are removed, and a line that was cut off is removed, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.durable import make_folder, replace_file, write_file
from verl_server.files.json_files import decode_json, whole_lines
from verl_server.files.json_values import jsonable
from verl_server.files.run_output import check_settings, claim_folder, plain, recorded, store_settings, stored_settings
from verl_server.rollout.agents.branches import episode_trajectories
from verl_server.rollout.agents.types import AgentEpisode, AgentTask
from verl_server.rollout.faults import fault_of
from verl_server.rollout.token_counts import REPLACED, TokenCounts, count_tokens
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory, append_jsonl, read_jsonl

logger = logging.getLogger(__name__)


class EpisodeLine(msgspec.Struct, kw_only=True):
    """One line of episodes.jsonl."""

    task: int
    """Number of the task."""
    member: int
    attempt: int
    session: str
    server: str
    reason: StopReason
    error: str | None
    exit_code: int | None
    reward: float | None
    environment_reward: float | None
    seconds: float
    tokens: int
    turns: int
    branches: int
    final: bool
    """True if no other attempt follows in this run."""
    sampled: int | None = None
    """Number of sampled tokens of all branches, including sub-agents' sessions. None in a run of an earlier version."""
    fault: Fault | None = None
    """The party that caused the end. None in a run of an earlier version."""
    reward_failed: bool | None = None
    """True if the reward function failed. None in a run of an earlier version."""
    metrics: dict[str, float] = {}
    """Figures beside the reward that the agent's own code computed: those of environments of verifiers."""
    counts: TokenCounts | None = None
    """How often the sampled tokens of the attempt are trained on. None in a run of an earlier version."""

    @property
    def trained(self) -> TokenCounts:
        """`counts`, with all tokens as untrained ones if another attempt follows."""
        counts = self.counts or TokenCounts()
        return counts if self.final else counts.left_out(REPLACED)

    @property
    def is_unsampled(self) -> bool:
        """True if the attempt has a reward or a regular end, and no sampled token."""
        sampled = self.tokens if self.sampled is None else self.sampled
        return (self.reward is not None or self.reason.is_regular) and not sampled

    @property
    def is_replaced(self) -> bool:
        """True if the infrastructure ended the attempt, and another one took its place."""
        is_cancelled = self.reason is StopReason.ABORTED  # by the end of the run: the same attempt is played again
        return not self.final and not is_cancelled and fault_of(self.reason, self.fault) is Fault.INFRASTRUCTURE

    @property
    def is_failure(self) -> bool:
        """True if the attempt has neither a reward nor a sampled token."""
        return self.reward is None and not (self.tokens if self.sampled is None else self.sampled)

    @property
    def has_lost_reward(self) -> bool:
        """True if the reward function of an ended episode failed."""
        if self.reward_failed is not None:
            return self.reward_failed
        return self.reward is None and self.reason.is_regular and not self.is_unsampled

    @property
    def is_complete(self) -> bool:
        """True if a resumed run does not play the task again.

        No other attempt follows, the reward did not fail, and the policy had a part in the episode.
        """
        return self.final and not self.is_unsampled and not self.has_lost_reward


class RunFolder:
    """The files of one run. Call `begin` when the servers are up, and `close` at the end."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        tasks: Sequence[AgentTask],
        resume: bool,
        may_differ: Mapping[str, str],
    ) -> None:
        """Check and lock the folder. Nothing of an earlier run is changed before `begin`.

        A resumed run compares `settings`, which have no keys, except those of `may_differ`. A folder counts as empty if
        nothing was recorded in it, or if every attempt failed without a sampled token: `begin` replaces such a run.
        Raise BadRequestError if the folder cannot be written, has a run already and `resume` is False, or has another
        run.
        """
        self.folder = folder
        self.logs = folder / "agents"
        self._run_file = folder / "run.json"
        self._trajectories = folder / "trajectories.jsonl"
        self._episodes = folder / "episodes.jsonl"
        self._settings = plain(settings | {"tasks": len(tasks), "tasks_digest": tasks_digest(tasks)})
        self._may_differ = may_differ
        self._left: _Left | None = None
        self._replaces = False
        self.id = settings_id()
        """Name of the run: the first part of its sessions' groups."""
        self.earlier: str | None = None
        """Name of the run that was in the folder, whose sessions a killed runner may have left on the servers."""
        self._claim = claim_folder(folder)
        try:
            self.earlier = self._stored_id()
            found = recorded(folder, also=() if self._run_file.exists() else ("summary.json", "report.html"))
            self._replaces = bool(found) and self._has_failures_only(found)
            if not found or self._replaces:
                if resume:
                    logger.warning("%s has no episodes: there is nothing to resume, and the run begins.", folder)
                return
            if not self._run_file.exists():
                raise BadRequestError(
                    f"{folder} has files of a run ({', '.join(found[:5])}), but no run.json. Restore it, or name "
                    "another folder."
                )
            if not resume:
                raise BadRequestError(
                    f"{folder} has a run already. Continue it (resume=True, --resume), or name another folder."
                    + self._lost_rewards()
                )
            self.id = str(stored_settings(self._run_file).get("run"))
            later = {"models": "they are known when the servers have answered"}
            check_settings(folder, self._run_file, {"run": self.id} | self._settings, {**may_differ, **later})
            self._left = self._read()
        except BaseException:
            self.close()
            raise

    @property
    def finished(self) -> dict[tuple[int, int], EpisodeLine]:
        """The final lines of the run that is resumed, by task and member."""
        lines = [] if self._left is None else self._left.lines
        return {(entry.task, entry.member): entry for entry in lines if entry.final}

    @property
    def replaced(self) -> Counter[tuple[int, int]]:
        """The number of replaced attempts of the run that is resumed, by task and member."""
        lines = [] if self._left is None else self._left.lines
        return Counter((entry.task, entry.member) for entry in lines if entry.is_replaced)

    @property
    def stored(self) -> dict[str, Any]:
        """The settings of the run that is resumed, {} for a new run."""
        return {} if self._left is None else stored_settings(self._run_file)

    def begin(self, models: Sequence[str] = ()) -> None:
        """Begin to write: store the settings of a new run, or remove the incomplete records of an interrupted run.

        `models` are the known models of the servers. Raise BadRequestError if a resumed run had others.
        """
        if self._left is not None:
            stored = stored_settings(self._run_file).get("models")
            known = list(models) if stored and models else stored
            wanted = {"run": self.id} | self._settings | {"models": known}
            check_settings(self.folder, self._run_file, wanted, self._may_differ)
        if self._replaces:
            logger.warning("In the earlier run in %s, every episode failed. It is replaced.", self.folder)
            shutil.rmtree(self.logs, ignore_errors=True)
        make_folder(self.logs)
        if self._left is None:
            for file in (self._trajectories, self._episodes):  # from now on, a file that is not there was lost
                write_file(file, b"")
            store_settings(self._run_file, {"run": self.id} | self._settings | {"models": list(models)})
            return
        _rewrite(self._episodes, self._left.lines)
        kept = self._left.kept
        trajectories = _whole_lines(self._trajectories, Trajectory)
        _rewrite(self._trajectories, (t for t in trajectories if (t.task.group, t.member, t.attempt) in kept))

    def close(self) -> None:
        """Release the lock of the folder, so that another run may write there. The files stay."""
        self._claim.release()

    def add(self, episode: AgentEpisode) -> list[Trajectory]:
        """Record an attempt that has ended, and return its trajectories. Only those of a final attempt are written."""
        branches = episode_trajectories(episode)
        if episode.final:
            append_jsonl(self._trajectories, branches)
        append_jsonl(self._episodes, [line(episode, branches)])
        return branches

    def lines(self) -> list[EpisodeLine]:
        """Return all attempts so far, including attempts before the resumption."""
        return read_lines(self._episodes)

    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories so far, including trajectories before the resumption."""
        return read_jsonl(self._trajectories) if self._trajectories.exists() else []

    def write_summary(self, seconds: float, expected: int) -> dict[str, Any]:
        """Write summary.json and return it. `expected` is the number of episodes of the whole run."""
        summary = summarize_lines(self.lines()) | {"expected": expected, "seconds": seconds}
        _write(self.folder / "summary.json", summary)
        return summary

    def _stored_id(self) -> str | None:
        """Return the name of the agent run that is in the folder, None if there is none."""
        with contextlib.suppress(BadRequestError):
            if self._run_file.exists() and (stored := stored_settings(self._run_file)).get("command") == "run_agents":
                return str(stored.get("run"))
        return None

    def _has_failures_only(self, found: Sequence[str]) -> bool:
        """Return True if the files are of an agent run in which no attempt has a sampled token or a reward."""
        if any(not name.startswith(("episodes.jsonl", "trajectories.jsonl", "agents/")) for name in found):
            return False
        try:
            if not self._run_file.exists() or stored_settings(self._run_file).get("command") != "run_agents":
                return False
            lines = self.lines()
            trajectories = _whole_lines(self._trajectories, Trajectory)
            return bool(lines) and all(e.is_failure for e in lines) and not any(any(t.loss_mask) for t in trajectories)
        except BadRequestError:  # a damaged file may have had episodes of use
            return False

    def _lost_rewards(self) -> str:
        """Return a sentence about episodes whose reward failed, or "" if there are none."""
        try:
            lost = sum(entry.has_lost_reward for entry in self.lines())
        except BadRequestError:
            return ""
        if not lost:
            return ""
        return f" The reward of {lost} episodes failed: correct its function, and --resume plays them again."

    def _read(self) -> _Left:
        """Read the episodes of an earlier part of the run, without episodes whose trajectories were lost."""
        for file in (self._episodes, self._trajectories):
            if not file.exists():
                raise BadRequestError(f"{file} of this run is missing. Restore it, or name another folder.")
        written = _whole_lines(self._episodes, EpisodeLine)
        lines = _without_repeated(
            [msgspec.structs.replace(entry, final=entry.is_complete) for entry in written], self._episodes
        )
        wanted = {(e.task, e.member, e.attempt): e.branches for e in lines if e.final}
        found = Counter((t.task.group, t.member, t.attempt) for t in _whole_lines(self._trajectories, Trajectory))
        lost = {key for key, branches in wanted.items() if found[key] != branches}
        if lost:
            logger.warning("%s lost trajectories of %d episodes. They are played again.", self._trajectories, len(lost))
        return _Left([e for e in lines if (e.task, e.member, e.attempt) not in lost], wanted.keys() - lost)


@dataclass(frozen=True)
class _Left:
    """The attempts of an earlier part of the run, without those whose trajectories were lost."""

    lines: list[EpisodeLine]
    kept: set[tuple[int, int, int]]
    """(task, member, attempt) of the final lines."""


def settings_id() -> str:
    """Return a new random name of a run. It is the first part of its sessions' groups."""
    return f"run-{os.urandom(6).hex()}"


def tasks_digest(tasks: Sequence[AgentTask]) -> str:
    """Return a digest of all tasks, in order."""
    return hashlib.blake2b(
        msgspec.json.encode(list(tasks), order="sorted", enc_hook=jsonable), digest_size=16
    ).hexdigest()


def line(episode: AgentEpisode, branches: Sequence[Trajectory]) -> EpisodeLine:
    """Return the line of episodes.jsonl for an attempt with these branches."""
    assert episode.reason is not None
    return EpisodeLine(
        task=episode.index,
        member=episode.member,
        attempt=episode.attempt,
        session=episode.session,
        server=episode.server,
        reason=episode.reason,
        error=episode.error,
        exit_code=episode.exit_code,
        reward=episode.reward,
        environment_reward=episode.environment_reward,
        seconds=round(episode.seconds, 3),
        tokens=episode.tokens,
        turns=episode.turns,
        branches=len(branches),
        final=episode.final,
        sampled=episode.sampled_tokens,
        fault=episode.fault,
        reward_failed=episode.reward_failed,
        counts=count_tokens(branches) if branches else None,
        metrics=episode.metrics,
    )


def read_lines(path: Path) -> list[EpisodeLine]:
    """Return the attempts in an episodes.jsonl, [] if there is no file."""
    return list(_whole_lines(path, EpisodeLine))


def summarize_lines(lines: Sequence[EpisodeLine]) -> dict[str, Any]:
    """Return the figures of a run from its attempts. `scored` and `mean_reward` count episodes with a sampled token."""
    final = [entry for entry in lines if entry.final]
    rewards = [entry.reward for entry in final if entry.reward is not None and not entry.is_unsampled]
    return {
        "episodes": len(final),
        "attempts": len(lines),
        "scored": len(rewards),
        "unsampled": sum(entry.is_unsampled for entry in final),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
        "faults": dict(Counter(str(fault_of(entry.reason, entry.fault)) for entry in final).most_common()),
        "replaced": sum(entry.is_replaced for entry in lines),
        "reasons": dict(Counter(str(entry.reason) for entry in final).most_common()),
        "reasons_of_attempts": dict(Counter(str(entry.reason) for entry in lines).most_common()),
        "tokens": sum(entry.tokens for entry in lines),
        "turns": sum(entry.turns for entry in lines),
        "branches": sum(entry.branches for entry in final),
        "token_counts": msgspec.to_builtins(trained_tokens(lines)),
        "metrics": _mean_metrics(final),
    }


def _mean_metrics(lines: Sequence[EpisodeLine]) -> dict[str, float]:
    """Return the mean of each metric over the episodes that have it and a sampled token."""
    values: dict[str, list[float]] = {}
    for entry in lines:
        for name, value in ({} if entry.is_unsampled else entry.metrics).items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def trained_tokens(lines: Sequence[EpisodeLine]) -> TokenCounts:
    """Return how often the sampled tokens of a run are trained on, with those of attempts that others replaced."""
    return sum((entry.trained for entry in lines), TokenCounts())


def _whole_lines(path: Path, kind: type[Any]) -> Iterable[Any]:
    """Yield the records up to the first line that is cut off. Raise BadRequestError for another damaged line."""
    for where, text in whole_lines(path):
        try:
            yield decode_json(text, kind, f"{where} is damaged")
        except BadRequestError as error:
            raise BadRequestError(f"{error}. Remove the line, or the run.") from None


def _without_repeated(lines: Sequence[EpisodeLine], file: Path) -> list[EpisodeLine]:
    """Remove repeated final lines, and return the rest. The last final line of each episode is kept."""
    last = {(entry.task, entry.member): number for number, entry in enumerate(lines) if entry.final}
    kept = [e for number, e in enumerate(lines) if not e.final or last[e.task, e.member] == number]
    if len(kept) < len(lines):
        logger.warning(
            "%s has %d final lines of episodes that have another one further down. The last one of each is kept.",
            *(file, len(lines) - len(kept)),
        )
    return kept


def _rewrite(path: Path, records: Iterable[Any]) -> None:
    """Replace the content of a file atomically."""
    new = path.with_suffix(".tmp")
    new.unlink(missing_ok=True)
    append_jsonl(new, records)
    path.with_name(f"{path.name}.index.sqlite").unlink(missing_ok=True)  # somebody may have made one of the old lines
    replace_file(new, path)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_file(path, json.dumps(content, indent=2).encode() + b"\n")
