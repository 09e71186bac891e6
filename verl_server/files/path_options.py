"""`OutputPath`: the type of an option that names an output, for tyro. `--out ''` is refused.

An empty text would be the current folder, and a script whose variable is not set would write there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec


def _path(words: list[str]) -> Path:
    """Return the path. Raise ValueError, which tyro prints, for an empty text."""
    if not words[0].strip():
        raise ValueError("the path is empty: name a place, or leave the option out")
    return Path(words[0])


OutputPath = Annotated[
    Path,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=_path,
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    ),
]
