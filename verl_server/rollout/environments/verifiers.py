"""Environments of the package `verifiers` by name: `verifiers:NAME`, or `verifiers:NAME?JSON` with settings.

The package brings the tasks, the program that plays them (a harness in a runtime), tools, rewards and metrics.
`agents/verifiers_agent` plays its episodes through sessions. This module parses the name, and loads and checks what it
names; it imports the package at the first use.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_server.errors import BadRequestError

FAMILY = "verifiers:"
_VERSIONS = "0.4."
_INSTALL = "pip install 'verl-server[verifiers]'"
_TALKATIVE = ("verifiers", "aiohttp.access", "httpx")
"""Loggers of verifiers and its HTTP, with lines for each episode and request. Those of httpx contain session keys."""
_EXAMPLE = 'verifiers:NAME?{"taskset": {"split": "train"}}'


@dataclass(frozen=True)
class VerifiersName:
    """What `verifiers:NAME?JSON` says."""

    name: str
    """Name of the installed environment."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The block `env` of verifiers' own configuration, without `taskset.id`."""
    held_out: dict[str, Any] | None = None
    """Settings that replace others for held-out tasks, None if there are none (the key `eval` of the JSON)."""


def is_verifiers(text: str | None) -> bool:
    """Return True if the text names an environment of verifiers."""
    return text is not None and text.startswith(FAMILY)


def check_alone(**options: object) -> None:
    """Raise BadRequestError if one of the options is set, each of which contradicts tasks of verifiers."""
    for name, value in options.items():
        if value:
            raise BadRequestError(
                f"--{name.replace('_', '-')} cannot be combined with --tasks verifiers:NAME, whose own code plays the "
                "tasks and scores them. Remove the option."
            )


def parse_name(text: str) -> VerifiersName:
    """Return the parts of a name. Raise BadRequestError if the JSON behind the question mark is no object."""
    name, mark, settings = text.removeprefix(FAMILY).partition("?")
    if not name:
        raise BadRequestError(f"{text!r} has no name behind the colon, such as {_EXAMPLE}.")
    try:
        block = json.loads(settings) if mark else {}
    except ValueError as error:
        raise BadRequestError(
            f"{text!r}: what follows the question mark is no JSON ({error}). Write {_EXAMPLE}."
        ) from None
    held_out = block.pop("eval", None) if isinstance(block, dict) else None
    for where, value in (("", block), ("eval: ", {} if held_out is None else held_out)):
        if not isinstance(value, dict) or not isinstance(value.get("taskset", {}), dict):
            raise BadRequestError(f"{text!r}: {where}the settings, and `taskset` in them, must be objects: {_EXAMPLE}.")
    return VerifiersName(name, block, held_out)


class VerifiersEnvironment:
    """An installed environment of verifiers, and its tasks."""

    def __init__(self, name: str, settings: Mapping[str, Any], max_turns: int | None = None) -> None:
        """Load it. Raise BadRequestError if the package or the environment is missing, or a setting is wrong.

        `max_turns` bounds the policy's turns, if the settings have no lower bound.
        """
        self.api = _api()
        config = _config(self.api, name, settings)
        self.role = _policy_role(self.api, name, config)
        try:
            config = _with_max_turns(config, self.role, max_turns)
            self.env = self.api.load_environment(config)
            self._rows = iter(self.env.taskset)
            self._tasks = list(self._rows) if self.env.taskset.bounded else []
        except Exception as error:
            raise BadRequestError(f"verifiers:{name} cannot be loaded: {type(error).__name__}: {error}") from error
        if self.env.taskset.bounded and not self._tasks:
            raise BadRequestError(f"verifiers:{name} has no tasks with the settings {dict(settings)}.")

    def task(self, row: int) -> Any:
        """Return the task of a row. Rows of a finite taskset repeat. An infinite one is read up to the row."""
        if self.env.taskset.bounded:
            return self._tasks[row % len(self._tasks)]
        self._tasks += itertools.islice(self._rows, row + 1 - len(self._tasks))
        return self._tasks[row]


def _api() -> Any:
    """Return the module `verifiers.v1`. Raise BadRequestError if the package is missing or has another API."""
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        raise BadRequestError(f"Environments of verifiers need the package: {_INSTALL}.") from None
    if not installed.startswith(_VERSIONS):
        raise BadRequestError(f"verifiers {installed} is installed, and its API differs from 0.4's: {_INSTALL}.")
    for name in _TALKATIVE:
        if logging.getLogger(name).level == logging.NOTSET:
            logging.getLogger(name).setLevel(logging.WARNING)
    return importlib.import_module("verifiers.v1")


def _config(api: Any, name: str, settings: Mapping[str, Any]) -> Any:
    taskset = {**settings.get("taskset", {}), "id": name}
    try:
        module = api.import_taskset(name)
    except ModuleNotFoundError as error:
        raise BadRequestError(
            f"verifiers:{name} is not installed ({error}). Install its package: `prime env install OWNER/{name}`."
        ) from error
    if not hasattr(module, "__all__") and hasattr(module, "load_environment"):
        raise BadRequestError(
            f"verifiers:{name} was written for verifiers before 0.4 (it has `load_environment`), and verifiers "
            f"{version('verifiers')} has no such API. Install a version of {name} that exports a Taskset."
        )
    try:
        return api.resolve_env_config({**settings, "taskset": taskset})
    except Exception as error:  # pydantic's errors name each wrong key
        raise BadRequestError(f"verifiers:{name} does not accept its settings: {error}") from error


def _policy_role(api: Any, name: str, config: Any) -> str:
    """Return the name of the role that the policy plays. Raise BadRequestError if its episode cannot be recorded."""
    roles = {key: value for key, value in config if isinstance(value, api.AgentConfig)}
    policy = [key for key, role in roles.items() if role.client is None]
    if len(policy) != 1:
        raise BadRequestError(
            f"verifiers:{name}: the roles {', '.join(policy) or 'none'} play with the policy, and an episode has one "
            f"reward, for one role. The roles: {', '.join(roles)}. Give the others a model of their own: "
            '{"ROLE": {"model": "M", "client": {"base_url": "http://HOST/v1"}}}.'
        )
    for where, owner in (("", config), *((f"{key}.", role) for key, role in roles.items())):
        if owner.retries.max_retries or owner.retries.rules:
            raise BadRequestError(
                f"verifiers:{name}: {where}retries would play twice in one session. Remove the setting: the runner "
                "replaces episodes that the infrastructure ended (--retries, --replacements)."
            )
    for key, role in roles.items():
        if role.runtime.type == "prime" and not _has_prime_key():
            raise BadRequestError(
                f"verifiers:{name}: the role {key} runs in a sandbox of Prime Intellect, which is the default of "
                "verifiers, and there is no key. Run `prime login`, or name another runtime. docker is isolated, a "
                f'subprocess is not: verifiers:{name}?{{"{key}": {{"runtime": {{"type": "subprocess"}}}}}}'
            )
    return str(policy[0])


def _with_max_turns(config: Any, role: str, most: int | None) -> Any:
    own = getattr(config, role)
    if most is None or (own.max_turns is not None and own.max_turns <= most):
        return config
    return config.model_copy(update={role: own.model_copy(update={"max_turns": most})})


def _has_prime_key() -> bool:
    load = importlib.import_module("verifiers.v1.utils.prime").load_prime_config
    return bool(os.environ.get("PRIME_API_KEY") or load().get("api_key"))
