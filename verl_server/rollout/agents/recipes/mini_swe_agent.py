"""mini-swe-agent, whose one tool is bash, over OpenAI's chat wire.

The prompt and the settings of the episode stand in a file, which is merged into mini.yaml of the program.
"""

from __future__ import annotations

import json

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_TRAJECTORY = "trajectory.json"
_SET = (
    *("run.task", "agent.mode", "agent.confirm_exit", "agent.cost_limit", "agent.output_path"),
    *("model.model_name", "model.model_class", "model.cost_tracking"),
    *("model.model_kwargs.timeout", "model.model_kwargs.max_tokens"),
)
"""The keys of the program's settings that `start` and its options set."""


def start(place: Place) -> Start:
    """Run `mini` without questions, with litellm's client of OpenAI."""
    request = {"timeout": place.seconds} | ({} if place.max_output is None else {"max_tokens": place.max_output})
    settings = {
        "run": {"task": place.prompt},
        "agent": {"mode": "yolo", "confirm_exit": False, "cost_limit": 0},
        "model": {"model_name": f"openai/{place.model}", "cost_tracking": "ignore_errors", "model_kwargs": request},
    }
    argv = [place.program, "-c", "mini.yaml", "-c", str(place.home / "episode.yaml")]
    argv += ["-o", str(place.home / _TRAJECTORY)]
    env = {
        "OPENAI_BASE_URL": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "MSWEA_CONFIGURED": "true",  # otherwise the program asks for a model and a key
        "MSWEA_SILENT_STARTUP": "true",
        "MSWEA_GLOBAL_CONFIG_DIR": str(place.home / "config"),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",  # the program repeats a request beyond a session's limit, too
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm downloads its table of prices
    }
    return Start(argv, env, files={"episode.yaml": json.dumps(settings)})  # JSON is YAML


def answer(stdout: str, read: ReadHome) -> str:
    """Return what the last command printed behind the program's end mark, else the last text of the policy."""
    try:
        trajectory = json.loads(read(_TRAJECTORY) or "")
        texts = [message.get("content") for message in trajectory["messages"] if message["role"] == "assistant"]
        found = [trajectory["info"]["submission"], *reversed(texts)]
    except (ValueError, TypeError, KeyError):
        return ""
    return next((text for text in found if text and isinstance(text, str)), "")


RECIPE = Recipe(
    program="mini",
    install="pip install mini-swe-agent",
    versions="2.4.6",
    start=start,
    answer=answer,
    version=["--help"],
    reserved=[
        *(f"{option} {key}" for option in ("-c", "--config") for key in _SET),
        *("-m", "--model", "--model-class", "-t", "--task", "-l", "--cost-limit", "--output"),
    ],
    least_context=2_048,
)
