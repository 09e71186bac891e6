"""Parts of tokenizer.json that transformers replaces: 5.x builds the pre-tokenizer of some models by the model's name.

All qwen2 folders are such models: the normalizer and the pre-tokenizer of their tokenizer.json are not used. So a
tokenizer that was trained anew returns other tokens than its file specifies. `choose_parts` compares the parts when the
tokenizer is loaded, and restores the parts of the file if the setting `tokenizer_pipeline` requires it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

from verl_server.files.json_files import read_json

logger = logging.getLogger(__name__)

PARTS = ("normalizer", "pre_tokenizer", "decoder")


def choose_parts(tokenizer: Any, file: Path, pipeline: Literal["transformers", "file"]) -> None:
    """Compare a tokenizer with the tokenizer.json from which it was loaded. Warn, or restore the parts of the file.

    `tokenizer` is a tokenizer of transformers. A tokenizer without a backend of the `tokenizers` library is not
    changed.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file():
        return
    from tokenizers import Tokenizer

    stored = Tokenizer.from_str(_without_vocabulary(read_json(file)))
    stored_parts, loaded_parts = json.loads(stored.to_str()), json.loads(_pipeline_of(backend))
    replaced = [part for part in PARTS if stored_parts[part] != loaded_parts[part]]
    if not replaced:
        return
    if pipeline == "file":
        for part in replaced:
            setattr(backend, part, getattr(stored, part))
        return
    logger.warning(
        "transformers replaced %s of %s by its own, so texts have other tokens than the file says. It does so for each "
        "tokenizer of this class (%s). Trainers that use transformers have the same tokens. To use the file's: "
        "tokenizer_pipeline=file.",
        " and ".join(replaced),
        file,
        type(tokenizer).__name__,
    )


def _without_vocabulary(content: Any) -> str:
    """Return a tokenizer.json with the same parts and no vocabulary, which takes no time to read."""
    parts = {part: content.get(part) for part in PARTS}
    model = {"type": "BPE", "vocab": {}, "merges": []}
    rest: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "post_processor": None,
    }
    return json.dumps(rest | parts | {"model": model})


def _pipeline_of(backend: Any) -> str:
    """Return the JSON of a tokenizer that has the parts of `backend` and no vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    empty = Tokenizer(BPE())
    for part in PARTS:
        if (value := getattr(backend, part)) is not None:
            setattr(empty, part, value)
    return str(empty.to_str())
