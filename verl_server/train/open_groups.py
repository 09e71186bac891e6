"""`OpenGroups`: the groups that had not finished when a run was killed, as far as their episodes were played.

With `--replay-actions`, a resumed run continues these episodes (`rollout.action_replay`), and does not play again those
that had ended. `kept_groups` reads them from the journals, and `step_journal` and `async_grpo` take them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from verl_server.rollout.recorded_turns import RecordedEpisode
from verl_server.train.ancestors import Ancestors
from verl_server.train.turn_journal import TurnRecord
from verl_server.weight_version import WeightVersion

Member = tuple[int, int]
"""(group, member) of an episode."""


class OpenGroup(NamedTuple):
    start: int
    """Place of the oldest version of its episodes on the line of this start's versions."""
    episodes: list[RecordedEpisode]
    """The episodes of which something is kept. The others begin anew."""


@dataclass(frozen=True)
class OpenGroups:
    ancestors: Ancestors = field(default_factory=Ancestors)
    """Those of this start, with the starts that played the episodes."""
    episodes: dict[Member, RecordedEpisode] = field(default_factory=dict)
    """The latest play of each episode."""
    plays: dict[Member, float] = field(default_factory=dict)
    """`TurnRecord.play` of each."""

    @classmethod
    def of(cls, records: Iterable[TurnRecord], ancestors: Ancestors, finished: Collection[int]) -> OpenGroups:
        """Return the open groups of a run. `finished` are the numbers of groups that are not open."""
        latest: dict[Member, list[TurnRecord]] = {}
        for record in records:
            if (version := WeightVersion.parse(record.version)) is not None:
                ancestors = ancestors.with_branch(version.incarnation, WeightVersion.parse(record.base))
            known = latest.setdefault((record.number, record.progress.member), [])
            if known and record.play > known[0].play:
                known.clear()
            if record.number not in finished and (not known or record.play == known[0].play):
                known.append(record)
        episodes = {place: _episode(found) for place, found in latest.items() if found}
        return cls(ancestors, episodes, {place: latest[place][0].play for place in episodes})

    def take(self, number: int, oldest: int) -> OpenGroup | None:
        """Return what is kept of a group, and forget it. None: nothing is.

        An episode is kept if all of its tokens are of weights from the place `oldest` on.
        """
        kept, starts = list[RecordedEpisode](), list[int]()
        for place in sorted(place for place in self.episodes if place[0] == number):
            episode = self.episodes.pop(place)
            places = [self.ancestors.number_of(label, "") for label in episode.weight_versions]
            known = [each for each in places if each is not None]
            if known and len(known) == len(places) and min(known) >= oldest:
                kept.append(episode)
                starts.append(min(known))
        return OpenGroup(min(starts), kept) if kept else None


def _episode(records: Iterable[TurnRecord]) -> RecordedEpisode:
    """Return an episode of the records of one play, which several files may have. Turns behind a gap are left out."""
    found = [record.progress for record in records]
    ended = next((progress for progress in found if progress.ended is not None), None)
    turns = {progress.turn.number: progress.turn for progress in found if progress.turn is not None}
    if ended is not None:
        return RecordedEpisode(member=ended.member, attempt=ended.attempt, ended=ended.ended)
    numbers = itertools.takewhile(turns.__contains__, itertools.count())
    whole = [turns[number] for number in numbers]
    return RecordedEpisode(member=found[0].member, attempt=found[0].attempt, turns=whole)
