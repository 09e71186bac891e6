"""Single-player games of the package `textarena` by name.

Its games draw from Python's global random generator. Each game gets a generator of its own here: the global state is
exchanged around each call, which runs on the event loop without a wait in between.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.rollout.environment import EnvError
from verl_server.rollout.environments.text import WithoutTools

_NEEDS_DOWNLOADS = ("nltk", "word_lists")
"""Words in the source of a game that loads data of nltk, which would be downloaded."""


class TextArenaEnvironment(WithoutTools):
    """A `TextEnvironment`: one game for one player. Its reward comes with the last step."""

    def __init__(self, name: str, **options: Any) -> None:
        """`options` are arguments of the game, such as `max_turns`. Needs the extra `games`."""
        self._game = _textarena().make(name, **options)
        self._random: Any = None

    async def reset(self, seed: int | None) -> str:
        self._random = random.Random(seed).getstate()
        with self._own_random():
            self._game.reset(num_players=1, seed=seed)
            return self._observation()

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        with self._own_random():
            done, _ = self._game.step(action=text)
            if not done:
                return self._observation(), None, False
            rewards, info = self._game.close()
            return self._last_words(info), float((rewards or {}).get(0, 0.0)), True

    def _observation(self) -> str:
        player, observation = self._game.get_observation()
        if player != 0:
            raise EnvError("The game waits for another player; only games for one player are supported.")
        return observation if isinstance(observation, str) else "\n".join(str(part[1]) for part in observation)

    @staticmethod
    def _last_words(info: Any) -> str:
        about = info.get(0, {}) if isinstance(info, dict) else {}
        return str(about.get("reason") or "The game is over.")

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(before)


def check_textarena(name: str) -> None:
    """Raise BadRequestError if the package lacks the game, or the game is not for one player or needs a download."""
    _textarena()
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    if name not in registry:
        near = [known for known in registry if known.lower().startswith(name.lower()[:4])][:10]
        raise BadRequestError(f"textarena has no game {name!r}. Similar names: {', '.join(near) or 'none'}.")
    module = str(registry[name].entry_point).partition(":")[0]
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec is not None and spec.origin else ""
    if any(word in source for word in _NEEDS_DOWNLOADS):
        raise BadRequestError(f"The game {name} needs data of nltk, which would be downloaded. Choose another game.")
    game = TextArenaEnvironment(name)
    try:
        game._random = random.Random(0).getstate()
        with game._own_random():
            game._game.reset(num_players=1, seed=0)
    except Exception as error:
        text = f"The game {name} does not start with one player: {error}. Choose a game for one player."
        raise BadRequestError(text) from error


def _textarena() -> Any:
    try:
        return importlib.import_module("textarena")
    except ImportError as error:
        raise BadRequestError("textarena games need textarena: pip install 'verl-server[games]'.") from error
