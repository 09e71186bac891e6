"""`Mixture`: the environments that a run trains on together, and what each of them has of its own.

`--mixture FILE.toml` names the file. It is read once, with the other options: the rollout process of an asynchronous
run gets what was read. `environment_draw` says which group plays which environment, `players` makes renderers and
limits, `environment_figures` reports about each environment, and `held_out` has tasks of each.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from verl_server.errors import BadRequestError
from verl_server.files.command_options import OptionError
from verl_server.files.json_files import convert, read_bytes
from verl_server.rollout.episode import Limits

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Names are parts of the names of figures in trackers."""
_LONGEST_PERIOD = 10_000
"""Most groups of a period. A period is held in memory, and each environment has a group in it."""
_OF_AGENTS = ("agent", "tasks", "reward", "agent_sampling")


@dataclass(frozen=True)
class MixedEnvironment:
    """An environment of a mixture: a table `[[environment]]` of its file."""

    name: str
    """Name in figures, records and messages."""
    url: str
    """URL of the environment server (OpenEnv's protocol)."""
    weight: float = 1.0
    """Number of its groups in proportion to the weights of the others."""
    observation_key: str | None = None
    """Key of the text in its observations. None: `--observation-key`."""
    action_key: str | None = None
    """Key of the policy's text in its actions. None: `--action-key`."""
    max_turns: int | None = None
    """Most turns of its episodes. None: `--max-turns`."""
    max_new_tokens: int | None = None
    """Most sampled tokens of one turn. None: `--max-new-tokens`."""
    success: float | None = None
    """Least reward of an episode that counts as a success. None: `--eval-success`."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadRequestError(
                f"{self.name!r:.100} is no name of an environment: use at most 64 letters, digits, '_', '.' and '-', "
                "and begin with a letter or a digit."
            )
        if "://" not in self.url:
            raise BadRequestError(f"url is {self.url!r:.200}, and no URL: write http://HOST:PORT.")
        if not 0 < self.weight < math.inf:
            raise BadRequestError(
                f"weight is {self.weight:g}, and must be more than 0. Remove the environment to leave it out."
            )
        for name in ("max_turns", "max_new_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadRequestError(f"{name} is {value}, and must be at least 1.")
        if self.success is not None and not math.isfinite(self.success):
            raise BadRequestError(f"success is {self.success}, and must be finite.")

    def limits(self, limits: Limits) -> Limits:
        """Return `limits`, those of the run, with the environment's own."""
        own = {name: getattr(self, name) for name in ("max_turns", "max_new_tokens")}
        return dataclasses.replace(limits, **{name: value for name, value in own.items() if value is not None})


@dataclass(frozen=True)
class Mixture:
    """The environments of a run, in the order of the file."""

    environments: tuple[MixedEnvironment, ...]

    def __post_init__(self) -> None:
        if not self.environments:
            raise BadRequestError("there is no [[environment]]: add a table for each environment.")
        names = [environment.name for environment in self.environments]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise BadRequestError(f"two environments have the name {twice!r}: rename one of them.")
        if (period := sum(self.shares.values())) > _LONGEST_PERIOD:
            weights = ", ".join(f"{environment.weight:g}" for environment in self.environments)
            raise BadRequestError(
                f"the weights {weights} are in proportion only every {period} groups, and the most is "
                f"{_LONGEST_PERIOD}: round them, such as 2 and 1 for 0.66667 and 0.33333."
            )

    def __getitem__(self, name: str) -> MixedEnvironment:
        return next(environment for environment in self.environments if environment.name == name)

    @property
    def shares(self) -> dict[str, int]:
        """Name -> groups of each period: the weights as the smallest whole numbers."""
        weights = {environment.name: Fraction(repr(environment.weight)) for environment in self.environments}
        scale = math.lcm(*(weight.denominator for weight in weights.values()))
        whole = {name: int(weight * scale) for name, weight in weights.items()}
        divisor = math.gcd(*whole.values())
        return {name: number // divisor for name, number in whole.items()}

    def judged(self, success: float) -> Mixture:
        """Return the mixture with `success` where an environment has none of its own."""
        return Mixture(
            tuple(e if e.success is not None else dataclasses.replace(e, success=success) for e in self.environments)
        )

    def compared(self, without_host: Callable[[str], str]) -> list[dict[str, Any]]:
        """Return what a resumed run compares, in JSON types."""
        return [
            dataclasses.asdict(environment) | {"url": without_host(environment.url)}
            for environment in self.environments
        ]


def read_mixture(file: Path) -> Mixture:
    """Return the mixture in a TOML file. Raise BadRequestError, which names the place and the remedy."""
    try:
        values = tomllib.loads(read_bytes(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"{file} is no TOML: {error}.") from None
    if unknown := sorted(values.keys() - {"environment"}):
        raise BadRequestError(f"{file} has {', '.join(unknown)}, and a mixture has [[environment]] tables only.")
    tables = values.get("environment", [])
    if not isinstance(tables, list):
        raise BadRequestError(f"{file}: write [[environment]] with two brackets, because it is one of several tables.")
    try:
        return Mixture(tuple(_environment(table, f"{file}: [[environment]] {i}") for i, table in enumerate(tables, 1)))
    except BadRequestError as error:
        text = str(error)
        raise BadRequestError(text if text.startswith(f"{file}") else f"{file}: {text}") from None


def _environment(table: Any, where: str) -> MixedEnvironment:
    known = [field.name for field in dataclasses.fields(MixedEnvironment)]
    if not isinstance(table, dict):
        raise BadRequestError(f"{where} is no table.")
    if isinstance(table.get("name"), str):
        where = f"{where} ({table['name']:.64})"
    for key in table:
        if key in _OF_AGENTS:
            raise BadRequestError(
                f"{where} has {key}: an agent cannot be an environment of a mixture, whose episodes the built-in loop "
                "plays. Remove it, or train with --agent alone."
            )
        if key not in known:
            raise BadRequestError(f"{where} has {key!r}, which is no key of an environment: {', '.join(known)}.")
    if missing := [key for key in ("name", "url") if key not in table]:
        raise BadRequestError(f"{where} has no {' and no '.join(missing)}: add it.")
    try:
        return convert(table, MixedEnvironment, where)
    except BadRequestError as error:
        text = str(error)
        raise BadRequestError(text if text.startswith(where) else f"{where}: {text}") from None


def _option(words: list[str]) -> Mixture:
    try:
        return read_mixture(Path(words[0]))
    except BadRequestError as error:
        raise OptionError(f"--mixture: {error}") from None


MixtureFile = Annotated[
    Mixture,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FILE.toml",
        instance_from_str=_option,
        is_instance=lambda value: isinstance(value, Mixture),
        str_from_instance=lambda value: [" ".join(value.shares)],
    ),
]
"""Type of the option that names the file."""
