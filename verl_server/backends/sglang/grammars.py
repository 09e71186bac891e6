"""SGLang's grammar backend for grammars that the front process has translated for llguidance.

SGLang finds it by the name `settings.GRAMMARS`. A request has its grammar in the field `json_schema`.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.constrained.llguidance_backend import GuidanceBackend


class TranslatedGrammars(GuidanceBackend):  # type: ignore[misc]
    def dispatch_json(self, key_string: str) -> Any:
        return self._from_serialized(key_string)


def make_grammars(_: Any, tokenizer: Any, vocab_size: int, eos_token_ids: set[int] | None) -> TranslatedGrammars:
    return TranslatedGrammars(tokenizer, n_vocab=vocab_size, eos_token_ids=eos_token_ids)
