"""`check_engine_args`: which arguments of an engine a caller may set. Each driver's `settings` calls it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verl_server import lora
from verl_server.errors import BadRequestError


def check_engine_args(engine_args: Mapping[str, Any], ours: Collection[str], refused: Mapping[str, str]) -> None:
    """Raise BadRequestError if `engine_args` has a name in `ours`, which the server sets, or in `refused`.

    `refused`: argument that would break a promise of the server -> the reason.
    """
    if (adapters := lora.first_named(engine_args)) is not None:
        raise BadRequestError(lora.refusal(f"engine_args.{adapters}"))
    if taken := sorted(name for name in engine_args if name in ours):
        raise BadRequestError(f"engine_args must not have {', '.join(taken)}: verl-server sets them itself.")
    for name in sorted(name for name in engine_args if name in refused):
        raise BadRequestError(f"engine_args must not have {name}: {refused[name]}. Remove it.")
