"""The words that a user adds to the command of a recipe: `check_words` refuses those that contradict it.

`InstalledAgent` calls it before the first episode. A program takes the last of two equal options, so that such a word
would replace the address, the model, a limit or the form of the answer, and each episode would be lost in silence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from verl_server.errors import BadRequestError

_PRINTS_ONLY = ("--help", "--version")


def check_words(recipe: str, words: Sequence[str], argv: Sequence[str], reserved: Iterable[str]) -> None:
    """Raise BadRequestError if a word repeats an option of the command `argv` of the recipe, or one that is `reserved`.

    `--model`, `--model=x`, `--no-model`, `-m`, `-mx` and `-m=x` are options of two names. A reserved "-c KEY" refuses
    `-c KEY=VALUE` with this key, with one within it ("KEY.part"), and with one that it is within.
    """
    pairs = [(name, key) for name, _, key in (option.partition(" ") for option in reserved)]
    keyed = {name for name, key in pairs if key}
    whole = {name for name, key in pairs if not key} | {name for name, _ in _options(argv) if name not in keyed}
    for name, value in _options(words):
        key = value.partition("=")[0]
        is_within = any(name == option and own and _overlap(key, own) for option, own in pairs)
        if is_within or _positive(name) in map(_positive, whole):
            raise BadRequestError(
                f"{f'{name} {key}' if is_within else name!r} is an option that the recipe {recipe} sets itself: its "
                "address, its model, its limits or its answer rely on it. Leave it out. The options of this command "
                "set limits (--limits.max-turns, --max-new-tokens), and the model is the served one."
            )
        if name in _PRINTS_ONLY:
            raise BadRequestError(f"With {name!r} the program plays nothing. Run `{argv[0]} {name}` yourself.")


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each option. The value may be a word that is none: few options have a value "-x"."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == "--":
            return
        if word.startswith("--"):
            name, is_joined, value = word.partition("=")
            yield name, value if is_joined else following
        elif word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            yield word[:2], word[2:].removeprefix("=") or following


def _positive(name: str) -> str:
    return f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name


def _overlap(key: str, own: str) -> bool:
    """Return True if one dotted key is, or lies within, the other."""
    return f"{key}.".startswith(f"{own}.") or f"{own}.".startswith(f"{key}.")
