"""`checkpoint_dtype`: what `dtype="auto"` means with every engine. Each driver's `settings` calls it."""

from __future__ import annotations

import json
from pathlib import Path


def checkpoint_dtype(folder: Path) -> str:
    """Return the dtype of a checkpoint, as the embedded engine does for "auto". Engines would round float32."""
    config = json.loads((folder / "config.json").read_bytes())
    for part in (config, config.get("text_config") or {}):
        if name := part.get("dtype") or part.get("torch_dtype"):
            return str(name).removeprefix("torch.")
    return "auto"
