"""smolagents' CodeAgent, which acts in Python code, over OpenAI's chat wire.

The package's own command has no tool for files, and expects the key as a word. So the program is the Python interpreter
of an environment with smolagents, and it runs the script below, whose agent has a shell.

The script keeps the conversation one branch of the session. By itself, CodeAgent sends each reply back with the closing
tag of its code, which is a stop string and so not in the reply, and with a copy of the code ("Calling tools: ...").
Each turn would begin a branch.
"""

from __future__ import annotations

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

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


def start(place: Place) -> Start:
    """Run the script with the program, which is a Python interpreter."""
    env = {
        "OPENAI_BASE_URL": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "MODEL": place.model,
        "MAX_OUTPUT": str(place.max_output or ""),
        "SECONDS": str(place.seconds),
        "HF_HUB_OFFLINE": "1",
    }
    argv = [place.program, str(place.home / "agent.py")]
    return Start(argv, env, files={"agent.py": _SCRIPT, "prompt.txt": place.prompt})


def answer(stdout: str, read: ReadHome) -> str:
    """Return what the script wrote at its end."""
    return read("answer.txt") or ""


RECIPE = Recipe(
    program="python",
    install="pip install 'smolagents[openai]'",
    versions="1.26.0",
    start=start,
    answer=answer,
    version=["-c", "from importlib.metadata import version; print('smolagents', version('smolagents'))"],
    takes_words=False,
    least_context=4_096,
)
