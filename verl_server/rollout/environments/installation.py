"""`installation_of`: the files and folders that an installed program needs, so that bubblewrap shows no others.

`isolated_program` shows them read-only. The narrowest folder that works is chosen: the node_modules folder of an npm
package, the virtual environment of a Python script with the installation of its interpreter, or one binary alone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from verl_server.errors import BadRequestError
from verl_server.rollout.environments.isolation import is_system, links_on

_HEAD_BYTES = 4096
_SHIMS = ("/.pyenv/shims/", "/.asdf/shims/", "/.volta/bin/", "/mise/shims/", "/.rbenv/shims/")
"""Folders of programs that choose another program. What they choose is not in their file."""
_MOST_INTERPRETERS = 4
_REMEDY = (
    "Name its folders with `readable` (--readable FOLDER), install it in a folder of its own (npm install, "
    "uv tool install, pipx, python -m venv), or run it without isolation (--isolation none)."
)


def installation_of(program: Path) -> list[Path]:
    """Return the paths that must be visible so that `program` runs: links on the way to it, files and folders.

    - A script needs its interpreter too, also one that `/usr/bin/env` finds on PATH.
    - An npm package needs the outermost node_modules folder around it, because its dependencies lie beside it.
    - A script of a virtual environment (venv, uv, pipx) needs the environment and the installation of its Python.
    - Any other binary needs its own prefix (the folder around `bin`) outside of HOME, and itself only within HOME.

    Packages that are installed in editable mode, and packages of `npm link`, lie elsewhere: they are not followed, and
    `readable` must name their folders. Raise BadRequestError with the remedy if the installation cannot be determined.
    """
    return list(dict.fromkeys(_needed(Path(os.path.abspath(program)), 0)))


def visible_path(path: str, readable: Sequence[Path]) -> str:
    """Return the folders of a PATH that an isolated program sees, in their order."""
    shown = [Path(os.path.realpath(folder)) for folder in readable] + [Path(os.path.abspath(f)) for f in readable]
    kept = []
    for word in path.split(os.pathsep):
        folder = Path(word)
        real = Path(os.path.realpath(folder))
        inside = any(part.is_relative_to(folder) or part.is_relative_to(real) for part in shown)
        around = any(real.is_relative_to(part) for part in shown)
        if folder.is_absolute() and (is_system(real) or inside or around):
            kept.append(word)
    kept += [folder for folder in ("/usr/local/bin", "/usr/bin", "/bin") if folder not in kept]
    return os.pathsep.join(kept)


def _needed(program: Path, depth: int) -> list[Path]:
    if depth > _MOST_INTERPRETERS:
        raise BadRequestError(f"{program} has an interpreter that is a script itself, and so on. {_REMEDY}")
    if any(shims in f"{program}" for shims in _SHIMS):
        raise BadRequestError(
            f"{program} is a shim that starts another program. Name that program itself: `pyenv which "
            f"{program.name}`, `asdf which`, `volta which` or `mise which` prints its path."
        )
    links, real = links_on(program)
    needed = [program, *links]
    interpreter = _interpreter(real)
    if (modules := _node_modules(real)) is not None:
        needed.append(modules)
    elif (environment := _environment(program, [*links, real])) is not None:
        needed += environment
    elif interpreter is not None:
        needed.append(_around_script(real, interpreter))
    elif not is_system(real):
        needed.append(_around_binary(real))
    if interpreter is not None:
        needed += _needed(interpreter, depth + 1)
    return needed


def _interpreter(script: Path) -> Path | None:
    """Return the interpreter in the first line of a script, None for a binary."""
    try:
        with script.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise BadRequestError(f"{script} cannot be read: {error.strerror}.") from error
    if not head.startswith(b"#!"):
        return None
    lines = head.decode(errors="replace").splitlines()
    words = lines[0][2:].split()
    if len(lines) > 1 and lines[1].startswith("'''exec' "):  # pip writes this where the first line would be too long
        words = [lines[1].removeprefix("'''exec' ").split('"$0"')[0].strip().strip('"')]
    if not words:
        return None
    if os.path.basename(words[0]) != "env":
        return Path(words[0])
    names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    found = shutil.which(names[0]) if names else None
    if found is None:
        raise BadRequestError(f"{script} needs {names[0] if names else 'an interpreter'}, which is not on PATH.")
    return Path(found)


def _node_modules(real: Path) -> Path | None:
    """Return the outermost node_modules folder around a file, None if there is none."""
    if "node_modules" not in real.parts[:-1]:
        return None
    return Path(*real.parts[: real.parts.index("node_modules") + 1])


def _environment(program: Path, places: Sequence[Path]) -> list[Path] | None:
    """Return a virtual environment, or an installation of Python, if one of the places is in its `bin`.

    `places` are the links on the way to the program, because `bin/python` of a virtual environment is a link to its
    base, and its real path. None if they lie in neither.
    """
    for place in (program, *places):
        prefix = place.parent.parent
        if place.parent.name != "bin" or is_system(place):
            continue
        if (prefix / "pyvenv.cfg").is_file():
            return [prefix, *_base(prefix / "pyvenv.cfg")]
        if any((prefix / "lib").glob("python3*/encodings")):
            return [_checked(prefix, program)]
    return None


def _base(config: Path) -> list[Path]:
    """Return the installation of the Python that a virtual environment was made with."""
    lines = [line.partition("=") for line in config.read_text(errors="replace").splitlines()]
    home = next((value.strip() for key, _, value in lines if key.strip() == "home"), "")
    if not home:
        raise BadRequestError(f"{config} has no line `home = FOLDER`: the virtual environment is broken. {_REMEDY}")
    prefix = Path(home).parent
    links, real = links_on(prefix)
    if is_system(real):
        return []
    if (prefix / "pyvenv.cfg").is_file():
        return [prefix, *_base(prefix / "pyvenv.cfg")]
    return [_checked(prefix, config), *links]


def _around_script(real: Path, interpreter: Path) -> Path:
    """Return what a script outside of packages needs: itself, or its folder if this is a package of node."""
    if "python" in interpreter.name and is_system(Path(os.path.realpath(interpreter))):
        user_site = [*(real.parent.parent / "lib").glob("python3*/site-packages")]
        if real.parent.name == "bin" and user_site and not is_system(real):
            raise BadRequestError(
                f"{real} was installed with `pip install --user` or --prefix: its packages lie in {user_site[0]}, "
                f"where an isolated program does not look. {_REMEDY}"
            )
    if interpreter.name in ("node", "nodejs", "bun", "deno"):
        for folder in real.parents:
            if (folder / "package.json").is_file():
                return _checked(folder, real)
    return real


def _around_binary(real: Path) -> Path:
    """Return the folder around `bin` for a binary outside of HOME, and the binary alone otherwise."""
    prefix = real.parent.parent
    home = Path(os.path.realpath(Path.home()))
    if str(real).startswith("/nix/store/"):
        return Path("/nix/store")
    if (
        real.parent.name == "bin"
        and prefix != Path("/")
        and not prefix.is_relative_to(home)
        and prefix not in home.parents
    ):
        return prefix
    return real


def _checked(prefix: Path, program: Path) -> Path:
    """Return the folder of an installation. Raise BadRequestError if the user's HOME is in it, or is it."""
    home = Path(os.path.realpath(Path.home()))
    real = Path(os.path.realpath(prefix))
    if home.is_relative_to(real) or real == home / ".local":
        raise BadRequestError(
            f"{program} needs {prefix}, which has other files of the user than those of the program. {_REMEDY}"
        )
    return prefix
