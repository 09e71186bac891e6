"""smolagents' CodeAgent, which acts in Python code, over OpenAI's chat wire.

The package's own command has no tool for files, and expects the key as a word. So the program is the Python interpreter
of an environment with smolagents, and it runs the script below, whose agent has a shell.

The script keeps the conversation one branch of the session. By itself, CodeAgent sends each reply back with the closing
tag of its code, which is a stop string and so not in the reply, and with a copy of the code ("Calling tools: ...").
Each turn would begin a branch.
"""

from __future__ import annotations

from verl_server.rollout.agents.recipes.python_script import script_recipe

_SCRIPT = '''\
import os
import subprocess
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, tool

HOME = Path(os.environ["HOME"])


@tool
def shell(command: str) -> str:
    """Run a bash command in the working folder. Return its output and its exit code.

    Args:
        command: The command. Each one runs in a new shell, for 120 seconds at most.
    """
    words = ["timeout", "-k", "5", "120", "bash", "-c", command]
    ran = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    return f"{ran.stdout}\\n(exit code {ran.returncode})"


def forget_calls(step, agent):
    step.tool_calls = None


request = {"extra_body": {"include_stop_str_in_output": True}}
if os.environ["MAX_OUTPUT"]:
    request["max_tokens"] = int(os.environ["MAX_OUTPUT"])
client = {"timeout": float(os.environ["SECONDS"])}
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIModel(os.environ["MODEL"], url, key, client_kwargs=client, **request)
agent = CodeAgent([shell], model, max_steps=100_000, step_callbacks=[forget_calls])
answer = agent.run((HOME / "prompt.txt").read_text())
(HOME / "answer.txt").write_text(str(answer))
'''


RECIPE = script_recipe(
    _SCRIPT,
    package="smolagents",
    install="pip install 'smolagents[openai]'",
    versions="1.26.0",
    least_context=4_096,
    env={"HF_HUB_OFFLINE": "1"},
)
