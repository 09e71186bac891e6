"""`task_prompt`: the first words that an agent reads. The tool loop and installed agents begin with them."""

from __future__ import annotations

from verl_server.files.json_values import dumps
from verl_server.rollout.agents.gateway import GuardedEnvironment
from verl_server.rollout.agents.types import AgentTask


def task_prompt(task: AgentTask, environment: GuardedEnvironment | None) -> str:
    """Return the task's input, as JSON unless it is a text, and then the first observation of its environment."""
    task_text = task.input if isinstance(task.input, str) else dumps(task.input).decode()
    parts = [] if task.input is None else [task_text]
    if environment is not None and environment.observation:
        parts.append(environment.observation)
    return "\n\n".join(parts)
