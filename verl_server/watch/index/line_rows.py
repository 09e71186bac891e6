"""The rows of lines: what the index holds about a trajectory, and about what the trainer recorded of it.

A writer has the record itself (`trajectory_row`, `trained_row`). A reader has the line (`line_row`, `trained_line_row`)
and decodes only what the row needs: it counts the tokens of a line without making objects of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from verl_server.rollout.trajectory import Event, Task, Trajectory
from verl_server.watch.index.columns import LINE, PLACE_WIDTH, TRAINED
from verl_server.watch.run_records import Label, TrainedTrajectory
from verl_server.weight_version import WeightVersion

ERROR_CHARACTERS = 200
ANSWER_CHARACTERS = 120
_ANSWER_KEYS = ("text", "prompt", "message", "content", "result")
"""Keys of an observation under which environments put what they say, as the page shows them."""
TOOL_NAMES, TOOL_CHARACTERS = 32, 100
"""Most names of tools of a row, and most characters of one."""
_MOST_WAITS = 2000
_KINDS = ("queue", "env", "generate")
_MOST_LABELS = 16
"""Weight versions of one line that are looked for by their texts. More are decoded."""


class _HasCalls(Protocol):
    action: Any
    reply: Any


def trajectory_row(kind: str, label: Label, trajectory: Trajectory, phase: str | None = None) -> Row:
    """Return the row of a trajectory, which was written with `label`."""
    t = trajectory
    sampled = sum(t.loss_mask)
    versions = list(dict.fromkeys(t.weight_versions))
    prompt = msgspec.json.encode(t.turns[0].messages) if t.turns and t.session else b"[]"
    sizes = len(t.tokens), sampled, sum(t.logprobs) / sampled if sampled else None
    return _row(kind, label, phase, t, sizes, versions, prompt)


def line_row(kind: str, line: bytes) -> Row:
    """Return the row of a line. One that cannot be read is of the kind damaged, and its error says why."""
    try:
        t = msgspec.json.decode(line, type=_Line)
        tokens = _count(t.loss_mask)
        sampled = bytes(t.loss_mask).count(b"1")
        total = sum(msgspec.json.decode(t.logprobs, type=list[float])) if sampled else 0.0
        sizes = tokens, sampled, total / sampled if sampled else None
        prompt = bytes(t.turns[0].messages) if t.turns and t.session else b"[]"
        return _row(kind, t, t.phase, t, sizes, _labels(bytes(t.weight_versions)), prompt)
    except (msgspec.DecodeError, ValueError, RecursionError, OverflowError) as error:
        return damaged_row(str(error))


def trained_row(record: TrainedTrajectory) -> Row:
    """Return the row of what the trainer recorded."""
    return _trained(record, _mean(record.entropy))


def trained_line_row(line: bytes) -> Row:
    """Return the row of a line of trained-rankN.jsonl, as `line_row`."""
    try:
        record = msgspec.json.decode(line, type=_TrainedLine)
        return _trained(record, _mean(msgspec.json.decode(record.entropy, type=list[float | None])))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return damaged_row(str(error), trained=True)


def damaged_row(error: str, *, trained: bool = False) -> Row:
    """Return the row of a line that cannot be read. `trained`: the line is of trained-rankN.jsonl."""
    empty: list[Any] = [None] * ((_TRAINED_WIDTH if trained else _LINE_WIDTH) - 1)
    if not trained:
        empty[_BEFORE_ERROR] = _text(error)[:ERROR_CHARACTERS]
    return ("damaged", *empty)


def unpack_waits(packed: bytes | None) -> list[tuple[str, float, float]]:
    """Return (kind, begin, end) of the waits of a row, in seconds of its clock."""
    if not packed:
        return []
    flat = msgspec.msgpack.decode(packed, type=list[int])
    return [
        (_KINDS[flat[i]], flat[i + 1] / 1000, (flat[i + 1] + flat[i + 2]) / 1000) for i in range(0, len(flat) - 2, 3)
    ]


def pack_waits(events: Sequence[Event]) -> bytes:
    """Return the waits in few bytes, with whole milliseconds. Of a very long episode, return the first ones."""
    flat: list[int] = []
    for event in events[:_MOST_WAITS]:
        if event.kind in _KINDS:
            start = round(event.start * 1000)
            flat += (_KINDS.index(event.kind), start, round(event.end * 1000) - start)
    return msgspec.msgpack.encode(flat)


Row = tuple[Any, ...]
"""Values in the order of `columns.LINE` or `columns.TRAINED`, without the place of the line."""
_LINE_WIDTH, _TRAINED_WIDTH = len(LINE) - PLACE_WIDTH, len(TRAINED) - PLACE_WIDTH
_BEFORE_ERROR = list(LINE).index("error") - PLACE_WIDTH - 1
"""Columns between the kind and the error."""


class _Call(msgspec.Struct):
    name: str = ""


class _Reply(msgspec.Struct):
    calls: list[_Call] = []


class _Turn(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    action: Any = None
    reply: _Reply | None = None


class _Line(Label, kw_only=True):
    """The fields of a line that its row needs. Lists about tokens stay text."""

    phase: str | None = None
    task: Task
    loss_mask: msgspec.Raw = msgspec.Raw(b"[]")
    logprobs: msgspec.Raw = msgspec.Raw(b"[]")
    weight_versions: msgspec.Raw = msgspec.Raw(b"[]")
    turns: list[_Turn] = msgspec.field(default_factory=list)
    final_observation: Any = None
    reward: float | None = None
    stop_reason: str | None = None
    fault: str | None = None
    error: str | None = None
    events: list[Event] = msgspec.field(default_factory=list)
    began: float | None = None
    session: str = ""
    parent: str = ""
    branch: int = 0
    fork_of: int | None = None
    shared: int = 0
    member: int = 0
    attempt: int = 0


class _TrainedLine(msgspec.Struct, kw_only=True):
    """The fields of a line of trained-rankN.jsonl that its row needs."""

    step: int
    sampled_step: int
    group: int
    member: int
    advantage: float
    age: int | None
    rank: int = 0
    incarnation: str = ""
    attempt: int = 0
    session: str = ""
    branch: int = 0
    sampled_rank: int | None = None
    entropy: msgspec.Raw = msgspec.Raw(b"[]")
    gap_mean: float | None = None
    gap_max: float | None = None


def _row(
    kind: str,
    label: Label,
    phase: str | None,
    t: Trajectory | _Line,
    sizes: tuple[int, int, float | None],
    versions: Sequence[str],
    prompt: bytes,
) -> Row:
    seconds = dict.fromkeys(_KINDS, 0.0)
    for event in t.events:
        if event.kind in seconds:
            seconds[event.kind] += event.end - event.start
    oldest, newest, count = _extremes(tuple(versions))
    return (
        kind,
        *(label.step, label.rank, label.incarnation, label.time, phase),
        *(str(t.task.seed), _optional(t.task.episode_id), _integer(t.task.group), _integer(t.member), t.attempt),
        *(_digest(t.task.seed, prompt), _text(t.session), _text(t.parent), t.branch, t.fork_of, t.shared),
        *(t.reward, None if t.stop_reason is None else str(t.stop_reason), None if t.fault is None else str(t.fault)),
        *(None if t.error is None else _text(t.error[:ERROR_CHARACTERS]), len(t.turns), sizes[0], sizes[1]),
        *(seconds["generate"], seconds["env"], seconds["queue"], t.began),
        min((event.start for event in t.events), default=None),
        max((event.end for event in t.events), default=None),
        *(pack_waits(t.events), oldest, newest, count, _tools(t.turns), sizes[2], _answer(t.final_observation)),
    )


def _trained(r: TrainedTrajectory | _TrainedLine, entropy: float | None) -> Row:
    rank = r.rank if r.sampled_rank is None else r.sampled_rank
    return (
        *("trained", r.step, r.incarnation, r.sampled_step, rank, r.group),
        *(r.member, r.attempt, _text(r.session), r.branch, r.advantage, r.age, r.gap_mean, r.gap_max, entropy),
    )


def _tools(turns: Sequence[_HasCalls]) -> str:
    """Return the names of the tools that the policy called, sorted and separated by line ends."""
    found: set[str] = set()
    for turn in turns:
        if isinstance(turn.action, dict):
            calls = turn.action.get("calls")
            given = [call.get("name") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
            found.update(name for name in (turn.action.get("tool_name"), *given) if isinstance(name, str))
        if turn.reply is not None:
            found.update(call.name for call in turn.reply.calls)
    names = {_text(" ".join(name.split())[:TOOL_CHARACTERS]) for name in found}
    return "\n".join(sorted(names - {""})[:TOOL_NAMES])


def _answer(observation: Any) -> str | None:
    """Return the first characters of what the environment said at last, on one line. None without a text."""
    if not isinstance(observation, dict):
        return None
    texts = (observation.get(key) for key in _ANSWER_KEYS)
    said = next((text for text in texts if isinstance(text, str) and text), "")
    return _text(" ".join(said[: 4 * ANSWER_CHARACTERS].split())[:ANSWER_CHARACTERS]) or None


@functools.lru_cache(maxsize=256)  # the episodes of a step have the same ones
def _extremes(versions: tuple[str, ...]) -> tuple[str, str, int]:
    """Return the oldest and the newest label, and the number of labels. Free labels are in the order of the tokens."""
    labels = [label for label in versions if label]
    if not labels:
        return "", "", 0
    parsed = [WeightVersion.parse(label) for label in labels]
    known = [version for version in parsed if version is not None]
    if len(known) == len(parsed) and len({version.incarnation for version in known}) == 1:
        return str(min(known)), str(max(known)), len(labels)
    return _text(labels[0]), _text(labels[-1]), len(labels)


def _labels(raw: bytes) -> list[str]:
    """Return the different labels of the JSON list `raw`, in their order."""
    if b"\\" in raw or b" " in raw:  # a quote in a label, or a space between labels, would deceive the search below
        return list(dict.fromkeys(msgspec.json.decode(raw, type=list[str])))
    rest = raw[1:-1] + b","
    found: list[str] = []
    while len(rest) > 1:
        entry = rest[: rest.index(b'",', 1) + 2]
        if len(found) == _MOST_LABELS:
            return list(dict.fromkeys(msgspec.json.decode(raw, type=list[str])))
        found.append(entry[1:-2].decode())
        rest = rest.replace(entry, b"")
    return found


def _count(raw: msgspec.Raw) -> int:
    """Return the number of the numbers in a JSON list."""
    text = bytes(raw)
    return text.count(b",") + 1 if len(text.strip()) > 2 else 0


def _digest(seed: int, prompt: bytes) -> str:
    """Return a digest of the first messages of an agent's episode; of the seed where there are none."""
    asked = prompt if prompt != b"[]" else str(seed).encode()
    return hashlib.blake2b(asked, digest_size=6).hexdigest()


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _text(text: str) -> str:
    """Return a text that a database can hold: without lone surrogates."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _optional(text: str | None) -> str | None:
    return None if text is None else _text(text)


def _integer(value: int) -> int:
    """Return a number that a column can hold. Larger ones become the largest."""
    return max(-(2**63), min(2**63 - 1, value))
