"""SGLang's grammar backend for grammars that the front process has translated for llguidance.

SGLang finds it by the name `settings.GRAMMARS`. A request has its grammar in the field `json_schema`.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.constrained.llguidance_backend import GuidanceBackend

logger = logging.getLogger(__name__)


class TranslatedGrammars(GuidanceBackend):  # type: ignore[misc]
    def dispatch_json(self, key_string: str) -> Any:
        return self._from_serialized(key_string)


def make_grammars(_: Any, tokenizer: Any, vocab_size: int, eos_token_ids: set[int] | None) -> TranslatedGrammars | None:
    """Return None for a tokenizer with which llguidance cannot work. SGLang then ends a request that has a grammar."""
    try:
        return TranslatedGrammars(tokenizer, n_vocab=vocab_size, eos_token_ids=eos_token_ids)
    except ValueError as error:
        logger.warning("Outputs cannot follow a grammar with this tokenizer: %s", error)
        return None
