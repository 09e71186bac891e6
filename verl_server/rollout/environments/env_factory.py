"""`load_factory`: converts "MODULE:CLASS" into a checked factory of environments.

An environment server calls it at its start. A wrong name, a missing method or a wrong argument raises BadRequestError
before the first client connects.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_server.errors import BadRequestError

logger = logging.getLogger(__name__)

EnvFactory = Callable[[], Any]
"""A class, or a function that returns an environment."""

METHODS = {"reset": "reset(seed=None)", "step": "step(action)"}
"""The methods that every environment must have, and their signatures."""


def load_factory(environment: str, kwargs: dict[str, Any] | None = None) -> EnvFactory:
    """Return the factory named "MODULE:CLASS" or "FILE.py:CLASS", with its keyword arguments bound.

    A module is looked up in the current folder first, then among the installed packages.
    """
    module, name = load_module(environment, "environment", "CLASS")
    factory: EnvFactory | None = getattr(module, name, None)
    if factory is None:
        found = ", ".join(_environment_classes(module)) or "none"
        raise BadRequestError(f"{_described(module)} has no {name!r}. Environment classes in it: {found}.")
    if not callable(factory):
        kind = type(factory).__name__
        raise BadRequestError(f"{environment} is a {kind}, not a class or a function that returns an environment.")
    _check_class(environment, factory)
    _check_arguments(environment, factory, kwargs or {})
    return _Bound(factory, kwargs) if kwargs else factory


def load_module(named: str, what: str, kind: str) -> tuple[ModuleType, str]:
    """Return the module of "MODULE:NAME" or "FILE.py:NAME", and the name.

    `what` describes the object in errors. `kind` stands for its name there: CLASS or FUNCTION.
    """
    where, _, name = named.rpartition(":")
    if not where or not name:
        raise BadRequestError(f"Name the {what} as MODULE:{kind} or FILE.py:{kind}, not {named!r}.")
    is_file = where.endswith(".py")
    return (_import_file(where, kind) if is_file else _import_module(where, kind, folder="")), name


def load_function(named: str, what: str) -> Callable[..., Any]:
    """Return the function named "MODULE:FUNCTION" or "FILE.py:FUNCTION". `what` describes it in errors."""
    module, name = load_module(named, what, "FUNCTION")
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        names = [
            n for n, member in inspect.getmembers(module, inspect.isfunction) if member.__module__ == module.__name__
        ]
        raise BadRequestError(
            f"{_described(module)} has no function {name!r}. Functions: {', '.join(names) or 'none'}."
        )
    return function


def missing_method(environment: Any) -> str | None:
    """Return the signature of the first method that an environment (or its class) lacks, None if it has all."""
    return next((written for name, written in METHODS.items() if not callable(getattr(environment, name, None))), None)


def _import_file(file: str, kind: str) -> ModuleType:
    path = Path(file)
    if not path.is_file():
        raise BadRequestError(f"There is no file {file} (current folder: {os.getcwd()}).")
    return _import_module(path.stem, kind, folder=str(path.resolve().parent))


def _import_module(name: str, kind: str, folder: str) -> ModuleType:
    """Import the module `name`, which is searched in `folder` first ("" is the current folder)."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise BadRequestError(f"The module {name} cannot be imported: {error}.{_raised_at(error)}") from error
        raise BadRequestError(
            f"There is no module {error.name!r} in the current folder ({os.getcwd()}) or among the installed packages. "
            f"Change to the folder that holds it, or name its file: PATH/TO/FILE.py:{kind}."
        ) from error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise BadRequestError(f"The module {name} cannot be imported: {text}.{_raised_at(error)}") from error


def _raised_at(error: Exception) -> str:
    """Return a sentence that names the line of the user's code that raised the error, or "" if no such line did."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    last = frames[-1]
    return "" if last.filename == __file__ else f" Raised at {last.filename}:{last.lineno}."


def _described(module: ModuleType) -> str:
    return f"The module {module.__name__} ({getattr(module, '__file__', None) or 'built in'})"


def _environment_classes(module: ModuleType) -> list[str]:
    members = inspect.getmembers(module, inspect.isclass)
    return [name for name, member in members if member.__module__ == module.__name__ and not missing_method(member)]


def _check_class(environment: str, factory: Any) -> None:
    if not inspect.isclass(factory):
        return  # the environment that a function returns is checked when the first client connects
    missing = missing_method(factory)
    if missing is not None:
        raise BadRequestError(
            f"The class {environment} has no method {missing}. An environment needs {' and '.join(METHODS.values())}; "
            "see verl_server.rollout.environment.Environment."
        )
    reset: Any = factory.reset  # type: ignore[attr-defined]
    if "seed" not in accepted(reset, {"seed": 0}):
        logger.warning("%s.reset takes no `seed`: its episodes cannot be repeated.", environment)


def _check_arguments(environment: str, factory: EnvFactory, kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except ValueError:
        return  # a class that is written in C may have no signature
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise BadRequestError(
            f"{environment}{signature} cannot be called with the keyword arguments {kwargs}: {error}. "
            "Pass them as a JSON object: --kwargs '{\"NAME\": VALUE}'."
        ) from error


def accepted(method: Callable[..., Any], data: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `data` that `method` takes as keyword arguments. OpenEnv's reset options are hints."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return data
    return {key: value for key, value in data.items() if key in parameters}


class _Bound:
    """A factory with its arguments. It has the attributes of the class: name, documentation and schemas."""

    def __init__(self, factory: EnvFactory, kwargs: dict[str, Any]) -> None:
        self._factory = factory
        self._kwargs = kwargs
        self.environment_class = factory
        self.__doc__ = factory.__doc__

    def __call__(self) -> Any:
        return self._factory(**self._kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._factory, name)
