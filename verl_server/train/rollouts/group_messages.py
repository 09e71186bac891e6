"""The messages between rank 0 of the trainer and the process that plays (`group_player`), and how rank 0 sees it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Protocol

import msgspec

from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.recorded_turns import EpisodeProgress, RecordedEpisode
from verl_server.rollout.trajectory import Task
from verl_server.train.options import TrainArgs
from verl_server.train.ppo_options import PPOConfig, PPOTrainArgs


class PlayerSetup(msgspec.Struct, kw_only=True):
    """The first message to the rollout process."""

    args: dict[str, Any]
    """The options of the run in JSON types (`encode_args`)."""
    urls: list[str]
    """URLs of the rollout servers."""
    keys: list[str | None]
    """API key of each server; an owner's key where an agent plays."""
    incarnation: str
    """Incarnation of this start of the run, for the labels of recorded episodes."""


class NowServed(msgspec.Struct, tag=True, kw_only=True):
    """The weights that groups begin with from now on."""

    version: str
    """Label of the version that was pushed last."""
    step: int
    """The trainer's next step, for the label of episodes that begin."""


class PlayGroup(msgspec.Struct, tag=True, kw_only=True):
    """Play a group as soon as there is room for its episodes."""

    group: int
    """Number of the group in the run."""
    tasks: list[Task]
    """One task for each episode."""
    held_out: int | None = None
    """`Evaluation.step` if this is one episode of an evaluation, else None."""
    earlier: list[RecordedEpisode] = []
    """Episodes that go on from an earlier start of the run (`--replay-actions`)."""


class CancelGroup(msgspec.Struct, tag=True, kw_only=True):
    """Stop to play a group. It gets no `GroupEnded`."""

    group: int


class EpisodeEnded(msgspec.Struct, tag=True, kw_only=True):
    """A trajectory has ended. It may be one that another episode replaces."""

    line: bytes
    """Its line of trajectories-rank0.jsonl."""
    row: tuple[Any, ...]
    """Its row in the index of these lines (`watch.index`)."""


class EpisodeWentOn(msgspec.Struct, tag=True, kw_only=True):
    """An episode of a group has played a turn, or has ended. It is sent with `--replay-actions`."""

    group: int
    progress: EpisodeProgress


class GroupBegan(msgspec.Struct, tag=True, kw_only=True):
    """There is room for the episodes of a group, and they begin."""

    group: int
    version: str
    """Label of the version with which the group begins: its servers have this one, or a later one."""
    step: int
    """`NowServed.step` of this version."""


class GroupEnded(msgspec.Struct, tag=True, kw_only=True):
    """All episodes of a group have ended, with their replacements."""

    group: int
    rollout: Rollout | None = None
    error: str | None = None
    """Type and message of the error because of which the group has no rollout. It ends the run, unless the group is
    held out."""
    time: float = 0.0
    """Wall time of the end."""


ToPlayer = NowServed | PlayGroup | CancelGroup


class Alive(msgspec.Struct, tag=True):
    """The process still plays. It is sent every few seconds."""


FromPlayer = EpisodeEnded | EpisodeWentOn | GroupBegan | GroupEnded | Alive


def decode_args(values: dict[str, Any]) -> TrainArgs:
    """Return the options of a run from JSON types, with the settings of its algorithm."""
    kind = _kind_of(values["algorithm"])
    return msgspec.convert(values, kind, dec_hook=lambda kind, value: kind(value), strict=False)


def encode_args(args: TrainArgs) -> dict[str, Any]:
    """Return the options of a run in JSON types, for `decode_args`."""
    kind = _kind_of(args.grpo.option)
    base = kind(**{field.name: getattr(args, field.name) for field in dataclasses.fields(kind)})
    values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(base, enc_hook=_text))
    return values | {"algorithm": args.grpo.option}


def _kind_of(algorithm: str) -> type[TrainArgs]:
    return PPOTrainArgs if algorithm == PPOConfig.option else TrainArgs


def _text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is no option.")


class Rollouts(Protocol):
    """The player of groups: a `RolloutProcess`."""

    environment_url: str
    """URL or name of the environment, for reports of failures."""
    is_agent: bool
    """True if an agent of the user plays."""

    def serve(self, served: NowServed) -> None:
        """Tell the weights that groups begin with from now on."""

    def play(self, group: PlayGroup) -> None:
        """Play a group as soon as there is room for it."""

    def cancel(self, group: int) -> None:
        """Stop to play a group."""

    def news(self, timeout: float) -> list[GroupBegan | GroupEnded]:
        """Return the groups that have begun and finished since the last call; wait at most `timeout` s for the first.

        A group that finishes has begun before.
        """
