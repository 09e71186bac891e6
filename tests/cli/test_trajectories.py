"""`verl-server trajectories` says of a damaged file which file and line it is, in one line and without a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from verl_server.cli.main import main

WHOLE: dict[str, Any] = {
    "task": {"seed": 1},
    "tokens": [5, 6, 7],
    "loss_mask": [0, 1, 1],
    "logprobs": [0.0, -0.5, -1.0],
    "weight_versions": ["", "1", "1"],
    "turns": [{"observation": {}, "observation_span": [0, 1], "action_span": [1, 3]}],
    "reward": 1.0,
    "stop_reason": "done",
}


def encoded(**changes: Any) -> bytes:
    return json.dumps(WHOLE | changes).encode()


_DAMAGED = {
    "cut": encoded()[:-9],
    "blank": b"",
    "binary": b"\xff\xfe\x00\x80",
    "empty object": b"{}",
    "null": b"null",
    "deep": b"[" * 100_000,
    "text of another encoding": encoded(error="x").replace(b'"x"', b'"\xff"'),
    "short mask": encoded(loss_mask=[0, 1]),
    "short logprobs": encoded(logprobs=[0.0]),
    "short versions": encoded(weight_versions=[]),
    "short choices": encoded(has_choice=[1]),
    "short policy_logprobs": encoded(policy_logprobs=[None]),
    "span beyond the tokens": encoded(turns=[{"observation": {}, "observation_span": [0, 1], "action_span": [1, 9]}]),
    "no token id": encoded(tokens=[5, 6, 10**30]),
}


@pytest.mark.parametrize("command", ["ls", "show", "stats"])
@pytest.mark.parametrize("damage", list(_DAMAGED))
def test_a_damaged_line_is_named(tmp_path: Path, command: str, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trajectories.jsonl"
    file.write_bytes(encoded() + b"\n" + _DAMAGED[damage] + b"\n")
    assert main(["trajectories", command, str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"{file}:2: " in error and error.count("\n") == 1, error


def test_a_whole_line_with_a_positive_log_probability_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trajectories.jsonl").write_bytes(encoded(logprobs=[0.0, 1e6, 0.0]) + b"\n")
    assert main(["trajectories", "show", str(tmp_path)]) == 0
    assert "5 " in capsys.readouterr().out


def test_an_agents_episode_is_shown_as_texts_without_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"name": "add", "arguments": '{"a": 1}'}
    reply = {"role": "assistant", "reasoning": "I add them.", "text": "", "calls": [call]}
    asked = {"role": "user", "text": "1 + 1?\u001b[2J", "cut": 9}
    place = {"observation": {}, "observation_span": [0, 1], "action_span": [1, 3]}
    turns = [place | {"messages": [asked], "reply": reply}]
    (tmp_path / "trajectories.jsonl").write_bytes(encoded(turns=turns) + b"\n")
    assert main(["trajectories", "show", str(tmp_path)]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    said = ["user: 1 + 1?\\x1b[2J", "(9 characters are missing)", "assistant, reasoning: I add them."]
    assert [line for line in lines if line in said or "call" in line] == [*said, 'call add: {"a": 1}']


def test_versions_are_named_in_the_order_of_their_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Labels have no other order: a resumed run counts again, as another incarnation."""
    orders = [["", "9@bbbbbbbb", "10@bbbbbbbb"], ["", "10@bbbbbbbb", "9@aaaaaaaa"]]
    lines = [encoded(weight_versions=versions) + b"\n" for versions in orders]
    (tmp_path / "trajectories.jsonl").write_bytes(b"".join(lines))
    assert main(["trajectories", "stats", str(tmp_path)]) == 0
    assert "9@bbbbbbbb, 10@bbbbbbbb, 9@aaaaaaaa" in capsys.readouterr().out


def test_ends_are_counted_by_fault_and_replaced_episodes_by_themselves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third line is of a run in which --fault moved the reason, and the last one is of an earlier version."""
    place = {"task": {"seed": 1, "group": 1}, "member": 0}
    lines = [
        encoded(**place, reward=None, stop_reason="env_error", fault="infrastructure"),
        encoded(**place, stop_reason="done", fault="policy", attempt=1),
        encoded(stop_reason="env_timeout", fault="policy"),
        encoded(stop_reason="time_limit", reward=None),
    ]
    (tmp_path / "trajectories.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    assert main(["trajectories", "stats", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ends by fault policy 3 (done 1, env_timeout 1, time_limit 1), infrastructure 1 (env_error 1)" in said
    assert "replaced episodes 1" in said and " episodes 3 " in said
    assert main(["trajectories", "show", str(tmp_path), "--episode", "1-0"]) == 0
    assert "1-0 attempt 1 branch 0" in capsys.readouterr().out


def test_an_agents_run_counts_how_often_its_tokens_are_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"observation": {}, "observation_span": [0, 1], "action_span": [1, 3], "began": "root"}
    first = encoded(turns=[place], session="ses", reward=1.0, retry_tokens=4)
    fork = encoded(turns=[place | {"began": "edited"}], session="ses", reward=1.0, branch=1, fork_of=0, shared=1)
    (tmp_path / "trajectories.jsonl").write_bytes(first + b"\n" + fork + b"\n")
    (tmp_path / "run.json").write_text('{"agent": ["codex", "exec"]}')
    assert main(["trajectories", "stats", str(tmp_path)]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert said[-8:] == [
        "agent codex exec",
        "all sampled tokens 8",
        "trained once 4 (50.0%)",
        "trained more than once 0",
        "never trained 4 (retry 4)",
        "branches 2, 2 an episode (root 1, edited 1)",
        "context tokens 2, 50.0% of them again",
        "unrecorded generations 0",
    ]


@pytest.mark.parametrize(
    "summary", [b"{", b"[]", b'{"reasons": []}', b'{"mean_reward": "x"}', b'{"episodes": "\xff"}', b"\xff"]
)
def test_a_damaged_summary_is_named(tmp_path: Path, summary: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a" / "summary.json"
    file.parent.mkdir()
    file.write_bytes(summary)
    assert main(["trajectories", "ls", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"{file}: " in error and error.count("\n") == 1, error


def test_a_summary_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    summary = {"episodes": 3, "scored": 2, "mean_reward": 0.5, "reasons": {"done": 3}, "tokens": 17}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary))
    assert main(["trajectories", "ls", str(tmp_path)]) == 0
    assert "0.500" in capsys.readouterr().out


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a" / "summary.json").mkdir(parents=True)
    assert main(["trajectories", "ls", str(tmp_path)]) == 1
    assert f"Cannot read {tmp_path}/a/summary.json" in capsys.readouterr().err


def test_the_tokenizer_that_a_run_names_may_be_gone_or_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trajectories.jsonl").write_bytes(encoded() + b"\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"\xff\x00")
    for model in (str(tmp_path / "gone"), str(tmp_path / "model"), [1]):
        (tmp_path / "run.json").write_text(json.dumps({"model_path": model}))
        assert main(["trajectories", "show", str(tmp_path), "--episode", "0-0"]) == 1
        error = capsys.readouterr().err
        assert str(tmp_path / "run.json") in error and error.count("\n") == 1, error


def test_the_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["trajectories", "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(f" {name} " in said for name in ("ls", "show", "stats", "repair"))


def training_run(folder: Path) -> None:
    """Write the files of a training run: two ranks that kept everything, after two steps that kept a few."""

    def lines(step: int, rank: int, group: int) -> bytes:
        members = ({"task": {"seed": 1, "group": group}, "member": m, "reward": float(m)} for m in range(2))
        return b"".join(encoded(**member, step=step, rank=rank) + b"\n" for member in members)

    (folder / "trajectories.jsonl").write_bytes(lines(0, 0, 0) + lines(1, 0, 0))
    for rank in (0, 1):
        (folder / f"trajectories-rank{rank}.jsonl").write_bytes(lines(2, rank, rank) + lines(10, rank, rank))
    (folder / "trajectories-rank9-old.jsonl").write_bytes(b"no file of a rank")


def test_a_training_run_is_read_by_step_over_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training_run(tmp_path)
    assert main(["trajectories", "ls", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["step", "episode"]
    every = [(0, "0-0"), (0, "0-1"), (1, "0-0"), (1, "0-1")]
    every += [(step, name) for step in (2, 10) for name in ("0-0", "0-1", "1-0", "1-1")]
    assert [(int(row.split()[0]), row.split()[1]) for row in rows] == every

    assert main(["trajectories", "ls", str(tmp_path), "--step", "2"]) == 0
    assert [row.split()[:2] for row in capsys.readouterr().out.splitlines()[1:]] == [
        ["2", "0-0"], ["2", "0-1"], ["2", "1-0"], ["2", "1-1"],
    ]  # fmt: skip
    assert main(["trajectories", "show", str(tmp_path), "--episode", "1-1"]) == 0
    assert "step 10 1-1 branch 0" in capsys.readouterr().out, "the last step"
    assert main(["trajectories", "show", str(tmp_path), "--episode", "1-1", "--step", "2"]) == 0
    assert "step 2 1-1 branch 0" in capsys.readouterr().out
    assert main(["trajectories", "stats", str(tmp_path)]) == 0
    figures = capsys.readouterr().out
    assert "6 of 6" in figures, "a group of one step is not one of another"
    assert main(["trajectories", "stats", str(tmp_path), "--step", "1"]) == 0
    assert "1 of 1" in capsys.readouterr().out

    for command in ("ls", "show", "stats"):
        assert main(["trajectories", command, str(tmp_path), "--step", "5"]) == 1
        assert "no trajectory of step 5. It has the steps 0 to 10" in capsys.readouterr().err
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "trajectories.jsonl").write_bytes(encoded() + b"\n")
    assert main(["trajectories", "ls", str(tmp_path / "plain"), "--step", "5"]) == 1
    assert "It has no steps: leave --step out" in capsys.readouterr().err


def test_episodes_of_a_mixture_name_their_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = [{"seed": 1, "group": group, "environment": name} for group, name in enumerate(["code", "math", "code"])]
    lines = [encoded(task=task, reward=reward) for task, reward in zip(tasks, [1.0, 0.25, 0.0], strict=True)]
    (tmp_path / "trajectories.jsonl").write_bytes(b"\n".join([*lines, b""]))
    assert main(["trajectories", "ls", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["environment", "episode"]
    assert [row.split()[:2] for row in rows] == [["code", "0-0"], ["math", "1-0"], ["code", "2-0"]]
    assert main(["trajectories", "stats", str(tmp_path)]) == 0
    figures = capsys.readouterr().out
    assert re.search(r"mean reward of code +0\.5\b", figures) and re.search(r"mean reward of math +0\.25\b", figures)


@pytest.mark.parametrize("width", ["40", "80", "160"])
def test_a_list_is_readable_at_any_width(
    tmp_path: Path, width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    error = "The environment [bold]failed[/]: " + "reason " * 10
    (tmp_path / "trajectories.jsonl").write_bytes(encoded(reward=None, stop_reason="env_error", error=error) + b"\n")
    summary = {"episodes": 128, "scored": 120, "unsampled": 2, "mean_reward": 0.5, "tokens": 1_234_567}
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "summary.json").write_text(json.dumps(summary | {"reasons": {"done": 100, "max_turns": 20}}))
    for path, facts in (
        (tmp_path / "trajectories.jsonl", ["0-0", "env_error", "[bold]failed[/]", *["reason"] * 10]),
        (tmp_path / "a" / "..", ["128", "120", "0.500", "1234567", "100", "20"]),
    ):
        if path.is_dir():
            (tmp_path / "trajectories.jsonl").unlink()
        assert main(["trajectories", "ls", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        words = " ".join(lines).replace(":", " ").replace(",", " ").split()
        assert all(fact in words for fact in facts), lines
        assert max(map(len, lines)) <= int(width)
