"""opencode, over OpenAI's chat wire."""

from __future__ import annotations

import json

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_MAX_OUTPUT = 32_000
"""opencode's own bound of a reply."""
_LONGEST_TIMEOUT = 2**31 - 1
"""Longest timer of JavaScript, in milliseconds."""


def start(place: Place) -> Start:
    """Run `opencode run` with a provider of its own and all permissions, and with no request but the turns."""
    milliseconds = min(int(place.seconds * 1000), _LONGEST_TIMEOUT)
    provider = {
        "npm": "@ai-sdk/openai-compatible",  # a part of the program
        "options": {
            "baseURL": place.openai_url,
            "apiKey": "{env:OPENAI_API_KEY}",
            "headerTimeout": milliseconds,
            "chunkTimeout": milliseconds,
        },
        "models": {
            place.model: {
                "tool_call": True,
                "limit": {
                    "context": place.context,
                    "output": place.max_output or min(_MAX_OUTPUT, place.context // 4),
                },
            }
        },
    }
    settings = {
        "provider": {"verl": provider},
        "enabled_providers": ["verl"],
        "model": f"verl/{place.model}",
        "small_model": f"verl/{place.model}",
        "permission": {"*": "allow"},
        "share": "disabled",
        "autoupdate": False,
        "snapshot": False,
        "lsp": False,
        "formatter": False,
    }
    # Without a title, the policy is asked for one.
    argv = [place.program, "run", "--format", "json", "--title", "episode"]
    env = {
        "OPENAI_API_KEY": place.key,
        "OPENCODE_CONFIG": str(place.home / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "true",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "true",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "true",
        "OPENCODE_DISABLE_MODELS_FETCH": "true",
        "npm_config_offline": "true",  # otherwise it installs its package for plugins into HOME
    }
    return Start(argv, env, files={"opencode.json": json.dumps(settings)}, stdin=place.prompt)


def answer(stdout: str, read: ReadHome) -> str:
    """Return the texts of the last step. Each line of stdout is an event."""
    texts: list[str] = []
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
            if event["type"] == "step_start":
                texts = []
            elif event["type"] == "text":
                texts.append(str(event["part"]["text"]))
        except (ValueError, TypeError, KeyError):
            continue  # no event, or one that was cut
    return "\n".join(texts)


RECIPE = Recipe(
    program="opencode",
    install="npm install -g opencode-ai",
    versions="1.18.33",
    start=start,
    answer=answer,
    needs=["rg"],  # its tools glob and grep fail without it, and it would download one
    reserved=["-m", "--model", "-c", "--continue", "-s", "--session", "--fork", "--attach", "--share"],
    least_context=12_288,
)
