"""OpenHands, by its SDK, over OpenAI's chat wire.

The SDK has no command. So the program is the Python interpreter of an environment with the SDK, and it runs the script
below: the default agent of OpenHands, without a browser, in the workspace.
"""

from __future__ import annotations

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_SCRIPT = """\
import os
from pathlib import Path

from openhands.sdk import LLM, Conversation
from openhands.sdk.conversation import get_agent_final_response
from openhands.tools.preset.default import get_default_agent

HOME = Path(os.environ["HOME"])
llm = LLM(
    model="openai/" + os.environ["MODEL"],
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_input_tokens=int(os.environ["CONTEXT"]),
    max_output_tokens=int(os.environ["MAX_OUTPUT"]) if os.environ["MAX_OUTPUT"] else None,
    timeout=int(float(os.environ["SECONDS"])) + 1,
)
agent = get_default_agent(llm, cli_mode=True)
conversation = Conversation(agent, workspace=os.getcwd(), max_iteration_per_run=100_000, visualizer=None)
conversation.send_message((HOME / "prompt.txt").read_text())
conversation.run()
(HOME / "answer.txt").write_text(get_agent_final_response(conversation.state.events))
"""


def start(place: Place) -> Start:
    """Run the script with the program, which is a Python interpreter."""
    env = {
        "OPENAI_BASE_URL": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "MODEL": place.model,
        "CONTEXT": str(place.context),
        "MAX_OUTPUT": str(place.max_output or ""),
        "SECONDS": str(place.seconds),
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm downloads its table of prices
    }
    argv = [place.program, str(place.home / "agent.py")]
    return Start(argv, env, files={"agent.py": _SCRIPT, "prompt.txt": place.prompt})


def answer(stdout: str, read: ReadHome) -> str:
    """Return what the script wrote at its end."""
    return read("answer.txt") or ""


RECIPE = Recipe(
    program="python",
    install="pip install openhands-sdk openhands-tools (Python 3.12 or later)",
    versions="1.58.2",
    start=start,
    answer=answer,
    version=["-c", "from importlib.metadata import version; print('openhands-sdk', version('openhands-sdk'))"],
    takes_words=False,
    least_context=12_288,
)
