"""Claude Code, Anthropic's coding agent: `claude -p`, over the wire of /v1/messages."""

from __future__ import annotations

import json

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_LONGEST_TIMEOUT = 2**31 - 1
"""Longest timer of JavaScript, in milliseconds. A longer one ends at once."""


def start(place: Place) -> Start:
    """Run `claude -p` with its own permissions off, which the isolation replaces, and with no request but the turns."""
    argv = [place.program, "-p", "--output-format", "json", "--dangerously-skip-permissions"]
    argv += ["--no-session-persistence"]
    if place.max_turns is not None:
        argv += ["--max-turns", str(place.max_turns)]
    milliseconds = str(min(int(place.seconds * 1000), _LONGEST_TIMEOUT))
    env = {
        "ANTHROPIC_BASE_URL": place.anthropic_url,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": place.model,
        "ANTHROPIC_SMALL_FAST_MODEL": place.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": place.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": place.model,
        "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(place.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(place.max_output or place.context // 4),
        # Without these, the beginning of the prompts changes, and requests beside the turns are sampled and trained.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "API_TIMEOUT_MS": milliseconds,
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": milliseconds,
        "IS_SANDBOX": "1",  # root may skip permissions, where there is no isolation
    }
    return Start(argv, env, stdin=place.prompt)


def answer(stdout: str, read: ReadHome) -> str:
    """Return `result` of the JSON object in the last line. An error of the API is no answer."""
    lines = stdout.strip().splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):  # the program was ended before it printed one
        return ""
    if not isinstance(result, dict) or result.get("is_error") or not isinstance(result.get("result"), str):
        return ""
    return str(result["result"])


RECIPE = Recipe(
    program="claude",
    install="npm install -g @anthropic-ai/claude-code",
    versions="2.1.197",
    start=start,
    answer=answer,
    reserved=[
        *("--print", "--input-format", "--permission-mode", "--model", "--fallback-model"),
        *("--bg", "--background", "-c", "--continue", "-r", "--resume", "--fork-session", "--from-pr"),
        *("ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
        *("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX"),
    ],
)
