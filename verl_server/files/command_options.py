"""`parse_options`: the options of a command, read by tyro. Errors of their values name options instead of fields.

The classes of options check their values, and name a field (`Limits.max_turns`), because programs make them, too. On a
command line the same value is an option, whose name depends on the class that contains the field (`--max-turns` or
`--limits.max-turns`).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructTypeInfo

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.json_options import JSON_OPTIONS

T = TypeVar("T")

_FIELD = re.compile(r"\b\w+\.\w+(?:\.\w+)*")


class OptionError(VerlServerError):
    """The value of an option is wrong. Nothing has started."""

    exit_status = 2


def parse_options(kind: type[T], argv: Sequence[str] | None, prog: str) -> T:
    """Return the options of `prog` as `kind`, a dataclass. `argv` defaults to the arguments of the process.

    Raise OptionError, which names the option, if a class of options refuses its values. tyro ends the process with
    status 2 for options that it cannot read.
    """
    with JSON_OPTIONS:
        return tyro.cli(kind, args=argv, prog=prog, registry=_checked(option_names(kind)))


def option_names(kind: type[Any]) -> dict[str, str]:
    """Return CLASS.FIELD -> --option of each field of a class of options, and of the classes of its fields."""
    return {f"{owner}.{field}": f"--{option}" for owner, field, option in _options(kind, "")}


def as_options(message: str, names: Mapping[str, str]) -> str:
    """Return a message with the options in place of their fields. `names` are `option_names`."""
    return _FIELD.sub(lambda found: names.get(found[0], found[0]), message)


def _options(kind: type[Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    """Yield (class, field, option without its dashes)."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        inner, *notes = get_args(hint) if get_origin(hint) is Annotated else [hint]
        renamed = next((note.name for note in notes if getattr(note, "name", None) is not None), field.name)
        option = ".".join(part for part in (prefix, renamed.replace("_", "-")) if part)
        if is_dataclass(inner) and isinstance(inner, type):
            yield from _options(inner, option)
        else:
            yield kind.__name__, field.name, option
            if not prefix:  # a class of options may check one of them as a sampling parameter
                yield "sampling_params", field.name, option


def _checked(names: Mapping[str, str]) -> ConstructorRegistry:
    """Return a registry whose dataclasses raise OptionError. tyro handles ValueError only, and in several ways."""
    registry = ConstructorRegistry()
    is_inner = False

    @registry.struct_rule
    def checked(info: StructTypeInfo) -> StructConstructorSpec | None:
        nonlocal is_inner
        if is_inner or not is_dataclass(info.type):
            return None
        is_inner = True
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            is_inner = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        return dataclasses.replace(spec, instantiate=_raising(spec.instantiate, names))

    return registry


def _raising(make: Callable[..., Any], names: Mapping[str, str]) -> Callable[..., Any]:
    @functools.wraps(make)  # tyro reads the description of a command here
    def instantiate(*args: Any, **kwargs: Any) -> Any:
        try:
            return make(*args, **kwargs)
        except BadRequestError as error:
            raise OptionError(as_options(str(error), names)) from None

    return instantiate
