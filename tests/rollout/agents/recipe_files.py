"""A recipe whose program is a small script, which speaks OpenAI's wire with the standard library."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.rollout.agents.common import PROGRAM_HEAD
from verl_server.rollout.agents.installed import InstalledAgent
from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start
from verl_server.rollout.environments.isolation import Isolation

_MAIN = """
if sys.argv[1:] == ["--version"]:
    print("script 1.2.3")
    sys.exit()
prompt = sys.stdin.read()
"""
ANSWERS = """
open(os.path.expanduser("~/answer.txt"), "w").write(chat(prompt))
"""
"""Asks the policy once with the whole prompt, and writes its reply as the answer."""


def script(folder: Path, code: str = ANSWERS, head: str = _MAIN) -> Path:
    """Write an executable program with `prompt`, `chat(text)` and `post(url, body)`."""
    path = folder / "script"
    path.write_text(f"#!{sys.executable} -IS\n{PROGRAM_HEAD}{head}{code}")
    path.chmod(0o755)
    return path


def start(place: Place) -> Start:
    return Start(
        argv=[place.program, "--context", str(place.context)],
        env={"OPENAI_BASE_URL": place.openai_url, "OPENAI_API_KEY": place.key, "MODEL": place.model},
        files={"config/settings.json": f'{{"turns": {place.max_turns or 0}}}'},
        stdin=place.prompt,
    )


def answer(stdout: str, read: ReadHome) -> str:
    return read("answer.txt") or ""


RECIPE = Recipe(program="no-such-script", install="make script", versions="1.2", start=start, answer=answer)


def installed(program: Path | None, isolation: Isolation = "none", **options: object) -> InstalledAgent:
    return InstalledAgent(RECIPE, "script", None if program is None else str(program), isolation=isolation, **options)  # type: ignore[arg-type]
