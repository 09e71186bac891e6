"""`RunIndex`: what it says of runs that are whole, killed, resumed, growing, asynchronous, or of several ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.watch.index.runs import (
    FIRST,
    SECOND,
    all_rows,
    answers,
    done,
    episode,
    follow,
    trained,
    write_steps,
    writer,
)
from verl_server.errors import BadRequestError
from verl_server.files.segments import Segments
from verl_server.rollout.trajectory import StopReason, append_jsonl, labelled
from verl_server.train.run_writer import RunWriter
from verl_server.watch.index.rows import (
    EpisodeFilter,
    RowGoneError,
    RowUnknownError,
    evaluated_step,
    group_number,
)
from verl_server.watch.index.run_database import RunDatabase
from verl_server.watch.index.run_index import RunIndex
from verl_server.watch.run_records import HELD_OUT, RunStarted, SegmentRemoved, StepBegan

Open = Callable[[Path], RunIndex]


@pytest.fixture
def opened() -> Iterator[Open]:
    """A function that opens and fills an index, which the test's end closes."""
    found: list[RunIndex] = []

    def make(path: Path) -> RunIndex:
        found.append(RunIndex(path))
        return follow(found[-1])

    yield make
    for index in found:
        index.close()


def expect_same_without_index(run: Path, opened: Open) -> RunIndex:
    """Check that the index of the writer, and the lines alone, give the same answers. Return an index of the run."""
    index = opened(run)
    found = answers(index)
    for file in run.glob("*.sqlite*"):
        file.unlink()
    assert answers(opened(run)) == found
    return index


def test_steps_groups_and_episodes(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 3)
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    steps = index.steps()
    assert [(s.name, s.episodes, s.groups, s.mean_reward, s.without_spread) for s in steps] == [
        (str(step), 4, 2, 0.5, 0) for step in range(3)
    ]
    group = index.groups("1")[0]
    assert (group.spread, group.mean_reward, group.ends, group.fate) == (0.5, 0.5, {"done": 2}, "")
    member = group.members[1]
    assert (member.reward, member.step, member.start_step, member.sampled, member.tokens) == (1.0, 1, 1, 3, 5)
    assert (member.logprob, member.tools, member.seed, member.oldest_version) == (-0.5, ["look"], "0", f"4@{FIRST}")
    assert (member.generate_seconds, member.env_seconds, member.began, member.ended) == (0.25, 0.75, 1000.0, 1001.0)
    assert (member.is_trained, member.trained_step, member.advantage, member.age) == (True, 1, 0.5, 1)
    assert (member.gap_mean, member.gap_max, member.entropy) == (0.125, 0.25, 0.25)
    record = index.trained(member.row)
    assert record is not None and (record.step, record.member) == (1, 1)
    assert index.trajectory(member.row).reward == 1.0
    progress = index.progress()
    assert progress.bytes_indexed == progress.bytes_total > 0 and progress.episodes == 12


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"text": "Correct!\n  Well done."}, "Correct! Well done."),
        ({"done": True, "message": "x" * 5000}, "x" * 120),
        ({"tool_name": "run", "result": "7"}, "7"),
        ({"text": ["no text"]}, None),
        ({}, None),
        (None, None),
    ],
)
def test_what_the_environment_said_at_last(
    said: dict[str, object] | None, shown: str | None, tmp_path: Path, opened: Open
) -> None:
    files = writer(tmp_path)
    t = episode(0)
    t.final_observation = said
    files.record_trajectories(0, [t])
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    (row,) = index.episodes(EpisodeFilter()).rows
    assert row.answer == shown


def test_filters(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 4)
    failed = episode(7, 0, None, length=0)
    files.record_trajectories(4, [failed, episode(8, 1, 5.0, length=40, version=f"9@{FIRST}")])
    files.close()
    index = opened(tmp_path)

    def count(**conditions: object) -> int:
        return len(index.episodes(EpisodeFilter(**conditions)).rows)  # type: ignore[arg-type]

    assert count() == 18
    assert count(first_step=1, last_step=2) == 8
    assert count(place="4") == 2
    assert count(stop_reason="env_error") == count(has_error=True) == 1
    assert count(least_reward=1.0) == 9 and count(most_reward=0.0) == 8
    assert count(least_tokens=42) == 1 and count(most_tokens=2) == 1
    assert count(tool="look") == 17 and count(tool="loo") == 0
    assert count(version=f"4@{FIRST}") == 16 and count(version=f"9@{FIRST}") == 1 and count(version=f"4@{SECOND}") == 0
    assert count(group=8) == 1 and count(incarnation=SECOND) == 0
    assert [group.group for group in index.groups("4", EpisodeFilter(has_error=True))] == [7]


@pytest.mark.parametrize("order", ["newest", "oldest", "reward", "-reward", "tokens", "-tokens", "turns", "-seconds"])
def test_each_order_pages_through_all_episodes(tmp_path: Path, opened: Open, order: str) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 3)
    files.record_trajectories(3, [episode(0, 0, None), episode(0, 1, 3.0, length=9)])
    files.close()
    index, cursor, found = opened(tmp_path), None, []
    assert index.episodes(EpisodeFilter(least_reward=2.5), limit=1).total == 1
    while True:
        page = index.episodes(EpisodeFilter(), order=order, limit=3, after=cursor)  # type: ignore[arg-type]
        assert page.total == (14 if cursor is None else None), "the first page counts"
        found += page.rows
        if (cursor := page.cursor) is None:
            break
    assert len(found) == len({row.row for row in found}) == 14
    if "reward" in order:
        known = [row.reward for row in found]
        assert known.pop() is None  # an episode without a reward is the last one in both
        assert known == sorted(known, reverse=order.startswith("-"))  # type: ignore[type-var]


def test_a_wrong_cursor_is_refused(tmp_path: Path, opened: Open) -> None:
    index = opened(tmp_path)
    for cursor in ("", "x", "[1]", "[1, 2, null]", "{}"):
        with pytest.raises(BadRequestError):
            index.episodes(EpisodeFilter(), after=cursor)


def test_a_run_that_grows(tmp_path: Path, opened: Open) -> None:
    index = opened(tmp_path)
    assert index.steps() == [] and index.span() is None
    files = writer(tmp_path)
    for step in range(4):
        before = index.progress().generation
        write_steps(files, step, step + 1)
        follow(index)
        assert [s.name for s in index.steps()] == [str(n) for n in range(step + 1)]
        assert index.progress().generation > before
    files.close()
    assert not index.poll() and index.progress().generation == index.progress().generation


def test_lost_steps_of_a_resumed_run(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 5)
    files.close()
    index = opened(tmp_path)  # it is open while the run goes on from an earlier step
    files = writer(tmp_path, SECOND, resumed_at=3)
    write_steps(files, 3, 4)
    files.close()
    follow(index)
    assert answers(index) == answers(expect_same_without_index(tmp_path, opened))
    assert [s.name for s in index.steps()] == ["0", "1", "2", "3"]
    assert {row.incarnation for row in index.episodes(EpisodeFilter(place="3")).rows} == {SECOND}
    lost = [row for row in all_rows(index) if row.is_lost]
    assert {(row.step, row.incarnation) for row in lost} == {(3, FIRST), (4, FIRST)}
    assert [s.episodes for s in index.steps(lost=True)] == [4, 4, 4, 8, 4]


def test_the_step_of_an_asynchronous_run_is_the_one_that_used_the_group(tmp_path: Path, opened: Open) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": "train.async_grpo"}))
    files = writer(tmp_path)
    for group, start in ((0, 0), (1, 0), (2, 1), (3, 1)):
        files.record_trajectories(start, [episode(group, member, float(member)) for member in range(2)])
    index = opened(tmp_path)
    assert [(s.name, s.episodes) for s in index.steps()] == [("playing", 8)]
    files.note(done(0, "trained", 1, 0))
    files.note(done(1, "dropped", 2, 0))
    files.note(done(2, "skipped", 2, 1))
    files.record_trained([trained(1, 0, 0, sampled_step=0)])
    follow(index)
    assert [(s.name, s.step, s.episodes) for s in index.steps()] == [
        ("1", 1, 2), ("2", 2, 2), ("playing", None, 2), ("dropped", None, 2),
    ]  # fmt: skip
    (group,) = index.groups("1")
    assert (group.fate, group.step, group.start_step) == ("trained", 1, 0)
    assert [member.is_trained for member in group.members] == [True, False]
    assert index.groups("2")[0].fate == "skipped"
    files.close()
    expect_same_without_index(tmp_path, opened)


def test_groups_that_a_resumed_asynchronous_run_plays_again_are_lost(tmp_path: Path, opened: Open) -> None:
    """The group 0 was trained before the checkpoint. The groups 1 (trained after it) and 2 (playing) play again."""
    (tmp_path / "run.json").write_text(json.dumps({"command": "train.async_grpo"}))
    files = writer(tmp_path)
    for group in range(3):
        files.record_trajectories(0, [episode(group, 0, 0.0)])
    files.note(done(0, "trained", 0, 0))
    files.note(done(1, "trained", 1, 0))
    files.close()
    files = writer(tmp_path, SECOND, resumed_at=1)
    for group in (1, 2):
        files.record_trajectories(1, [episode(group, 0, 1.0)])
    files.note(done(1, "trained", 1, 1))
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    assert [(s.name, s.episodes, s.mean_reward) for s in index.steps()] == [
        ("0", 1, 0.0), ("1", 1, 1.0), ("playing", 1, 1.0),
    ]  # fmt: skip
    assert {(row.group, row.incarnation) for row in all_rows(index) if row.is_lost} == {(1, FIRST), (2, FIRST)}


def test_a_group_that_a_new_rollout_process_plays_again_counts_once(tmp_path: Path, opened: Open) -> None:
    """The first process was killed. The second one played the group in another step, and in the same one."""
    files = writer(tmp_path)
    files.record_trajectories(0, [episode(0, 0, 0.0), episode(1, 0, 0.0)])
    files.record_trajectories(1, [episode(0, 0, 1.0)])
    files.record_trajectories(0, [episode(1, 0, 1.0)])
    files.note(done(0, "trained", 1, 1))
    files.note(done(1, "trained", 1, 0))
    files.close()
    (step,) = expect_same_without_index(tmp_path, opened).steps()
    assert (step.name, step.episodes, step.mean_reward) == ("1", 2, 1.0)


def test_replaced_episodes_are_in_no_figure(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    tries = [episode(0, 0, None), episode(0, 0, 1.0, attempt=1), episode(0, 1, 0.0)]
    tries[0].stop_reason = StopReason.ENV_ERROR
    files.record_trajectories(0, [tries[1], tries[2], tries[0]])  # a run writes the replaced ones last
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    (step,) = index.steps()
    assert (step.episodes, step.scored, step.replaced, step.failed, step.mean_reward) == (2, 2, 1, 0, 0.5)
    (group,) = index.groups("0")
    assert [(m.member, m.attempt, m.is_replaced) for m in group.members] == [(0, 0, True), (0, 1, False), (1, 0, False)]
    assert len(index.episodes(EpisodeFilter(replaced=False)).rows) == 2


def test_branches_of_an_agent_are_one_episode(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    branches = [
        episode(0, 0, 1.0, session="s", branch=0, length=3),
        episode(0, 0, 1.0, session="s", branch=1, length=6),
        episode(0, 0, 1.0, session="helper", branch=2, length=2),
    ]
    branches[1].fork_of, branches[1].shared, branches[2].parent = 0, 2, "s"
    files.record_trajectories(0, [*branches, episode(0, 1, 0.0, session="t"), episode(0, 2, 2.0, length=0)])
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    (step,) = index.steps()
    assert (step.episodes, step.scored, step.unsampled, step.mean_reward) == (3, 2, 1, 0.5)
    row = index.groups("0")[0].members[0]
    assert (row.branches, row.tokens, row.sampled, row.turns) == (3, 8, 11, 3)
    for place in (0, 1, 2):
        found = index.episode(index.episode(row.row).branches[place].row)
        assert found.head.row == row.row
        facts = [(b.session, b.branch, b.parent, b.fork_of, b.shared) for b in found.branches]
        assert facts == [("s", 0, "", None, 0), ("s", 1, "", 0, 2), ("helper", 2, "s", None, 0)]


def test_several_ranks(tmp_path: Path, opened: Open) -> None:
    for rank in range(2):
        files = writer(tmp_path, rank=rank)
        files.record_trajectories(0, [episode(rank, member, float(rank)) for member in range(2)])
        files.record_trained([trained(0, rank, 1)])
        files.close()
    index = expect_same_without_index(tmp_path, opened)
    assert sorted(file.name for file in tmp_path.glob("index-*.sqlite")) == []  # removed by the check
    (step,) = index.steps()
    assert (step.episodes, step.groups, step.without_spread) == (4, 2, 2)
    assert sorted((g.rank, g.group, g.members[1].is_trained) for g in index.groups("0")) == [(0, 0, True), (1, 1, True)]


def test_episodes_of_a_step_that_was_not_completed(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 1)
    files.record_untrained(1, [episode(0)])
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    assert [(s.name, s.episodes) for s in index.steps()] == [("0", 4), ("untrained", 1)]
    assert index.groups("untrained")[0].fate == "untrained"


def test_held_out_episodes_are_in_no_step(tmp_path: Path, opened: Open) -> None:
    """An evaluation is lost if the step before it runs again, not if only the step after it does."""
    files = writer(tmp_path)
    write_steps(files, 0, 2)
    for step in (0, 1, 2):
        files.record_held_out(step, [episode(0), episode(1)])
    files.close()
    index = expect_same_without_index(tmp_path, opened)
    assert [(s.name, s.episodes) for s in index.steps()] == [
        *(("0", 4), ("1", 4)),
        *(("held-out-0", 2), ("held-out-1", 2), ("held-out-2", 2)),
    ]
    assert {group.fate for group in index.groups("held-out-1")} == {"held-out"}
    writer(tmp_path, SECOND, resumed_at=1).close()
    index = opened(tmp_path)
    assert [(s.name, s.episodes) for s in index.steps()] == [("0", 4), ("held-out-0", 2), ("held-out-1", 2)]
    assert index.groups("held-out-2") == [] and len(index.groups("held-out-2", EpisodeFilter(lost=True))) == 2


def test_evaluations_are_in_the_order_of_their_steps(tmp_path: Path, opened: Open) -> None:
    """A line without a step, or with one that makes no sense, is in the place of all of these."""
    files = writer(tmp_path)
    for step in (20, 100, 3):
        files.record_held_out(step, [episode(HELD_OUT + 7)])
    files.close()
    (line,) = (tmp_path / "held-out-rank0.jsonl").read_bytes().splitlines(keepends=True)[:1]
    odd = line.replace(b'"step":20', b'"step":-5'), line.replace(b'"step":20', b'"step":null')
    (tmp_path / "held-out-rank1.jsonl").write_bytes(b"".join(odd))
    index = opened(tmp_path)
    names = ["held-out", "held-out-3", "held-out-20", "held-out-100"]
    assert [row.name for row in index.steps()] == names
    assert [evaluated_step(name) for name in names] == [None, 3, 20, 100]
    assert group_number(index.groups("held-out-3")[0].group) == 7
    assert index.lanes(0.0, 2000.0, 10).rows[0].label.endswith(" 7-0")


def test_a_file_of_rollout(tmp_path: Path, opened: Open) -> None:
    file = tmp_path / "out.jsonl"
    append_jsonl(file, [episode(n, 0, float(n)) for n in range(3)])
    index = opened(file)
    assert [(s.name, s.step, s.episodes) for s in index.steps()] == [("-", None, 3)]
    row = index.episodes(EpisodeFilter(), order="-reward").rows[0]
    assert (row.reward, row.step, row.incarnation, row.is_trained) == (2.0, None, None, False)
    assert index.trajectory(row.row).reward == 2.0 and index.trained(row.row) is None


def test_the_file_of_the_demo(tmp_path: Path, opened: Open) -> None:
    file = tmp_path / "trajectories.jsonl"
    append_jsonl(file, labelled([episode(n, seed=70 + n) for n in range(2)], phase="before"))
    append_jsonl(file, labelled([episode(0)], phase="training", step=0))
    append_jsonl(file, labelled([episode(n, seed=70 + n) for n in range(2)], phase="after"))
    index = opened(tmp_path)
    assert [(s.name, s.episodes) for s in index.steps()] == [("before", 2), ("0", 1), ("after", 2)]
    before, after = (sorted(g.task for g in index.groups(place)) for place in ("before", "after"))
    assert before == after  # the same tasks can be compared
    file.unlink()  # a new demo replaces the file of an earlier one
    append_jsonl(file, labelled([episode(0, 0, 0.0)], phase="before"))
    follow(index)
    assert [(s.name, s.episodes) for s in index.steps()] == [("before", 1)]


def test_a_rewritten_file_of_the_same_size_is_indexed_again(tmp_path: Path, opened: Open) -> None:
    file = tmp_path / "out.jsonl"
    append_jsonl(file, [episode(0, 0, 1.0)])
    index = opened(file)
    (row,) = index.episodes(EpisodeFilter()).rows
    text = file.read_bytes()
    file.write_bytes(text.replace(b'"reward":1.0', b'"reward":2.0').replace(b'"seed":0', b'"seed":7'))
    os.utime(file, ns=(1, 1))
    follow(index)
    assert [row.reward for row in index.episodes(EpisodeFilter()).rows] == [2.0]
    with pytest.raises(RowGoneError, match="replaced"):
        index.trajectory(row.row)


def test_a_row_whose_line_has_moved_is_refused_and_its_file_is_indexed_again(tmp_path: Path, opened: Open) -> None:
    file = tmp_path / "out.jsonl"
    append_jsonl(file, [episode(0), episode(1)])
    index = opened(file)
    rows = index.episodes(EpisodeFilter(), order="oldest").rows
    file.write_bytes(file.read_bytes()[1:] + b"\n")  # between two polls
    with pytest.raises(RowGoneError, match="reload"):
        index.trajectory(rows[1].row)
    append_jsonl(file, [episode(2)])
    follow(index)
    assert [row.group for row in index.episodes(EpisodeFilter(), order="oldest").rows] == [1, 2]
    assert index.progress().damaged == 2


def test_ids_of_rows_that_are_not_there(tmp_path: Path, opened: Open) -> None:
    files = RunWriter(tmp_path, FIRST)
    files.begin(RunStarted(ranks=1, version="1"))
    segments = Segments(tmp_path / "trajectories-rank0.jsonl", 4000)
    for step in range(10):
        lines = labelled([episode(0)], step=step, rank=0, incarnation=FIRST, time=float(step))
        segments.append([msgspec.json.encode(line) + b"\n" for line in lines])
    index = opened(tmp_path)
    rows = [row.row for row in index.episodes(EpisodeFilter(), order="oldest").rows]
    oldest = tmp_path / "trajectories-rank0.jsonl"
    oldest.unlink()
    files.note(SegmentRemoved(rank=0, file=oldest.name, bytes=1))
    files.close()
    with pytest.raises(RowGoneError):  # also before the index has seen it
        index.trajectory(rows[0])
    follow(index)
    with pytest.raises(RowGoneError, match="--keep-trajectories"):
        index.trajectory(rows[0])
    assert index.trajectory(rows[-1]).task.group == 0
    assert len(index.steps()) < 10
    for name in (
        "",
        "x",
        "a:b:c",
        "../../etc/passwd:0:abcdef",
        f"{rows[-1].rpartition(':')[0]}:xxxxxx".replace(":0:", ":1:"),
    ):
        with pytest.raises((RowUnknownError, RowGoneError)):
            index.trajectory(name)


def test_damaged_lines_are_counted_and_the_others_are_there(tmp_path: Path, opened: Open) -> None:
    file = tmp_path / "trajectories-rank0.jsonl"
    good = [msgspec.json.encode(line) + b"\n" for line in labelled([episode(0), episode(1)], step=0)]
    file.write_bytes(good[0] + b"{\n" + b"\xff\xfe\n" + b"[]\n" + b'{"task": 3}\n' + b"\n" + good[1] + good[0][:50])
    index = opened(tmp_path)
    assert (index.progress().episodes, index.progress().damaged) == (2, 5)
    assert index.steps()[0].episodes == 2
    follow(index)
    progress = index.progress()
    assert progress.bytes_indexed == progress.bytes_total  # a line that was cut off is not waited for
    file.write_bytes(file.read_bytes()[:-50] + good[0].replace(b'"step":0', b'"step":1'))
    follow(index)
    assert [s.name for s in index.steps()] == ["0", "1"]


def test_a_line_that_is_too_long_is_damaged(tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "out.jsonl"
    append_jsonl(file, [episode(0), episode(1, length=4000), episode(2)])
    monkeypatch.setattr("verl_server.watch.index.line_files.MOST_LINE_BYTES", 20_000)
    monkeypatch.setattr("verl_server.watch.index.line_files._BUFFER", 1000)
    index = opened(file)
    assert [row.group for row in index.episodes(EpisodeFilter(), order="oldest").rows] == [0, 2]
    assert index.progress().damaged == 1


def test_numbers_and_texts_at_the_edge(tmp_path: Path, opened: Open) -> None:
    file, large = tmp_path / "out.jsonl", 2**80
    odd = episode(0, seed=large, session="ses\0sion")
    odd.error, odd.task = "\x00\x1b[31m‮" * 100, msgspec.structs.replace(odd.task, seed=large, episode_id="é\n")
    odd.turns[0].action = {"calls": [{"name": "a\nb"}, {"name": 3}, "x", {"name": "z" * 999}], "tool_name": ["y"]}
    append_jsonl(file, [odd])
    (row,) = opened(file).episodes(EpisodeFilter()).rows
    assert row.seed == str(large) and row.episode_id == "é\n" and row.error is not None and len(row.error) == 200
    assert row.tools == ["a b", "z" * 100]


def test_lanes_and_activity(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    files.record_trajectories(0, [episode(group, began=1000.0 + group) for group in range(10)])
    files.record_trajectories(1, [episode(0, began=None)])
    files.close()
    index = opened(tmp_path)
    assert index.span() == (1000.0, 1010.0)
    lanes = index.lanes(1002.5, 1004.5)
    assert [lane.label for lane in lanes.rows] == ["0 2-0", "0 3-0", "0 4-0"]
    assert lanes.rows[0].parts == [("generate", 1002.0, 1002.25), ("env", 1002.25, 1003.0)]
    assert (lanes.episodes, lanes.unknown) == (3, 1)
    few = index.lanes(1000.0, 1010.0, limit=5)
    assert [lane.began for lane in few.rows] == [1000.0, 1002.0, 1004.0, 1006.0, 1008.0] and few.episodes == 10
    activity = index.activity(1000.0, 1010.0, points=20)
    assert activity.generate == [0.5, 0.0] * 10 and activity.env == [0.5, 1.0] * 10 and sum(activity.queue) == 0
    with pytest.raises(BadRequestError):
        index.activity(3.0, 3.0)


def test_old_synchronous_files_count_from_the_begin_of_their_step(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    files.note(StepBegan(step=0))
    files.record_trajectories(0, [episode(0, began=None)])
    files.close()
    begin = json.loads((tmp_path / "events.jsonl").read_bytes().splitlines()[-1])["time"]
    (row,) = opened(tmp_path).episodes(EpisodeFilter()).rows
    assert (row.began, row.ended) == (begin, begin + 1.0)


def test_search_finds_texts_and_goes_on(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 5)
    special = episode(0, seed=5)
    special.turns[0].observation = {"deep": [{"text": 'Quoth the "Raven"\nNevermore é'}]}
    files.record_trajectories(5, [special, episode(1, 0, None)])
    files.close()
    index = opened(tmp_path)
    for text in ('"raven"', "NEVERMORE", "\nnever", "more é"):
        page = index.search(EpisodeFilter(), text)
        assert [row.seed for row in page.rows] == ["5"] and page.cursor is None
        assert page.searched_bytes == page.total_bytes
    assert len(index.search(EpisodeFilter(), "under the sofa").rows) == 22
    assert len(index.search(EpisodeFilter(), "look").rows) == 22
    assert len(index.search(EpisodeFilter(), "is full").rows) == 1
    for text in ("logprobs", "deep", "stop_reason", "0.5"):  # keys and numbers are no texts
        assert index.search(EpisodeFilter(), text).rows == []
    cursor, found, shares = None, [], []
    while True:
        page = index.search(EpisodeFilter(), "sofa", cursor=cursor, seconds=0.0)
        found += [row.row for row in page.rows]
        shares.append(page.searched_bytes)
        if (cursor := page.cursor) is None:
            break
    assert len(set(found)) == len(found) == 22 and shares == sorted(shares) and len(shares) > 20
    assert "Sofa" in index.search(EpisodeFilter(), "sofa", limit=1).places[0]


def test_two_indexes_of_one_run(tmp_path: Path, opened: Open) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 1)
    first, second = opened(tmp_path), opened(tmp_path)
    write_steps(files, 1, 2)
    files.close()
    assert answers(follow(first)) == answers(follow(second))


def test_the_thread_follows_the_run_and_ends(tmp_path: Path) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 2)
    files.close()
    index = RunIndex(tmp_path)
    index.start()
    index.close()


def test_the_questions_of_one_answer_see_the_same_rows(tmp_path: Path) -> None:
    files = writer(tmp_path)
    write_steps(files, 0, 1)
    database = RunDatabase(tmp_path)
    try:
        while database.poll(1.0):
            pass
        with database.reading() as connection:
            before = connection.execute("SELECT count(*) FROM episodes").fetchone()[0]
            write_steps(files, 1, 2)
            while database.poll(1.0):
                pass
            assert connection.execute("SELECT count(*) FROM episodes").fetchone()[0] == before > 0
        with database.reading() as connection:
            assert connection.execute("SELECT count(*) FROM episodes").fetchone()[0] > before
    finally:
        database.close()
        files.close()
