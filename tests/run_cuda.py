"""Runs the tests that need an NVIDIA GPU, with any interpreter: `make test-cuda`.

`python -m tests.run_cuda [pytest's arguments]` checks that this interpreter has the packages, and then becomes pytest
over the files with such tests. No other test file is imported, so the packages that only others need may be absent.
Nothing is installed or downloaded.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.cuda_files import files_with_cuda_tests

ROOT = Path(__file__).parents[1]
OURS = ("tests", "verl_server")
IMPORTED_LATER = (
    "verl_server.engine.in_process",
    "verl_server.grammar.compiler",
    "verl_server.scheduler.process",
    "verl_server.scheduler.rank",
    "verl_server.server.dialects.sglang.info_routes",
    "verl_server.server.tokenizer_manager",
)
"""Modules that an `Engine` imports inside functions, or in its child processes."""
PACKAGES = {"re2": "google-re2"}
"""Module -> the package that has it, where more than hyphens differ."""
MOST_WORKERS = 4


def main() -> None:
    arguments, targets = split(sys.argv[1:])
    missing = missing_packages({Path(target.partition("::")[0]) for target in targets})
    with_xdist, sets_workers = _is_there("xdist"), any(map(_sets_workers, arguments))
    if any(argument.startswith(("-n", "--numprocesses")) for argument in arguments) and not with_xdist:
        missing.append("pytest-xdist (for -n)")
    if missing:
        sys.exit(
            f"make test-cuda: {sys.executable} lacks {', '.join(missing)}. Install them for this interpreter, or add "
            "their folder to PYTHONPATH. (Without INTERPRETER, .venv is set up with all packages.)"
        )
    if not _is_there("pytest_timeout"):
        print("pytest-timeout is not installed: a test that hangs will not be ended.", file=sys.stderr)
    if with_xdist and not sets_workers:
        arguments += ["-n", str(min(MOST_WORKERS, len(os.sched_getaffinity(0)))), "--dist", "worksteal"]
    elif not with_xdist:
        print("pytest-xdist is not installed: the tests run one after another.", file=sys.stderr)
    # Child processes of tests import this checkout too. Some run with -P, which leaves out the working directory.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-m", "cuda", *arguments, *targets])


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return (options, targets): files or tests, with a folder replaced by its files that have tests marked `cuda`.

    The targets are all those files if no argument is the path of a file or a folder.
    """
    options, targets, files = [], [], files_with_cuda_tests()
    for argument in arguments:
        path = Path(argument.partition("::")[0]).resolve()
        if argument.startswith("-") or not path.exists():
            options.append(argument)
        elif path.is_dir():
            targets += [str(file) for file in files if path in file.parents]
        else:
            targets.append(str(path) + argument[len(argument.partition("::")[0]) :])
    return options, targets or [str(file) for file in files]


def _sets_workers(argument: str) -> bool:
    return argument in ("--collect-only", "--co", "--pdb", "no:xdist", "-pno:xdist") or argument.startswith(
        ("-n", "--numprocesses", "--dist")
    )


def missing_packages(files: Iterable[Path]) -> list[str]:
    """Return the packages that `files` and an `Engine` need when they are imported, and that this interpreter lacks."""
    needed = {"pytest", *needed_modules([*files, ROOT / "tests" / "conftest.py"])}
    lacking = sorted(name for name in needed if not _is_there(name))
    return [PACKAGES.get(name, name.replace("_", "-")) for name in lacking]


def needed_modules(files: Iterable[Path]) -> set[str]:
    """Return the top-level modules of other projects that are imported with `files` and by an `Engine`.

    Imports inside functions are left out, and so are imports that may fail (`try`) or are for type checkers only.
    """
    seen: set[Path] = set()
    others: set[str] = set()
    waiting = [*files, *filter(None, map(_source, IMPORTED_LATER))]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in _imported(ast.parse(path.read_text(encoding="utf-8")).body):
            top = name.partition(".")[0]
            if top in OURS:
                waiting += filter(None, map(_source, _with_parents(name)))
            elif top not in sys.stdlib_module_names:
                others.add(top)
    return others


def _imported(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the modules that import statements name; for `from a import b` both `a` and `a.b`."""
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{alias.name}" for alias in statement.names)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _source(module: str) -> Path | None:
    """Return the file of one of our modules; None if there is none, as for the name of a function."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


if __name__ == "__main__":
    main()
