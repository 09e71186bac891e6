"""The texts of all refusals of LoRA adapters, which a request, a setting or a folder may name.

Adapters are not served: the weights of a server are those of a whole model. A trainer merges its adapter into them for
each push, and an adapter in a folder is merged once. Whoever refuses an adapter says this first, and then what was
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NoReturn

from verl_server.errors import BadRequestError

_WORD = re.compile(r"(?<![a-z])q?loras?(?![a-z])", re.IGNORECASE)
PAGE = "docs/weight-sync.md#from-peft"
_HOW = (
    "the adapter into the weights, push them, and unmerge (PEFT: model.merge_adapter(), engine.push_weights(), "
    f"model.unmerge_adapter(); see {PAGE})"
)
PUSH_MERGED = f"merge {_HOW}, because adapters are not served"
"""The remedy, as the end of a sentence."""
MERGE_FOLDER = (
    "Merge the adapter into its base model (PEFT: AutoPeftModelForCausalLM.from_pretrained(ADAPTER).merge_and_unload()"
    f".save_pretrained(FOLDER); see {PAGE}), and name the merged folder"
)
"""The remedy for a folder, as the beginning of a sentence."""
MERGE_IN_VERL = (
    "Set actor_rollout_ref.model.lora.merge=True, and verl merges the adapter into the weights that it pushes "
    f"(see {PAGE})"
)
"""The remedy for a setting of verl's trainer, as a sentence without its end."""

REQUEST_FIELDS = dict.fromkeys(("lora_path", "lora_id", "lora_name", "lora_int_id", "lora_request"), PUSH_MERGED)
"""Fields of generation requests that choose an adapter, in SGLang or by the names of vLLM's `LoRARequest`."""


def refusal(what: str, fault: str = "is not supported") -> str:
    """Return the message for `what`: a route, a setting, or the name of a model."""
    return f"Merge {_HOW}. {what} {fault}, because adapters are not served."


def first_named(names: Iterable[str]) -> str | None:
    """Return the first of `names`, of settings or methods, that has the word; None if there is none."""
    return next((name for name in names if _WORD.search(name)), None)


def refuse_options(args: Iterable[str]) -> None:
    """Raise BadRequestError if an argument of a command is an option about adapters, of any project."""
    option = first_named(arg.split("=")[0] for arg in args if arg.startswith("--"))
    if option is not None:
        raise BadRequestError(refusal(option))


class NoAdapters:
    """An engine's methods about adapters, by SGLang's names. Each raises BadRequestError, which says what to do."""

    def load_lora_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise BadRequestError, which says how an adapter is merged."""
        raise BadRequestError(refusal("load_lora_adapter"))

    def load_lora_adapter_from_tensors(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise BadRequestError, which says how an adapter is merged."""
        raise BadRequestError(refusal("load_lora_adapter_from_tensors"))

    def unload_lora_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise BadRequestError, which says how an adapter is merged."""
        raise BadRequestError(refusal("unload_lora_adapter"))
