"""OpenHands, by its SDK, over OpenAI's chat wire.

The SDK has no command. So the program is the Python interpreter of an environment with the SDK, and it runs the script
below: the default agent of OpenHands, without a browser, in the workspace.
"""

from __future__ import annotations

from verl_server.rollout.agents.recipes.python_script import script_recipe

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


RECIPE = script_recipe(
    _SCRIPT,
    package="openhands-sdk",
    install="pip install openhands-sdk openhands-tools (Python 3.12 or later)",
    versions="1.58.2",
    least_context=12_288,
    env={
        "OPENHANDS_SUPPRESS_BANNER": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm downloads its table of prices
    },
)
