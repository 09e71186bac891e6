"""Codex, OpenAI's coding agent: `codex exec` with a provider of its own, over the wire of /v1/responses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_ANSWER = "answer.txt"
_CONFIG = """\
model = {model}
model_provider = "verl"
model_context_window = {context}
model_auto_compact_token_limit = {compact_at}
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.verl]
name = "verl"
base_url = {url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 2
stream_max_retries = 2
stream_idle_timeout_ms = {milliseconds}

[analytics]
enabled = false

[agents]
enabled = false

[features]
goals = false
unbounded_connection_retries = false

[skills]
include_instructions = false

[skills.bundled]
enabled = false
"""


def start(place: Place) -> Start:
    """Run `codex exec` without approvals and without its own sandbox, which the isolation replaces."""
    config = _CONFIG.format(
        model=json.dumps(place.model),
        context=place.context,
        compact_at=_compact_at(place),
        url=json.dumps(place.openai_url),
        milliseconds=min(int(place.seconds * 1000), 2**31 - 1),
    )
    argv = [place.program, "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    argv += ["-C", str(place.workspace), "-o", str(place.home / _ANSWER), "-"]
    env = {"CODEX_HOME": str(place.home / ".codex"), "OPENAI_API_KEY": place.key}
    return Start(argv, env, files={".codex/config.toml": config}, stdin=place.prompt)


def _compact_at(place: Place) -> int:
    """Return the tokens at which the history is made shorter: one reply and one output of a tool must still fit."""
    reply = min(place.max_output or place.context // 8, place.context // 4)
    output = min(10_000, place.context // 8)
    return place.context - reply - output


def _keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted keys of nested settings."""
    for key, value in settings.items():
        yield from [f"{key}.{inner}" for inner in _keys(value)] if isinstance(value, dict) else [key]


def _reserved() -> list[str]:
    """Return the options that would replace a setting of the recipe."""
    keys = list(_keys(tomllib.loads(_CONFIG.format(model='""', context=0, compact_at=0, url='""', milliseconds=0))))
    features = [key.removeprefix("features.") for key in keys if key.startswith("features.")]
    set_keys = [f"{option} {key}" for option in ("-c", "--config") for key in keys]
    switches = [f"{option} {feature}" for option in ("--enable", "--disable") for feature in features]
    others = ["-m", "--model", "-p", "--profile", "--oss", "--local-provider", "--remote", "--ignore-user-config"]
    others += ["-s", "--sandbox", "--approve-for-me", "--cd", "--worktree", "--output-last-message"]
    return [*set_keys, *switches, *others]


def answer(stdout: str, read: ReadHome) -> str:
    """Return the last message. There is none if the last turn failed."""
    return read(_ANSWER) or ""


RECIPE = Recipe(
    program="codex",
    install="npm install -g @openai/codex",
    versions="0.171.0",
    start=start,
    answer=answer,
    reserved=_reserved(),
    least_context=8_192,
)
