"""aider, over OpenAI's chat wire.

aider sees the files that are in the index of a git repository. So it first makes the workspace a repository, if it is
none, and adds all files. It runs no commands of the policy. Words such as `--agent "aider --test-cmd make --auto-test"`
let it run tests.
"""

from __future__ import annotations

import json
import re

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_REPLIES = "replies.txt"
_REPLY = re.compile(r"^LLM RESPONSE .*\n((?:ASSISTANT .*\n?)*)", re.MULTILINE)
"""One reply in aider's file of replies: a mark begins each of its lines."""


def start(place: Place) -> Start:
    """Run `aider --message-file` without questions, commits and requests beside the turns."""
    model = f"openai/{place.model}"
    limits = {"max_input_tokens": place.context, "litellm_provider": "openai", "mode": "chat"}
    settings = {
        "name": model,
        "weak_model_name": model,
        "use_repo_map": True,
        "use_temperature": False,  # otherwise aider asks for 0
        "extra_params": {} if place.max_output is None else {"max_tokens": place.max_output},
    }
    paths = {
        "--load": "commands.txt",
        "--message-file": "prompt.txt",
        "--model-metadata-file": "metadata.json",
        "--model-settings-file": "settings.yml",
        "--input-history-file": "input.txt",
        "--chat-history-file": "chat.md",
        "--llm-history-file": _REPLIES,
    }
    argv = [place.program, "--model", model, "--timeout", str(place.seconds)]
    argv += [word for option, name in paths.items() for word in (option, str(place.home / name))]
    argv += ["--yes-always", "--no-pretty", "--no-stream", "--no-fancy-input", "--no-gitignore"]
    argv += ["--no-auto-commits", "--no-dirty-commits"]  # the policy would write the message of each commit
    argv += ["--analytics-disable", "--no-check-update", "--no-show-release-notes", "--no-show-model-warnings"]
    argv += ["--no-detect-urls", "--disable-playwright"]
    env = {
        "OPENAI_API_BASE": place.openai_url,
        "OPENAI_API_KEY": place.key,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise litellm downloads its table of prices
    }
    files = {
        "commands.txt": "/git add -A\n",
        "prompt.txt": place.prompt,
        "metadata.json": json.dumps({model: limits}),
        "settings.yml": json.dumps([settings]),  # JSON is YAML
    }
    return Start(argv, env, files)


def answer(stdout: str, read: ReadHome) -> str:
    """Return the last reply."""
    replies = _REPLY.findall(read(_REPLIES) or "")
    return re.sub("^ASSISTANT ", "", replies[-1], flags=re.MULTILINE).strip() if replies else ""


RECIPE = Recipe(
    program="aider",
    install="pip install aider-chat",
    versions="0.86.2",
    start=start,
    answer=answer,
    needs=["git"],
    reserved=[
        *("-m", "--message", "--msg", "-f", "--weak-model", "--editor-model", "--openai-api-base", "--openai-api-key"),
        *("--api-key", "--set-env", "--env-file", "-c", "--config", "--git", "--restore-chat-history", "--analytics"),
        *("--gui", "--browser", "--exit", "--dry-run"),
    ],
    least_context=1_024,
)
