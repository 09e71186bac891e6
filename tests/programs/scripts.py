"""The tasks of examples/workspace_tasks.jsonl, how each is solved by commands of a shell, and how it is not."""

from __future__ import annotations

from pathlib import Path

from scripted import Call, Say, Script

from verl_server.rollout.agents.loading import read_tasks

FILE = Path(__file__).parents[2] / "examples" / "workspace_tasks.jsonl"
TASKS = read_tasks(FILE)
SOLUTIONS: list[Script] = [
    [Call('sed -i \'s/"aeio"/"aeiouAEIOU"/\' counting.py'), Say("I corrected the function.")],
    [Call("python3 puzzle.py"), Say("21171191")],
    [
        Call("sort -t, -k2 -n temperatures.csv > sorted.csv"),
        Call('echo "$(wc -l < sorted.csv) $(tail -n 1 sorted.csv | cut -d, -f1)" > summary.txt'),
        Say("Both files are written."),
    ],
]
FAILURES: list[Script] = [
    [Call("cat counting.py"), Say("It is right as it is.")],
    [Say("21171192")],
    [Call("sort -t, -k2 -n temperatures.csv > sorted.csv"), Say("Half of the work is done.")],
]
REWARDS_OF_FAILURES = [0.0, 0.0, 0.5]


def scripts(of_tasks: list[Script]) -> dict[str, Script]:
    """Return the scripts by the text of their tasks."""
    return {task.input: script for task, script in zip(TASKS, of_tasks, strict=True)}
