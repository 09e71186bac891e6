"""GRPO on tasks that Claude Code plays: the trainer is killed after two steps, and the resumed run loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import KEY, files_below, sandboxed
from playing import SHORT

from tests.waiting import eventually
from verl_server.files.trees import remove_tree

STEPS, GROUPS, MEMBERS = 4, 2, 4
MOST_SECONDS = 200.0
OPTIONS = {
    "--steps": STEPS,
    "--save-every": 1,
    "--device": "cpu",
    "--environment": "workspace",
    "--max-turns": 2,
    "--max-new-tokens": 24,
    "--max-tokens": 8192,
    "--max-concurrency": 8,
    "--grpo.groups": GROUPS,
    "--grpo.group-size": MEMBERS,
    "--grpo.epochs": 1,
    "--grpo.minibatches": 1,
    "--grpo.learning-rate": 1e-3,
    "--grpo.warmup-steps": 1,
    "--server.kv-cache-gib": 0.1,
    "--server.cpu-threads": 1,
}
CHECK = """\
letters=$(tr -cd a-z < "$VERL_ANSWER_FILE" | wc -c)
bytes=$(wc -c < "$VERL_ANSWER_FILE")
awk "BEGIN {print $letters / ($bytes + 1)}" > "$VERL_REWARD_FILE"
"""
"""The reward is the share of small letters in the answer: most answers of a random model have another one."""


@pytest.fixture
def short_temporary() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="vp-"))
    yield folder
    remove_tree(folder)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def place(trajectory: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return step, group, member and branch of a trajectory."""
    return trajectory["step"], trajectory["task"]["group"], trajectory["member"], trajectory["branch"]


@pytest.mark.timeout(500)
def test_a_run_that_is_killed_goes_on(
    tiny_folder: Path, program: Callable[[str], str], short_temporary: Path, tmp_path: Path
) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "run"
    check = {"command": ["sh", "check.sh"], "files": {"check.sh": CHECK}}
    environment = {"files": {"word.txt": "a\n"}, "check": check}
    tasks.write_text(
        "".join(json.dumps({"input": f"Say word {n}.", "environment": environment}) + "\n" for n in range(3))
    )
    command = [sys.executable, "-m", "verl_server.train.grpo", "--model-path", str(tiny_folder), "--out", str(out)]
    command += ["--agent", SHORT["claude-code"], "--program", program("claude"), "--tasks", str(tasks)]
    command += [str(part) for option in OPTIONS.items() for part in option]
    own = os.environ | {"TMPDIR": str(short_temporary), "OMP_NUM_THREADS": "1"}

    with (tmp_path / "killed.log").open("w+") as log:
        run = subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)
        try:
            done = eventually(
                lambda: len(lines(out / "metrics.jsonl")) >= 2 or run.poll() is not None, seconds=MOST_SECONDS
            )
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
        assert done and len(lines(out / "metrics.jsonl")) >= 2, (tmp_path / "killed.log").read_text()
    assert eventually(lambda: sandboxed(short_temporary) == [], seconds=30), sandboxed(short_temporary)

    resumed = subprocess.run(
        [*command, "--resume"],
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MOST_SECONDS,
    )
    assert resumed.returncode == 0, resumed.stdout
    metrics = lines(out / "metrics.jsonl")
    print([(step["rollout_seconds"], step["reward"], step["logprob_gap"]) for step in metrics])
    # A step whose checkpoint the kill cut off is trained again, on the same episodes.
    assert sorted({step["step"] for step in metrics}) == list(range(STEPS))
    assert len({(step["step"], step["reward"]) for step in metrics}) == STEPS
    assert {(step["skipped"], step["failed"]) for step in metrics} == {(None, 0)}
    assert all(step["logprob_gap"] < 1e-4 for step in metrics)
    kept = lines(out / "trajectories-rank0.jsonl")
    assert len({place(each)[:3] for each in kept}) == STEPS * GROUPS * MEMBERS
    assert len({(*place(each), tuple(each["tokens"])) for each in kept}) == len({place(each) for each in kept})
    assert all(each["reward"] is not None for each in kept)
    assert len({each["reward"] for each in kept}) > STEPS  # there was something to learn
    assert files_below(short_temporary) == [] and sandboxed(short_temporary) == []
    assert shutil.which("bwrap") and KEY not in resumed.stdout
