"""`script_recipe`: recipes whose program is a Python interpreter with a package, which runs a script of the recipe.

The packages of `openhands` and `smolagents` have no command that plays one task. The script reads the prompt from
HOME/prompt.txt, the settings from the variables OPENAI_BASE_URL, OPENAI_API_KEY, MODEL, CONTEXT, MAX_OUTPUT ("": none)
and SECONDS, and writes its answer to HOME/answer.txt.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_server.rollout.agents.recipes.recipe import Place, ReadHome, Recipe, Start

_SCRIPT, _PROMPT, _ANSWER = "agent.py", "prompt.txt", "answer.txt"


def script_recipe(
    script: str, *, package: str, install: str, versions: str, least_context: int, env: Mapping[str, str]
) -> Recipe:
    """Return the recipe that runs `script` with an interpreter that has `package`. `env` are further variables."""

    def start(place: Place) -> Start:
        variables = {
            "OPENAI_BASE_URL": place.openai_url,
            "OPENAI_API_KEY": place.key,
            "MODEL": place.model,
            "CONTEXT": str(place.context),
            "MAX_OUTPUT": str(place.max_output or ""),
            "SECONDS": str(place.seconds),
        }
        files = {_SCRIPT: script, _PROMPT: place.prompt}
        return Start([place.program, str(place.home / _SCRIPT)], variables | dict(env), files)

    return Recipe(
        program="python",
        install=install,
        versions=versions,
        start=start,
        answer=_answer,
        version=["-c", f"from importlib.metadata import version; print({package!r}, version({package!r}))"],
        takes_words=False,
        least_context=least_context,
    )


def _answer(stdout: str, read: ReadHome) -> str:
    return read(_ANSWER) or ""
