"""An agent that asks once, as a function (`ask`) and as a program (`python -I -S held_out_agent.py`).

The input of a task is {"words": the question, "folder": a folder of the test}. Its file `begun` counts the episodes of
held-out tasks. Where the file `victim` has the number KILL and a process id, the KILL-th of them kills that process.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any


def begin(given: dict[str, Any]) -> None:
    if "held out" not in given:
        return
    folder = Path(given["folder"])
    with (folder / "begun").open("ab", buffering=0) as file:
        file.write(b".")
        count = file.tell()
    if (folder / "victim").exists():
        kill, pid = map(int, (folder / "victim").read_text().split())
        if count == kill:
            os.kill(pid, signal.SIGKILL)


async def ask(session: Any, task: Any) -> None:
    begin(task.input)
    async with session.http(timeout=30) as client:
        answer = await client.post("/chat/completions", json=_question(task.input))
        answer.raise_for_status()


def share_of_even(episode: Any) -> float:
    """A reward that depends on the sampled tokens."""
    (branch,) = episode.trajectory.branches
    sampled = [token for token, mask in zip(branch.ids, branch.loss_mask, strict=True) if mask]
    return sum(token % 2 == 0 for token in sampled) / len(sampled)


def _question(given: dict[str, Any]) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": given["words"]}]}


if __name__ == "__main__":
    given = json.loads(Path(os.environ["VERL_TASK_FILE"]).read_text())["input"]
    begin(given)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url, body = os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(_question(given)).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30).read()
