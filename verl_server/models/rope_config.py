"""`read_rope`: the keys of a Hugging Face config that set the rotary embedding, checked.

`load_model_config` calls it. `models/rope.py` computes the frequencies from what it returns. A wrong value is never
replaced by a default: it raises `BadRequestError` that names the file, the key, the value and the remedy.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from verl_server.errors import BadRequestError

_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
"""Supported rope type -> the keys that it needs."""
_POSITIVE = (
    *("factor", "low_freq_factor", "high_freq_factor", "attention_factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "rope_theta"),
)
"""Keys of all rope types whose values are positive numbers."""
_ROPE_THETA = 10000.0
_MOST_POSITIONS = 2**31 - 1
"""Positions of tokens are int32."""
Refuse = Callable[[str, str], NoReturn]
"""Raises BadRequestError for the value of a key: (key, what the value must be)."""


class RopeKeys(msgspec.Struct, kw_only=True):
    """The keys of config.json that set the rotary embedding. Old configs have `rope_scaling`, new ones
    `rope_parameters`."""

    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1, le=_MOST_POSITIONS)]
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None


def read_rope(file: RopeKeys, path: Path, head_dim: int) -> dict[str, Any]:
    """Return rope_theta, rope_type and the keys of that type, named as in transformers' `rope_parameters`.

    `path` is the config.json that errors name. A key that is null counts as absent. Raise BadRequestError for values
    from which no frequencies can be computed.
    """
    source = "rope_scaling" if file.rope_scaling else "rope_parameters"
    given = file.rope_scaling or file.rope_parameters or {}
    rope = dict(given)
    kind = rope["rope_type"] = _rope_type(rope, source, path)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = _ROPE_THETA if file.rope_theta is None else file.rope_theta
    if kind in ("llama3", "yarn", "longrope"):
        originals = (file.original_max_position_embeddings, rope.get("original_max_position_embeddings"))
        found = (original for original in originals if original is not None)
        rope["original_max_position_embeddings"] = next(found, file.max_position_embeddings)

    def refuse(name: str, problem: str) -> NoReturn:
        key = f"{source}.{name}" if name in given else name
        raise BadRequestError(
            f"{path}: {key} of rope type {kind!r} {problem}, but is {reprlib.repr(rope.get(name))}. "
            "Set it to the value that the model was trained with."
        )

    partial = rope.get("partial_rotary_factor", file.partial_rotary_factor)
    if partial not in (None, 1.0):
        raise BadRequestError(f"{path}: partial_rotary_factor must be 1, but is {partial!r}. Others are not supported.")
    for name in _KEYS[kind]:
        # transformers computes the factor of YaRN from the two context lengths if the key is there and null.
        if rope.get(name) is None and not (kind == "yarn" and name in rope):
            raise BadRequestError(
                f"{path}: rope type {kind!r} needs {source}.{name}, which is absent or null. "
                "Set it to the value that the model was trained with."
            )
    _check_numbers(rope, refuse)
    _check_type(rope, head_dim, refuse)
    if kind in ("yarn", "longrope") and rope.get("factor") is None:
        rope["factor"] = file.max_position_embeddings / rope["original_max_position_embeddings"]
    if kind == "yarn" and rope["factor"] * rope["original_max_position_embeddings"] > _MOST_POSITIONS:
        refuse("factor", f"must stretch original_max_position_embeddings to at most {_MOST_POSITIONS} tokens")
    return rope


def _rope_type(rope: dict[str, Any], source: str, path: Path) -> str:
    """Return the value of `rope_type`. Old configs name the key `type`, which is removed."""
    if nested := [name for name in rope if name.endswith("_attention") and isinstance(rope[name], dict)]:
        raise BadRequestError(
            f"{path}: {source} has other values for each type of layer ({', '.join(nested)}), which is not supported; "
            "supported: one rope type for all layers."
        )
    kind = rope.get("rope_type")
    if kind is None:
        kind = rope.pop("type", None)
    if kind is None:
        kind = "default"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise BadRequestError(
            f"{path}: rope type {kind!r} ({source}.rope_type, or type) is not supported; supported: {', '.join(_KEYS)}."
        )
    return kind


def _check_numbers(rope: dict[str, Any], refuse: Refuse) -> None:
    """Check the keys that hold one number."""
    for name in _POSITIVE:
        if rope.get(name) is not None and not _is_positive(rope[name]):
            refuse(name, "must be a positive number")
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name) is not None and not (_is_number(rope[name]) and rope[name] >= 0):
            refuse(name, "must be a positive number or 0")


def _check_type(rope: dict[str, Any], head_dim: int, refuse: Refuse) -> None:
    """Check what the formulas of one rope type need, after `_check_numbers`."""
    kind = rope["rope_type"]
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        refuse("low_freq_factor", f"must be less than high_freq_factor={rope['high_freq_factor']}")
    if kind == "yarn" and rope["rope_theta"] <= 1:
        refuse("rope_theta", "must be greater than 1, because YaRN divides by its logarithm")
    if kind == "yarn" and not isinstance(rope.get("truncate"), bool | None):
        refuse("truncate", "must be true or false")
    if kind == "longrope":
        if rope["original_max_position_embeddings"] <= 1:
            refuse("original_max_position_embeddings", "must be greater than 1, because its logarithm is a divisor")
        for name in ("short_factor", "long_factor"):
            values, half = rope[name], head_dim // 2
            if not isinstance(values, list) or len(values) != half:
                refuse(name, f"must hold {half} numbers (head_dim / 2)")
            for index, value in enumerate(values):
                if not _is_positive(value):
                    refuse(name, f"must hold positive numbers (at index {index} it has {reprlib.repr(value)})")


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    """Return True if `value` is a number that a float can hold, other than NaN and infinity."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
