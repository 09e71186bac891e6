"""Converts trainers' names of parameters into the model's names.

`WeightReceiver` converts names before it opens memory.

DDP, torch.compile, FSDP, activation checkpointing and PEFT add segments to names. The model of the server has no such
segments. So they are removed from a name that is not a name of the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from verl_server import lora
from verl_server.errors import WeightUpdateError
from verl_server.models.loader import WeightMap

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_LISTED, _LONGEST = 8, 200
"""The most names in an error message, and the most characters of a name. Names from the wire may be long."""


class ModelNames:
    def __init__(self, weight_map: WeightMap) -> None:
        self._map = weight_map

    def settle(self, names: Sequence[str]) -> list[str | None]:
        """Return the model's name for each of `names`, as in `slots`, `aliases` or `stacks`; None: skip the tensor.

        Skipped are buffers of old checkpoints, and PEFT's frozen copies of modules that it trains. Raise
        WeightUpdateError for an unknown name, for two names of one parameter, and for adapters.
        """
        plain = [self._plain(name) for name in names]
        self._refuse_adapters([n for n, known in zip(names, plain, strict=True) if not self._is_known(known)])
        self._refuse_unknown([n for n, known in zip(names, plain, strict=True) if not self._is_known(_trained(known))])
        given = dict.fromkeys(plain)
        frozen = [n for n, known in zip(names, plain, strict=True) if known != _trained(known)]
        if any(_trained(self._plain(name)) not in given for name in frozen):
            raise WeightUpdateError(
                f"{listed(frozen)} are copies that PEFT keeps from before the training: push the trained ones, "
                "whose names have 'modules_to_save'."
            )
        settled: list[str | None] = []
        taken: dict[str, str] = {}
        for name, known in zip(names, plain, strict=True):
            if known not in self._map.slots and known not in self._map.aliases and known not in self._map.stacks:
                settled.append(None)
                continue
            if known in taken:
                raise WeightUpdateError(
                    f"The update has '{_cut(known)}' twice, as '{_cut(taken[known])}' and as '{_cut(name)}'."
                )
            taken[known] = name
            settled.append(known)
        return settled

    def _is_known(self, name: str) -> bool:
        return not self._map.unknown([name])

    def _plain(self, name: str) -> str:
        """Return `name` without the segments that trainers' wrappers add."""
        if self._is_known(name):
            return name
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        if parts[:2] == ["base_model", "model"]:
            parts = parts[2:]
        if "modules_to_save" in parts:  # followed by the adapter's name
            at = parts.index("modules_to_save")
            del parts[at : at + 2]
        return ".".join(part for part in parts if part != "base_layer")

    def _refuse_adapters(self, unknown: list[str]) -> None:
        adapters = [n for n in unknown if any(part.startswith("lora_") for part in n.split("."))]
        if adapters:
            refusal = lora.refusal(f"An update with LoRA parameters ({listed(adapters)})")
            raise WeightUpdateError(f"{refusal} After the merge, leave out every name with 'lora_'.")

    def _refuse_unknown(self, unknown: list[str]) -> None:
        if not unknown:
            return
        known = [*self._map.slots, *self._map.aliases, *self._map.stacks]
        hints = []
        for name in unknown[:3]:
            close = difflib.get_close_matches(name, known, 1, 0.7) if len(name) <= _LONGEST else []
            hints += [f"'{name}' is like '{match}'" for match in close]
        hint = "; ".join(hints) if hints else f"The model has, for example, '{known[0]}'"
        raise WeightUpdateError(f"The model has no parameter {listed(unknown)}. {hint}.")


def listed(names: Sequence[str]) -> str:
    """Return the first names as text for an error message. The number of names and their lengths are limited."""
    rest = len(names) - _LISTED
    return ", ".join(f"'{_cut(name)}'" for name in names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def bounded(names: Sequence[str]) -> dict[str, Any]:
    """Return {"count": number of names, "names": the first names}, with limits on their number and lengths."""
    return {"count": len(names), "names": [_cut(name) for name in names[:_LISTED]]}


def lacking(missing: Sequence[str], total: int) -> str:
    """Return the error message for a whole update with missing parameters.

    `total` is the model's number of parameters.
    """
    return (
        f"The update does not cover every parameter: it lacks {len(missing)} of {total}; missing: {listed(missing)}. "
        "Push every parameter, pass partial=True to leave the others as they are, or push in parts inside a "
        "transaction with an id (begin_weight_update). A checkpoint must be whole."
    )


def _trained(name: str) -> str:
    """Return the name of the trained copy for PEFT's name of the frozen copy, `<module>.original_module.weight`."""
    return name.replace(".original_module.", ".")


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..."
